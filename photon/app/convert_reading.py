"""Whole records of log files that grow no more, compressed or not, for the commands that read them once."""

import gzip
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import zstandard

from photon.core.errors import StorageError
from photon.core.framing import Framing, framing_of
from photon.core.packed import is_packed, unpacked

_STEP_BYTES: Final = 1 << 20
_OVERSIZED_BYTES_KEPT: Final = 1024


class Records(NamedTuple):
    """Whole records from `start` on (an offset in the unpacked file).

    `oversized`: instead of them, the beginning of one that is longer than the bound, and its length.
    """

    start: int
    data: bytes
    oversized: int = 0


def read_records(path: Path, record_bytes_max: int) -> Iterator[Records]:
    """All of a file in steps of a MiB or so; what stands after the last newline counts as a line.

    StorageError if it can't be read or is damaged.
    """
    framing = framing_of(path.name)
    start, data, passed = 0, b"", 0
    for piece in _pieces(path):
        if passed:  # within an oversized record: only its end is looked for
            end = piece.find(b"\n") + 1
            passed += end or len(piece)
            if not end:
                continue
            yield Records(start, data, passed)
            start, data, passed = start + passed, piece[end:], 0
        else:
            data = data + piece if data else piece
        whole = framing.whole(data)
        if whole:
            yield Records(start, data[:whole])
            start, data = start + whole, data[whole:]
        if len(data) > record_bytes_max and _wanted(framing, data) > record_bytes_max:
            passed, data = len(data), data[:_OVERSIZED_BYTES_KEPT]
    if passed:
        yield Records(start, data, passed)
    elif data:
        yield Records(start, data)


def _wanted(framing: Framing, data: bytes) -> int:
    """The length of the line that data begins with, as far as it is known; 0 for a block."""
    return 0 if framing.length(data) is not None else len(data)


def _pieces(path: Path) -> Iterator[bytes]:
    """What is in the file, a MiB at a time: an unpacker gives it in smaller bits."""
    bits: list[bytes] = []
    size = 0
    try:
        for bit in unpacked(str(path)) if is_packed(path.name) else _plain(path):
            bits.append(bit)
            size += len(bit)
            if size >= _STEP_BYTES:
                yield b"".join(bits)
                bits, size = [], 0
    except (EOFError, zlib.error, zstandard.ZstdError, gzip.BadGzipFile) as error:
        raise StorageError(f"{path}: not a whole archive ({error}); replace it or leave it out") from error
    except OSError as error:
        raise StorageError(f"{path}: cannot be read ({error.strerror}); see to its permissions") from error
    if bits:
        yield b"".join(bits)


def _plain(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while bit := file.read(_STEP_BYTES):
            yield bit
