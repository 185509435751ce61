"""A stage that calls user code a record at a time (paper 4.4 to 4.6).

Records are called in a row, all of a batch, as long as none raises. One that does undoes the batch; it is
done again with a settled state after each call, where only the call that raises is undone, tried again, and
given up.
"""

from collections.abc import Callable, Iterator, Sequence
from heapq import heappop, heappush
from itertools import repeat
from reprlib import repr as _short
from typing import Any, Final

import numpy as np

from millwheel.computation import Clock, Computation, Record, Stream, Tag, Timer
from millwheel.engine.calls import FAULTS, reason_of
from millwheel.engine.due import HOLD, WALL, WATERMARK, Firing
from millwheel.engine.plan import Plan, shown_type
from millwheel.engine.records import Records, Slots, coded, values_of, wire
from millwheel.engine.stage import Held, Stage, _encode, shown_value

_CLOCKS: Final = {"watermark": WATERMARK, "wall": WALL}
_CLOCK_NAMES: Final[tuple[Clock, ...]] = ("watermark", "wall")
_Row = tuple[str, int, Any, bool]
"""Of a record: key, time, value, whether it is late."""
_Bury = Callable[[Any, str], None]


class Keyed(Stage):
    """For one thread."""

    def __init__(
        self, plan: Plan, name: str, slots: Slots, read: Callable[[Sequence[bytes]], list[bytes | None]]
    ) -> None:
        super().__init__(plan, name, slots, read)
        assert isinstance(self.node.computation, Computation)
        self.computation = self.node.computation
        kind = self._kind
        self._sure = kind if kind in (int, float, str, bool) else None
        """A type whose values need no look: their bytes are theirs alone."""
        self._ctx = KeyContext(self, kind)
        self._record = Record()
        self._timer = Timer()

    def _call(self, number: int, records: Records, late: Any) -> None:
        rows = self._rows(records, late)
        self._each(lambda: iter(rows), *self._recording(number, records.names))

    def _fire(self, clock: int, firing: list[Firing]) -> None:
        ctx = self._ctx
        for one in firing:  # they are gone already: here they stand until their call
            self.due.set(one.key, clock, one.tag, one.time)

        def agenda() -> Iterator[Firing]:
            heap = list(firing)
            ctx.agenda = heap, clock, firing[-1].time
            while heap:
                yield heappop(heap)
            ctx.agenda = None

        self._each(agenda, *self._firing(clock, list({one.key for one in firing})))

    def _rows(self, records: Records, late: Any) -> list[_Row]:
        lates = late.tolist() if late.any() else repeat(False, len(records))
        values = values_of(records.values, len(records))
        return list(zip(records.keys, records.times.tolist(), values, lates, strict=True))

    def _recording(self, number: int, names: list[str]) -> tuple[Callable[[_Row], None], _Bury]:
        """What calls user code for a record of that input, and what gives one up."""
        stream, opened = self._openers[number]
        cache = self._hold(names)
        ctx, record = self._ctx, self._record
        process = self.computation.process_record
        mark = self.calls.begin(self.number)
        ctx.begin()

        def call(row: _Row) -> None:
            key, time, value, is_late = row
            mark[1] = time
            ctx.held = cache[key]
            ctx.key = record.key = key
            ctx.time = ctx.floor = record.time = time
            record.stream, record.value, record.late = stream, opened(value), is_late
            process(record, ctx)

        def bury(row: _Row, reason: str) -> None:
            self._bury(row[0], row[1], reason, stream=stream, value=shown_value(opened, row[2]))

        def known(row: _Row) -> tuple[int, Any]:
            return row[1], (number, row[0], row[2])

        return self.calls.careful(self.number, call, known), bury

    def _firing(self, clock: int, names: list[str]) -> tuple[Callable[[Firing], None], _Bury]:
        """The same for a timer that is pending on that clock."""
        cache = self._hold(names)
        ctx, timer = self._ctx, self._timer
        process = self.computation.process_timer
        mark = self.calls.begin(self.number)
        ctx.begin()

        def call(one: Firing) -> None:
            if self.due.time_of(one.key, clock, one.tag) != one.time:
                return  # dropped or set anew by a timer before it
            mark[1] = one.time
            self._timers_of(one.key)
            self.due.drop(one.key, clock, one.tag)
            ctx.held = cache[one.key]
            ctx.key = timer.key = one.key
            timer.clock, timer.time, timer.tag = _CLOCK_NAMES[clock], one.time, one.tag
            if clock == WATERMARK:
                ctx.time = ctx.floor = one.time
            else:
                ctx.time = max(one.time, self.low_watermark)
                ctx.floor = self.low_watermark
            process(timer, ctx)

        def bury(one: Firing, reason: str) -> None:
            self._timers_of(one.key)
            self.due.drop(one.key, clock, one.tag)
            self._bury(one.key, one.time, reason, timer=one.tag)

        def known(one: Firing) -> tuple[int, Any]:
            return one.time, (clock, one.key, one.tag)

        return self.calls.careful(self.number, call, known), bury

    def _packed_states(self) -> list[bytes | None]:
        """A call finds the same with and without a restart: from here on, what the bytes say is the state."""
        states: list[bytes | None] = []
        sure = self._sure
        for held in self._touched:
            state = held.state
            packed = None if state is None else _encode(state)
            states.append(packed)
            if packed is not None and packed != held.packed and type(state) is not sure:
                held.state = self._unpacked(packed)
                if held.state != state and repr(held.state) != repr(state):  # nan is not itself
                    raise TypeError(
                        f"state of type {shown_type(self._kind)}: {_short(state)} would come back as "
                        f"{_short(held.state)}. Declare its type, or set what stays the same"
                    )
        return states

    def _each(
        self,
        items: Callable[[], Iterator[Any]],
        call: Callable[[Any], None],
        bury: Callable[[Any, str], None],
    ) -> None:
        try:
            for item in items():
                call(item)
            self._done()
        except FAULTS as error:
            self._failed(error)
            for item in items():
                self._carefully(item, call, bury)
        self.calls.end()

    def _carefully(self, item: Any, call: Callable[[Any], None], bury: Callable[[Any, str], None]) -> None:
        for left in reversed(range(self.node.tries)):
            try:
                call(item)
                self._done()
            except FAULTS as error:
                self._failed(error)
                if not left:
                    bury(item, reason_of(error))
                    self._settle()
            else:
                return

    def _failed(self, error: BaseException) -> None:
        super()._failed(error)
        self._ctx.begin()

    def _done(self) -> None:
        outputs = [
            self._output(stream, Records(*coded(keys), np.array(times, np.int64), values))
            for stream, (keys, times, values) in self._ctx.produced.items()
            if keys
        ]
        self._stand(outputs)
        self._ctx.begin()


class KeyContext:
    """The Context of a stage's calls."""

    __slots__ = ("_due", "_kind", "_stage", "agenda", "floor", "held", "key", "produced", "time")

    def __init__(self, stage: Keyed, kind: Callable[[], Any]) -> None:
        self._stage, self._due, self._kind = stage, stage.due, kind
        self.key = ""
        self.time = self.floor = 0
        self.held: Held
        self.agenda: tuple[list[Firing], int, int] | None = None
        """Timers that are called now, of which clock, up to which time."""
        self.produced: dict[str, tuple[list[str], list[int], list[Any]]] = {}

    def begin(self) -> None:
        self.produced = {stream: ([], [], []) for stream in self._stage.streams}

    @property
    def low_watermark(self) -> int:
        return self._stage.low_watermark

    @property
    def now(self) -> int:
        return self._stage.now

    @property
    def state(self) -> Any:
        state = self._stage._load(self.held, self._kind)
        if state is None:  # forgotten in this batch
            state = self.held.state = self._kind()
        return state

    @state.setter
    def state(self, state: Any) -> None:
        self._stage._load(self.held, self._kind)
        self.held.state = state

    def forget(self) -> None:
        self._stage._load(self.held, self._kind)
        self.held.state = None

    def set_timer(self, tag: Tag, time: int, clock: Clock = "watermark") -> None:
        if type(time) is not int or type(tag) not in (int, str):
            raise TypeError(
                f"set_timer({tag!r}, {time!r}): a tag is a text or a whole number, a time is in whole us"
            )
        self._stage._timers_of(self.key)
        self._due.set(self.key, _CLOCKS[clock], tag, time)
        if self.agenda is not None:
            heap, which, upto = self.agenda
            if time <= upto and which == _CLOCKS[clock]:  # timers of a key are called by time
                heappush(heap, Firing(time, self.key, type(tag) is str, tag))

    def drop_timer(self, tag: Tag, clock: Clock = "watermark") -> None:
        self._stage._timers_of(self.key)
        self._due.drop(self.key, _CLOCKS[clock], tag)

    def hold(self, time: int) -> None:
        self._check_time("hold", time)
        self._stage._timers_of(self.key)
        self._due.set(self.key, HOLD, "", time)

    def release(self) -> None:
        self._stage._timers_of(self.key)
        self._due.drop(self.key, HOLD, "")

    def produce(
        self, stream: str | Stream[Any], value: Any, time: int | None = None, key: str | None = None
    ) -> None:
        name = stream.name if isinstance(stream, Stream) else stream
        columns = self.produced.get(name)
        if columns is None:
            raise KeyError(f"'{name}' is no stream that '{self._stage.name}' declares")
        if time is None:
            time = self.time
        elif type(time) is not int or time < self.floor:
            self._check_time("produce", time)
        if key is None:
            key = self.key
        elif not isinstance(key, str):
            raise TypeError(f"produce(key={key!r}): a key is a text")
        columns[0].append(key)
        columns[1].append(time)
        columns[2].append(wire(value))

    def _check_time(self, what: str, time: int) -> None:
        if type(time) is not int:
            raise TypeError(f"{what} at {time!r}: a time is in whole us")
        held = self._due.time_of(self.key, HOLD, "")
        least = self.floor if held is None else min(held, self.floor)
        if time < least:
            raise ValueError(f"{what} at {time}, before {least}: the low watermark may be past it")
