"""A field of each joined line, for sinks that keep lines by it."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from photon.core.columns import Field, decoder_of, parse_path, split_lines


def keys_by(field: str) -> Callable[[bytes], Sequence[bytes | None]]:
    """Whole lines -> the value of a field of each, as text or else as JSON; None where it has none.

    UsageError for a field that can't be.
    """
    decoder, columns = decoder_of("Keyed", {"key": Field(parse_path(field), Any, optional=True)})
    column = columns["key"]

    def of_line(line: bytes) -> Any:
        try:
            return column([decoder.decode(line)])[0]
        except msgspec.DecodeError:  # what is on the way to it is something else here
            return None

    def keys(lines: bytes) -> Sequence[bytes | None]:
        try:
            found = column(decoder.decode_lines(lines))
        except msgspec.DecodeError:
            found = [of_line(line) for line in split_lines(lines)]
        return [_as_text(value) for value in found]

    return keys


def _as_text(value: Any) -> bytes | None:
    if value is None:
        return None
    return value.encode() if isinstance(value, str) else msgspec.json.encode(value)
