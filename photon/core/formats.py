"""Log lines to packed columns. JSON lines are the first format; the format is a port.

Whole chunks are parsed at once and only the fields that are named; a chunk with a bad line is halved until
the bad line stands alone, so that the rest goes on.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Any, Final, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from photon.core.columns import pack_times
from photon.core.ids import IdPacker, opaque_mask, timestamps_us
from photon.core.settings import Foreign, Primary

_BRACES: Final = b"{}"
_BYTE_ORDER_MARK: Final = "\ufeff".encode()
_UNIT_US: Final = {"s": 1_000_000, "ms": 1_000, "us": 1}
_FLOAT_UNIT_US: Final = {"s": 1e6, "ms": 1e3, "us": 1.0, "ns": 1e-3}


@dataclass(frozen=True, slots=True)
class Malformed:
    """A line that is no event. `start` is its offset in the chunk."""

    start: int
    line: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class PrimaryBatch:
    """N primary events in log order; `starts` (N,) are the lines' offsets in the chunk."""

    ids: bytes
    lines: list[bytes]
    starts: npt.NDArray[np.int64]
    malformed: list[Malformed]


@dataclass(frozen=True, slots=True)
class ForeignBatch:
    """N foreign events in log order. Lines have no white space around them."""

    ids: bytes
    primary_ids: bytes
    times: bytes
    lines: list[bytes]
    starts: npt.NDArray[np.int64]
    malformed: list[Malformed]


class LogFormat(Protocol):
    """Turns a chunk of whole lines into columns. Not for several threads at once."""

    def parse_primary(self, chunk: bytes) -> PrimaryBatch: ...

    def parse_foreign(self, chunk: bytes) -> ForeignBatch: ...


class JsonLines:
    """One JSON object a line, UTF-8. Names of the fields come from the settings."""

    def __init__(self, primary: Primary, foreign: Foreign, packer: IdPacker) -> None:
        self._packer = packer
        self._time_unit = foreign.time_unit
        self._time_field = foreign.time
        self._primary = msgspec.json.Decoder(
            msgspec.defstruct("PrimaryEvent", [("id", str | int)], rename={"id": primary.id}, gc=False)
        )
        names = {"id": foreign.id, "primary_id": foreign.primary_id, "time": foreign.time}
        self._foreign = msgspec.json.Decoder(
            msgspec.defstruct(
                "ForeignEvent",
                [("id", str | int), ("primary_id", str | int), ("time", int | float | None, None)],
                rename=names,
                gc=False,
            )
        )

    def parse_primary(self, chunk: bytes) -> PrimaryBatch:
        lines, starts = split_chunk(chunk)
        events, good, malformed = _decode(self._primary, lines, starts)
        if malformed:
            lines, starts = [lines[row] for row in good], starts[good]
        return PrimaryBatch(self._packer.pack(_texts([e.id for e in events])), lines, starts, malformed)

    def parse_foreign(self, chunk: bytes) -> ForeignBatch:
        lines, starts = split_chunk(chunk)
        events, good, malformed = _decode(self._foreign, lines, starts)
        if malformed:
            lines, starts = [lines[row] for row in good], starts[good]
        ids = self._packer.pack(_texts([e.id for e in events]))
        times = event_times(ids, [e.time for e in events], self._time_unit)
        if not isinstance(times, bytes):
            return self._without_bad_times(chunk, lines, starts, events, malformed)
        primary_ids = self._packer.pack(_texts([e.primary_id for e in events]))
        return ForeignBatch(ids, primary_ids, times, lines, starts, malformed)

    def _without_bad_times(
        self,
        chunk: bytes,
        lines: list[bytes],
        starts: npt.NDArray[np.int64],
        events: list[Any],
        malformed: list[Malformed],
    ) -> ForeignBatch:
        """The slow path: some event has no usable time and goes to the malformed ones."""
        kept = []
        for row, event in enumerate(events):
            one = event_times(self._packer.pack(_texts([event.id])), [event.time], self._time_unit)
            if isinstance(one, bytes):
                kept.append(row)
            else:
                reason = f"field '{self._time_field}' {one}"
                malformed.append(Malformed(int(starts[row]), lines[row], reason))
        malformed.sort(key=lambda bad: bad.start)
        good = [events[row] for row in kept]
        ids = self._packer.pack(_texts([e.id for e in good]))
        times = event_times(ids, [e.time for e in good], self._time_unit)
        assert isinstance(times, bytes)
        primary_ids = self._packer.pack(_texts([e.primary_id for e in good]))
        return ForeignBatch(ids, primary_ids, times, [lines[row] for row in kept], starts[kept], malformed)


def split_chunk(chunk: bytes) -> tuple[list[bytes], npt.NDArray[np.int64]]:
    """Whole lines -> lines without white space around them, blank ones left out, and each one's offset.

    A byte order mark, as some editors put at a file's start, counts as white space before a line.
    """
    lines = chunk.split(b"\n")
    if not lines[-1]:
        lines.pop()
    lengths = np.fromiter(map(len, lines), np.int64, len(lines))
    starts = np.zeros(len(lines), np.int64)
    np.cumsum(lengths[:-1] + 1, out=starts[1:])
    # Clean lines, the common case, start with { and end with }: then nothing is to be stripped.
    if lengths.all():
        text = np.frombuffer(chunk, np.uint8)
        if (text[starts] == _BRACES[0]).all() and (text[starts + lengths - 1] == _BRACES[1]).all():
            return lines, starts
    bare = [line.strip().removeprefix(_BYTE_ORDER_MARK).lstrip() for line in lines]
    starts += [len(line.rstrip()) - len(rest) for line, rest in zip(lines, bare, strict=True)]
    lines = bare
    if not all(lines):
        filled = [row for row, line in enumerate(lines) if line]
        return [lines[row] for row in filled], starts[filled]
    return lines, starts


def _stand_alone(text: bytes, count: int) -> bool:
    """Whether no object can reach over a line's end: each of `count` lines starts with { and ends with }.

    Between } and { no newline is allowed inside a JSON value, so every line's end is an object's end.
    """
    return text.startswith(b"{") and text.endswith(b"}") and text.count(b"}\n{") == count - 1


def _decode(
    decoder: Any, lines: list[bytes], starts: npt.NDArray[np.int64]
) -> tuple[list[Any], list[int], list[Malformed]]:
    """Lines -> events, the rows they came from, and the malformed rest."""
    events: list[Any] = []
    good: list[int] = []
    malformed: list[Malformed] = []
    pending = [(0, len(lines))]
    while pending:
        low, high = pending.pop()
        if low == high:
            continue
        text = b"\n".join(lines[low:high])
        try:
            if high - low > 1 and not _stand_alone(text, high - low):
                raise msgspec.DecodeError("lines that are no objects")
            text.isascii() or text.decode("utf-8")
            decoded = decoder.decode_lines(text)
            if len(decoded) != high - low:
                raise msgspec.DecodeError("not one JSON object")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if high - low == 1:
                malformed.append(Malformed(int(starts[low]), lines[low], _reason(error)))
            else:
                middle = (low + high) // 2
                pending += [(middle, high), (low, middle)]
            continue
        events += decoded
        good += range(low, high)
    return events, good, malformed


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: byte 0x{error.object[error.start]:02x} at {error.start}"
    return f"not a valid event: {str(error).split(' - at `$[')[0]}"


def _texts(ids: Sequence[Any]) -> list[str]:
    """Ids given as numbers are the text of the number."""
    return ids if all(map(str.__instancecheck__, ids)) else [str(i) for i in ids]  # type: ignore[return-value]


def event_times(ids: bytes, values: Sequence[Any], unit: str) -> bytes | str:
    """Event times in us as a column, or why there is none.

    A photon id's own timestamp is its event's time (paper 3.1): it can't disagree between copies of an event.
    """
    opaque = opaque_mask(ids)
    if not opaque.any():
        return pack_times(timestamps_us(ids))
    if not opaque.all():
        times = timestamps_us(ids).copy()
        own = event_times(
            b"\xe0" * 16 * int(opaque.sum()), [v for v, o in zip(values, opaque, strict=True) if o], unit
        )
        if isinstance(own, str):
            return own
        times[opaque] = np.frombuffer(own, "<i8")
        return pack_times(times)
    try:
        return pack_times(_to_us(values, unit))
    except TypeError:
        return "is missing (an opaque id needs its event's time)"
    except (OverflowError, ValueError):
        return "is out of range"


def _to_us(values: Sequence[Any], unit: str) -> npt.NDArray[np.int64]:
    """Each value by itself, so that an event's time never depends on the batch it came in.

    Whole numbers exactly (ns rounded down), others to the nearest us. TypeError for None.
    """
    if None in values:
        raise TypeError
    if all(map(int.__instancecheck__, values)):
        return _whole_to_us(np.array(values, dtype=np.int64), unit)
    whole = [isinstance(value, int) for value in values]
    times = np.empty(len(values), np.int64)
    rows = np.array(whole, np.bool_)
    times[rows] = _whole_to_us(np.array(list(compress(values, whole)), dtype=np.int64), unit)
    scaled = np.array([v for v in values if not isinstance(v, int)], np.float64) * _FLOAT_UNIT_US[unit]
    if not np.isfinite(scaled).all() or np.abs(scaled).max(initial=0) >= 2.0**63:
        raise OverflowError
    times[~rows] = np.round(scaled).astype(np.int64)
    return times


def _whole_to_us(values: npt.NDArray[np.int64], unit: str) -> npt.NDArray[np.int64]:
    if unit == "ns":
        return values // 1_000
    factor = _UNIT_US[unit]
    largest = (2**63 - 1) // factor
    if factor > 1 and (values.max(initial=0) > largest or values.min(initial=0) < -largest):
        raise OverflowError
    return values * factor
