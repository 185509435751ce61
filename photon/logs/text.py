"""What several files have grown by, as one text: it is parsed at once.

Most growth is little, and of many files at a time. To parse each file's growth by itself costs more than its
lines do.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from photon.core.fates import Fate
from photon.logs.files import Chunk, FileState, read_at, shown
from photon.logs.follow import LogFollower
from photon.logs.writer import DeadLetter

LINGER_S: Final = 0.019
"""After something was found nobody looks for more for so long: what comes meanwhile is one text, one batch,
one sync of each disk. A line that comes alone does not wait."""

ALL_READ: Final = (1 << 63) - 1
"""Logs are read up to this time (us): up to their ends, as far as is known."""

_OVERSIZED_BYTES_KEPT: Final = 1024

Part = tuple[FileState, Chunk]
Starts = npt.NDArray[np.int64]
"""Of lines, in the text."""


def gather(follower: LogFollower, bytes_enough: int) -> tuple[list[Part], Part | None]:
    """Chunks of one file after the other, until there are so many bytes or no more is known; and an oversized
    line that comes after them."""
    parts: list[Part] = []
    size = 0
    while size < bytes_enough:
        part = follower.next_chunk()
        if part is None:
            break
        if part[1].oversized:
            return parts, part
        parts.append(part)
        size += len(part[1].data)
    return parts, None


def oversized_letter(part: Part, line_bytes_max: int) -> DeadLetter:
    """Of a line that is longer than that: its first bytes."""
    file, chunk = part
    reason = (
        f"a line of {chunk.end - chunk.start} bytes is longer than 'logs.line_bytes_max' ({line_bytes_max}); "
        "here are its first bytes"
    )
    try:
        head = read_at(file.path, chunk.start, _OVERSIZED_BYTES_KEPT)
    except OSError as error:
        head, reason = b"", f"{reason}, but they can't be read again ({error.strerror})"
    return DeadLetter(Fate.MALFORMED, reason, head, shown(file.name), chunk.start, file.number)


class Text:
    """The lines of P parts, one part after the other. `data`: all bytes."""

    def __init__(self, parts: Sequence[Part]) -> None:
        """At least one; none is oversized."""
        chunks = [chunk for _, chunk in parts]
        lengths = [len(chunk.data) for chunk in chunks]
        self.data = chunks[0].data if len(chunks) == 1 else b"".join([chunk.data for chunk in chunks])
        self._parts = parts
        self._ends: Starts = np.cumsum(lengths, dtype=np.int64)
        self._bases = self._ends - lengths
        self._names = [shown(state.name) for state, _ in parts]
        self._shift: Starts = np.array([chunk.start for chunk in chunks], np.int64) - self._bases

    def parts_of(self, starts: Starts) -> Starts:
        """In which part each line stands."""
        return np.searchsorted(self._bases, starts, "right") - 1

    def last_rows(self, starts: Starts) -> list[int | None]:
        """The last line of each part; None where it has none."""
        ends = np.searchsorted(starts, self._ends)
        begins = np.concatenate(([0], ends[:-1]))
        return [int(end) - 1 if end > begin else None for begin, end in zip(begins, ends, strict=True)]

    def offsets(self, starts: Starts) -> Starts:
        """Where each line stands in its file."""
        if len(self._parts) == 1:
            return starts + int(self._shift[0])
        return starts + self._shift[self.parts_of(starts)]

    def origin(self, start: int) -> tuple[str, int]:
        """The file's name, and where the line stands in it."""
        part = int(np.searchsorted(self._bases, start, "right")) - 1
        return self._names[part], start + int(self._shift[part])

    def names(self, starts: Starts, low: int, high: int) -> tuple[list[str], list[int]]:
        """Of lines low to high: the files' names, and from which of these lines on each one counts."""
        if len(self._parts) == 1 or low == high:
            return self._names[:1], [0]
        first, last = self.parts_of(starts[[low, high - 1]])
        rows = np.searchsorted(starts[low:high], self._bases[first : last + 1])
        return self._names[first : last + 1], rows.tolist()

    def spans(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """What a piece of the text stands for: file number, first byte and end."""
        first = int(np.searchsorted(self._ends, start, "right"))
        last = int(np.searchsorted(self._bases, end, "left"))
        spans = []
        for part in range(first, last):
            state, chunk = self._parts[part]
            shift, whole = int(self._shift[part]), end >= int(self._ends[part])
            # A last line without its newline was given one, so the text may be longer than the file.
            to = chunk.end if whole else end + shift
            spans.append((state.number, max(chunk.start, start + shift), to))
        return spans
