"""What verification takes from lines, as rows (spark.verification.accounts): ids as text and packed, times,
digests of primary events.

A line is an event where photon.logs.formats says so. Each class turns a chunk of whole lines into one record
batch of Arrow with a row a line; a line that is no event has no key. Primary events are compared by digests
of what they mean (`canonical`).
"""

import base64
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from joiner.joined_lines import ID, JoinedDecoder
from photon.core.columns import Field, decoder_of, join_lines
from photon.core.fates import Fate
from photon.core.ids import IdPacker, opaque_mask, timestamps_us
from photon.core.settings import Settings, parse_path
from photon.logs.files import Chunk
from photon.logs.formats import JsonLines, Lines, decode, split_chunk
from spark.reading.lines import LogSet, Parse, fixed_binary, for_joined
from spark.verification.accounts import Source, rows_of

Positions = Mapping[str, tuple[int, int]]
"""Log -> the bytes of it that all dispatchers that know it have read, and that at least one has."""


def digests(contents: Sequence[bytes]) -> Any:
    """N contents -> N binaries of 8 bytes. The digest itself is the cost: nothing to gain without a loop."""
    digest = hashlib.blake2b
    return fixed_binary(b"".join([digest(c, digest_size=8).digest() for c in contents]), 8)


def contents(raws: Sequence[bytes], loosely: bool) -> Any:
    """Digests that are the same for the same object, however it is written."""
    way = b"~" if loosely else b"="
    return digests([way + canonical(raw, loosely) for raw in raws])


def canonical(raw: bytes, loosely: bool) -> bytes:
    """The same for the same object, whatever its white space and the order of its keys.

    `loosely`: also whatever a column of Parquet does not tell apart: a missing field, null and an object
    without fields; 1 and 1.0.
    """
    try:
        value = msgspec.json.decode(raw)
        return msgspec.json.encode(_loosely(value) if loosely else value, order="sorted")
    except (msgspec.MsgspecError, RecursionError, OverflowError, TypeError):
        return raw


def _loosely(value: Any) -> Any:
    if isinstance(value, dict):
        kept = {name: _loosely(inner) for name, inner in value.items()}
        return {name: inner for name, inner in kept.items() if inner is not None} or None
    if isinstance(value, list):
        return list(map(_loosely, value))
    if isinstance(value, float) and value.is_integer():
        return int(value)
    return value


def unspliced(lines: Sequence[bytes], primaries: Sequence[bytes], field: str) -> list[bytes]:
    """The foreign lines of N joined ones (joiner.adapter.splice_column); such a line itself where it does not
    end in its primary event."""
    name = b",%b:" % msgspec.json.encode(field)
    ends = [name + primary + b"}" for primary in primaries]
    return [
        line[: -len(end)] + b"}" if line.endswith(end) else line
        for line, end in zip(lines, ends, strict=True)
    ]


_FATES: Final = frozenset(fate.value for fate in Fate)


class _KeepingPacker(IdPacker):
    """Keeps the texts of the last two columns that it packed."""

    before: Sequence[str] = ()
    last: Sequence[str] = ()

    def pack(self, ids: Sequence[str | int]) -> bytes:
        self.before, self.last = self.last, _texts(ids)
        return super().pack(self.last)


class ForeignFacts:
    """Of foreign lines. `positions`: how far the dispatchers have read each log, by its name (Positions)."""

    def __init__(self, settings: Settings, positions: Positions | None = None) -> None:
        self._packer = _KeepingPacker(settings.ids.key.encode())
        self._lines = JsonLines(settings.primary, settings.foreign, self._packer)
        self._positions = positions

    def rows(self, chunk: bytes, name: str = "", offset: int = 0) -> Any:
        """`name` of the log, `offset` of the chunk in it."""
        found = self._lines.parse_foreign(chunk)
        read = None
        if self._positions is not None and name in self._positions:
            by_all, by_some = self._positions[name]
            places = found.starts + offset
            read = pa.array((places < by_some).astype(np.int8) + (places < by_all).astype(np.int8))
        return rows_of(
            Source.FOREIGN,
            len(found.lines),
            len(found.malformed),
            # Of the events that are left the ids are packed last but one.
            id=pa.array(self._packer.before if found.lines else [], pa.string()),
            key=fixed_binary(found.ids),
            primary=fixed_binary(found.primary_ids),
            time_us=pa.array(np.frombuffer(found.times, "<i8")),
            content=digests(found.lines),
            read=read,
        )


class JoinedFacts:
    """Of joined lines. `content`: is it wanted; `loosely`: of lines from Parquet.

    `primary` is the id of the object in the adapter's field, null if there is none; `time_us` is null where
    the line does not tell it. `line` is null where it is not known what it was: in Parquet, which keeps no
    bytes, and where an adapter made the joined line.
    """

    def __init__(self, settings: Settings, content: bool = True, loosely: bool = False) -> None:
        foreign = settings.foreign
        self._packer = IdPacker(settings.ids.key.encode())
        self._content, self._loosely = content, loosely
        self._field = None if settings.adapter.use or loosely else settings.adapter.field
        self._lines = JoinedDecoder(settings, raw=True)
        timed = replace(settings.primary, time=foreign.time, time_unit=foreign.time_unit)
        self._timed = JsonLines(timed, foreign, self._packer)
        self._primary = PrimaryIds(settings)

    def rows(self, chunk: bytes, _name: str = "", _offset: int = 0) -> Any:
        lines = split_chunk(chunk)
        found = self._lines.decode(lines)
        texts = _texts(self._lines.columns["id"](found.events))
        keys = self._packer.pack(texts)
        raws = [bytes(event.raw) for event in found.events]
        whole = lines if found.rows is None else lines.take(found.rows)
        batch = rows_of(
            Source.JOINED,
            len(texts),
            id=pa.array(texts, pa.string()),
            key=fixed_binary(keys),
            primary=self._primary.of(raws),
            time_us=self._times(keys, whole),
            content=contents(raws, self._loosely) if self._content else None,
            line=None if self._field is None else digests(unspliced(whole.lines, raws, self._field)),
        )
        if found.rows is None:
            return batch
        places: list[int | None] = [None] * len(lines)
        for place, row in enumerate(found.rows):
            places[row] = place
        source = pa.array(np.full(len(lines), Source.JOINED, np.int8))
        return batch.take(pa.array(places, pa.int64())).set_column(0, "source", source)

    def _times(self, keys: bytes, lines: Lines) -> Any:
        """Each event's time; null where it is not told: an adapter may have made something else of it."""
        if not opaque_mask(keys).any():
            return pa.array(timestamps_us(keys))
        times, wrong = self._timed.primary_times(keys, lines.lines)
        mask = np.zeros(len(lines), np.bool_)
        mask[list(wrong)] = True
        return pa.array(np.frombuffer(times, "<i8"), mask=mask)


class PrimaryFacts:
    """Of primary lines, events only. `loosely`: a second row each, for joined lines from Parquet."""

    def __init__(self, settings: Settings, loosely: bool = False) -> None:
        self._lines = JsonLines(settings.primary, settings.foreign, IdPacker(settings.ids.key.encode()))
        self._ways = (False, True) if loosely else (False,)

    def rows(self, chunk: bytes, _name: str = "", _offset: int = 0) -> Any:
        found = self._lines.parse_primary(chunk)
        ids = fixed_binary(found.ids)
        ways = [contents(found.lines, loosely) for loosely in self._ways]
        count = len(found.lines) * len(ways)
        return rows_of(
            Source.LOGGED,
            count,
            primary=pa.concat_arrays([ids] * len(ways)),
            content=pa.concat_arrays(ways),
        )


class LetterFacts:
    """Of dead letters. Those of malformed lines that can't be read here are left out: they have no id to
    count by. So are those of duplicates that differ: their ids are registered."""

    def __init__(self, settings: Settings) -> None:
        self._letter = msgspec.json.Decoder(_Letter)
        self._event = JoinedFacts(settings, content=False)
        self._foreign = ForeignFacts(settings)

    def rows(self, chunk: bytes, _name: str = "", _offset: int = 0) -> Any:
        letters, _, unreadable = decode(self._letter, split_chunk(chunk))
        sound = [letter for letter in letters if letter.fate in _FATES]
        told = [letter for letter in sound if letter.fate not in (Fate.MALFORMED, Fate.DUPLICATE)]
        events = self._event.rows(join_lines([bytes(letter.event) for letter in told]))
        fates = [letter.fate for letter in told]
        lines = [_line(letter) for letter in sound if letter.fate == Fate.MALFORMED]
        found = self._foreign.rows(join_lines(lines))
        found = found.filter(found.column("key").is_valid())
        columns = {
            name: pa.concat_arrays([events.column(name), found.column(name)])
            for name in ("id", "key", "time_us")
        }
        columns["fate"] = pa.array(fates + [Fate.MALFORMED.value] * len(found), pa.string())
        bad = len(unreadable) + len(letters) - len(sound)
        return rows_of(Source.LETTER, len(events) + len(found), bad, **columns)


class _Letter(msgspec.Struct, frozen=True, gc=False):
    fate: str
    event: msgspec.Raw
    event_base64: str | None = None


def _line(letter: _Letter) -> bytes:
    """The malformed line; b"{" for one that is not told as text."""
    if letter.event_base64 is not None:
        return base64.b64decode(letter.event_base64).replace(b"\n", b" ") or b"{"
    try:
        text = msgspec.json.decode(letter.event, type=str)
    except msgspec.DecodeError:
        return b"{"
    return text.encode("utf-8", "replace").replace(b"\n", b" ") or b"{"


class PrimaryIds:
    """The ids of primary objects within lines."""

    def __init__(self, settings: Settings) -> None:
        self._packer = IdPacker(settings.ids.key.encode())
        fields = {"id": Field(parse_path(settings.primary.id), ID)}
        self._decoder, columns = decoder_of("PrimaryInside", fields)
        self._id = columns["id"]

    def of(self, raws: Sequence[bytes]) -> Any:
        """N objects (b"": none) -> N packed ids; null for what has none."""
        if not raws:
            return pa.array([], pa.binary())
        try:
            if not all(raws):
                raise msgspec.DecodeError("no object")
            events = self._decoder.decode_lines(b"\n".join(raws))
            if len(events) == len(raws):
                return fixed_binary(self._packer.pack(self._id(events)))
        except (msgspec.DecodeError, RecursionError):
            pass
        return pa.array(list(map(self._one, raws)), pa.binary())

    def _one(self, raw: bytes) -> bytes | None:
        try:
            return self._packer.pack(self._id([self._decoder.decode(raw)]))
        except (msgspec.DecodeError, RecursionError):
            return None


def _texts(ids: Sequence[str | int]) -> list[str]:
    try:
        "".join(ids)  # type: ignore[arg-type]
    except TypeError:
        return list(map(str, ids))
    return list(ids)  # type: ignore[arg-type]


def _parse(kind: Any, settings: Settings, *more: Any) -> Parse:
    """The rows of each chunk. A line that is too long counts as one that is no event."""
    of = kind(settings, *more).rows

    def parse(name: str, _path: str, chunk: Chunk) -> list[Any]:
        return [of(b"{\n" if chunk.oversized else chunk.data, name, chunk.start)]

    return parse


def foreign_logs(paths: Sequence[str], settings: Settings, positions: Positions | None = None) -> LogSet:
    """A malformed line has no key."""
    return LogSet(paths, settings, partial(_parse, ForeignFacts, settings, positions), unended=True)


def primary_logs(paths: Sequence[str], settings: Settings, loosely: bool) -> LogSet:
    """Malformed lines are left out."""
    return LogSet(paths, settings, partial(_parse, PrimaryFacts, settings, loosely), unended=True)


def joined_logs(paths: Sequence[str], settings: Settings, content: bool = True) -> LogSet:
    """A line that can't be read has no key. A last line without its newline is none yet."""
    lines = partial(_parse, JoinedFacts, settings, content)
    rows = partial(_parse, JoinedFacts, settings, content, True)
    return LogSet(paths, for_joined(settings), lines, unended=False, make_for_parquet=rows)


def dead_letters(paths: Sequence[str], settings: Settings) -> LogSet:
    """Letters of foreign events. One that can't be read has no key."""
    foreign = [path for path in paths if not path.rpartition("/")[2].startswith("primary-")]
    return LogSet(foreign, for_joined(settings), partial(_parse, LetterFacts, settings), unended=False)


def registered_rows(batch: Any) -> Any:
    """Columns of spark.registered -> the registry's rows."""
    columns = {name: batch.column(name) for name in ("address", "incarnation", "token_us")}
    return rows_of(Source.REGISTERED, len(batch), key=batch.column("id"), **columns)


def waiting_rows(ids: bytes) -> Iterator[Any]:
    """16 x N ids of events that wait."""
    yield rows_of(Source.WAITING, len(ids) // 16, key=fixed_binary(ids))
