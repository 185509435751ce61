"""Low watermarks (paper 4.5): the central authority, and what a worker makes of its word.

    low watermark of C = min(oldest work of C, low watermark of each that produces to C)

A worker reports, for each injector and computation, the least of the oldest work that it has and of the low
watermarks of the inputs *as the authority has told them*. So the authority never leads a worker: what it says
of a producer was reported after all that is older had been handed on and made durable by whom it was handed
to.
"""

from collections.abc import Iterable, Mapping, Sequence

from millwheel.computation import BEFORE, NEVER


class Authority:
    """The least of what workers reported, never going back. Reports count by sequencer (paper 5.2)."""

    def __init__(self, names: Iterable[str], workers: int) -> None:
        self.marks = dict.fromkeys(names, BEFORE)
        self._reports: list[dict[str, int]] = [{} for _ in range(workers)]
        self._sequencers = [0] * workers

    def begins(self, worker: int, sequencer: int) -> None:
        """From now on only this owner's reports count; the last one of the former stands until then."""
        self._sequencers[worker] = max(self._sequencers[worker], sequencer)

    def restore(self, marks: Mapping[str, int]) -> bool:
        """What a worker had been told, by its durable state. Whether anything moved."""
        return self._raise({name: mark for name, mark in marks.items() if name in self.marks})

    def report(self, worker: int, sequencer: int, lows: Mapping[str, int]) -> bool:
        """Whether anything moved."""
        if sequencer != self._sequencers[worker]:
            return False
        self._reports[worker] = dict(lows)
        return self._raise(
            {name: min(report.get(name, BEFORE) for report in self._reports) for name in self.marks}
        )

    @property
    def ended(self) -> bool:
        """By the last report of each, as marks that are restored may have ended with an earlier run."""
        return all(report.get(name, BEFORE) >= NEVER for report in self._reports for name in self.marks)

    def holder(self, name: str) -> int:
        """The worker whose report is the least."""
        lows = [report.get(name, BEFORE) for report in self._reports]
        return lows.index(min(lows))

    def _raise(self, marks: Mapping[str, int]) -> bool:
        moved = False
        for name, mark in marks.items():
            if mark > self.marks[name]:
                self.marks[name] = mark
                moved = True
        return moved


def of_inputs(makers: Sequence[str], marks: Mapping[str, int]) -> int:
    """What a computation that reads from these can rely on."""
    return min((marks.get(maker, BEFORE) for maker in makers), default=NEVER)
