"""What the records of the intent journal say: pure rules, no IO (design: "Beyond the paper").

    BATCH   token length u16 | events u32 | token | ids 16 x N | times 8 x N | lines, newline-closed
    INTENT  the batch before it has this sequence, and none of its lines can stand before this place of the
            joined log (file, offset)
    DONE    the sequence of an intent that has its end, and the range of the joined log that holds the lines
            that won

A batch that no intent follows was never promised to anybody.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from photon.core.columns import split_lines
from photon.core.ids import ID_BYTES
from photon.core.journal import pack_record
from photon.logs.writer import LogPosition

_BATCH: Final = struct.Struct("<HI")
_INTENT: Final = struct.Struct("<QIQ")  # sequence, file, offset
_DONE: Final = struct.Struct("<QIQQ")  # sequence, file, start, end
_TIME_BYTES: Final = 8


class Kind(IntEnum):
    BATCH = 1
    INTENT = 2
    DONE = 3


@dataclass(frozen=True, slots=True)
class Intent:
    """A batch that is going to be registered and written: N ids, their times, and their joined lines."""

    sequence: int
    token: bytes
    ids: bytes
    times: bytes
    lines: bytes
    position: LogPosition

    def __len__(self) -> int:
        return len(self.ids) // ID_BYTES


@dataclass(frozen=True, slots=True)
class Range:
    """Bytes `start` to `end` of one file of the joined log."""

    file: int
    start: int
    end: int


class Draft:
    """An intent but for its sequence and place: what can be made ready without the journal's lock."""

    def __init__(self, salt: int, token: bytes, ids: bytes, times: bytes, lines: bytes) -> None:
        self.token, self.ids, self.times, self.lines = token, ids, times, lines
        self._salt = salt
        self._packed = self._pack(salt)

    def pack(self, salt: int, sequence: int, position: LogPosition) -> list[bytes]:
        """The records as the pieces to write; made anew where the journal's segment has changed meanwhile."""
        batch = self._packed if salt == self._salt else self._pack(salt)
        return batch + pack_record(salt, Kind.INTENT, _INTENT.pack(sequence, position.file, position.offset))

    def intent(self, sequence: int, position: LogPosition) -> Intent:
        return Intent(sequence, self.token, self.ids, self.times, self.lines, position)

    def _pack(self, salt: int) -> list[bytes]:
        head = _BATCH.pack(len(self.token), len(self.ids) // ID_BYTES)
        return pack_record(salt, Kind.BATCH, head, self.token, self.ids, self.times, self.lines)


def pack_done(salt: int, sequence: int, written: Range) -> list[bytes]:
    """The record that ends an intent."""
    return pack_record(salt, Kind.DONE, _DONE.pack(sequence, written.file, written.start, written.end))


def unpack_done(payload: memoryview) -> tuple[int, Range]:
    sequence, file, start, end = _DONE.unpack(payload)
    return sequence, Range(file, start, end)


def unpack_intent(batch: memoryview, intent: memoryview) -> Intent:
    """ValueError if it does not hold what its head says."""
    sequence, file, offset = _INTENT.unpack(intent)
    token_bytes, count = _BATCH.unpack_from(batch)
    ids_at = _BATCH.size + token_bytes
    times_at = ids_at + ID_BYTES * count
    lines_at = times_at + _TIME_BYTES * count
    token, ids, times, lines = (
        bytes(part)
        for part in (
            batch[_BATCH.size : ids_at],
            batch[ids_at:times_at],
            batch[times_at:lines_at],
            batch[lines_at:],
        )
    )
    if len(split_lines(lines)) != count:
        raise ValueError(f"intent {sequence} holds {len(split_lines(lines))} lines for {count} events")
    return Intent(sequence, token, ids, times, lines, LogPosition(file, offset))
