"""Spikes and dips: keys that come more or less often than their own past lets expect (paper 2, 3)."""

from typing import Any

import msgspec

from millwheel.computation import Computation, Context, Record, Timer
from millwheel.ready.windows import SECOND_US


class Model(msgspec.Struct):
    """What is expected of a key. `heard`: the last window judged; `odd`: windows in a row above (+) or below
    (-).
    """

    windows: int = 0
    mean: float = 0.0
    variance: float = 0.0
    heard: int = -1
    odd: int = 0


class Zeitgeist(Computation[Model]):
    """Reads what WindowCounts of the same `length_s` (tumbling) produces, keyed by the same key.

    After `learn` windows of a key, one is odd if its count is more than `sigmas` standard deviations from the
    moving mean; `row` odd ones in a row on the same side are told: {"key", "kind": "spike" or "dip",
    "start_us", "count", "expected"}. A window without a record counts as 0: that it is one, and not merely
    late, is known by the low watermark. A key whose mean has fallen to next to nothing is forgotten.
    """

    state = Model

    def __init__(
        self, stream: str, length_s: float = 1.0, learn: int = 20, sigmas: float = 3.0, row: int = 3
    ) -> None:
        self._stream, self._learn, self._sigmas, self._row = stream, learn, sigmas, row
        self._length = round(length_s * SECOND_US)

    def process_record(self, record: Record, ctx: Context[Model]) -> None:
        window = record.value["start_us"] // self._length
        if ctx.state.heard >= 0 and window <= ctx.state.heard:
            return  # what came late of a window that was judged
        self._silent_until(window, ctx)
        self._judge(window, record.value["count"], ctx)
        self._expect(ctx)

    def process_timer(self, timer: Timer, ctx: Context[Model]) -> None:
        self._silent_until(timer.tag + 1, ctx)
        self._expect(ctx)

    def _silent_until(self, window: int, ctx: Context[Model]) -> None:
        """Windows that brought no record."""
        while ctx.state.heard >= 0 and ctx.state.heard < window - 1:
            self._judge(ctx.state.heard + 1, 0, ctx)
            if not self._is_known(ctx.state):
                ctx.state = Model()

    def _expect(self, ctx: Context[Model]) -> None:
        model = ctx.state
        if not self._is_known(model):
            ctx.forget()
            return
        # The count of the next window is produced at its end: a timer right after knows that there was none.
        following = model.heard + 1
        ctx.drop_timer(model.heard)
        ctx.set_timer(following, (following + 1) * self._length + 1)

    def _is_known(self, model: Model) -> bool:
        return model.heard >= 0 and (model.mean > 0.05 or model.windows < self._learn)

    def _judge(self, window: int, count: int, ctx: Context[Model]) -> None:
        model: Model = ctx.state
        model.heard = window
        off = count - model.mean
        bound = self._sigmas * max(1.0, model.variance**0.5)
        side = 0 if model.windows < self._learn else (off > bound) - (off < -bound)
        model.odd = model.odd + side if side * model.odd > 0 else side
        if side and abs(model.odd) == self._row:
            found: dict[str, Any] = {"key": ctx.key, "kind": "spike" if side > 0 else "dip"}
            found |= {"start_us": window * self._length, "count": count, "expected": round(model.mean, 2)}
            ctx.produce(self._stream, found)
        rate = max(1 / (model.windows + 1), 0.02)
        model.variance = (1 - rate) * (model.variance + rate * off * off)
        model.mean += rate * off
        model.windows += 1
