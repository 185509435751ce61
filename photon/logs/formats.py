"""Log lines to packed columns (docs/formats.md).

A log holds JSON lines, compressed or not. Another line format would be another class with the two methods of
JsonLines, and `json_lines`, from which every reader of logs gets its parser, would choose it.
"""

import datetime
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import compress, repeat
from operator import sub
from typing import Annotated, Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from photon.core.columns import Field, decoder_of, pack_times, take_ids
from photon.core.ids import IdPacker, opaque_mask, timestamps_us
from photon.core.settings import Foreign, Primary, Settings, parse_path

_ID: Final = Annotated[str, msgspec.Meta(min_length=1)] | int
_EMPTY_ID: Final = "Expected `str` of length >= 1"
_NEWLINE: Final = b"\n"[0]
_BRACES: Final = b"{}"
_CHECKED_BYTES: Final = 1 << 16
_BLANK: Final = b" \t\n\r\v\f\0"
_BYTE_ORDER_MARK: Final = "\ufeff".encode()
IS_UTF16: Final = re.compile(rb"\xff\xfe|\xfe\xff|\0?\{\0")
"""Begins what has a byte order mark of it, and each line, whose first NUL may be taken for white space."""
_TIME_MEND: Final = ': a time is a JSON number, or text with time_unit = "rfc3339"'
NOT_UTF8: Final = "not UTF-8"
UTF16: Final = f"UTF-16, {NOT_UTF8}: convert the file, as by iconv -f UTF-16 -t UTF-8"
_ESCAPE: Final = re.compile(rb"\\(?:u[dD][89abAB]..\\u[dD][c-fC-F]..|(u[dD][89a-fA-F]..)|.)")
"""The group: half of a surrogate pair that stands alone."""
_PLACE: Final = re.compile(r" - at `\$\[[^\]]*\]\.?(.*)`$")
RFC3339: Final = "rfc3339"
_UNIT_US: Final = {"s": 1_000_000, "ms": 1_000, "us": 1}
_FLOAT_UNIT_US: Final = {"s": 1e6, "ms": 1e3, "us": 1.0, "ns": 1e-3}
_EPOCH: Final = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)

Offsets = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Malformed:
    """A line that is no event. `start` is its offset in the chunk."""

    start: int
    line: bytes
    reason: str


@dataclass(frozen=True)
class Lines:
    """N lines of a text without the white space around them, blank ones left out: offsets and lengths, each
    (N,), in bytes.

    `clean`: the text is these lines and their newlines, and each starts with { and ends with }. No object
    can reach over a line's end then: between } and { no newline is allowed inside a JSON value.
    """

    text: bytes
    starts: Offsets
    lengths: Offsets
    clean: bool = False

    def __len__(self) -> int:
        return len(self.starts)

    @cached_property
    def lines(self) -> list[bytes]:
        """Copies: they take longer to make than to find."""
        if self.clean:
            return self.text.split(b"\n")[: len(self)]
        ends = (self.starts + self.lengths).tolist()
        return list(map(self.text.__getitem__, map(slice, self.starts.tolist(), ends)))

    def take(self, rows: Sequence[int] | slice) -> "Lines":
        return Lines(self.text, self.starts[rows], self.lengths[rows])


@dataclass(frozen=True, slots=True)
class PrimaryBatch:
    """N primary events in log order."""

    ids: bytes
    found: Lines
    malformed: list[Malformed]

    @property
    def lines(self) -> list[bytes]:
        return self.found.lines

    @property
    def starts(self) -> Offsets:
        """The lines' offsets in the chunk."""
        return self.found.starts


@dataclass(frozen=True, slots=True)
class ForeignBatch:
    """N foreign events in log order. Lines have no white space around them."""

    ids: bytes
    primary_ids: bytes
    times: bytes
    lines: list[bytes]
    starts: Offsets
    malformed: list[Malformed]


class JsonLines:
    """One JSON object a line, UTF-8. Paths of the fields come from the settings; no other is looked at."""

    def __init__(self, primary: Primary, foreign: Foreign, packer: IdPacker) -> None:
        """SettingsError for paths that can't be."""
        self._packer = packer
        self._time_unit = foreign.time_unit
        self._time_field = foreign.time
        self._primary, columns = decoder_of("PrimaryEvent", {"id": Field(parse_path(primary.id), _ID)})
        self._primary_id = columns["id"]
        self._primary_unit = primary.time_unit
        self._timed, columns = decoder_of(
            "TimedPrimaryEvent",
            {"time": Field(parse_path(primary.time), time_type(primary.time_unit), optional=True)},
        )
        self._primary_time = columns["time"]
        self._foreign, columns = decoder_of(
            "ForeignEvent",
            {
                "id": Field(parse_path(foreign.id), _ID),
                "primary_id": Field(parse_path(foreign.primary_id), _ID),
                "time": Field(parse_path(foreign.time), time_type(foreign.time_unit), optional=True),
            },
        )
        self._id, self._named_id, self._time = columns["id"], columns["primary_id"], columns["time"]

    def parse_primary(self, chunk: bytes) -> PrimaryBatch:
        events, found, malformed = events_of(self._primary, chunk)
        return PrimaryBatch(self._packer.pack(self._primary_id(events)), found, malformed)

    def primary_times(self, ids: bytes, lines: Sequence[bytes]) -> tuple[bytes, dict[int, str]]:
        """Of N primary events: 8 x N times (us), 0 of those that have none; and why, by row."""
        try:
            found = event_times(ids, self._times_in(lines), self._primary_unit)
            if isinstance(found, bytes):
                return found, {}
        except msgspec.DecodeError:
            pass
        times, wrong = [], {}
        for row, line in enumerate(lines):
            try:
                one = event_times(ids[16 * row : 16 * row + 16], self._times_in([line]), self._primary_unit)
            except msgspec.DecodeError as error:
                one = str(error)
            if isinstance(one, str):
                wrong[row] = one
            times.append(pack_times([0]) if isinstance(one, str) else one)
        return b"".join(times), wrong

    def _times_in(self, lines: Sequence[bytes]) -> list[Any]:
        return self._primary_time(self._timed.decode_lines(b"\n".join(lines)))

    def parse_foreign(self, chunk: bytes) -> ForeignBatch:
        events, found, malformed = events_of(self._foreign, chunk)
        lines, starts = found.lines, found.starts
        named, values = self._named_id(events), self._time(events)
        ids = self._packer.pack(self._id(events))
        times = event_times(ids, values, self._time_unit)
        if not isinstance(times, bytes):  # the slow path: which have a usable one
            each = [
                event_times(ids[16 * row : 16 * row + 16], [value], self._time_unit)
                for row, value in enumerate(values)
            ]
            fits = np.ones(len(lines), np.bool_)
            for row, why in enumerate(each):
                if isinstance(why, str):
                    fits[row] = False
                    reason = f"field '{self._time_field}' {why}"
                    malformed.append(Malformed(int(starts[row]), lines[row], reason))
            malformed.sort(key=lambda bad: bad.start)
            times = b"".join([one for one in each if isinstance(one, bytes)])
            lines, named = list(compress(lines, fits)), list(compress(named, fits))
            ids, starts = take_ids(ids, fits), starts[fits]
        return ForeignBatch(ids, self._packer.pack(named), times, lines, starts, malformed)


def events_of(decoder: Any, chunk: bytes) -> tuple[list[Any], Lines, list[Malformed]]:
    """N events, their lines, and the malformed rest."""
    found = split_chunk(chunk)
    events, good, malformed = decode(decoder, found)
    return events, found if good is None else found.take(good), malformed


def json_lines(settings: Settings, packer: IdPacker | None = None) -> JsonLines:
    """The parser of a system's logs, for one thread. `packer`: else one with the key of the settings."""
    packer = packer or IdPacker(settings.ids.key.encode())
    return JsonLines(settings.primary, settings.foreign, packer)


def split_chunk(chunk: bytes) -> Lines:
    """NULs, as a cut under its writer or a power cut leaves them, count as white space around a line, and so
    does a byte order mark before it, as some editors put at a file's start.
    """
    ends = np.flatnonzero(np.frombuffer(chunk, np.uint8) == _NEWLINE)
    if not chunk.endswith(b"\n"):
        ends = np.append(ends, len(chunk))
    starts = np.zeros(len(ends), np.int64)
    starts[1:] = ends[:-1] + 1
    lengths = ends - starts
    # Clean lines are the common case: then nothing is to be stripped.
    if lengths.all() and in_braces(chunk, starts, lengths):
        return Lines(chunk, starts, lengths, clean=True)
    lines = Lines(chunk, starts, lengths).lines
    bare = [line.strip(_BLANK).removeprefix(_BYTE_ORDER_MARK).lstrip(_BLANK) for line in lines]
    starts += [len(line.rstrip(_BLANK)) - len(rest) for line, rest in zip(lines, bare, strict=True)]
    lengths = np.fromiter(map(len, bare), np.int64, len(bare))
    filled = np.flatnonzero(lengths)
    return Lines(chunk, starts[filled], lengths[filled])


def in_braces(text: bytes, starts: Offsets, lengths: Offsets) -> bool:
    """Whether each of the lines, none of them empty, starts with { and ends with }."""
    bytes_of = np.frombuffer(text, np.uint8)
    return bool(
        (bytes_of[starts] == _BRACES[0]).all() and (bytes_of[starts + lengths - 1] == _BRACES[1]).all()
    )


def decode(decoder: Any, found: Lines) -> tuple[list[Any], list[int] | None, list[Malformed]]:
    """Events, the rows they came from (None for all), and the malformed rest."""
    if found.clean:
        try:
            _check_text(found.text)
            decoded = decoder.decode_lines(found.text)
            if len(decoded) == len(found):
                return decoded, None, []
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass  # which line it is, is found below
    lines, starts = found.lines, found.starts
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
            _check_text(text)
            decoded = decoder.decode_lines(text)
            if len(decoded) != high - low:
                raise msgspec.DecodeError("not one JSON object")
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if high - low == 1:
                malformed.append(Malformed(int(starts[low]), lines[low], _reason(error, lines[low])))
            else:
                middle = (low + high) // 2
                pending += [(middle, high), (low, middle)]
            continue
        events += decoded
        good += range(low, high)
    return events, good if malformed else None, malformed


def _stand_alone(text: bytes, count: int) -> bool:
    """Whether no object can reach over a line's end: each of `count` lines starts with { and ends with }."""
    return text.startswith(b"{") and text.endswith(b"}") and text.count(b"}\n{") == count - 1


def _check_text(text: bytes) -> None:
    """UnicodeDecodeError unless it is UTF-8: the decoder does not look into what it passes over."""
    end = len(text) if text.isascii() else 0
    # A piece at a time: what it becomes is four times as long, and stays in no cache else.
    while end < len(text):
        start, end = end, text.find(b"\n", end + _CHECKED_BYTES) + 1 or len(text)
        text[start:end].decode("utf-8")


def _reason(error: Exception, line: bytes) -> str:
    if IS_UTF16.match(line):
        return UTF16
    if isinstance(error, UnicodeDecodeError):
        return f"{NOT_UTF8}: byte 0x{error.object[error.start]:02x} at {error.start}"
    lone = next(filter(None, (escape[1] for escape in _ESCAPE.finditer(line))), None)
    if lone is not None and not isinstance(error, msgspec.ValidationError):
        return f"not a valid event: \\{lone.decode('utf-8', 'replace')} is half a character, which is no text"
    place = _PLACE.search(str(error))
    where = f" in `{place[1]}`" if place and place[1] else ""
    why = _PLACE.sub("", str(error)).replace(_EMPTY_ID, "an empty id")
    mend = _TIME_MEND if why.startswith("Expected `int | float") and "got `str`" in why else ""
    return f"not a valid event: {why}{where}{mend}"


def time_type(unit: str) -> Any:
    """What a time field must hold."""
    if unit == RFC3339:
        return Annotated[datetime.datetime, msgspec.Meta(tz=True)]
    return int | float


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
        return pack_times(to_us(values, unit))
    except TypeError:
        return "is missing (an opaque id needs its event's time)"
    except (OverflowError, ValueError):
        return "is out of range"


def to_us(values: Sequence[Any], unit: str) -> npt.NDArray[np.int64]:
    """Each value by itself, so that an event's time never depends on the batch it came in.

    Whole numbers exactly (ns rounded down), others to the nearest us. TypeError for None.
    """
    if None in values:
        raise TypeError
    if unit == RFC3339:
        return np.array(list(map(sub, values, repeat(_EPOCH))), "m8[us]").view(np.int64)
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
