"""Where records end in the bytes of a log: lines, or blocks (docs/formats.md).

A reader that knows no more than this can cut a growing file between records and leave a half-written one.
"""

from collections.abc import Iterator
from typing import Final, NamedTuple, Protocol

from photon.core.blocks_header import HEADER_BYTES, MAGIC, Header, unpack_header

BLOCKS_SUFFIX: Final = ".pblk"
PACKED_SUFFIXES: Final = (".gz", ".zst")


class Framing(Protocol):
    """How records follow each other in a file. Data always begins where a record may begin."""

    def whole(self, data: bytes) -> int:
        """How many bytes of data are whole records; 0: none yet. Damaged bytes count as records."""
        ...

    def length(self, data: bytes) -> int | None:
        """Bytes of the first record, if its head tells. None: unknown (lines), or nothing is understood."""
        ...


class Lines:
    """Each record ends with a newline."""

    def whole(self, data: bytes) -> int:
        return data.rfind(b"\n") + 1

    def length(self, data: bytes) -> int | None:
        return None


class Piece(NamedTuple):
    """Bytes `start` to `end` of the data: a block with a sound header, or a stretch that is none.

    `header` is the reason then. `complete`: more data would not make it longer.
    """

    start: int
    end: int
    header: Header | str
    complete: bool


def pieces(data: bytes, closely: bool = False) -> Iterator[Piece]:
    """All of data, cut at the blocks. Whatever is damaged, reading goes on at the next magic.

    A block that ends where another begins is believed to be whole, unless one looks `closely`: then it is
    searched for a magic within, as one has that was cut short by chance just so far before another's end.
    """
    start, size = 0, len(data)
    while start < size:
        header = unpack_header(data, start) if size - start >= HEADER_BYTES else "a block that is cut short"
        if not closely and isinstance(header, Header) and data.startswith(MAGIC, start + header.length):
            yield Piece(start, start + header.length, header, True)
            start += header.length
            continue
        following = data.find(MAGIC, start + 1)
        end = size if following < 0 else following
        if end - start < HEADER_BYTES:
            header = "a block that is cut short"
        if isinstance(header, str):
            last = following < 0
            begun = last and end - start < HEADER_BYTES and MAGIC.startswith(data[start : start + len(MAGIC)])
            if last and not begun:
                end -= _magic_begun(data)
            yield Piece(start, end, header, not begun)
        elif header.length > end - start:
            yield Piece(start, end, "a block that is cut short", following >= 0)
        else:
            end = start + header.length
            yield Piece(start, end, header, True)
        start = end


def _magic_begun(data: bytes) -> int:
    """How many of the last bytes may become a magic when more are written."""
    return next(n for n in range(len(MAGIC) - 1, -1, -1) if data.endswith(MAGIC[:n]))


class Blocks:
    """Each record is a block; its head tells its length."""

    def whole(self, data: bytes) -> int:
        return max((piece.end for piece in pieces(data) if piece.complete), default=0)

    def length(self, data: bytes) -> int | None:
        if len(data) < HEADER_BYTES:
            return None
        header = unpack_header(data)
        return None if isinstance(header, str) else header.length


LINES: Final = Lines()
BLOCKS: Final = Blocks()


def framing_of(name: str) -> Framing:
    """By the file's suffix, that of its compression taken off first; lines if it is none of ours."""
    return BLOCKS if holds_blocks(name) else LINES


def holds_blocks(name: str) -> bool:
    """Whether the file's name says that it holds blocks."""
    for suffix in PACKED_SUFFIXES:
        name = name.removesuffix(suffix)
    return name.endswith(BLOCKS_SUFFIX)
