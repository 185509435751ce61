"""The intent journal: what this joiner asks the IdRegistry to register, until it is written (design.md).

The paper loses an event that was registered but not written when its joiner crashed (3.3.2). Here the joined
lines are on disk before they are registered, so that a restarted joiner can end what it began.
"""

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

from joiner.intent_records import Draft, Intent, Kind, Range, Record, decode_intent, done_record, scan
from photon.core.disk import storage_errors
from photon.core.errors import CorruptStateError, OverloadedError, StorageError
from photon.core.logwriter import LogPosition, RotatingLog

SEGMENT_BYTES: Final = 64 << 20
JOURNAL_BYTES_MAX: Final = 1 << 30
_NEVER: Final = 1 << 62
_SEQUENCES_A_SEGMENT: Final = 32  # as a power of two


class IntentJournal:
    """Segments `<directory>/intents-NNNNNN.journal`. For many threads at once; a directory has one owner."""

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
        self._log = RotatingLog(directory, "intents", _NEVER, ".journal")
        self._closed_segments: dict[int, int] = {}  # number -> bytes, ascending
        self._open: dict[int, LogPosition] = {}  # sequence -> the place after its record
        self._places: dict[int, LogPosition] = {}  # sequence -> where its lines may begin to stand
        self._unwritten_ends: list[tuple[int, Range]] = []
        self._sequence = 0
        self._taken_over = self._read()

    def take_over(self) -> tuple[list[Intent], list[Range]]:
        """What the process before left, once: its intents without an end, oldest first, and the places in the
        joined log of the lines of those that have one."""
        taken, self._taken_over = self._taken_over, ([], [])
        return taken

    @property
    def broken(self) -> bool:
        """No write will work before a restart."""
        return self._log.broken

    def append(self, draft: Draft, output_position: Callable[[], LogPosition]) -> Intent:
        """Write an intent; it counts when `sync` has returned.

        OverloadedError while the journal is at its bound, DiskFullError, StorageError: nothing was written.
        """
        with self._lock:
            self._rotate_if_due()
            sequence = self._sequence
            # Asked under the lock: the lines of every intent that ended before stand before this place.
            position = output_position()
            self._write(draft.record(sequence, position, self._synced_here()), sequence)
            self._sequence += 1
            self._places[sequence] = position
            return draft.intent(sequence, position)

    def sync(self, intent: Intent) -> None:
        """Return when the intent is durable. Threads that wait together share one fdatasync."""
        if self._fsync:
            self._log.sync(self._open[intent.sequence])

    def done(self, intent: Intent, written: Range) -> None:
        """The intent's outcome is known and its winning lines are durable at `written`. Raises nothing.

        Not synced: without it, the next start finds the lines where they are.
        """
        with self._lock:
            del self._open[intent.sequence]
            self._unwritten_ends.append((intent.sequence, written))
            with contextlib.suppress(StorageError):  # kept, and written before the next intent
                self._write(b"", None)
            self._delete_ended_segments()

    def needed_from(self, output_position: Callable[[], LogPosition]) -> LogPosition:
        """Lines of intents without an end, also of those to come, stand after this place of the output.

        No crash makes it earlier once `sync_ends` has returned.
        """
        with self._lock:
            return min([output_position(), *self._places.values()])

    def sync_ends(self) -> None:
        """Return when all ends that were written are durable. StorageError."""
        self._log.sync()

    @property
    def open_count(self) -> int:
        return len(self._open)

    def close(self) -> None:
        self._log.close()

    def _write(self, record: bytes, sequence: int | None) -> None:
        synced = self._synced_here()
        ends = b"".join([done_record(s, written, synced) for s, written in self._unwritten_ends])
        end = self._log.append(ends + record)
        for ended, _ in self._unwritten_ends:
            del self._places[ended]
        self._unwritten_ends.clear()
        if sequence is not None:
            self._open[sequence] = end

    def _synced_here(self) -> int:
        synced = self._log.synced
        return synced.offset if synced.file == self._log.position.file else 0

    def _rotate_if_due(self) -> None:
        position = self._log.position
        if position.offset >= self._segment_bytes:
            self._log.rotate()
            self._closed_segments[position.file] = position.offset
            self._number_on()
            self._delete_ended_segments()
        held = sum(self._closed_segments.values())
        if held >= self._bytes_max:
            raise OverloadedError(
                f"{self._log.directory}: {held} bytes of intents wait for the outcome of some batch; "
                "bring the IdRegistry back"
            )

    def _number_on(self) -> None:
        # No sequence comes twice, even if a power cut brings a deleted segment back.
        self._sequence = max(self._sequence, self._log.position.file << _SEQUENCES_A_SEGMENT)

    def _delete_ended_segments(self) -> None:
        """Delete from the oldest on, up to the first that holds an open intent.

        In order: the ranges of `take_over` must reach back as far as the oldest open intent.
        """
        if not self._closed_segments:
            return
        oldest_open = min((p.file for p in self._open.values()), default=self._log.position.file)
        for number in list(self._closed_segments):
            if number >= oldest_open:
                return
            try:
                self._log.path(number).unlink(missing_ok=True)
            except OSError:
                return  # it still counts against the bound and is tried again with the next end
            del self._closed_segments[number]

    def _read(self) -> tuple[list[Intent], list[Range]]:
        numbers = self._log.file_numbers()
        intents: dict[int, tuple[int, Record]] = {}
        done_ranges = []
        for number in numbers:
            segment = self._read_segment(number)
            found = scan(segment, last=number == numbers[-1])
            if found.damage is not None:
                raise self._corrupt(number, found.damage)
            for record in found.records:
                if record.kind is Kind.INTENT:
                    intents[record.sequence] = number, record
                else:
                    intents.pop(record.sequence, None)
                    done_ranges.append(record.place)
                self._sequence = max(self._sequence, record.sequence + 1)
            if number != numbers[-1]:
                self._closed_segments[number] = len(segment)
            elif found.end < len(segment):
                self._log.truncate(LogPosition(number, found.end))
        self._number_on()
        self._open = {s: LogPosition(n, record.to) for s, (n, record) in intents.items()}
        opened = self._decode(intents)
        self._places = {intent.sequence: intent.position for intent in opened}
        self._delete_ended_segments()
        return opened, done_ranges

    def _decode(self, intents: dict[int, tuple[int, Record]]) -> list[Intent]:
        opened = []
        number, segment = -1, b""
        for sequence in sorted(intents):
            holder, record = intents[sequence]
            if holder != number:
                number, segment = holder, self._read_segment(holder)
            try:
                opened.append(decode_intent(segment, record))
            except ValueError as error:
                raise self._corrupt(number, str(error)) from error
        return opened

    def _read_segment(self, number: int) -> bytes:
        path = self._log.path(number)
        with storage_errors(path):
            return path.read_bytes()

    def _corrupt(self, number: int, what: str) -> CorruptStateError:
        path = self._log.path(number)
        return CorruptStateError(
            f"{path}: {what}; restore it from a backup, or move it away and let recovery find what was "
            "registered and not written"
        )
