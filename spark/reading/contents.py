"""What is in primary events: digests of lines as they stand, and of what they mean."""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

FORMS: Final = "primary binary, content long, forms array<long>"


def digests(contents: Sequence[bytes]) -> Any:
    """N contents -> (N,) int64. The digest itself is the cost, so there is nothing to gain without a loop."""
    digest = hashlib.blake2b
    return np.frombuffer(b"".join([digest(c, digest_size=8).digest() for c in contents]), "<i8")


def canonical(raw: bytes, loosely: bool) -> bytes:
    """The same for the same object, whatever its white space and the order of its keys.

    `loosely`: also whatever a column of Parquet does not tell apart: a missing field, null and an object
    without fields; 1 and 1.0.
    """
    try:
        value = msgspec.json.decode(raw)
        return msgspec.json.encode(_loosely(value) if loosely else value, order="sorted")
    except (msgspec.DecodeError, msgspec.MsgspecError, RecursionError, OverflowError, TypeError):
        return raw


def _loosely(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {name: _loosely(inner) for name, inner in value.items()}
        return {name: inner for name, inner in kept.items() if inner is not None} or None
    if isinstance(value, list):
        return list(map(_loosely, value))
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def forms(batches: Iterable[Any]) -> Iterator[Any]:
    """Record batches of PRIMARY_RAW -> of FORMS: digests of the canonical contents to compare by."""
    for batch in batches:
        raws, ways = batch.column("raw").to_pylist(), batch.column("loosely").to_pylist()
        found = [
            [_form(raw, way) for way in ((False, True) if loosely is None else (loosely,))]
            for raw, loosely in zip(raws, ways, strict=True)
        ]
        columns = {
            "primary": batch.column("primary"),
            "content": batch.column("content"),
            "forms": pa.array(found, pa.list_(pa.int64())),
        }
        yield pa.RecordBatch.from_pydict(columns)


def _form(raw: bytes, loosely: bool) -> int:
    told = (b"~" if loosely else b"=") + canonical(raw, loosely)
    return int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "little", signed=True)
