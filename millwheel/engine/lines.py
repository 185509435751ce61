"""Lines of logs to records, for each input that reads them: fields in columns, nothing else is looked at."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import msgspec
import numpy as np

from millwheel.computation import Times
from millwheel.engine.records import JSON, MSGPACK, Ext, Records, keyed, made_keys
from millwheel.topology import WHOLE, Input, Logs
from photon.core.columns import Column, Field, decoder_of
from photon.core.settings import parse_path
from photon.logs.files import Chunk
from photon.logs.formats import Malformed, events_of, time_type, to_us

_encode: Final = msgspec.msgpack.encode
_decode: Final = msgspec.json.decode


@dataclass(frozen=True, slots=True)
class Parsed:
    """`records`: by number of the input. `times` (N,) of the lines. `malformed`: those without a record, for
    all inputs or for one that finds no key."""

    records: dict[int, Records]
    times: Times
    malformed: list[Malformed]

    def letters(self, injector: str, file: str = "") -> list[dict[str, Any]]:
        """Dead letters of the malformed lines, with their places in the file if there is one."""
        letters = []
        for bad in self.malformed:
            letter: dict[str, Any] = {"injector": injector}
            letter |= {"file": file, "offset": bad.start} if file else {}
            letter |= {"reason": bad.reason}
            letter |= {"line": bad.line.decode("utf-8", "replace")} if bad.line else {}
            letters.append(letter)
        return letters


class LineParser:
    """Of one injector."""

    def __init__(self, injector: Logs, inputs: dict[int, Input]) -> None:
        self._unit, self._inputs = injector.unit, inputs
        paths = {injector.time: Field(parse_path(injector.time), time_type(injector.unit))}
        for read in inputs.values():
            if isinstance(read.key, str):
                paths[read.key] = Field(parse_path(read.key), str | int)
            for path in read.fields:
                paths.setdefault(path, Field(parse_path(path), Any, optional=True))
        self._decoder, self._columns = decoder_of("Line", paths)
        self._time = injector.time

    def parse(self, chunk: bytes) -> Parsed:
        events, found, malformed = events_of(self._decoder, chunk)
        lines, starts = found.lines, found.starts
        try:
            times = to_us(self._columns[self._time](events), self._unit)
        except (OverflowError, ValueError):
            rows, times, bad = self._timed(events, lines, starts)
            events, lines, starts = [events[row] for row in rows], [lines[row] for row in rows], starts[rows]
            malformed += bad
        records = {}
        for number, read in self._inputs.items():
            keys, wrong = self._keys(read, events, lines)
            records[number] = keyed(keys, wrong, times, self._values(read, events, lines))
            malformed += [Malformed(int(starts[row]), lines[row], reason) for row, reason in wrong.items()]
        return Parsed(records, times, malformed)

    def parse_chunk(self, chunk: Chunk) -> Parsed:
        """Of a file: where lines start there."""
        parsed = self.parse(b"" if chunk.oversized else chunk.data)
        malformed = [replace(bad, start=chunk.start + bad.start) for bad in parsed.malformed]
        if chunk.oversized:
            malformed = [Malformed(chunk.start, b"", "the line is longer than 4 MiB")]
        return replace(parsed, malformed=malformed)

    def _keys(
        self, read: Input, events: list[Any], lines: list[bytes]
    ) -> tuple[Sequence[str], dict[int, str]]:
        """As made_keys."""
        if isinstance(read.key, str):
            return texts(self._columns[read.key](events)), {}
        assert read.key is not None
        return made_keys(read.key, _decode, lines)

    def _values(self, read: Input, events: list[Any], lines: list[bytes]) -> list[Any] | None:
        if read.value is None:
            return None
        if read.value == WHOLE:
            return [Ext(JSON, line) for line in lines]
        if isinstance(read.value, str):
            return [_travelling(value) for value in self._columns[read.value](events)]
        columns: list[Column] = [self._columns[path] for path in read.value]
        rows = zip(*[column(events) for column in columns], strict=True)
        names = read.value
        return [_travelling(dict(zip(names, row, strict=True))) for row in rows]

    def _timed(
        self, events: list[Any], lines: list[bytes], starts: Any
    ) -> tuple[list[int], Times, list[Malformed]]:
        """The slow path: rows of those that have a time in range."""
        kept, times, bad = [], [], []
        for row, value in enumerate(self._columns[self._time](events)):
            try:
                times.append(int(to_us([value], self._unit)[0]))
                kept.append(row)
            except (OverflowError, ValueError):
                bad.append(Malformed(int(starts[row]), lines[row], f"field '{self._time}' is out of range"))
        return kept, np.array(times, np.int64), bad


def texts(keys: Sequence[Any]) -> list[str]:
    """Keys as texts: whole numbers in decimal."""
    try:
        "".join(keys)  # the quickest way to see that all are texts
        return keys  # type: ignore[return-value]
    except TypeError:
        return list(map(str, keys))


def _travelling(value: Any) -> Any:
    """As `wire`; but whole numbers of a log may be beyond 64 bits, which JSON alone has."""
    large = type(value) is int and value.bit_length() > 63
    if isinstance(value, dict | list):
        try:
            return Ext(MSGPACK, _encode(value))
        except OverflowError:
            large = True
    return Ext(JSON, msgspec.json.encode(value)) if large else value
