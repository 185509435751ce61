"""Copies what sources have into log files, each record once, so that all else works as with any logs.

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
import itertools
import os
import re
import select
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from photon.connect.ports import Batch, Fields, Loss, Runs, State, shown
from photon.connect.rows import note_rows, rows_path
from photon.connect.uris import is_source, make_source, parse_uri
from photon.core.clock import Background, Backoff
from photon.core.disk import LmdbFile, make_directory, storage_errors
from photon.core.errors import DiskFullError, PhotonError, StorageError, UnavailableError, UsageError, told
from photon.core.settings import Imports, Settings
from photon.logs.writer import LogPosition, RotatingLog

STRIPES: Final = 4
"""Logs of a source: as many dispatchers can share them."""
CAUGHT_UP_RECORDS: Final = 10_000
WAIT_S: Final = 0.5
"""For the first record of a turn."""
_RETRIES: Final = Backoff(0.2, 10.0)
_LOOK_S: Final = 0.1
_SWEEP_EVERY_S: Final = 30.0
_STOP_WAIT_S: Final = 15.0
_STATE_BYTES_MAX: Final = 1 << 30
_DAY_S: Final = 86_400.0
_PARTITION: Final = b"p"
_STRIPE: Final = b"s"
_KEY_BYTES_MAX: Final = 511
"""Of LMDB."""

SIDES: Final = ("primary", "foreign")


def fields_of(settings: Settings, side: str) -> Fields:
    if side == "primary":
        primary = settings.primary
        return Fields((primary.id,), primary.time, primary.time_unit)
    foreign = settings.foreign
    return Fields((foreign.id, foreign.primary_id), foreign.time, foreign.time_unit)


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
        self._recover()

    @property
    def after(self) -> dict[str, int]:
        """Partition -> the number of its last record that is in the logs."""
        return dict(self._places.values())

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

    def tell(self, upto_us: int, finished: bool, trouble: str, notices: Sequence[str], lost: int) -> None:
        """As `known_to` reads it. Of what is not durable nothing is told; whether this is, does not matter.
        StorageError."""
        places = [(log, log.position) for log in self._logs]
        ends = tuple((log.path(at.file).name, at.offset) for log, at in places)
        path = self.directory / _KNOWN
        with storage_errors(path):
            known = Known(upto_us, ends, finished, trouble, tuple(notices), lost)
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


class Import:
    """One source on its way into its copies, in a thread of its own."""

    def __init__(
        self,
        text: str,
        side: str,
        directory: Path,
        fields: Fields,
        settings: Imports,
        drain: bool,
        notice: Callable[[str], None],
        fail: Callable[[BaseException], None],
        may_begin: Callable[[], bool] = lambda: True,
        notices: Callable[[], Sequence[str]] | None = None,
    ) -> None:
        """UsageError for a source that can't be; CorruptStateError, StorageError. `fail` is told of what no
        other try will mend; until `may_begin`, nothing is read. `notices`: the last ones; where they are
        given, what the copies have is told as `known_to` reads it."""
        self._name, self.side, self._drain = parse_uri(text).shown, side, drain
        self._text = text
        self._source = make_source(text, fields)
        self._directory, self._settings, self._notices = copies_of(directory, side, text), settings, notices
        self._known_to = 0
        self._notice, self._fail, self._may_begin = notice, fail, may_begin
        self._copies = Copies(self._directory, settings.file_bytes_max, text)
        self._opened = self._stale = False
        self.caught_up = False
        """Whether all but the last records have been copied, once since the start."""
        self._fatal: str | None = None
        self._lost = self._records = self._bytes = 0
        self._state = State.ACTIVE
        self._behind: int | None = None
        self._held = 0
        self._swept_s = float("-inf")
        self._work = Background(f"import {self._name}", self._step, _RETRIES)

    def start(self) -> None:
        self._work.start()

    def stop(self) -> None:
        if self._work.stop(_STOP_WAIT_S):
            self._source.close()
            self._copies.close()

    @property
    def finished(self) -> bool:
        return self._state is State.FINISHED

    @property
    def trouble(self) -> str | None:
        """Why the last turn failed."""
        return self._fatal or self._work.trouble

    def status(self) -> dict[str, Any]:
        return {
            "source": self._name,
            "side": self.side,
            "state": self._state.value,
            "partitions": len(self._copies.after),
            "records": self._records,
            "bytes": self._bytes,
            "behind": self._behind,
            "kept_bytes": self._held,
            "lost": self._lost,
            "trouble": self.trouble,
        }

    def _step(self) -> float:
        try:
            return self._turn()
        except UsageError as error:
            self._fatal = str(error)
            self._fail(error)
            return float("inf")
        except Exception as error:
            if told(error) != self.trouble:
                self._notice(told(error))
                with contextlib.suppress(StorageError):
                    self._tell(told(error))
            if not isinstance(error, UnavailableError):
                self._reopen()  # whatever was read and is not in the logs is asked for again
            raise

    def _turn(self) -> float:
        if not (self._opened or self._may_begin()):
            return _LOOK_S
        if self._stale:
            self._copies.close()
            self._copies = Copies(self._directory, self._settings.file_bytes_max, self._text)
            self._stale = False
        if not self._opened:
            self._source.open(self._copies.after, self._drain)
            self._opened = True
        self._sweep()
        if self._held >= self._settings.bytes_max:
            holds = f"{self._directory}: holds {self._held} bytes; raise imports.bytes_max"
            if self._notices is not None:
                mend = "wait until more of them is read"
            elif self._drain:  # nothing is deleted then
                raise UsageError(holds)
            else:
                mend = "lower imports.keep_days"
            self._copies.end_files()
            raise StorageError(f"{holds}, or {mend}")
        batches = self._source.read(WAIT_S)
        for loss in self._source.losses():
            self._note_loss(loss)
        if batches:
            if anew := self._copies.made_anew(batches):
                joins = "what has joined does not join twice; what the former had that was not read is lost"
                counts = "what was read of the former counts beside it"
                self._notice(
                    f"{self._name}: made anew, so read from the start: {', '.join(sorted(anew))}; "
                    + (f"{joins} to the join" if self._notices is None else counts)
                )
            upto = self._copies.append(batches)
            self._records += sum(count for batch in batches for _, count in batch.runs)
            size = sum(len(batch.lines) for batch in batches)
            self._bytes += size
            self._held += size
            self._source.kept(upto)
        self._behind = self._source.behind()
        self._state = self._source.state()
        few = self._behind is not None and self._behind <= CAUGHT_UP_RECORDS
        self.caught_up |= few or self._state is not State.ACTIVE
        if self._notices is not None:
            self._known_to = max(self._known_to, self._source.known_to())
            self._tell()
        return float("inf") if self.finished else 0.0

    def _tell(self, trouble: str = "") -> None:
        if self._notices is not None:
            self._copies.tell(self._known_to, self.finished, trouble, self._notices(), self._lost)

    def _note_loss(self, loss: Loss) -> None:
        reader = "join" if self._notices is None else "run"
        self._lost += loss.count
        self._notice(
            f"{self._name}: {loss.partition} has records {loss.first} to {loss.first + loss.count - 1} no "
            f"more ({loss.count}): they were deleted before they were read, and are lost to the {reader}"
        )

    def _sweep(self) -> None:
        now_s = time.monotonic()
        if now_s - self._swept_s >= _SWEEP_EVERY_S:
            self._swept_s = now_s
            keep_s = 0.0 if self._drain else self._settings.keep_days * _DAY_S
            self._held = self._copies.sweep(keep_s, time.time())

    def _reopen(self) -> None:
        """What an append that failed has left is found as after a crash."""
        self._swept_s = float("-inf")
        self._opened, self._stale = False, True


@contextlib.contextmanager
def copying(
    sources: Mapping[str, Iterable[str]],
    directory: Path,
    settings: Settings,
    notice: Callable[[str], None],
    fail: Callable[[BaseException], None],
    drain: bool = False,
    fields: Fields | None = None,
    notices: Callable[[], Sequence[str]] | None = None,
) -> Iterator[list[Import]]:
    """Copy what the sources of each side have and gain, within the block. `fields`: of all sources, if not
    those of their sides in the settings; the rest as of Import. UsageError, CorruptStateError,
    StorageError."""
    with contextlib.ExitStack() as running:
        imports = []
        for side, texts in sources.items():
            given = directory, fields or fields_of(settings, side), settings.imports, drain, notice, fail
            for text in texts:
                one = Import(text, side, *given, notices=notices)
                running.callback(one.stop)
                one.start()
                imports.append(one)
        yield imports


def copy_all(
    sources: Mapping[str, Iterable[str]], directory: Path, settings: Settings, notice: Callable[[str], None]
) -> None:
    """Copy what the sources of each side have now; again it goes on where it was.

    UsageError, CorruptStateError, StorageError. One that is away is told of and waited for.
    """
    failed: list[BaseException] = []
    with copying(sources, directory, settings, notice, failed.append, drain=True) as imports:
        while not (failed or all(one.finished for one in imports)):
            time.sleep(_LOOK_S)
    if failed:
        raise failed[0]


# --- Standard input: it is copied into a log file, and read there as any other.
#
# It can't be asked for again what it brought before, so each run has a file of its own. Who pipes the same
# events into the next run has them told as duplicates.

STDIN: Final = "-"
_READ_BYTES: Final = 1 << 20


def side_of_stdin(sides: Mapping[str, Sequence[str]]) -> str | None:
    """The one that it is, of the sources of each. UsageError where it is more than one."""
    piped = [side for side, texts in sides.items() for text in texts if text == STDIN]
    if len(piped) > 1:
        raise UsageError("standard input (-) can be one of the logs only")
    if piped and sys.stdin is None:  # its number may be another file's by now
        raise UsageError("standard input (-) is closed; pipe something into it, or name a file")
    return next(iter(piped), None)


def stdin_pattern(directory: Path, side: str) -> str:
    """Of the log files that standard input is copied into."""
    return str(directory / f"stdin-{side}-*.jsonl")


def copy_stdin(
    directory: Path,
    side: str,
    file_bytes_max: int,
    fd: int = 0,
    await_room: Callable[[DiskFullError, int], None] | None = None,
    is_over: Callable[[], bool] = lambda: False,
) -> None:
    """Return when it ends, or `is_over`, and all of it is durable, the last line too if it has no end.
    DiskFullError, StorageError, OSError. `await_room`: told of a full disk, and how often in a row, before
    another try."""
    with contextlib.closing(RotatingLog(directory, f"stdin-{side}", file_bytes_max)) as log:
        if log.position.offset:
            log.rotate()

        def append(lines: bytes) -> None:
            for failures in itertools.count(1):
                try:
                    log.append(lines)
                    return
                except DiskFullError as error:
                    if await_room is None or log.broken:
                        raise
                    await_room(error, failures)

        rest = b""
        while block := _block(fd, is_over):
            lines, newline, rest = (rest + block).rpartition(b"\n")
            if newline:
                append(lines + newline)
        if rest and not is_over():  # else it may be a part of a line
            append(rest + b"\n")
        log.sync()


def _block(fd: int, is_over: Callable[[], bool]) -> bytes:
    """Nothing at the end: a read alone goes on after a signal."""
    while not is_over():
        if select.select([fd], [], [], _LOOK_S)[0]:
            return os.read(fd, _READ_BYTES)
    return b""


def follow_stdin(directory: Path, side: str, file_bytes_max: int, notice: Callable[[str], None]) -> None:
    """The same in a thread, which waits for room on a full disk, and tells how it ended."""

    def await_room(error: DiskFullError, failures: int) -> None:
        if failures == 1:
            notice(f"standard input waits: {error}")
        time.sleep(_RETRIES.delay_s(failures))

    def copy() -> None:
        try:
            copy_stdin(directory, side, file_bytes_max, await_room=await_room)
        except (PhotonError, OSError) as error:
            notice(f"standard input is read no more: {told(error)}")
        else:
            notice("standard input has ended")

    threading.Thread(target=copy, name="stdin", daemon=True).start()
