"""Counts by key and window of time: tumbling, sliding, and sessions."""

from typing import Any

import msgspec
import numpy as np

from millwheel.computation import (
    Batch,
    BatchComputation,
    BatchContext,
    Computation,
    Context,
    Fired,
    Record,
    Timer,
)
from millwheel.errors import TopologyError

SECOND_US = 1_000_000


class WindowCounts(BatchComputation):
    """How many records a key has in each window, once the low watermark is past the window's end.

    Windows are `length_s` long and begin every `every_s` (by default: at the end of the one before). To
    `stream` it produces {"key", "start_us", "end_us", "count"}, by the window's end. A record that comes
    after that opens its window anew: what is told then is what came late, unless the node drops late records.
    """

    def __init__(self, stream: str, length_s: float, every_s: float | None = None) -> None:
        self._stream = stream
        self._length = round(length_s * SECOND_US)
        self._every = self._length if every_s is None else round(every_s * SECOND_US)
        if self._length <= 0:
            raise TopologyError(f"WindowCounts: length_s is {length_s:g}; it must be above 0")
        if self._every <= 0 or self._length < self._every or self._length % self._every:
            raise TopologyError(f"WindowCounts: length_s {length_s:g} is no multiple of every_s {every_s}")

    def process_batch(self, batch: Batch, ctx: BatchContext) -> None:
        last = batch.times // self._every
        for back in range(self._length // self._every):
            names, starts = ctx.add(batch.names, batch.codes, last - back)
            ctx.set_timers(names, starts, [start * self._every + self._length for start in starts])

    def process_timers(self, fired: Fired, ctx: BatchContext) -> None:
        counts = ctx.take(fired.names, fired.tags)
        starts = np.array(fired.tags, np.int64) * self._every
        values: list[Any] = [
            {"key": name, "start_us": start, "end_us": start + self._length, "count": count}
            for name, start, count in zip(fired.names, starts.tolist(), counts, strict=True)
        ]
        ctx.produce(self._stream, fired.names, values, fired.times)


class _Spans(msgspec.Struct):
    """Sessions that may still grow: [first, last, records], by time."""

    spans: list[list[int]] = []


class Sessions(Computation[_Spans]):
    """Records of a key with less than `gap_s` between each and the next are one session.

    To `stream` it produces {"key", "start_us", "end_us", "count"} once the low watermark is `gap_s` past its
    last record, whatever the order in which they came.
    """

    state = _Spans

    def __init__(self, stream: str, gap_s: float) -> None:
        self._stream = stream
        self._gap = round(gap_s * SECOND_US)
        if self._gap <= 0:
            raise TopologyError(f"Sessions: gap_s {gap_s:g} must be more than 0")

    def process_record(self, record: Record, ctx: Context[_Spans]) -> None:
        first, last, count = record.time, record.time, 1
        rest = []
        for span in ctx.state.spans:
            if span[0] - self._gap < last and first < span[1] + self._gap:
                first, last, count = min(first, span[0]), max(last, span[1]), count + span[2]
            else:
                rest.append(span)
        ctx.state.spans = sorted([*rest, [first, last, count]])
        self._wait(ctx)

    def process_timer(self, timer: Timer, ctx: Context[_Spans]) -> None:
        open_spans = []
        for first, last, count in ctx.state.spans:
            if last + self._gap <= timer.time:
                value = {"key": ctx.key, "start_us": first, "end_us": last, "count": count}
                ctx.produce(self._stream, value)
            else:
                open_spans.append([first, last, count])
        ctx.state.spans = open_spans
        if open_spans:
            self._wait(ctx)
        else:
            ctx.forget()

    def _wait(self, ctx: Context[_Spans]) -> None:
        ctx.set_timer("end", min(last for _, last, _ in ctx.state.spans) + self._gap)
