"""The intent journal: what this joiner asks the IdRegistry to register, until it is written (design.md).

The paper loses an event that was registered but not written when its joiner crashed (3.3.2). Here the joined
lines are on disk before they are registered, so that a restarted joiner can end what it began.
"""

import contextlib
import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from joiner.rules.intent import Draft, Intent, Kind, Range, pack_done, unpack_done, unpack_intent
from photon.core.disk import make_directory, storage_errors
from photon.core.errors import CorruptStateError, OverloadedError, StorageError
from photon.core.journal import Place, Record, SegmentedJournal
from photon.logs.writer import LogPosition

SEGMENT_BYTES: Final = 64 << 20
JOURNAL_BYTES_MAX: Final = 1 << 30
_SEQUENCES_A_SEGMENT: Final = 32  # as a power of two


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
        self._open: dict[int, Place] = {}  # sequence -> the place after its records
        self._places: dict[int, LogPosition] = {}  # sequence -> where its lines may begin to stand
        self._unwritten_ends: list[tuple[int, Range]] = []
        self._sequence = 0
        self._batch = memoryview(b"")
        self._intents: dict[int, Intent] = {}
        self._ranges: list[Range] = []
        with storage_errors(directory):
            make_directory(directory)
            self._log = SegmentedJournal(directory, "intents", self._replay, _corrupt)
        self._batch = memoryview(b"")
        self._number_on()
        self._drop_ended_segments()

    def take_over(self) -> tuple[list[Intent], list[Range]]:
        """What the process before left, once: its intents without an end, oldest first, and the places in the
        joined log of the lines of those that have one."""
        intents = [self._intents[sequence] for sequence in sorted(self._intents)]
        ranges = self._ranges
        self._intents, self._ranges = {}, []
        return intents, ranges

    @property
    def broken(self) -> bool:
        """No write will work before a restart."""
        return self._log.broken

    def draft(self, token: bytes, ids: bytes, times: bytes, lines: bytes) -> Draft:
        """What `append` takes."""
        return Draft(self._log.salt, token, ids, times, lines)

    def append(self, draft: Draft, output_position: Callable[[], LogPosition]) -> Intent:
        """Write an intent; it counts when `sync` has returned.

        OverloadedError while the journal is at its bound, DiskFullError, StorageError: nothing was written.
        """
        with self._lock:
            self._roll_if_due()
            sequence = self._sequence
            # Asked under the lock: the lines of every intent that ended before stand before this place.
            position = output_position()
            self._open[sequence] = self._write(draft.pack(self._log.salt, sequence, position))
            self._sequence += 1
            self._places[sequence] = position
            return draft.intent(sequence, position)

    def sync(self, intent: Intent) -> None:
        """Return when the intent is durable. Threads that wait together share one fdatasync."""
        if self._fsync:
            place = self._open[intent.sequence]
            with storage_errors(self._log.path):
                self._log.sync(place)

    def done(self, intent: Intent, written: Range) -> None:
        """The intent's outcome is known and its winning lines are durable at `written`. Raises nothing.

        Not synced: without it, the next start finds the lines where they are.
        """
        with self._lock:
            del self._open[intent.sequence]
            self._unwritten_ends.append((intent.sequence, written))
            with contextlib.suppress(StorageError):  # kept, and written before the next intent
                self._write([])
            self._drop_ended_segments()

    def needed_from(self, output_position: Callable[[], LogPosition]) -> LogPosition:
        """Lines of intents without an end, also of those to come, stand after this place of the output.

        No crash makes it earlier once `sync_ends` has returned.
        """
        with self._lock:
            return min([output_position(), *self._places.values()])

    def sync_ends(self) -> None:
        """Return when all ends that were written are durable. StorageError."""
        with storage_errors(self._log.path):
            self._log.sync()

    @property
    def open_count(self) -> int:
        return len(self._open)

    def close(self) -> None:
        self._log.close()

    def _write(self, records: list[bytes]) -> Place:
        salt = self._log.salt
        ends = [piece for ended in self._unwritten_ends for piece in pack_done(salt, *ended)]
        with storage_errors(self._log.path):
            place = self._log.append(b"".join(ends + records))
        for ended, _ in self._unwritten_ends:
            del self._places[ended]
        self._unwritten_ends.clear()
        return place

    def _roll_if_due(self) -> None:
        if self._log.end.offset >= self._segment_bytes:
            with storage_errors(self._log.path):
                self._log.roll()
            self._number_on()
            self._drop_ended_segments()
        held = sum(list(self._log.segments.values())[:-1])
        if held >= self._bytes_max:
            raise OverloadedError(
                f"{self._log.directory}: {held} bytes of intents wait for the outcome of some batch; "
                "bring the IdRegistry back"
            )

    def _number_on(self) -> None:
        # No sequence comes twice, though all segments that held them are gone.
        self._sequence = max(self._sequence, self._log.number << _SEQUENCES_A_SEGMENT)

    def _drop_ended_segments(self) -> None:
        """Delete from the oldest on, up to the first that holds an open intent.

        In order: the ranges of `take_over` must reach back as far as the oldest open intent.
        """
        needed = min((place.segment for place in self._open.values()), default=self._log.number)
        with contextlib.suppress(OSError):  # they still count against the bound and are tried again
            self._log.drop_before(needed)

    def _replay(self, segment: int, path: Path, record: Record) -> None:
        if record.kind == Kind.BATCH:
            self._batch = record.payload
        elif record.kind == Kind.INTENT:
            try:
                intent = unpack_intent(self._batch, record.payload)
            except (ValueError, struct.error) as error:
                raise _corrupt(path, str(error)) from error
            self._intents[intent.sequence] = intent
            self._open[intent.sequence] = Place(segment, 0)
            self._places[intent.sequence] = intent.position
            self._sequence = max(self._sequence, intent.sequence + 1)
        elif record.kind == Kind.DONE:
            sequence, written = unpack_done(record.payload)
            self._ranges.append(written)
            self._sequence = max(self._sequence, sequence + 1)
            self._intents.pop(sequence, None)
            self._open.pop(sequence, None)
            self._places.pop(sequence, None)
        else:
            raise _corrupt(path, f"a record of an unknown kind, {record.kind}")


def _corrupt(path: Path, what: str) -> CorruptStateError:
    return CorruptStateError(
        f"{path}: {what}; restore it from a backup, or move it away and let recovery find what was "
        "registered and not written"
    )
