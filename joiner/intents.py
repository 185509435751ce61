"""The intent journal: what this joiner asks the IdRegistry to register, until it is written (design.md).

The paper loses an event that was registered but not written when its joiner crashed (3.3.2). Here the joined
lines are on disk before they are registered, so that a restarted joiner can end what it began.

    BATCH   token length u16 | events u32 | token | ids 16 x N | times 8 x N | lines, newline-closed
    INTENT  the batch before it has this sequence, and none of its lines can stand before this place of the
            joined log (file, offset)
    ROWS    what was written of the intents that the next record ends (joiner.accounts.Row)
    ENDS    sequences of intents that have their end, and the place of the joined log that the lines of all
            intents with an end stand before (file, offset)
    TALLY   what was written of all intents that had an end before, as ROWS; a segment begins with it

A batch that no intent follows was never promised to anybody.

Intents end in the order of their lines in the joined log, all that one sync made durable in one record. So
whatever end of the journal a crash takes, one place parts the lines of the intents that have an end from
those of the others (`Left`), and a start needs to read no line to know whose it is.
"""

import contextlib
import struct
import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise
from pathlib import Path
from typing import Final

from joiner.accounts import Row, Written, pack_rows, unpack_rows
from photon.core.accounts import Sum, window_of
from photon.core.columns import count_lines
from photon.core.disk import make_directory, storage_errors
from photon.core.errors import CorruptStateError, OverloadedError, StorageError
from photon.core.ids import ID_BYTES, parse_token
from photon.core.journal import Place, Record, SegmentedJournal, pack_record
from photon.logs.writer import LogPosition

SEGMENT_BYTES: Final = 16 << 20
"""While one is deleted, which takes 4 ms, nothing is noted; of four times as much it takes 17."""
JOURNAL_BYTES_MAX: Final = 1 << 30
_SEQUENCES_A_SEGMENT: Final = 32  # as a power of two

_BATCH: Final = struct.Struct("<HI")
_INTENT: Final = struct.Struct("<QIQ")  # sequence, file, offset
_ENDS: Final = struct.Struct("<IQ")  # file, offset; sequences follow
_SEQUENCE_BYTES: Final = 8
_TIME_BYTES: Final = 8
_NOWHERE: Final = LogPosition(0, 0)


class Kind(IntEnum):
    BATCH = 1
    INTENT = 2
    ENDS = 3
    ROWS = 4
    TALLY = 5


@dataclass(slots=True)
class Intent:
    """A batch that is going to be registered and written: N ids, their times, and their joined lines."""

    token: bytes
    ids: bytes
    times: bytes
    lines: bytes
    sequence: int = -1
    position: LogPosition = _NOWHERE
    """Both set by the journal."""

    def __len__(self) -> int:
        return len(self.ids) // ID_BYTES


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes `start` to `end` of one file of the joined log."""

    file: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Left:
    """Where the life before left the joined log.

    From `cut` on stand only lines of intents without an end, before it none; None where there are no such
    intents. What comes now stands after `latest`, or the next start would not know whose it is.
    """

    cut: LogPosition | None
    latest: LogPosition


def _pack_batch(salt: int, intent: Intent) -> list[bytes]:
    head = _BATCH.pack(len(intent.token), len(intent))
    return pack_record(salt, Kind.BATCH, head, intent.token, intent.ids, intent.times, intent.lines)


def _unpack_intent(batch: memoryview, intent: memoryview) -> Intent:
    """ValueError if it does not hold what its head says."""
    sequence, file, offset = _INTENT.unpack(intent)
    token_bytes, count = _BATCH.unpack_from(batch)
    ids_at = _BATCH.size + token_bytes
    times_at = ids_at + ID_BYTES * count
    lines_at = times_at + _TIME_BYTES * count
    places = (_BATCH.size, ids_at, times_at, lines_at, len(batch))
    token, ids, times, lines = (bytes(batch[start:end]) for start, end in pairwise(places))
    if (held := count_lines(lines)) != count:
        raise ValueError(f"intent {sequence} holds {held} lines for {count} events")
    return Intent(token, ids, times, lines, sequence, LogPosition(file, offset))


class IntentJournal:
    """For many threads at once; a directory has one owner."""

    def __init__(
        self,
        directory: Path,
        fsync: bool,
        segment_bytes: int = SEGMENT_BYTES,
        bytes_max: int = JOURNAL_BYTES_MAX,
    ) -> None:
        """CorruptStateError if a record that was synced is damaged; a torn tail is cut."""
        self._fsync = fsync
        self._segment_bytes = segment_bytes
        self._bytes_max = bytes_max
        self._lock = threading.Lock()
        self._open: dict[int, tuple[Place, LogPosition, int]] = {}
        """Sequences without a written end -> the place after their records, where their lines begin, and
        their token's window."""
        self._lines: deque[tuple[Range, int, list[Row]]] = deque()
        """What stands in the joined log of intents without an end, in order: its place, the sequence, and
        what it is."""
        self._unwritten: list[tuple[Range, int, list[Row]]] = []
        """Ends that no record tells yet."""
        self._end = _NOWHERE
        """The lines of the intents whose ends are written stand before it."""
        self._sequence = 0
        self._written = Written()
        self._rows: list[Row] = []
        self._tally_in = 0
        """The last segment that begins with what was written before it; 0: none does."""
        self._batch = memoryview(b"")
        self._intents: dict[int, Intent] = {}
        with storage_errors(directory):
            make_directory(directory)
            self._log = SegmentedJournal(directory, "intents", self._replay, _corrupt)
        self._batch = memoryview(b"")
        self._number_on()
        self._drop_ended_segments()

    def take_over(self) -> tuple[list[Intent], Left]:
        """What the process before left, once: its intents without an end, oldest first, and the joined log's
        place."""
        intents, self._intents = [*self._intents.values()], {}
        begins = [intent.position for intent in intents]
        cut = max(min(begins), self._end) if begins else None
        return intents, Left(cut, max([*begins, self._end]))

    @property
    def broken(self) -> bool:
        """No write will work before a restart."""
        return self._log.broken

    def append(self, intent: Intent, output_position: Callable[[], LogPosition]) -> None:
        """Write an intent; it counts when `sync` has returned.

        OverloadedError while the journal is at its bound, DiskFullError, StorageError: nothing was written.
        """
        salt = self._log.salt
        batch = _pack_batch(salt, intent)  # without the lock, for it takes long
        with self._lock:
            self._roll_if_due()
            if salt != self._log.salt:
                salt = self._log.salt
                batch = _pack_batch(salt, intent)
            # Asked under the lock: the lines of what ended before are before this place, or end after it.
            sequence, position = self._sequence, output_position()
            head = _INTENT.pack(sequence, position.file, position.offset)
            place = self._write(batch + pack_record(salt, Kind.INTENT, head))
            self._open[sequence] = place, position, _window_of(intent)
            self._sequence += 1
            intent.sequence, intent.position = sequence, position

    def sync(self, intent: Intent) -> None:
        """Return when the intent is durable. Threads that wait together share one fdatasync."""
        if self._fsync:
            place = self._open[intent.sequence][0]
            with storage_errors(self._log.path):
                self._log.sync(place)

    def written(self, intent: Intent, lines: Range, days: Mapping[int, Sum]) -> None:
        """The intent's winning lines stand there, so many of each day (core.accounts.sums_by_day). Told in
        their order, before more are appended."""
        whose, window = parse_token(intent.token).incarnation, _window_of(intent)
        rows = [Row(lines.file, lines.end, whose, window, day, *sum_) for day, sum_ in days.items()]
        self._lines.append((lines, intent.sequence, rows))

    def synced(self, upto: Range) -> None:
        """All lines up to the end of this range are durable, so the intents that they are of have their ends.
        Raises nothing.

        The ends are not synced: without them the next start writes the lines once more.
        """
        with self._lock:
            while self._lines and _is_before(self._lines[0][0], upto):
                self._unwritten.append(self._lines.popleft())
            self._write_ends()

    def ended(self, intent: Intent) -> None:
        """The intent's outcome is known, and no line of it stands in the joined log. Raises nothing."""
        with self._lock:
            self._unwritten.append((Range(0, 0, 0), intent.sequence, []))
            self._write_ends()

    def needed_from(self, output_position: Callable[[], LogPosition]) -> LogPosition:
        """Lines of intents without an end, also of those to come, stand after this place of the output.

        No crash makes it earlier once `sync_ends` has returned.
        """
        position = output_position()
        with self._lock:
            waiting = [place for place, *_ in self._unwritten if place.end]
            if self._lines:
                waiting.append(self._lines[0][0])
        return min([position, *(LogPosition(place.file, place.start) for place in waiting)])

    def sync_ends(self) -> None:
        """Return when all ends that were written are durable. StorageError."""
        with storage_errors(self._log.path):
            self._log.sync()

    def account(self, latest: int) -> tuple[int, Written]:
        """All tokens of earlier windows than the one told, which is `latest` at most, have their end; and a
        copy of what is written of all that have it."""
        with self._lock:
            self._written.tally.move_on(latest)
            copied = Written()
            copied.tally, copied.lengths = self._written.tally.copy(), dict(self._written.lengths)
            return min([latest, *(window for _, _, window in self._open.values())]), copied

    def forget_before(self, day: int) -> None:
        """What was written of events of earlier days is compared with nothing any more."""
        with self._lock:
            self._written.forget_before(day)

    @property
    def open_count(self) -> int:
        with self._lock:
            return len(self._open) - len(self._unwritten)

    def close(self) -> None:
        self._log.close()

    def _write_ends(self) -> None:
        if self._unwritten:
            with contextlib.suppress(StorageError):  # kept, and written before the next intent
                self._write([])
            self._drop_ended_segments()

    def _write(self, records: list[bytes]) -> Place:
        end = max([self._end, *(LogPosition(place.file, place.end) for place, *_ in self._unwritten)])
        ends: list[bytes] = []
        if self._unwritten:
            sequences = b"".join(n.to_bytes(_SEQUENCE_BYTES, "little") for _, n, _ in self._unwritten)
            rows = [row for *_, rows in self._unwritten for row in rows]
            # Also where there are none: a crash may have left some whose ends are lost.
            ends = pack_record(self._log.salt, Kind.ROWS, pack_rows(rows))
            ends += pack_record(self._log.salt, Kind.ENDS, _ENDS.pack(end.file, end.offset), sequences)
        with storage_errors(self._log.path):
            place = self._log.append(b"".join(ends + records))
        for _, ended, rows in self._unwritten:
            del self._open[ended]
            self._written.add(rows)
        self._unwritten.clear()
        self._end = end
        return place

    def _roll_if_due(self) -> None:
        if self._log.end.offset >= self._segment_bytes:
            with storage_errors(self._log.path):
                self._log.roll()
                tally = pack_rows(self._written.rows())
                self._log.append(b"".join(pack_record(self._log.salt, Kind.TALLY, tally)))
            self._tally_in = self._log.number
            self._number_on()
            self._drop_ended_segments()
        if self._held() >= self._bytes_max:
            self._write_ends()
            if self._held() >= self._bytes_max:
                raise OverloadedError(
                    f"{self._log.directory}: {self._held()} bytes of intents wait for the outcome of some "
                    "batch; bring the IdRegistry back"
                )

    def _held(self) -> int:
        return sum(list(self._log.segments.values())[:-1])

    def _number_on(self) -> None:
        # No sequence comes twice, though all segments that held them are gone.
        self._sequence = max(self._sequence, self._log.number << _SEQUENCES_A_SEGMENT)

    def _drop_ended_segments(self) -> None:
        """Delete from the oldest on, up to the first that holds an open intent.

        Only when the ends of what goes are durable: without them, what stays would not tell where the lines
        of the others end. And only if what stays tells what was written.
        """
        needed = min((place.segment for place, *_ in self._open.values()), default=self._tally_in)
        needed = min(needed, self._tally_in)
        if needed > next(iter(self._log.segments)):
            with contextlib.suppress(OSError):  # they still count against the bound and are tried again
                if self._fsync:
                    self._log.sync()
                self._log.drop_before(needed)

    def _replay(self, segment: int, path: Path, record: Record) -> None:
        if record.kind == Kind.BATCH:
            self._batch = record.payload
        elif record.kind == Kind.INTENT:
            try:
                intent = _unpack_intent(self._batch, record.payload)
                window = _window_of(intent)
            except (ValueError, struct.error) as error:
                raise _corrupt(path, str(error)) from error
            self._intents[intent.sequence] = intent
            self._open[intent.sequence] = Place(segment, 0), intent.position, window
            self._sequence = max(self._sequence, intent.sequence + 1)
        elif record.kind == Kind.ENDS:
            self._written.add(self._rows)
            self._rows = []
            self._end = LogPosition(*_ENDS.unpack_from(record.payload))
            for (sequence,) in struct.iter_unpack("<Q", record.payload[_ENDS.size :]):
                self._sequence = max(self._sequence, sequence + 1)
                self._intents.pop(sequence, None)
                self._open.pop(sequence, None)
        elif record.kind == Kind.ROWS:
            self._rows = unpack_rows(record.payload)
        elif record.kind == Kind.TALLY:
            self._written, self._tally_in = Written(), segment
            self._written.add(unpack_rows(record.payload))
        else:
            raise _corrupt(path, f"a record of an unknown kind, {record.kind}")


def _window_of(intent: Intent) -> int:
    return window_of(parse_token(intent.token).time_us)


def _is_before(lines: Range, upto: Range) -> bool:
    return (lines.file, lines.end) <= (upto.file, upto.end)


def _corrupt(path: Path, what: str) -> CorruptStateError:
    return CorruptStateError(
        f"{path}: {what}; restore it from a backup, or move it away and let recovery find what was "
        "registered and not written"
    )
