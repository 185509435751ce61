"""What sources have, as log files; each record is in them once.

`<directory>/<side>/<name>/<stripe>-NNNNNN.jsonl` are the copies of one source: its partitions share a few
logs, a batch whole in one of them. Beside them stands, in LMDB, where the last append to each log began and
what it was of. So a start finds how much of it got into the file, cuts off half a line, and goes on behind
the last whole one: nothing is left out, and no line is written twice (but where a file is gone).

The place is durable before the lines are appended, and the lines before the source is told; so two syncs a
turn, whatever the number of records.

Who computes by time asks of copies up to when they have all (`known_to`): the promise stands beside them.
"""

import contextlib
import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final

import msgspec

from photon.connect.ports import Batch, Loss, Runs, shown
from photon.connect.rows import note_rows, rows_path
from photon.connect.uris import is_source, parse_uri
from photon.core.disk import LmdbFile, make_directory, storage_errors
from photon.logs.writer import LogPosition, RotatingLog

STRIPES: Final = 4
"""Logs of a source: as many dispatchers can share them."""
_STATE_BYTES_MAX: Final = 1 << 30
_PARTITION: Final = b"p"
_STRIPE: Final = b"s"
_LOST: Final = b"l"
_KEY_BYTES_MAX: Final = 511
"""Of LMDB."""


def copies_of(directory: Path, side: str, text: str) -> Path:
    """Where the copies of a source lie. Options of its URI (how to log in) make no difference."""
    uri = parse_uri(text)
    known = f"{uri.scheme}://{uri.place}/{uri.path}".encode()
    last = re.sub(r"[^A-Za-z0-9_.-]", "_", uri.path.rstrip("/").rpartition("/")[2])
    return directory / side / f"{last}-{hashlib.blake2b(known, digest_size=4).hexdigest()}"


def patterns_of(
    directory: Path, side: str, texts: Iterable[str], imported: Callable[[str], bool] = is_source
) -> list[str]:
    """Globs of log files: of the copies of those that are imported; the others as they are."""
    return [str(copies_of(directory, side, text) / "*.jsonl") if imported(text) else text for text in texts]


class Known(msgspec.Struct, frozen=True, array_like=True):
    """What copies have: all that their source got before `upto_us`, once each of their logs is read up to its
    end: file and offset. `trouble`: why they have no more. `notices`: the last ones. `lost`: records
    that it deleted before they were copied."""

    upto_us: int = 0
    ends: tuple[tuple[str, int], ...] = ()
    finished: bool = False
    trouble: str = ""
    notices: tuple[str, ...] = ()
    lost: int = 0


_known: Final = msgspec.json.Decoder(Known).decode
_KNOWN: Final = "known.json"


def known_to(copies: Path) -> Known:
    """Of the directory of a source's copies, as its importer told last."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return _known((copies / _KNOWN).read_bytes())
    return Known()


def forget_known(copies: Path) -> None:
    """Before a run: that a former one had finished says nothing of this one. StorageError."""
    with storage_errors(copies):
        (copies / _KNOWN).unlink(missing_ok=True)


class _Part(msgspec.Struct, frozen=True, array_like=True):
    """Of an append: a batch. `before`: the last number of the partition that is in the logs before it."""

    partition: str
    bytes: int
    before: int | None
    runs: Runs


class _Append(msgspec.Struct, frozen=True, array_like=True):
    file: int
    at: int
    parts: tuple[_Part, ...]


class Copies:
    """The logs of one source, and how far each partition is copied. For one thread."""

    def __init__(self, directory: Path, file_bytes_max: int, source: str) -> None:
        """CorruptStateError, StorageError."""
        self.directory, self._source = directory, source
        with storage_errors(directory):
            make_directory(directory)
        self._file = LmdbFile(
            directory / "positions",
            "the places of a source",
            "the disk",
            "delete the directory of the copies to have all copied anew, which joins nothing twice",
        )
        self._file_bytes_max = file_bytes_max
        self._state = self._file.open(_STATE_BYTES_MAX)
        self._logs = [
            RotatingLog(directory, f"{stripe}", file_bytes_max, read_at_once=True)
            for stripe in range(STRIPES)
        ]
        self._places: dict[bytes, tuple[str, int]] = {}
        """By key: a partition, and the number of its last record that is in the logs. One that was made anew
        takes the place of the former."""
        self._stripes: dict[str, int] = {}
        """Partition -> its log, for the sake of their sizes; it may be another after the next start."""
        self._lost: dict[bytes, tuple[int, int]] = {}
        """By key, a partition: records that the source deleted before they were copied, and the number behind
        the last."""
        self.lost = 0
        """Of all partitions."""
        self._recover()

    @property
    def after(self) -> dict[str, int]:
        """Partition -> the number of its last record that is in the logs."""
        return dict(self._places.values())

    def note(self, loss: Loss) -> None:
        """Durably; one that is told again counts once. StorageError."""
        key = _LOST + hashlib.blake2b(loss.partition.encode()).digest()
        records, upto = self._lost.get(key, (0, 0))
        end = loss.first + loss.count
        more = max(0, end - max(loss.first, upto))
        now = records + more, max(upto, end)
        with self._file.errors(), self._state.begin(write=True) as txn:
            txn.put(key, msgspec.msgpack.encode(now))
        self._lost[key] = now
        self.lost += more

    def made_anew(self, batches: Iterable[Batch]) -> set[str]:
        """Names of partitions by which others are in the logs."""
        known = ((one.partition, self._places.get(_key(one.partition))) for one in batches)
        return {shown(name) for name, place in known if place and place[0] not in (name, shown(name))}

    def _recover(self) -> None:
        with self._file.errors(), self._state.begin(write=True) as txn:
            appends: dict[int, _Append] = {}
            for key, value in txn.cursor():
                if key[:1] == _PARTITION:
                    self._places[key] = msgspec.msgpack.decode(value, type=tuple[str, int])
                elif key[:1] == _LOST:
                    self._lost[key] = msgspec.msgpack.decode(value, type=tuple[int, int])
                else:
                    appends[key[1]] = msgspec.msgpack.decode(value, type=_Append)
            for stripe, append in appends.items():
                left_out = self._left_out(stripe, append)
                if left_out:  # settled here, once: the partition may go on in another log
                    settled = _Append(append.file, append.at, ())
                    txn.put(_STRIPE + bytes([stripe]), msgspec.msgpack.encode(settled))
                for partition, number in left_out.items():
                    key = _key(partition)
                    if number is None:
                        self._places.pop(key, None)
                        txn.delete(key)
                    else:
                        self._places[key] = partition, number
                        txn.put(key, msgspec.msgpack.encode(self._places[key]))
        self.lost = sum(records for records, _ in self._lost.values())
        for stripe, log in enumerate(self._logs):
            log.cut_torn_line()
            if stripe not in appends and log.position.offset:
                raise self._file.corrupt(f"it does not know of {log.path(log.position.file)}")

    def _left_out(self, stripe: int, append: _Append) -> dict[str, int | None]:
        """Partitions of which some of the append is not in the log -> the last number that is."""
        path = self._logs[stripe].path(append.file)
        if not path.exists() and append.file < self._logs[stripe].position.file:
            return {}  # no other is begun before it is whole; it was read since, and deleted
        with storage_errors(path):
            data = b""
            if path.exists():
                if path.stat().st_size < append.at:
                    raise self._file.corrupt(f"{path} is shorter than it was")
                with path.open("rb") as file:
                    file.seek(append.at)
                    data = file.read()
        found: dict[str, int | None] = {}
        for part in append.parts:
            here, data = data[: part.bytes], data[part.bytes :]
            if len(here) < part.bytes and part.partition not in found:
                found[part.partition] = _number_of(part, here.count(b"\n"))
        return found

    def append(self, batches: Sequence[Batch]) -> dict[str, int]:
        """Write the batches, durably. Partition -> its last number in the logs now.

        DiskFullError, StorageError: none of a log's may be there; it must be opened anew.
        """
        by_log: dict[int, list[Batch]] = defaultdict(list)
        for batch in batches:
            by_log[self._stripes.setdefault(batch.partition, len(self._stripes) % STRIPES)].append(batch)
        places: dict[bytes, tuple[str, int]] = {}
        lines = {stripe: b"".join([one.lines for one in of_it]) for stripe, of_it in by_log.items()}
        with self._file.errors(), self._state.begin(write=True) as txn:
            for stripe, of_it in by_log.items():
                place = self._room(self._logs[stripe], len(lines[stripe]))
                parts = []
                for batch in of_it:
                    key = _key(batch.partition)
                    name, number = places.get(key) or self._places.get(key) or ("", 0)
                    before = number if name == batch.partition else None
                    parts.append(_Part(batch.partition, len(batch.lines), before, batch.runs))
                    first, count = batch.runs[-1]
                    places[key] = batch.partition, first + count - 1
                append = _Append(place.file, place.offset, tuple(parts))
                txn.put(_STRIPE + bytes([stripe]), msgspec.msgpack.encode(append))
                note_rows(self._logs[stripe].path(place.file), place.offset, of_it, self._source)
            for key, last in places.items():
                txn.put(key, msgspec.msgpack.encode(last))
        for stripe, column in lines.items():
            self._logs[stripe].append(column, rotate=False)
        for stripe in lines:
            self._logs[stripe].sync()
        self._places |= places
        return dict(places.values())

    def tell(self, upto_us: int, finished: bool, trouble: str, notices: Sequence[str]) -> None:
        """As `known_to` reads it. Of what is not durable nothing is told; whether this is, does not matter.
        StorageError."""
        places = [(log, log.position) for log in self._logs]
        ends = tuple((log.path(at.file).name, at.offset) for log, at in places)
        path = self.directory / _KNOWN
        with storage_errors(path):
            known = Known(upto_us, ends, finished, trouble, tuple(notices), self.lost)
            path.with_suffix(".new").write_bytes(msgspec.json.encode(known))
            path.with_suffix(".new").replace(path)

    def _room(self, log: RotatingLog, size: int) -> LogPosition:
        if log.position.offset and log.position.offset + size > self._file_bytes_max:
            log.rotate()
        return log.position

    def end_files(self) -> None:
        """None grows any more: each can be deleted once it was read. StorageError."""
        for log in self._logs:
            if log.position.offset:
                log.rotate()

    def sweep(self, keep_s: float, now_s: float) -> int:
        """Delete files that were left so long ago; bytes of what stays."""
        size = 0
        for log in self._logs:
            for number in log.file_numbers():
                path = log.path(number)
                with storage_errors(path), contextlib.suppress(FileNotFoundError):
                    status = path.stat()
                    if number < log.position.file and keep_s and now_s - status.st_mtime > keep_s:
                        drop_copy(path)
                    else:
                        size += status.st_size
        return size

    def close(self) -> None:
        for log in self._logs:
            log.close()
        self._state.close()


def drop_copy(path: Path) -> None:
    """A file of copies that grows no more. OSError."""
    path.unlink(missing_ok=True)
    rows_path(path).unlink(missing_ok=True)


def stripe_of(path: str) -> str:
    """What a file of copies has in common with those before and behind it."""
    return path.rpartition("-")[0]


def _key(partition: str) -> bytes:
    """What its place is kept by, whatever the length of its name."""
    key = _PARTITION + shown(partition).encode()
    return key if len(key) <= _KEY_BYTES_MAX else _PARTITION + hashlib.blake2b(key).digest()


def _number_of(part: _Part, lines: int) -> int | None:
    """The number of so manieth record of it."""
    if not lines:
        return part.before
    for first, count in part.runs:
        if lines <= count:
            return first + lines - 1
        lines -= count
    raise AssertionError(f"{part.partition}: more lines than records")
