"""Merges the segments of the dense log file map, in a thread of its own, a small part at a time."""

import threading
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Final

import numpy as np

from eventstore.dense import DenseMap
from eventstore.map_format import Listed
from eventstore.segments import Columns, merged
from photon.core.background import Background
from photon.core.backoff import Backoff

FAN: Final = 4
"""So many segments of a level become one of the next."""
SEGMENTS_MAX: Final = 64
"""With more the reader waits for the merges."""
_DEAD_SHARE: Final = 8
"""A segment is written anew when an eighth of it points to logs that are gone."""
_RETRIES: Final = Backoff(10.0, 10.0)
_PAUSE_S: Final = 0.002  # between parts: lookups go first
_LOOKED_AT_ONCE: Final = 1 << 20


class Merger:
    """`wake` it when there may be something to do. It starts with the first call."""

    def __init__(self, dense: DenseMap) -> None:
        self._dense = dense
        self._changed = threading.Condition()
        self._due = False
        self._sweep = False
        self._started = False
        self._work = Background("dense-merger", self._work_off, _RETRIES)

    @property
    def trouble(self) -> str | None:
        """Why the last merge failed; it is tried again."""
        return self._work.trouble

    def wake(self, sweep: bool = False) -> None:
        """`sweep`: logs were deleted, so look for segments that point to them."""
        with self._changed:
            self._due = True
            self._sweep |= sweep
            if not self._started and not self._work.stopping:
                self._started = True
                self._work.start()
        self._work.wake()

    def wait(self, timeout_s: float) -> None:
        """Until there are no more than SEGMENTS_MAX. For a writer that is faster than the merges."""
        if self._count() > SEGMENTS_MAX:
            self.wake()
            with self._changed:
                self._changed.wait_for(lambda: self._count() <= SEGMENTS_MAX, timeout_s)

    def settle(self, timeout_s: float) -> bool:
        """Wait until there is nothing left to do (tests, benchmarks)."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._due, timeout_s)

    def close(self) -> None:
        """A merge under way is given up: the segments it was made of are all still there."""
        self._work.stop()

    def _count(self) -> int:
        with self._dense.transaction() as transaction:
            return len(self._dense.listed(transaction))

    def _work_off(self) -> float:
        """All merges that there are to do, then the sweep if one is due."""
        with self._changed:
            sweep, self._sweep = self._sweep, False
        try:
            while self._step():
                with self._changed:
                    self._changed.notify_all()
            if sweep:
                self._rewrite_dead()
        except BaseException:
            with self._changed:
                self._sweep |= sweep
            raise
        with self._changed:
            self._due = self._sweep or job_of(self._listed()) is not None
            self._changed.notify_all()
            return 0.0 if self._due else float("inf")

    def _step(self) -> bool:
        """One merge, if there is one to do."""
        job = job_of(self._listed())
        return job is not None and self._merge(job, job[0].level + 1)

    def _merge(self, job: Sequence[Listed], level: int) -> bool:
        segments = [self._dense.segment(one.number) for one in job]
        # After the segments were chosen: what is live then and in them is live now, or was deleted.
        live = np.sort(np.fromiter(list(self._dense.live), np.int64))

        def parts() -> Iterator[Columns | None]:
            for part in merged(segments, live):
                yield None if self._work.rest(_PAUSE_S) else part

        number = self._dense.write_segment(parts(), sum(segment.count for segment in segments))
        if number is None:
            return False
        self._dense.exchange(job, number, level)
        return True

    def _rewrite_dead(self) -> None:
        for one in self._listed():
            segment = self._dense.segment(one.number)
            live = np.fromiter(list(self._dense.live), np.int64)
            dead = 0
            for start in range(0, segment.count, _LOOKED_AT_ONCE):
                part = segment.columns.file[start : start + _LOOKED_AT_ONCE]
                dead += len(part) - int(np.isin(part, live).sum())
                if self._work.rest(_PAUSE_S):
                    return
            if dead * _DEAD_SHARE > segment.count:
                self._merge([one], one.level)

    def _listed(self) -> list[Listed]:
        with self._dense.transaction() as transaction:
            return self._dense.listed(transaction)


def job_of(listed: Sequence[Listed]) -> list[Listed] | None:
    """The segments to merge next: the oldest FAN neighbours of the least level that has so many. Pure."""
    groups = [list(group) for _, group in groupby(listed, key=lambda segment: segment.level)]
    full = [group[:FAN] for group in groups if len(group) >= FAN]
    return full[-1] if full else None
