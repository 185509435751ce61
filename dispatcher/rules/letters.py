"""What files of dead letters are called; and where those of a share stand in the logs, packed, so that who
goes on with the share tells of them, too, when the disk that they were on is lost. Pure.

Places are in rows of some hundred, numbered as they come. All rows together are bounded, so of very many dead
letters the newest are kept.
"""

import re
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple, Self

import msgspec
import numpy as np

from photon.logs.writer import DeadLetter

PLACES_BYTES_MAX: Final = 256 << 10
"""Of all rows. At 2 to 6 bytes each: some 50,000 to 100,000 dead letters."""
_OF_A_ROW: Final = 1024
_FAST: Final = 1


def letters_stem(worker: int, process: int = 0) -> str:
    """The names of a worker's dead letters begin with it."""
    return "foreign" + (f"-p{process}" if process else "") + (f"-w{worker}" if worker else "")


def names_letters(worker: int) -> re.Pattern[str]:
    """Of the files of a worker's dead letters, whichever process wrote them."""
    return re.compile(letters_stem(worker).replace("foreign", r"foreign(-p\d+)?") + r"-\d+\.jsonl")


class LetterPlace(NamedTuple):
    """`size` bytes at `offset` of the log with that number are the event."""

    log: int
    offset: int
    size: int
    fate: str
    reason: str

    @classmethod
    def of(cls, letter: DeadLetter) -> Self:
        return cls(letter.log, letter.offset, len(letter.event), letter.fate.value, letter.reason)


class _Columns(msgspec.Struct, array_like=True):
    """`offsets`: each less the one before; `why`: of each, which of `reasons`."""

    logs: list[int]
    offsets: list[int]
    sizes: list[int]
    why: list[int]
    reasons: list[tuple[str, str]]


def with_more(rows: Mapping[int, bytes], places: Iterable[LetterPlace]) -> dict[int, bytes]:
    """The rows with these after the others. Rows that are full stay as they are."""
    last = max(rows, default=0)
    behind = [*unpack_letters([rows[last]] if last in rows else []), *places]
    more = dict(rows)
    for number, low in enumerate(range(0, len(behind), _OF_A_ROW), last):
        more[number] = _pack(behind[low : low + _OF_A_ROW])
    size = sum(map(len, more.values()))
    while size > PLACES_BYTES_MAX:
        size -= len(more.pop(min(more)))
    return more


def unpack_letters(rows: Iterable[bytes]) -> list[LetterPlace]:
    """ValueError, zlib.error or msgspec.DecodeError for what `with_more` has not made."""
    places: list[LetterPlace] = []
    for row in rows:
        columns = msgspec.msgpack.decode(zlib.decompress(row), type=_Columns)
        offsets = np.cumsum(columns.offsets).tolist()
        reasons = [columns.reasons[number] for number in columns.why]
        parts = zip(columns.logs, offsets, columns.sizes, reasons, strict=True)
        places += [LetterPlace(log, offset, size, *reason) for log, offset, size, reason in parts]
    return places


def _pack(places: Sequence[LetterPlace]) -> bytes:
    logs, offsets, sizes, *_ = map(list, zip(*places, strict=True))
    numbers: dict[tuple[str, str], int] = {}
    why = [numbers.setdefault((place.fate, place.reason), len(numbers)) for place in places]
    columns = _Columns(logs, np.diff(offsets, prepend=0).tolist(), sizes, why, list(numbers))
    return zlib.compress(msgspec.msgpack.encode(columns), _FAST)
