"""Fields of each line, for sinks that look at some."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from photon.core.columns import Field, decoder_of, split_lines
from photon.core.settings import parse_path

Columns = dict[str, list[Any]]


def fields_of(paths: Mapping[str, str]) -> Callable[[bytes], Columns]:
    """Names and paths of fields -> whole lines -> by name the value of each line, None where it has none.

    UsageError for paths that can't be.
    """
    fields = {name: Field(parse_path(path), Any, optional=True) for name, path in paths.items()}
    decoder, columns = decoder_of("Looked", fields)

    def of_lines(lines: bytes) -> Columns:
        try:
            events = decoder.decode_lines(lines)
        except msgspec.DecodeError:
            return _one_by_one(fields, split_lines(lines))
        return {name: column(events) for name, column in columns.items()}

    return of_lines


def _one_by_one(fields: Mapping[str, Field], lines: Sequence[bytes]) -> Columns:
    """The same, where what is on the way to a field is something else in a line."""

    def value(decoder: Any, column: Callable[[list[Any]], list[Any]], line: bytes) -> Any:
        try:
            return column([decoder.decode(line)])[0]
        except msgspec.DecodeError:
            return None

    found = {}
    for name, field in fields.items():
        decoder, columns = decoder_of("LookedAlone", {name: field})
        found[name] = [value(decoder, columns[name], line) for line in lines]
    return found


def keys_by(given: str) -> Callable[[bytes], Sequence[bytes | None]]:
    """Whole lines -> the value of a field of each, as text or else as JSON; of several, with commas between
    them, a JSON array of their values. None where a line lacks one.

    UsageError for fields that can't be.
    """
    paths = given.split(",")
    of_lines = fields_of({f"key{number}": path for number, path in enumerate(paths)})
    if len(paths) == 1:
        return lambda lines: [_as_text(value) for value in of_lines(lines)["key0"]]
    return lambda lines: [
        None if None in values else msgspec.json.encode(values)
        for values in zip(*of_lines(lines).values(), strict=True)
    ]


def _as_text(value: Any) -> bytes | None:
    if value is None:
        return None
    return value.encode() if isinstance(value, str) else msgspec.json.encode(value)
