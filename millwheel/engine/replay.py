"""A computation over records that are all there already, in the order of their times: what Spark runs.

The low watermark is virtual: at each call it is the time of the record or of the timer that is called. So it
is as good as it can be: no record is late, and each timer of a key is called between the records of that key
that are before and after it, however many of them come in a batch. The wall clock says the same.

A BatchComputation gets its records in batches, as it does live: its timers fire behind each of them.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np

from millwheel.computation import BEFORE, Computation
from millwheel.engine.columnar import Columnar
from millwheel.engine.due import HOLD, WALL, WATERMARK, Firing
from millwheel.engine.keyed import Keyed
from millwheel.engine.plan import Plan
from millwheel.engine.records import SLOTS, Records, Slots, key_hash, together

_BATCH: Final = 16_384
"""Records that are called in a row, about."""
_SPREAD: Final = 1 << 16
"""Records that are gathered before they are put into parts."""
_Inputs = list[tuple[int, Records]]
"""Records by the number of the input."""


class Replay:
    """One computation over all records of some of its keys. For one thread."""

    def __init__(self, plan: Plan, name: str, low: int) -> None:
        """`low`: where the low watermark ends; what is due later waits."""
        keyed = isinstance(plan.topology.computations[name].computation, Computation)
        kind = KeyedByTime if keyed else ByTime
        self.stage: KeyedByTime | ByTime = kind(plan, name, Slots(), self._read)
        self._low = low
        self.rows: dict[bytes, bytes] = {}
        """State and timers, as a run has them in its store."""
        self._waiting: _Inputs = []
        self._count, self._enough = 0, _BATCH
        self._newest = BEFORE

    def take(self, number: int, records: Records) -> None:
        """Records for an input; none that follow are older than the oldest of these."""
        self._newest = max(self._newest, int(records.times.max()))
        if self._count >= self._enough:
            self._go_to(int(records.times.min()))
        self._waiting.append((number, records))
        self._count += len(records)

    def end(self) -> None:
        """All was taken."""
        self._call(self._waiting)
        self._waiting = []
        self._fire(self._low)

    def _go_to(self, low: int) -> None:
        before: _Inputs = []
        after: _Inputs = []
        for number, records in self._waiting:
            due = np.asarray(records.times < low)
            for kept, rows in ((before, due), (after, ~due)):
                if rows.any():
                    kept.append((number, records.rows(np.flatnonzero(rows))))
        self._waiting, self._count = after, sum(len(records) for _, records in after)
        self._enough = max(_BATCH, 2 * self._count)  # of records that overlap much, not all at each time
        self._call(before)
        self._fire(low)

    def _call(self, inputs: _Inputs) -> None:
        if inputs:
            self.stage.replay(inputs, self._low)
            self._keep()

    def _fire(self, low: int) -> None:
        low = min(low, self._low)
        now = min(low, self._newest)
        while (wall := self.stage.due.earliest(WALL)) is not None and wall <= now:
            self._fire_at(wall, wall)  # those on the low watermark that are before it come first
        self._fire_at(low, now)

    def _fire_at(self, low: int, now: int) -> None:
        self.stage.low_watermark, self.stage.now = low, now
        while self.stage.fire():
            self._keep()

    def _keep(self) -> None:
        for row, value in self.stage.changes.items():
            if value is None:
                self.rows.pop(row, None)
            else:
                self.rows[row] = value
        self.stage.changes = {}
        self.stage.forget_cached({})

    def _read(self, rows: Sequence[bytes]) -> list[bytes | None]:
        return list(map(self.rows.get, rows))


class ByTime(Columnar):
    """For one thread."""

    def replay(self, inputs: _Inputs, low: int) -> None:
        """Records that are after all that were fired for."""
        for number in sorted({number for number, _ in inputs}):
            records = together([records for which, records in inputs if which == number])
            self.process(number, records.rows(np.argsort(records.times, kind="stable")))


class KeyedByTime(Keyed):
    """For one thread."""

    def replay(self, inputs: _Inputs, low: int) -> None:
        """Records that are after all that were fired for, and the timers between them, up to `low`."""
        rows: list[tuple[int, Any]] = []
        for number, records in inputs:
            self.counts["records"] += len(records)
            self._hold(records.names)
            rows += [(number, row) for row in self._rows(records, np.zeros(len(records), np.bool_))]
        order = np.argsort(np.concatenate([records.times for _, records in inputs]), kind="stable")
        in_order = list(map(rows.__getitem__, order.tolist()))
        ways: dict[int, tuple[Callable[[Any], None], Callable[[Any, str], None]]]
        ways = {number: self._recording(number, []) for number, _ in inputs}
        ways |= {_timers(clock): self._firing(clock, []) for clock in (WATERMARK, WALL)}

        fired = 0

        def agenda() -> Iterator[tuple[int, Any]]:
            nonlocal fired
            fired = 0
            for number, row in in_order:
                key, time = row[0], row[1]
                upto = min(time, low)
                while self.due.next_of(key) <= upto:
                    clock, one = self._next(key)
                    self.low_watermark = self.now = one.time
                    fired += 1
                    yield _timers(clock), one
                self.low_watermark = self.now = upto
                yield number, row

        def call(item: tuple[int, Any]) -> None:
            ways[item[0]][0](item[1])

        def bury(item: tuple[int, Any], reason: str) -> None:
            ways[item[0]][1](item[1], reason)

        self._each(agenda, call, bury)
        self.counts["timers"] += fired

    def _next(self, key: str) -> tuple[int, Firing]:
        """The key's next timer, and its clock."""
        pending = self.due.of(key).items()
        times = [
            (Firing(time, key, type(tag) is str, tag), clock)
            for (clock, tag), time in pending
            if clock != HOLD
        ]
        one, clock = min(times)
        return clock, one


def _timers(clock: int) -> int:
    """Beside the numbers of inputs."""
    return -1 - clock


class Spread:
    """Records on their way to inputs, in parts by their keys: a part is all that is to be known of a key."""

    def __init__(self, parts: int) -> None:
        self._part = Slots(lambda key: key_hash(key) // SLOTS % parts)  # a part has keys of all slots
        self._waiting: dict[int, list[Records]] = {}
        self._count = 0

    @property
    def full(self) -> bool:
        return self._count >= _SPREAD

    def add(self, number: int, records: Records) -> None:
        if len(records):
            self._waiting.setdefault(number, []).append(records)
            self._count += len(records)

    def take(self) -> Iterator[tuple[int, int, Records]]:
        """All that waits: input, part, records."""
        waiting, self._waiting, self._count = self._waiting, {}, 0
        for number, several in waiting.items():
            records = together(several)
            parts = self._part.of(records.names)[records.codes]
            order = np.argsort(parts, kind="stable")
            found, begins = np.unique(parts[order], return_index=True)
            for part, rows in zip(found.tolist(), np.split(order, begins[1:]), strict=True):
                yield number, part, records.rows(rows).named()
