"""What sources have, as log files; each record is in them once.

`<directory>/<side>/<name>/<stripe>-NNNNNN.jsonl` are the copies of one source: its partitions share a few
logs, a batch whole in one of them. How far each partition is copied stands beside them (Copies), or where
several machines have it (photon.connect.shared_copies); it is durable, and so are the lines, before the
source is told: two syncs a turn, whatever the number of records.

Who computes by time asks of copies up to when they have all (`known_to`): the promise stands beside them.
"""

import abc
import contextlib
import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
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
    end: file and offset; of shared ones the end of each file, beyond which nothing counts. `trouble`: why
    they have no more. `notices`: the last ones. `lost`: records that it deleted before they were copied."""

    upto_us: int = 0
    ends: tuple[tuple[str, int], ...] = ()
    finished: bool = False
    trouble: str = ""
    notices: tuple[str, ...] = ()
    lost: int = 0


_known: Final = msgspec.json.Decoder(Known).decode


def known_file(reign: int = 0) -> str:
    """By whose name an importer tells what copies have; `reign`: as of who shares them."""
    return f"known-{reign}.json" if reign else "known.json"


def known_to(copies: Path, reign: int = 0) -> Known:
    """Of the directory of a source's copies, as its importer told last."""
    with contextlib.suppress(OSError, msgspec.DecodeError):
        return _known((copies / known_file(reign)).read_bytes())
    return Known()


def forget_known(copies: Path) -> None:
    """Before a run: that a former one had finished says nothing of this one. StorageError."""
    with storage_errors(copies):
        (copies / known_file()).unlink(missing_ok=True)


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


class CopiedLogs(abc.ABC):
    """The logs of one source, and how far each partition is copied. For one thread."""

    def __init__(
        self, directory: Path, file_bytes_max: int, source: str, first: int = 0, reign: int = 0
    ) -> None:
        """`first`: of the numbers of files. `reign`: as of `known_file`. StorageError."""
        self.directory, self._source, self._file_bytes_max = directory, source, file_bytes_max
        self.known = known_file(reign)
        self._logs = [
            RotatingLog(directory, f"{stripe}", file_bytes_max, first, read_at_once=True)
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

    @abc.abstractmethod
    def _put(self, rows: Mapping[bytes, bytes]) -> None:
        """Durably. StorageError."""

    @abc.abstractmethod
    def _append(
        self,
        by_log: Mapping[int, Sequence[Batch]],
        starts: Mapping[int, LogPosition],
        rows: Mapping[bytes, bytes],
    ) -> None:
        """The batches to the logs, where they start, and the rows, which say that they are there: durably."""

    @abc.abstractmethod
    def _ends(self) -> Iterable[tuple[str, int]]:
        """As `Known.ends`."""

    def _take_in(self, key: bytes, value: bytes) -> bool:
        """A row of before; whether it was one of all."""
        if key[:1] == _PARTITION:
            self._places[key] = msgspec.msgpack.decode(value, type=tuple[str, int])
        elif key[:1] == _LOST:
            self._lost[key] = msgspec.msgpack.decode(value, type=tuple[int, int])
        else:
            return False
        return True

    @property
    def after(self) -> dict[str, int]:
        """Partition -> the number of its last record that is in the logs."""
        return dict(self._places.values())

    @property
    def lost(self) -> int:
        """Records, of all partitions."""
        return sum(records for records, _ in self._lost.values())

    def note(self, loss: Loss) -> None:
        """Durably; one that is told again counts once. StorageError."""
        key = _LOST + hashlib.blake2b(loss.partition.encode()).digest()
        records, upto = self._lost.get(key, (0, 0))
        end = loss.first + loss.count
        now = records + max(0, end - max(loss.first, upto)), max(upto, end)
        self._put({key: msgspec.msgpack.encode(now)})
        self._lost[key] = now

    def made_anew(self, batches: Iterable[Batch]) -> set[str]:
        """Names of partitions by which others are in the logs."""
        known = ((one.partition, self._places.get(_key(one.partition))) for one in batches)
        return {shown(name) for name, place in known if place and place[0] not in (name, shown(name))}

    def append(self, batches: Sequence[Batch]) -> dict[str, int]:
        """Write the batches, durably. Partition -> its last number in the logs now.

        DiskFullError, StorageError: none of a log's may be there; it must be opened anew.
        """
        by_log: dict[int, list[Batch]] = defaultdict(list)
        places: dict[bytes, tuple[str, int]] = {}
        for batch in batches:
            by_log[self._stripes.setdefault(batch.partition, len(self._stripes) % STRIPES)].append(batch)
            first, count = batch.runs[-1]
            places[_key(batch.partition)] = batch.partition, first + count - 1
        starts = {}
        for stripe, of_it in by_log.items():
            log = self._logs[stripe]
            starts[stripe] = place = self._room(log, sum(len(batch.lines) for batch in of_it))
            note_rows(log.path(place.file), place.offset, of_it, self._source)
        self._append(by_log, starts, {key: msgspec.msgpack.encode(last) for key, last in places.items()})
        self._places |= places
        return dict(places.values())

    def _write(self, by_log: Mapping[int, Sequence[Batch]]) -> None:
        for stripe, of_it in by_log.items():
            self._logs[stripe].append(b"".join([batch.lines for batch in of_it]), rotate=False)
        for stripe in by_log:
            self._logs[stripe].sync()

    def tell(self, upto_us: int, finished: bool, trouble: str, notices: Sequence[str]) -> None:
        """As `known_to` reads it. Of what is not durable nothing is told; whether this is, does not matter.
        StorageError."""
        path = self.directory / self.known
        with storage_errors(path):
            known = Known(upto_us, tuple(self._ends()), finished, trouble, tuple(notices), self.lost)
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


class Copies(CopiedLogs):
    """Of one machine. In LMDB stands where the last append to each log began and what it was of, before it is
    made. So a start finds how much of it got into the file, cuts off half a line, and goes on behind the last
    whole one: nothing is left out, and no line is written twice (but where a file is gone)."""

    def __init__(self, directory: Path, file_bytes_max: int, source: str) -> None:
        """CorruptStateError, StorageError."""
        with storage_errors(directory):
            make_directory(directory)
        self._file = LmdbFile(
            directory / "positions",
            "the places of a source",
            "the disk",
            "delete the directory of the copies to have all copied anew, which joins nothing twice",
        )
        self._state = self._file.open(_STATE_BYTES_MAX)
        super().__init__(directory, file_bytes_max, source)
        self._recover()

    def _put(self, rows: Mapping[bytes, bytes]) -> None:
        with self._file.errors(), self._state.begin(write=True) as txn:
            for key, value in rows.items():
                txn.put(key, value)

    def _append(
        self,
        by_log: Mapping[int, Sequence[Batch]],
        starts: Mapping[int, LogPosition],
        rows: Mapping[bytes, bytes],
    ) -> None:
        appends: dict[bytes, bytes] = {}
        last: dict[bytes, tuple[str, int]] = {}
        for stripe, of_it in by_log.items():
            parts = []
            for batch in of_it:
                key = _key(batch.partition)
                name, number = last.get(key) or self._places.get(key) or ("", 0)
                before = number if name == batch.partition else None
                parts.append(_Part(batch.partition, len(batch.lines), before, batch.runs))
                first, count = batch.runs[-1]
                last[key] = batch.partition, first + count - 1
            append = _Append(starts[stripe].file, starts[stripe].offset, tuple(parts))
            appends[_STRIPE + bytes([stripe])] = msgspec.msgpack.encode(append)
        self._put({**appends, **rows})
        self._write(by_log)

    def _ends(self) -> Iterable[tuple[str, int]]:
        return map(end_of, self._logs)

    def _recover(self) -> None:
        with self._file.errors(), self._state.begin(write=True) as txn:
            appends: dict[int, _Append] = {}
            for key, value in txn.cursor():
                if not self._take_in(key, value):
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

    def close(self) -> None:
        super().close()
        self._state.close()


def end_of(log: RotatingLog) -> tuple[str, int]:
    """The file that grows, and where it ends."""
    at = log.position
    return log.path(at.file).name, at.offset


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
