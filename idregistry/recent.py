"""Ids registered of late: 256 dicts, key -> stamp. Pure.

    stamp = holder (4) | token time us (8) | bucket (4), little endian; one object for all ids of a request
            that are of one bucket

Nothing is ever deleted from a dict in place: a released id keeps its place with the stamp GONE, so that the
first n rows of a dict are the same ids for as long as the dict lives. Cuts and freezing rest on that.
One dict of millions of ids stops everything while it grows (0.5 s at 5.6 M); 256 of them grow one by one.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, repeat
from typing import Final

import numpy as np
import numpy.typing as npt

from idregistry.buckets import DEAD, bucket_of, buckets_of
from idregistry.encoding import SUBS, Encoded
from photon.core.columns import unpack_times

Sub = dict[bytes, bytes]
Subs = tuple[Sub, ...]

STAMP: Final = struct.Struct("<Iqi")
STAMP_DTYPE: Final = np.dtype([("holder", "<u4"), ("time_us", "<i8"), ("bucket", "<i4")])
GONE: Final = STAMP.pack(0, 0, DEAD)

_TOKEN_BYTES: Final = 12
_BUCKET: Final = struct.Struct("<i")

assert STAMP_DTYPE.itemsize == STAMP.size


def empty_subs() -> Subs:
    return tuple({} for _ in range(SUBS))


def subs_of(subs: Subs, batch: Encoded) -> Iterator[Sub]:
    """The sub-dict of each id."""
    return map(subs.__getitem__, batch.subs)


def stamps_of(subs: Subs, batch: Encoded) -> npt.NDArray[np.void]:
    """N stamps (STAMP_DTYPE), GONE where there is none. Any thread: each step is one under the GIL."""
    return stamps_in(subs_of(subs, batch), batch.keys)


def stamps_in(subs: Iterable[Sub], keys: Iterable[bytes]) -> npt.NDArray[np.void]:
    """The same: the sub-dict of each key is given."""
    return np.frombuffer(b"".join(map(dict.get, subs, keys, repeat(GONE))), STAMP_DTYPE)


def split_stamps(packed: bytes) -> Iterator[bytes]:
    """16 x N bytes -> N stamps."""
    return (packed[at : at + STAMP.size] for at in range(0, len(packed), STAMP.size))


def token_of(stamp: bytes) -> bytes:
    """What of a stamp tells tokens apart: holder and time."""
    return stamp[:_TOKEN_BYTES]


def bucket_in(stamp: bytes) -> int:
    """The bucket a stamp names."""
    bucket: int = _BUCKET.unpack_from(stamp, _TOKEN_BYTES)[0]
    return bucket


def new_stamps(
    holders: Sequence[tuple[int, int]], counts: Sequence[int], times: bytes, low_us: int, high_us: int
) -> list[bytes]:
    """N fresh stamps, for each segment its (holder, token time) with the buckets of its `counts[i]` ids.

    `low_us` and `high_us` are the least and the greatest of `times`. Each stamp is an object that was not
    there before.
    """
    bucket = bucket_of(low_us)
    if bucket == bucket_of(high_us):
        stamps = [STAMP.pack(holder, time_us, bucket) for holder, time_us in holders]
        return list(chain.from_iterable(map(repeat, stamps, counts)))
    segments = np.repeat(np.arange(len(counts), dtype=np.int64), counts)
    distinct, rows = np.unique(
        (segments << 32) + (buckets_of(unpack_times(times)) - DEAD), return_inverse=True
    )
    stamps = [STAMP.pack(*holders[pair >> 32], (pair & 0xFFFF_FFFF) + DEAD) for pair in distinct.tolist()]
    return list(map(stamps.__getitem__, rows.tolist()))
