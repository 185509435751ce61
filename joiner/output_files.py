"""The files of the joined logs, as their readers find them (docs/output.md).

joined/<datacenter>/<joiner>-NNNNNN.jsonl     lines; the last one of a joiner grows
joined/<datacenter>/<joiner>-NNNNNN.parquet   the same as rows, once complete, if the settings say so
joined/<datacenter>/<joiner>.manifest         a JSON object a line for each complete file
joined/<datacenter>/<joiner>.lives            a JSON object a line for each start of the joiner
"""

import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from photon.core.disk import storage_errors, sync_directory, write_all
from photon.core.errors import CorruptStateError, UsageError

LINES: Final = ".jsonl"
PARQUET: Final = ".parquet"
MANIFEST: Final = ".manifest"
LIVES: Final = ".lives"
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


@dataclass(frozen=True, slots=True)
class Life:
    """One start of a process that writes joined events here: what it registered stands here, or is lost.

    `incarnation` and `address` as in its tokens (photon.core.tokens); `since_us`: us since the epoch.
    """

    incarnation: int
    address: str
    since_us: int


class _LifeLine(msgspec.Struct, frozen=True):
    incarnation: str
    address: str
    since_us: int


_LIFE_DECODER: Final = msgspec.json.Decoder(_LifeLine)


def encode_life(life: Life) -> bytes:
    """A line of a `.lives` file."""
    line = _LifeLine(f"{life.incarnation:016x}", life.address, life.since_us)
    return msgspec.json.encode(line) + b"\n"


def note_life(directory: Path, stem: str, life: Life) -> None:
    """Append a life to `<stem>.lives`, durably. DiskFullError, StorageError: it may not register anything.

    For several processes at once: nothing that stands there is touched.
    """
    path = directory / f"{stem}{LIVES}"
    with storage_errors(path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(fd).st_size
            torn = size and os.pread(fd, 1, size - 1) != b"\n"
            write_all(fd, b"\n" * bool(torn) + encode_life(life))
            os.fdatasync(fd)
        finally:
            os.close(fd)
        sync_directory(directory)


def read_lives(directory: Path) -> dict[int, Life]:
    """The lives that `joined/<datacenter>` tells of, by incarnation; none where there is no such directory.

    StorageError. A line that is torn is of a start that failed then: that life registered nothing.
    """
    found: dict[int, Life] = {}
    for path in sorted(directory.glob(f"*{LIVES}")):
        with storage_errors(path):
            data = path.read_bytes()
        for line in data[: data.rfind(b"\n") + 1].splitlines():
            if (life := _read_life(line)) is not None:
                found[life.incarnation] = life
    return found


def _read_life(line: bytes) -> Life | None:
    try:
        told = _LIFE_DECODER.decode(line)
        return Life(int(told.incarnation, 16), told.address, told.since_us)
    except ValueError:  # msgspec's too
        return None


def count_joined(directory: Path, writers: str = "") -> int:
    """Joined events in the files of a directory tree: lines of .jsonl and rows of .parquet.

    `writers`: how the names begin of those that count (`joiner-`, `backfill-`); all do by default.
    A file that is converted meanwhile, or stood half converted when its joiner was killed, counts once.
    CorruptStateError, StorageError; UsageError where a Parquet file is in no manifest and pyarrow is missing.
    """
    return sum(_count_in(Path(place), writers) for place, _, _ in os.walk(directory))


def _count_in(directory: Path, writers: str) -> int:
    names = [name for name in _joined_names(directory) if name.startswith(writers)]
    stems = {name.removesuffix(LINES).removesuffix(PARQUET) for name in names}
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
