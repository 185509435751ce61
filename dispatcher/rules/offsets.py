"""How far each file is taken care of, though its batches finish in any order. Pure.

An offset moves only over the unbroken run of finished batches at its front: a batch that finished early is
held back until then, so that what is counted and what the offset has passed are always the same events.
"""

from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """The bytes of a file that a batch covers."""

    file: int
    start: int
    end: int


class OffsetTracker:
    """Which finished batches may be recorded, and the offset of each file after them.

    A batch may cover several files; batches are sent in one order, so those that wait for each other
    never form a ring. Not for several threads at once.
    """

    def __init__(self, offsets: Mapping[int, int]) -> None:
        self._offsets = dict(offsets)
        self._sent_to = dict(offsets)
        self._spans: dict[int, tuple[Span, ...]] = {}
        self._fronts: dict[int, deque[int]] = {}
        self._finished: set[int] = set()

    def offset(self, file: int) -> int:
        """Every byte before it is in a batch that was given out by `finished`; 0 for a new file."""
        return self._offsets.get(file, 0)

    def sent(self, batch: int, spans: Iterable[Span]) -> None:
        """A batch is under way. Its spans go on where those sent before ended."""
        kept = tuple(spans)
        for span in kept:
            assert span.start == self._sent_to.get(span.file, 0) <= span.end, (span, self._sent_to)
            self._sent_to[span.file] = span.end
            self._fronts.setdefault(span.file, deque()).append(batch)
        self._spans[batch] = kept

    def finished(self, batch: int) -> list[int]:
        """The batches that can be recorded now that this one is finished, in the order they were sent."""
        self._finished.add(batch)
        ready = []
        candidates = {batch}
        while candidates:
            candidate = min(candidates)
            candidates.remove(candidate)
            if self._is_next(candidate):
                ready.append(candidate)
                candidates |= self._pass_over(candidate)
        return ready

    def _is_next(self, batch: int) -> bool:
        return batch in self._finished and all(
            self._fronts[span.file][0] == batch for span in self._spans[batch]
        )

    def _pass_over(self, batch: int) -> set[int]:
        """Move the offsets; the finished batches that have come to the front of a file."""
        fronts = set()
        self._finished.remove(batch)
        for span in self._spans.pop(batch):
            self._offsets[span.file] = span.end
            front = self._fronts[span.file]
            front.popleft()
            if not front:
                del self._fronts[span.file]
            elif front[0] in self._finished:
                fronts.add(front[0])
        return fronts
