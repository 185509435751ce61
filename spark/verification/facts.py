"""What verification takes from lines, as DataFrames: ids as text and packed, times, digests.

A line is an event where photon.logs.formats says so. Each class turns a chunk of whole lines into one record
batch of Arrow with a row a line; a line that is no event has nulls.

Primary events are compared by digests of lines as they stand, and of what they mean (`canonical_forms`).
"""

import base64
import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from joiner.joined_lines import ID, JoinedDecoder
from photon.core.columns import Field, decoder_of, join_lines, parse_path
from photon.core.fates import Fate
from photon.core.ids import IdPacker, opaque_mask, timestamps_us
from photon.core.settings import Settings
from photon.logs.formats import JsonLines, Lines, decode, event_times, split_chunk, time_type
from spark.reading.events import MakeParse, Parse, for_joined, parsed, parsed_joined
from spark.reading.lines import fixed_binary
from spark.session import map_in_arrow

FORMS: Final = "primary binary, content long, forms array<long>"


def digests(contents: Sequence[bytes]) -> Any:
    """N contents -> (N,) int64. The digest itself is the cost, so there is nothing to gain without a loop."""
    digest = hashlib.blake2b
    return np.frombuffer(b"".join([digest(c, digest_size=8).digest() for c in contents]), "<i8")


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


def canonical_forms(lines: DataFrame) -> DataFrame:
    """Of primary_lines or joined_primaries -> primary, content, forms: digests that are the same for the same
    object, however it is written."""
    return map_in_arrow(lines.select("primary", "content", "raw", "loosely"), _forms, FORMS)


def _forms(batches: Iterable[Any]) -> Iterator[Any]:
    for batch in batches:
        raws, ways = batch.column("raw").to_pylist(), batch.column("loosely").to_pylist()
        found = [
            [_form(raw, way) for way in ((False, True) if loosely is None else (loosely,))]
            for raw, loosely in zip(raws, ways, strict=True)
        ]
        columns = {name: batch.column(name) for name in ("primary", "content")}
        yield pa.RecordBatch.from_pydict({**columns, "forms": pa.array(found, pa.list_(pa.int64()))})


def _form(raw: bytes, loosely: bool) -> int:
    told = (b"~" if loosely else b"=") + canonical(raw, loosely)
    return int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "little", signed=True)


FOREIGN_FACTS: Final = "id string, key binary, primary binary, time_us long"
JOINED_FACTS: Final = "id string, key binary, primary binary, time_us long, content long"
LETTER_FACTS: Final = "id string, key binary, time_us long, fate string"
PRIMARY_FACTS: Final = "primary binary, content long"
PRIMARY_RAW: Final = "primary binary, content long, raw binary, loosely boolean"

_FATES: Final = frozenset(fate.value for fate in Fate)


class _KeepingPacker(IdPacker):
    """Keeps the texts of the last two columns that it packed."""

    before: Sequence[str] = ()
    last: Sequence[str] = ()

    def pack(self, ids: Sequence[str | int]) -> bytes:
        self.before, self.last = self.last, _texts(ids)
        return super().pack(self.last)


class ForeignFacts:
    """Of foreign lines: FOREIGN_FACTS."""

    def __init__(self, settings: Settings) -> None:
        self._packer = _KeepingPacker(settings.ids.key.encode())
        self._lines = JsonLines(settings.primary, settings.foreign, self._packer)

    def rows(self, chunk: bytes) -> Any:
        found = self._lines.parse_foreign(chunk)
        # Of the events that are left the ids are packed last but one.
        texts = self._packer.before if found.lines else []
        columns = {
            "id": pa.array(texts, pa.string()),
            "key": fixed_binary(found.ids),
            "primary": fixed_binary(found.primary_ids),
            "time_us": pa.array(np.frombuffer(found.times, "<i8")),
        }
        return _with_nulls(columns, len(found.malformed))


class JoinedFacts:
    """Of joined lines: JOINED_FACTS. `digests`: else `content` is null.

    `primary` is the id of the object in the adapter's field, null if there is none; `time_us` is null where
    the line does not tell it.
    """

    def __init__(self, settings: Settings, digests: bool = True) -> None:
        foreign = settings.foreign
        self._packer = IdPacker(settings.ids.key.encode())
        self._unit = foreign.time_unit
        self._digests = digests
        time = Field(parse_path(foreign.time), time_type(foreign.time_unit), optional=True)
        self._lines = JoinedDecoder(settings, {"time": time}, raw=True)
        self._id, self._time = self._lines.columns["id"], self._lines.columns["time"]
        # The id comes first in both: its column takes events of either.
        self._timeless = JoinedDecoder(settings, raw=True)
        self._primary = PrimaryIds(settings)

    def rows(self, chunk: bytes) -> Any:
        events, times, places = self._events(chunk)
        texts = _texts(self._id(events))
        keys = self._packer.pack(texts)
        raws = [bytes(event.raw) for event in events]
        columns = {
            "id": pa.array(texts, pa.string()),
            "key": fixed_binary(keys),
            "primary": self._primary.of(raws),
            "time_us": _times(keys, times, self._unit),
            "content": pa.array(digests(raws)) if self._digests else pa.nulls(len(raws), pa.int64()),
        }
        batch = pa.RecordBatch.from_pydict(columns)
        return batch if places is None else batch.take(places)

    def _events(self, chunk: bytes) -> tuple[list[Any], list[Any], Any]:
        """Decoded lines, what each has for a time, and where among them each line of the chunk stands (null:
        it can't be read); None for all in their order.

        An adapter may have made something else of the time: a line is known by its id.
        """
        lines = split_chunk(chunk)
        found = self._lines.decode(chunk, lines)
        times = self._time(found.events)
        if found.rows is None:
            return found.events, times, None
        places: list[int | None] = [None] * len(lines.lines)
        for place, row in enumerate(found.rows):
            places[row] = place
        left = [row for row, place in enumerate(places) if place is None]
        others = Lines([one.line for one in found.malformed], lines.starts[left], clean=False)
        timeless = self._timeless.decode(b"", others)
        rows = range(len(left)) if timeless.rows is None else timeless.rows
        for place, row in enumerate(rows, len(found.events)):
            places[left[row]] = place
        events = found.events + timeless.events
        return events, times + [None] * len(timeless.events), pa.array(places, pa.int64())

    def raw_rows(self, chunk: bytes, loosely: bool = False) -> Any:
        """PRIMARY_RAW: the primary events inside, as they stand there. `loosely`: they come from Parquet."""
        events, _, _ = self._events(chunk)
        raws = [bytes(event.raw) for event in events]
        return _raw_batch(self._primary.of(raws), raws, loosely)


class PrimaryFacts:
    """Of primary lines: PRIMARY_FACTS, events only."""

    def __init__(self, settings: Settings) -> None:
        self._lines = JsonLines(settings.primary, settings.foreign, IdPacker(settings.ids.key.encode()))

    def rows(self, chunk: bytes) -> Any:
        found = self._lines.parse_primary(chunk)
        columns = {"primary": fixed_binary(found.ids), "content": pa.array(digests(found.lines))}
        return pa.RecordBatch.from_pydict(columns)

    def raw_rows(self, chunk: bytes) -> Any:
        """PRIMARY_RAW; `loosely` is null: it may be compared either way."""
        found = self._lines.parse_primary(chunk)
        return _raw_batch(fixed_binary(found.ids), found.lines, None)


class LetterFacts:
    """Of dead letters: LETTER_FACTS. Those of malformed lines that can't be read here are left out: they have
    no id to count by."""

    def __init__(self, settings: Settings) -> None:
        self._letter = msgspec.json.Decoder(_Letter)
        self._event = JoinedFacts(settings, digests=False)
        self._foreign = ForeignFacts(settings)

    def rows(self, chunk: bytes) -> Any:
        letters, _, unreadable = decode(self._letter, chunk, split_chunk(chunk))
        sound = [letter for letter in letters if letter.fate in _FATES]
        told = [letter for letter in sound if letter.fate != Fate.MALFORMED]
        events = self._event.rows(join_lines([bytes(letter.event) for letter in told]))
        fates = [letter.fate for letter in told]
        lines = [_line(letter) for letter in sound if letter.fate == Fate.MALFORMED]
        found = self._foreign.rows(join_lines(lines))
        found = found.filter(found.column("key").is_valid())
        bad = len(unreadable) + len(letters) - len(sound)
        columns = {
            name: pa.concat_arrays([events.column(name), found.column(name)])
            for name in ("id", "key", "time_us")
        }
        columns["fate"] = pa.array(fates + [Fate.MALFORMED.value] * len(found), pa.string())
        return _with_nulls(columns, bad)


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


def _times(keys: bytes, values: Sequence[Any], unit: str) -> Any:
    """Each event's time; null where it is not told."""
    if not keys:
        return pa.array([], pa.int64())
    opaque = opaque_mask(keys)
    if not opaque.any():
        return pa.array(timestamps_us(keys))
    times = event_times(keys, values, unit)
    if isinstance(times, bytes):
        return pa.array(np.frombuffer(times, "<i8"))
    found = []
    for row, value in enumerate(values):
        one = event_times(keys[16 * row : 16 * row + 16], [value], unit)
        found.append(int.from_bytes(one, "little", signed=True) if isinstance(one, bytes) else None)
    return pa.array(found, pa.int64())


def _texts(ids: Sequence[str | int]) -> list[str]:
    try:
        "".join(ids)  # type: ignore[arg-type]
    except TypeError:
        return list(map(str, ids))
    return list(ids)  # type: ignore[arg-type]


def _raw_batch(primaries: Any, raws: Sequence[bytes], loosely: bool | None) -> Any:
    columns = {
        "primary": primaries,
        "content": pa.array(digests(raws)),
        "raw": pa.array(raws, pa.binary()),
        "loosely": pa.repeat(pa.scalar(loosely, pa.bool_()), len(raws)),
    }
    return pa.RecordBatch.from_pydict(columns)


def _with_nulls(columns: dict[str, Any], count: int) -> Any:
    """With so many rows more in which everything is null."""
    if count:
        columns = {n: pa.concat_arrays([c, pa.nulls(count, c.type)]) for n, c in columns.items()}
    return pa.RecordBatch.from_pydict(columns)


def _facts(rows: Callable[[], Callable[[bytes], Any]]) -> MakeParse:
    """The facts of each chunk. A line that is too long counts as one that is no event."""

    def make() -> Parse:
        of = rows()
        return lambda _name, _path, chunk: [of(b"{\n" if chunk.oversized else chunk.data)]

    return make


def foreign_events(session: SparkSession, paths: Sequence[str], settings: Settings) -> DataFrame:
    """-> id, key (its 16 bytes), primary (16 bytes), time_us; all null for a malformed line."""
    make = _facts(lambda: ForeignFacts(settings).rows)
    return parsed(session, paths, settings, make, FOREIGN_FACTS, unended=True)


def primary_events(session: SparkSession, paths: Sequence[str], settings: Settings) -> DataFrame:
    """-> primary (16 bytes), content (a digest of the line). Malformed ones are left out."""
    make = _facts(lambda: PrimaryFacts(settings).rows)
    return parsed(session, paths, settings, make, PRIMARY_FACTS, unended=True)


def primary_lines(session: SparkSession, paths: Sequence[str], settings: Settings) -> DataFrame:
    """As primary_events, with raw, the line."""
    make = _facts(lambda: PrimaryFacts(settings).raw_rows)
    return parsed(session, paths, settings, make, PRIMARY_RAW, unended=True)


def joined_events(
    session: SparkSession, paths: Sequence[str], settings: Settings, digests: bool = True
) -> DataFrame:
    """-> id, key, primary and content of the primary object inside (null: none), time_us (null: not told).

    `id` and `key` are null for a line that can't be read. A last line without its newline is none yet.
    """
    make = _facts(lambda: JoinedFacts(settings, digests).rows)
    return parsed_joined(session, paths, settings, make, JOINED_FACTS, unended=False)


def joined_primaries(session: SparkSession, paths: Sequence[str], settings: Settings) -> DataFrame:
    """-> primary, content, raw, loosely (it is from Parquet) of the primary objects inside joined lines."""
    lines = _facts(lambda: JoinedFacts(settings).raw_rows)
    tables = _facts(lambda: partial(JoinedFacts(settings).raw_rows, loosely=True))
    return parsed_joined(session, paths, settings, lines, PRIMARY_RAW, False, tables)


def dead_letters(session: SparkSession, paths: Sequence[str], settings: Settings) -> DataFrame:
    """Letters of foreign events -> id, key, time_us, fate. `key` is null for one that can't be read."""
    foreign = [path for path in paths if not path.rpartition("/")[2].startswith("primary-")]
    make = _facts(lambda: LetterFacts(settings).rows)
    return parsed(session, foreign, for_joined(settings), make, LETTER_FACTS, unended=False)
