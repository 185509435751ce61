"""A stage that calls user code a batch at a time, with state in cells: numbers by key and whole number."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from millwheel.computation import Batch, BatchComputation, Codes, Fired, Stream, Tag, Times, Values
from millwheel.engine.calls import FAULTS, reason_of
from millwheel.engine.due import WATERMARK, Firing
from millwheel.engine.plan import Plan
from millwheel.engine.records import Records, Slots, coded, values_of, wire
from millwheel.engine.stage import Stage, shown_value

_Cells = dict[int, Any]
_SPAN_MAX: Final = 1 << 62


class Columnar(Stage):
    """For one thread."""

    def __init__(
        self, plan: Plan, name: str, slots: Slots, read: Callable[[Sequence[bytes]], list[bytes | None]]
    ) -> None:
        super().__init__(plan, name, slots, read)
        assert isinstance(self.node.computation, BatchComputation)
        self.computation = self.node.computation
        self._ctx = CellContext(self)

    def _call(self, number: int, records: Records, late: Any) -> None:
        stream, opened = self._openers[number]
        values = records.values
        try:
            if isinstance(values, list):
                values = list(map(opened, values))
            batch = Batch(stream, records.names, records.codes, records.times, values, late)
            self._ctx.floor = int(records.times.min())
            self.computation.process_batch(batch, self._ctx)
            self._done()
        except FAULTS as error:
            self._failed(error)
            if len(records) > 1:
                half = np.arange(len(records) // 2)
                rest = np.arange(len(half), len(records))
                self._call(number, records.rows(half).named(), late[half])
                self._call(number, records.rows(rest).named(), late[rest])
                return
            value = shown_value(opened, values_of(records.values, 1)[0])
            self._bury(records.keys[0], int(records.times[0]), reason_of(error), stream=stream, value=value)

    def _fire(self, clock: int, firing: list[Firing]) -> None:
        for one in firing:
            self._timers_before.setdefault(one.key, {**self.due.of(one.key), (clock, one.tag): one.time})[
                clock, one.tag
            ] = one.time
        try:
            times = np.array([one.time for one in firing], np.int64)
            fired = Fired([one.key for one in firing], [one.tag for one in firing], times)
            self._ctx.floor = int(times.min())
            self.computation.process_timers(fired, self._ctx)
            self._done()
        except FAULTS as error:
            self._failed(error)
            for one in firing:
                self.due.drop(one.key, clock, one.tag)
            if len(firing) > 1:
                half = len(firing) // 2
                self._fire(clock, firing[:half])
                self._fire(clock, firing[half:])
                return
            one = firing[0]
            self._timers_of(one.key)
            self._settle()
            self._bury(one.key, one.time, reason_of(error), timer=one.tag)

    def _done(self) -> None:
        outputs = [self._output(stream, records) for stream, records in self._ctx.produced]
        self._stand(outputs)
        self._ctx.produced.clear()

    def _failed(self, error: BaseException) -> None:
        super()._failed(error)
        self._ctx.produced.clear()


class CellContext:
    """The BatchContext of a stage's calls."""

    def __init__(self, stage: Columnar) -> None:
        self._stage = stage
        self.floor = 0
        self.produced: list[tuple[str, Records]] = []

    @property
    def low_watermark(self) -> int:
        return self._stage.low_watermark

    @property
    def now(self) -> int:
        return self._stage.now

    def add(
        self,
        names: Sequence[str],
        codes: Codes,
        cells: npt.NDArray[np.int64],
        amounts: npt.NDArray[Any] | int = 1,
    ) -> tuple[list[str], list[int]]:
        if not len(codes):
            return [], []
        rows, columns, sums = _summed(codes, np.asarray(cells, np.int64), amounts)
        cache = self._stage._hold([names[row] for row in dict.fromkeys(rows)])
        new_names, new_cells = [], []
        last, state = -1, {}
        for row, cell, amount in zip(rows, columns, sums, strict=True):
            if row != last:
                state, last = self._state(cache[names[row]]), row
            before = state.get(cell)
            if before is None:
                state[cell] = amount
                new_names.append(names[row])
                new_cells.append(cell)
            else:
                state[cell] = before + amount
        return new_names, new_cells

    def take(self, names: Sequence[str], cells: Sequence[int]) -> list[Any]:
        cache = self._stage._hold(list(dict.fromkeys(names)))
        taken = []
        for name, cell in zip(names, cells, strict=True):
            held = cache[name]
            state = self._state(held)
            taken.append(state.pop(cell, 0))
            if not state:
                held.state = None
        return taken

    def set_timers(self, names: Sequence[str], tags: Sequence[Tag], times: Sequence[int]) -> None:
        stage = self._stage
        due = stage.due
        if not {*map(type, tags)} <= {int, str} or not {*map(type, times)} <= {int}:
            raise TypeError("set_timers: tags are texts or whole numbers, times in whole us, none of numpy")
        for name, tag, time in zip(names, tags, times, strict=True):
            stage._timers_of(name)
            due.set(name, WATERMARK, tag, time)

    def produce(
        self, stream: str | Stream[Any], names: list[str], values: Values, times: Times | Sequence[int]
    ) -> None:
        stream = stream.name if isinstance(stream, Stream) else stream
        if stream not in self._stage.streams:
            raise KeyError(f"'{stream}' is no stream that '{self._stage.name}' declares")
        if isinstance(values, np.ndarray) and not _is_column(values):
            values = values.tolist()
        if isinstance(values, list):
            values = list(map(wire, values))
        if len(names) and (kind := np.asarray(times).dtype).kind not in "iuO":
            raise TypeError(f"produce: times are in whole us, not {kind}")
        at = np.asarray(times, np.int64)
        if not len(names) == len(at) == (len(at) if values is None else len(values)):
            raise ValueError(f"produce: {len(names)} keys, {len(at)} times and other than as many values")
        if len(names):
            if at.min() < self.floor:
                raise ValueError(
                    f"produce at {at.min()}, before {self.floor}: the low watermark may be past it"
                )
            self.produced.append((stream, Records(*coded(names), at, values)))

    def _state(self, held: Any) -> _Cells:
        state = self._stage._load(held, dict)
        if state is None:
            state = held.state = {}
        return state  # type: ignore[no-any-return]


def _is_column(values: npt.NDArray[Any]) -> bool:
    """Whether its bytes and the name of its type are all of it."""
    return type(values) is np.ndarray and values.ndim == 1 and values.dtype.kind in "biufmMUS"


def _summed(
    codes: Codes, cells: npt.NDArray[np.int64], amounts: Any
) -> tuple[list[int], list[int], list[Any]]:
    """The distinct pairs by code and cell, and the sum of each one's amounts."""
    low = int(cells.min())
    span = int(cells.max()) - low + 1
    known = None
    if (int(codes.max()) + 1) * span >= _SPAN_MAX:
        known, cells = np.unique(cells, return_inverse=True)
        low, span = 0, len(known)
    pairs = codes * span + (cells - low)
    if isinstance(amounts, int):
        distinct, counts = np.unique(pairs, return_counts=True)
        sums = (counts * amounts).tolist()
    else:
        distinct, inverse = np.unique(pairs, return_inverse=True)
        sums = _sums(inverse.reshape(-1), len(distinct), amounts)
    found = distinct % span + low
    return (distinct // span).tolist(), (found if known is None else known[found]).tolist(), sums


def _sums(inverse: npt.NDArray[np.int64], count: int, amounts: Any) -> list[Any]:
    column = np.broadcast_to(np.asarray(amounts), inverse.shape)
    if column.dtype.kind not in "biuf":
        raise TypeError(f"add: amounts are numbers, not {column.dtype}")
    sums = np.zeros(count, column.dtype)
    np.add.at(sums, inverse, column)
    found: list[Any] = sums.tolist()
    return found
