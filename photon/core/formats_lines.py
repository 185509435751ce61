"""Chunks of JSON lines: cut into lines, and parsed at once.

A chunk with a bad line is halved until the bad line stands alone, so that the rest goes on.
"""

import re
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from photon.core.formats_batches import Malformed

_BRACES: Final = b"{}"
_BYTE_ORDER_MARK: Final = "\ufeff".encode()
_PLACE: Final = re.compile(r" - at `\$\[[^\]]*\]\.?(.*)`$")


class Lines(NamedTuple):
    """N lines without white space around them, blank ones left out, and their offsets (N,) in the chunk.

    `clean`: the chunk is these lines and their newlines, and each starts with { and ends with }. No object
    can reach over a line's end then: between } and { no newline is allowed inside a JSON value.
    """

    lines: list[bytes]
    starts: npt.NDArray[np.int64]
    clean: bool


def split_chunk(chunk: bytes) -> Lines:
    """A byte order mark, as some editors put at a file's start, counts as white space before a line."""
    lines = chunk.split(b"\n")
    if not lines[-1]:
        lines.pop()
    lengths = np.fromiter(map(len, lines), np.int64, len(lines))
    starts = np.zeros(len(lines), np.int64)
    np.cumsum(lengths[:-1] + 1, out=starts[1:])
    # Clean lines are the common case: then nothing is to be stripped.
    if lengths.all() and in_braces(chunk, starts, lengths):
        return Lines(lines, starts, True)
    bare = [line.strip().removeprefix(_BYTE_ORDER_MARK).lstrip() for line in lines]
    starts += [len(line.rstrip()) - len(rest) for line, rest in zip(lines, bare, strict=True)]
    lines = bare
    if not all(lines):
        filled = [row for row, line in enumerate(lines) if line]
        return Lines([lines[row] for row in filled], starts[filled], False)
    return Lines(lines, starts, False)


def in_braces(text: bytes, starts: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64]) -> bool:
    """Whether each of the lines, none of them empty, starts with { and ends with }."""
    bytes_of = np.frombuffer(text, np.uint8)
    return bool(
        (bytes_of[starts] == _BRACES[0]).all() and (bytes_of[starts + lengths - 1] == _BRACES[1]).all()
    )


def decode(decoder: Any, chunk: bytes, found: Lines) -> tuple[list[Any], list[int] | None, list[Malformed]]:
    """Events, the rows they came from (None for all), and the malformed rest."""
    lines, starts, clean = found
    if clean:
        try:
            _check_text(chunk)
            decoded = decoder.decode_lines(chunk)
            if len(decoded) == len(lines):
                return decoded, None, []
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            pass  # which line it is, is found below
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
                malformed.append(Malformed(int(starts[low]), lines[low], _reason(error)))
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
    text.isascii() or text.decode("utf-8")


def _reason(error: Exception) -> str:
    if isinstance(error, UnicodeDecodeError):
        return f"not UTF-8: byte 0x{error.object[error.start]:02x} at {error.start}"
    place = _PLACE.search(str(error))
    where = f" in `{place[1]}`" if place and place[1] else ""
    return f"not a valid event: {_PLACE.sub('', str(error))}{where}"
