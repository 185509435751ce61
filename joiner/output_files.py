"""The files of the joined logs, as their readers find them (docs/output.md), and the roots they stand in.

joined/<datacenter>/<joiner>-NNNNNN.jsonl     lines; the last one of a joiner grows
joined/<datacenter>/<joiner>-NNNNNN.parquet   the same as rows, once complete, if the settings say so
joined/<datacenter>/<joiner>.manifest         a JSON object a line for each complete file
joined/<datacenter>/<joiner>.lives            a JSON object a line for each start of the joiner
joined/<datacenter>/recovered                 incarnations that recovery has seen to, in hex, one a line

A file is listed in the manifest when it will never change again: a reader that takes listed files only reads
nothing twice and nothing that is taken back. The manifest also keeps a second joiner of the same name out of
a root.

`<directory>/roots`, in the joiner's own directory, names the roots that the life before wrote to beside the
output, in a JSON array.
"""

import contextlib
import importlib
import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from photon.core.disk import (
    lines_in,
    make_directory,
    open_alone,
    read_json,
    storage_errors,
    sync_directory,
    write_all,
    write_json,
)
from photon.core.errors import CorruptStateError, SettingsError
from photon.logs.writer import LogPosition, RotatingLog

LINES: Final = ".jsonl"
PARQUET: Final = ".parquet"
MANIFEST: Final = ".manifest"
LIVES: Final = ".lives"
_RECOVERED: Final = "recovered"
_HEX_DIGITS: Final = 16


@dataclass(frozen=True, slots=True)
class CompleteFile:
    """A file that never changes any more: every byte of it is durable, in every root.

    `lines`: joined events in it; `crc32`: of its bytes, 8 hex digits; times in us since the epoch,
    `opened_us` None where a crash lay between. `line_bytes`: of the lines that a Parquet file was made of.
    """

    file: str
    bytes: int
    lines: int
    crc32: str
    opened_us: int | None
    closed_us: int
    line_bytes: int | None = None


def _read_entries(data: bytes, path: Path) -> dict[str, CompleteFile]:
    """A manifest's whole lines -> its files by name. CorruptStateError if a line is none of ours."""
    whole = data[: data.rfind(b"\n") + 1]
    try:
        entries = msgspec.json.Decoder(CompleteFile).decode_lines(whole)
    except ValueError as error:
        raise CorruptStateError(
            f"{path}: a line that is no entry of a manifest ({error}); restore it from another output root, "
            "or move it away and have every file listed anew"
        ) from error
    return {entry.file: entry for entry in entries}


def complete_files(directory: str | Path) -> dict[str, CompleteFile]:
    """What the manifests of `joined/<datacenter>` list, by name. CorruptStateError, StorageError."""
    found: dict[str, CompleteFile] = {}
    for path in sorted(Path(directory).glob(f"*{MANIFEST}")):
        with storage_errors(path):
            found.update(_read_entries(path.read_bytes(), path))
    return found


@dataclass(frozen=True, slots=True)
class Life:
    """One start of a process that writes joined events here: what it registered stands here, or is lost.

    `incarnation` and `address` as in its tokens (photon.core.ids); `since_us`: us since the epoch.
    """

    incarnation: int
    address: str
    since_us: int


class _LifeLine(msgspec.Struct, frozen=True):
    incarnation: str
    address: str
    since_us: int


def encode_life(life: Life) -> bytes:
    """A line of a `.lives` file."""
    return msgspec.json.encode(_LifeLine(f"{life.incarnation:016x}", life.address, life.since_us)) + b"\n"


def note_life(directory: Path, stem: str, life: Life) -> None:
    """Append a life to `<stem>.lives`, durably. DiskFullError, StorageError: it may not register anything.

    For several processes at once: nothing that stands there is touched.
    """
    _append(directory / f"{stem}{LIVES}", encode_life(life))


def note_recovered(directory: Path, incarnations: Iterable[int]) -> None:
    """Say, durably, of lives that have ended that nothing of theirs is lost any more. StorageError."""
    new = {*incarnations} - read_recovered(directory)
    if new:
        _append(directory / _RECOVERED, b"".join(b"%016x\n" % one for one in sorted(new)))


def read_recovered(directory: Path) -> set[int]:
    """What `note_recovered` has said there. StorageError."""
    path = directory / _RECOVERED
    with storage_errors(path):
        data = path.read_bytes() if path.exists() else b""
    return {int(line, 16) for line in data.split() if len(line) == _HEX_DIGITS}


def _append(path: Path, lines: bytes) -> None:
    with storage_errors(path):
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        try:
            size = os.fstat(fd).st_size
            torn = size and os.pread(fd, 1, size - 1) != b"\n"
            write_all(fd, b"\n" * bool(torn) + lines)
            os.fdatasync(fd)
        finally:
            os.close(fd)
        sync_directory(path.parent)


def read_lives(directory: str | Path, stem: str = "*") -> dict[int, Life]:
    """The lives that `joined/<datacenter>` tells of, by incarnation; none where there is no such directory.
    `stem`: of one joiner.

    StorageError. A line that is torn is of a start that failed then: that life registered nothing.
    """
    found: dict[int, Life] = {}
    for path in sorted(Path(directory).glob(f"{stem}{LIVES}")):
        with storage_errors(path):
            data = path.read_bytes()
        for line in data[: data.rfind(b"\n") + 1].splitlines():
            with contextlib.suppress(ValueError):  # msgspec's errors are such
                told = msgspec.json.decode(line, type=_LifeLine)
                incarnation = int(told.incarnation, 16)
                found[incarnation] = Life(incarnation, told.address, told.since_us)
    return found


def count_joined(directory: Path, writers: str = "") -> int:
    """Joined events in the files of a directory tree: lines of .jsonl and rows of .parquet.

    `writers`: how the names begin of those that count (`joiner-`, `backfill-`); all do by default.
    A file that is converted meanwhile, or stood half converted when its joiner was killed, counts once.
    CorruptStateError, StorageError.
    """
    return sum(_count_in(Path(place), writers) for place, _, _ in os.walk(directory))


def _count_in(directory: Path, writers: str) -> int:
    with storage_errors(directory):
        names = [name for name in os.listdir(directory) if name.endswith((LINES, PARQUET))]
    stems = {os.path.splitext(name)[0] for name in names if name.startswith(writers)}
    listed = complete_files(directory) if stems else {}
    total = 0
    for stem in stems:
        lines, rows = stem + LINES, stem + PARQUET
        # In this order: lines go only when their Parquet file is listed.
        count = _count(directory / lines, listed.get(lines))
        if count is None:
            if rows not in listed:
                listed = complete_files(directory)
            count = _count(directory / rows, listed.get(rows))
        total += count or 0
    return total


def _count(path: Path, entry: CompleteFile | None) -> int | None:
    """None if there is no such file."""
    try:
        if entry is not None and path.stat().st_size == entry.bytes:
            return entry.lines
        if path.suffix == PARQUET:
            rows: int = importlib.import_module("pyarrow.parquet").read_metadata(path).num_rows
            return rows
        return lines_in(path)
    except FileNotFoundError:
        return None


_NUMBER: Final = re.compile(r"-(\d+)\.[a-z]+$")


def numbers_in(names: Iterable[str]) -> list[int]:
    """NNNNNN of each `<joiner>-NNNNNN.jsonl` or `.parquet` among the names."""
    return [int(match[1]) for name in names if (match := _NUMBER.search(name))]


class Manifest:
    """Which of one joiner's files in one root are complete. For one process and one thread at a time."""

    def __init__(self, directory: Path, stem: str) -> None:
        """LockedError if another process has it; CorruptStateError, StorageError. A torn last line is cut."""
        self.path = directory / f"{stem}{MANIFEST}"
        with storage_errors(self.path):
            make_directory(directory)
        self._fd = open_alone(
            self.path, "another joiner of this name writes here; stop it, or name another output", os.O_APPEND
        )
        try:
            with storage_errors(self.path):
                data = self.path.read_bytes()
                self._size = data.rfind(b"\n") + 1
                os.ftruncate(self._fd, self._size)
                sync_directory(directory)
            self.listed = _read_entries(data, self.path)
            """By their names."""
        except BaseException:
            self.close()
            raise

    @property
    def next_number(self) -> int:
        """Of files: greater than those of all that are listed, whether they are still there or not."""
        return 1 + max(numbers_in(self.listed), default=-1)

    def add(self, entry: CompleteFile) -> None:
        """List a file, durably. DiskFullError, StorageError: it is not listed, or will be listed twice."""
        line = msgspec.json.encode(entry) + b"\n"
        with storage_errors(self.path):
            os.ftruncate(self._fd, self._size)  # what a write that failed has left
            try:
                write_all(self._fd, line)
            except OSError:
                with contextlib.suppress(OSError):  # the next entry begins with it
                    os.ftruncate(self._fd, self._size)
                raise
            self._size += len(line)
            os.fdatasync(self._fd)
        self.listed[entry.file] = entry

    def close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1


_NAME: Final = "roots"
_NEVER: Final = 1 << 62  # files are left when all roots leave them


@dataclass(frozen=True, slots=True)
class Root:
    """`is_new`: the life before did not write to it."""

    directory: Path
    manifest: Manifest
    log: RotatingLog
    is_new: bool
    torn_bytes: int
    """Of an unfinished last line that a crash had left; cut off."""

    def close(self) -> None:
        self.log.close()
        self.manifest.close()


def output_directories(output_root: Path, more: Sequence[str], datacenter: str) -> list[Path]:
    """`joined/<datacenter>` in each root, made where it is missing. SettingsError if two are the same."""
    roots = [str(output_root), *more]
    directories = [Path(os.path.abspath(root), "joined", datacenter) for root in roots]
    seen: dict[tuple[int, int], str] = {}
    for root, directory in zip(roots, directories, strict=True):
        with storage_errors(directory):
            make_directory(directory)
            status = directory.stat()
        key = status.st_dev, status.st_ino
        if key in seen:
            raise same_directory(root, seen[key])
        seen[key] = root
    return directories


def same_directory(root: str, other: str) -> SettingsError:
    """The error to raise; both named as they were configured."""
    return SettingsError(
        f"joiner.output_roots: {root} and {other} are the same directory, so each line would stand in it "
        "twice; name different ones"
    )


def open_roots(state: Path, directories: Sequence[Path], stem: str) -> list[Root]:
    """The first directory is never new. LockedError, CorruptStateError, StorageError."""
    before = _read_known(state)
    known = before or []
    roots: list[Root] = []
    try:
        for directory in (d for d in directories if d is directories[0] or str(d) in known):
            if before is not None:
                _check_there(directory, stem, state)
            roots.append(_open_root(directory, stem, False, 0))
        number = max(root.log.position.file for root in roots)  # new ones come in where the others are
        for directory in (d for d in directories[1:] if str(d) not in known):
            roots.append(_open_root(directory, stem, True, number))
    except BaseException:
        for root in roots:
            root.close()
        raise
    return roots


def _open_root(directory: Path, stem: str, is_new: bool, first: int) -> Root:
    manifest = Manifest(directory, stem)
    try:
        log = RotatingLog(directory, stem, _NEVER, first=manifest.next_number)
        torn_bytes = log.cut_torn_line()
        if log.position.file < first:
            log.rotate(past=first - 1)
        return Root(directory, manifest, log, is_new, torn_bytes)
    except BaseException:
        manifest.close()
        raise


def _read_known(state: Path) -> list[str] | None:
    """The additional directories that the life before wrote to; None if there was none."""
    return read_json(
        state / _NAME, list[str], "no record of output roots ({}); move it away and start once more"
    )


def write_known(state: Path, roots: Sequence[Root]) -> None:
    """To be called when all logs have begun and nothing is appended yet."""
    known = [str(root.directory) for root in roots[1:]]
    if _read_known(state) != known:
        write_json(state / _NAME, known)


def _check_there(directory: Path, stem: str, state: Path) -> None:
    """CorruptStateError if a root that was written to holds nothing: its disk is not mounted, perhaps."""
    if not is_there(directory, stem):
        raise CorruptStateError(
            f"{directory}: this joiner wrote here, and nothing of it is there; mount the disk or bring the "
            f"files back, or, if they are gone for good, say so to photon recover, or delete {state / _NAME}"
        )


def is_there(directory: Path, stem: str) -> bool:
    """Whether a root holds any file of this joiner. StorageError."""
    ours = re.compile(re.escape(stem) + r"(-\d+)?\.[a-z]+")  # not those of `<stem>-1`
    with storage_errors(directory):
        return directory.is_dir() and any(map(ours.fullmatch, os.listdir(directory)))


def check_new(root: Root, cut: LogPosition) -> None:
    """SettingsError if files of a new root may hold lines of batches without an end: it was moved?"""
    if any(root.log.path(n).stat().st_size for n in root.log.file_numbers() if n >= cut.file):
        raise SettingsError(
            f"joiner.output_roots: {root.directory} holds files of this joiner but was none of its roots "
            "when it ended with batches under way; name it as before for one start, or move the files away"
        )
