"""The files of the joined logs, as their readers find them (docs/output.md).

joined/<datacenter>/<joiner>-NNNNNN.jsonl     lines; the last one of a joiner grows
joined/<datacenter>/<joiner>-NNNNNN.parquet   the same as rows, once complete, if the settings say so
joined/<datacenter>/<joiner>.manifest         a JSON object a line for each complete file
"""

import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from photon.core.disk import storage_errors
from photon.core.errors import CorruptStateError, UsageError

LINES: Final = ".jsonl"
PARQUET: Final = ".parquet"
MANIFEST: Final = ".manifest"
_BLOCK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class CompleteFile:
    """A file that never changes any more: every byte of it is durable, in every root.

    `lines`: joined events in it; `crc32`: of its bytes, 8 hex digits; times in us since the epoch,
    `opened_us` None where a crash lay between.
    """

    file: str
    bytes: int
    lines: int
    crc32: str
    opened_us: int | None
    closed_us: int


_DECODER: Final = msgspec.json.Decoder(CompleteFile)


def encode_entry(entry: CompleteFile) -> bytes:
    """A line of a manifest."""
    return msgspec.json.encode(entry) + b"\n"


def read_entries(data: bytes, path: Path) -> dict[str, CompleteFile]:
    """A manifest's whole lines -> its files by name. CorruptStateError if a line is none of ours."""
    whole = data[: data.rfind(b"\n") + 1]
    try:
        entries = [_DECODER.decode(line) for line in whole.splitlines()]
    except msgspec.DecodeError as error:
        raise CorruptStateError(
            f"{path}: a line that is no entry of a manifest ({error}); restore it from another output root, "
            "or move it away and have every file listed anew"
        ) from error
    return {entry.file: entry for entry in entries}


def complete_files(directory: Path) -> dict[str, CompleteFile]:
    """What the manifests of `joined/<datacenter>` list, by name. CorruptStateError, StorageError."""
    found: dict[str, CompleteFile] = {}
    for path in sorted(directory.glob(f"*{MANIFEST}")):
        with storage_errors(path):
            found.update(read_entries(path.read_bytes(), path))
    return found


def count_joined(directory: Path) -> int:
    """Joined events in all the files of a directory tree: lines of .jsonl and rows of .parquet.

    A file that is converted meanwhile, or stood half converted when its joiner was killed, counts once.
    CorruptStateError, StorageError; UsageError where a Parquet file is in no manifest and pyarrow is missing.
    """
    return sum(_count_in(Path(place)) for place, _, _ in os.walk(directory))


def _count_in(directory: Path) -> int:
    stems = {name.removesuffix(LINES).removesuffix(PARQUET) for name in _joined_names(directory)}
    listed = complete_files(directory) if stems else {}
    return sum(_count_one(directory, stem, listed) for stem in stems)


def _joined_names(directory: Path) -> list[str]:
    with storage_errors(directory):
        return [name for name in os.listdir(directory) if name.endswith((LINES, PARQUET))]


def _count_one(directory: Path, stem: str, listed: dict[str, CompleteFile]) -> int:
    # In this order: lines go only when their Parquet file is listed.
    count = _count_lines(directory / (stem + LINES), listed.get(stem + LINES))
    if count is None and stem + PARQUET not in listed:
        listed = complete_files(directory)
    if count is None:
        count = _count_rows(directory / (stem + PARQUET), listed.get(stem + PARQUET))
    return count or 0


def _count_lines(path: Path, entry: CompleteFile | None) -> int | None:
    """None if there is no such file."""
    try:
        with path.open("rb", buffering=0) as file:
            if entry is not None and os.fstat(file.fileno()).st_size == entry.bytes:
                return entry.lines
            return sum(block.count(b"\n") for block in iter(lambda: file.read(_BLOCK_BYTES), b""))
    except FileNotFoundError:
        return None


def _count_rows(path: Path, entry: CompleteFile | None) -> int | None:
    try:
        if entry is not None and path.stat().st_size == entry.bytes:
            return entry.lines
    except FileNotFoundError:
        return None
    try:
        parquet = importlib.import_module("pyarrow.parquet")
    except ImportError as error:
        raise UsageError(
            f"{path}: in no manifest, and pyarrow, which could count its rows, is not installed; "
            "install photon-joiner[parquet]"
        ) from error
    rows: int = parquet.read_metadata(path).num_rows
    return rows
