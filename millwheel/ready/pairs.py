"""Records of two streams that belong together, or of which one is missing; and ids that come again."""

from typing import Any

import msgspec

from millwheel.computation import Computation, Context, Record, Timer
from millwheel.ready.windows import SECOND_US


class _Waiting(msgspec.Struct):
    """`value`: of the record that waits; `answered_us`, `last_us`: when the first and the last answer were,
    which may have come before it."""

    value: Any = None
    answered_us: int | None = None
    last_us: int | None = None


class Unmatched(Computation[_Waiting]):
    """An asking record (an impression) without an answer (a click) of the same key within `after_s`.

    Reads both streams, keyed by what they have in common; `asking` names the one. To `stream` it produces the
    asking record's value, once the low watermark is `after_s` past it. An answer whose time is before that
    end counts, however the two came.
    """

    state = _Waiting

    def __init__(self, stream: str, asking: str, after_s: float) -> None:
        self._stream, self._asking, self._after = stream, asking, round(after_s * SECOND_US)

    def process_record(self, record: Record, ctx: Context[_Waiting]) -> None:
        if record.stream == self._asking:
            ctx.state.value = record.value
            ctx.set_timer("over", record.time + self._after)
        else:
            state, time = ctx.state, record.time
            state.answered_us = time if state.answered_us is None else min(state.answered_us, time)
            state.last_us = time if state.last_us is None else max(state.last_us, time)
            ctx.set_timer("forget", state.last_us + self._after)

    def process_timer(self, timer: Timer, ctx: Context[_Waiting]) -> None:
        if timer.tag == "over":
            answered_us = ctx.state.answered_us  # in a backlog answers come that are later than the end
            if answered_us is None or answered_us >= timer.time:
                ctx.produce(self._stream, ctx.state.value)
            ctx.forget()
            ctx.drop_timer("forget")
        elif ctx.state.value is None:  # an answer to nothing
            ctx.forget()


class _History(msgspec.Struct):
    """Touches by time, and conversions that wait until all touches before them are there."""

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
        of_stream.append((record.time, record.value))
        self._wait(ctx)

    def process_timer(self, timer: Timer, ctx: Context[_History]) -> None:
        history = ctx.state
        due = [one for one in history.conversions if one[0] < timer.time]
        for time, conversion in sorted(due, key=lambda one: one[0]):
            before = [one for one in history.touches if time - self._lookback <= one[0] <= time]
            touch = max(before, key=lambda one: one[0])[1] if before else None
            value = {"key": ctx.key, "time_us": time, "conversion": conversion, "touch": touch}
            ctx.produce(self._stream, value)
        history.conversions = [one for one in history.conversions if one[0] >= timer.time]
        oldest = min([timer.time, *(time for time, _ in history.conversions)]) - self._lookback
        history.touches = [one for one in history.touches if one[0] >= oldest]
        if history.touches or history.conversions:
            self._wait(ctx)
        else:
            ctx.forget()

    def _wait(self, ctx: Context[_History]) -> None:
        conversions = [time + 1 for time, _ in ctx.state.conversions]
        oldest = min((time for time, _ in ctx.state.touches), default=0)
        # Later than the oldest could go: so several go at a time.
        ctx.set_timer("next", min(conversions, default=oldest + self._lookback * 5 // 4 + 1))


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
