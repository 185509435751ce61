"""Records of two streams that belong together, or of which one is missing; and ids that come again."""

from bisect import bisect_left, bisect_right, insort
from typing import Any

import msgspec

from millwheel.computation import Computation, Context, Record, Timer
from millwheel.ready.windows import SECOND_US


class _Asked(msgspec.Struct, forbid_unknown_fields=True):
    """Records that wait, and when answers were, by time."""

    asks: list[tuple[int, Any]] = []
    answers: list[int] = []


class Unmatched(Computation[_Asked]):
    """An asking record (an impression) without an answer (a click) of the same key within `after_s`.

    Reads both streams, keyed by what they have in common; `asking` names the one. To `stream` it produces the
    asking record's value, once the low watermark is `after_s` past it. An answer counts whose time is less
    than `after_s` later, or not more than that earlier, however the two came; for each that asks.
    """

    state = _Asked

    def __init__(self, stream: str, asking: str, after_s: float) -> None:
        self._stream, self._asking, self._after = stream, asking, round(after_s * SECOND_US)

    def process_record(self, record: Record, ctx: Context[_Asked]) -> None:
        if record.stream == self._asking:
            insort(ctx.state.asks, (record.time, record.value), key=_time)
        else:
            insort(ctx.state.answers, record.time)
        self._wait(ctx)

    def process_timer(self, timer: Timer, ctx: Context[_Asked]) -> None:
        state = ctx.state
        over = bisect_right(state.asks, timer.time - self._after, key=_time)
        for time, value in state.asks[:over]:
            first = bisect_left(state.answers, time - self._after)
            if first == len(state.answers) or state.answers[first] >= time + self._after:
                ctx.produce(self._stream, value)
        del state.asks[:over]
        oldest = min([timer.time, *(time for time, _ in state.asks[:1])]) - self._after
        del state.answers[: bisect_left(state.answers, oldest)]
        if state.asks or state.answers:
            self._wait(ctx)
        else:
            ctx.forget()

    def _wait(self, ctx: Context[_Asked]) -> None:
        state = ctx.state
        if state.asks:
            ctx.set_timer("next", state.asks[0][0] + self._after)
        else:
            ctx.set_timer("next", _when_some_go(state.answers[0], self._after))


class _History(msgspec.Struct):
    """Touches, and conversions that wait until all touches before them are there; by time."""

    touches: list[tuple[int, Any]] = []
    conversions: list[tuple[int, Any]] = []


class Attribution(Computation[_History]):
    """Last touch: a conversion of a user belongs to the user's last touch at or before it, at most
    `lookback_s` old.

    Reads both streams, keyed by the user; `touches` names the one. To `stream` it produces {"key", "time_us",
    "conversion", "touch"} once the low watermark is past the conversion; "touch" is null where there is none.
    """

    state = _History

    def __init__(self, stream: str, touches: str, lookback_s: float) -> None:
        self._stream, self._touches, self._lookback = stream, touches, round(lookback_s * SECOND_US)

    def process_record(self, record: Record, ctx: Context[_History]) -> None:
        of_stream = ctx.state.touches if record.stream == self._touches else ctx.state.conversions
        insort(of_stream, (record.time, record.value), key=_time)
        self._wait(ctx)

    def process_timer(self, timer: Timer, ctx: Context[_History]) -> None:
        touches, conversions = ctx.state.touches, ctx.state.conversions
        due = bisect_left(conversions, timer.time, key=_time)
        for time, conversion in conversions[:due]:
            before = bisect_right(touches, time, key=_time)
            touch = None
            if before and touches[before - 1][0] >= time - self._lookback:
                touch = touches[bisect_left(touches, touches[before - 1][0], key=_time)][1]
            value = {"key": ctx.key, "time_us": time, "conversion": conversion, "touch": touch}
            ctx.produce(self._stream, value)
        del conversions[:due]
        oldest = min([timer.time, *(time for time, _ in conversions[:1])]) - self._lookback
        del touches[: bisect_left(touches, oldest, key=_time)]
        if touches or conversions:
            self._wait(ctx)
        else:
            ctx.forget()

    def _wait(self, ctx: Context[_History]) -> None:
        history = ctx.state
        if history.conversions:
            ctx.set_timer("next", history.conversions[0][0] + 1)
        else:
            ctx.set_timer("next", _when_some_go(history.touches[0][0], self._lookback))


def _time(one: tuple[int, Any]) -> int:
    return one[0]


def _when_some_go(oldest: int, after: int) -> int:
    """Later than the oldest could go, so that several go at a time."""
    return oldest + after * 5 // 4 + 1


class Deduplicate(Computation[bool]):
    """The first record of each key; others are dropped until the low watermark is `within_s` past it.

    Key it by an id: for logs in which a line may stand twice.
    """

    state = bool

    def __init__(self, stream: str, within_s: float) -> None:
        self._stream, self._within = stream, round(within_s * SECOND_US)

    def process_record(self, record: Record, ctx: Context[bool]) -> None:
        if not ctx.state:
            ctx.state = True
            ctx.produce(self._stream, record.value)
            ctx.set_timer("forget", record.time + self._within)

    def process_timer(self, timer: Timer, ctx: Context[bool]) -> None:
        ctx.forget()
