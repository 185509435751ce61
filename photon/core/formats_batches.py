"""What every log format makes of a chunk: packed columns and the lines' own bytes."""

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True, slots=True)
class Malformed:
    """What is no event: a line, or a damaged block of which `line` is the beginning.

    `start` is its offset in the chunk.
    """

    start: int
    line: bytes
    reason: str


@dataclass(frozen=True, slots=True)
class PrimaryBatch:
    """N primary events in log order; `starts` (N,) are the lines' offsets in the chunk."""

    ids: bytes
    lines: list[bytes]
    starts: npt.NDArray[np.int64]
    malformed: list[Malformed]


@dataclass(frozen=True, slots=True)
class ForeignBatch:
    """N foreign events in log order. Lines have no white space around them.

    `units`: offsets in the chunk at which reading may begin again (the starts of blocks); None: at any line.
    """

    ids: bytes
    primary_ids: bytes
    times: bytes
    lines: list[bytes]
    starts: npt.NDArray[np.int64]
    malformed: list[Malformed]
    units: npt.NDArray[np.int64] | None = None


class LogFormat(Protocol):
    """Turns a chunk of whole records into columns. Not for several threads at once."""

    def parse_primary(self, chunk: bytes) -> PrimaryBatch: ...

    def parse_foreign(self, chunk: bytes) -> ForeignBatch: ...
