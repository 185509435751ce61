"""What `photon bench millwheel` runs, in a directory with logs/ and, later, out/."""

import os
from typing import Any, Final

from millwheel import Computation, Context, Input, Logs, LogSink, Record, Stream, Timer, Topology, node
from millwheel.engine import stage
from millwheel.ready import WindowCounts, Zeitgeist
from millwheel.topology import DEAD_LETTERS

SECOND_US = 1_000_000
CACHED: Final = "PHOTON_BENCH_CACHED_KEYS"
"""The environment's word for how many keys a worker keeps in memory; of a benchmark only."""
if CACHED in os.environ:
    vars(stage)["CACHED_KEYS"] = int(os.environ[CACHED])


class Counts(Computation[dict[int, int]]):
    """As WindowCounts of a second, a record at a time."""

    def process_record(self, record: Record, ctx: Context[dict[int, int]]) -> None:
        second = record.time // SECOND_US
        if second not in ctx.state:
            ctx.set_timer(second, (second + 1) * SECOND_US)
        ctx.state[second] = ctx.state.get(second, 0) + 1

    def process_timer(self, timer: Timer, ctx: Context[dict[int, int]]) -> None:
        start = timer.tag * SECOND_US
        value = {"key": ctx.key, "start_us": start, "end_us": start + SECOND_US}
        ctx.produce("counts", value | {"count": ctx.state.pop(timer.tag)})
        if not ctx.state:
            ctx.forget()


class Echo(Computation[int]):
    """Hands on what it gets, and counts it."""

    state = int

    def __init__(self, stream: str) -> None:
        self._stream = stream

    def process_record(self, record: Record, ctx: Context[int]) -> None:
        ctx.state += 1
        ctx.produce(self._stream, record.value)


class Relay(Echo):
    """Keeps no count, so a record may come twice."""

    def process_record(self, record: Record, ctx: Context[int]) -> None:
        ctx.produce(self._stream, record.value)


class Waiting(Echo):
    """As Echo, with a timer a key that never fires; of numbers below -1 it says nothing."""

    def process_record(self, record: Record, ctx: Context[int]) -> None:
        ctx.state += 1
        ctx.set_timer("far", 1 << 61)
        if record.value >= -1:
            ctx.produce(self._stream, record.value)


def _logs(lateness_s: float) -> dict[str, Logs]:
    return {"events": Logs("logs/*.jsonl", "ts_us", lateness_s=lateness_s)}


def _counting(computation: Any) -> Any:
    return node(computation, Input("events", key="key", value=None), Stream("counts"))


_COUNTS = {"counts": LogSink("out/counts")}
WINDOWS = Topology(_logs(1), {"windows": _counting(WindowCounts("counts", 1.0))}, _COUNTS)
RECORDS = Topology(_logs(1), {"windows": _counting(Counts())}, _COUNTS)
ZEITGEIST = Topology(
    _logs(1),
    {
        "windows": _counting(WindowCounts("counts", 1.0)),
        "zeitgeist": node(Zeitgeist("odd", 1.0), Input("counts"), Stream("odd")),
    },
    _COUNTS | {"odd": LogSink("out/odd")},
)
_ECHOED = {"echoed": LogSink("out/echoed"), DEAD_LETTERS: LogSink("out/dead-letters")}


def _one_stage(kind: type[Echo], **how: Any) -> Topology:
    read = Input("events", key="key", value="n")
    return Topology(_logs(0), {"echo": node(kind("echoed"), read, Stream("echoed"), **how)}, _ECHOED)


def _three_stages(kind: type[Echo], **how: Any) -> Topology:
    reads = {
        "a": Input("events", key="key", value="n"),
        "b": Input("a", key=lambda n: f"x{n % 1_000}"),
        "echoed": Input("b", key=lambda n: f"y{n % 997}"),
    }
    names = dict(zip(reads, ("first", "second", "third"), strict=True))
    stages = {names[to]: node(kind(to), read, Stream(to), **how) for to, read in reads.items()}
    return Topology(_logs(0), stages, _ECHOED)


_WEAK: Final[dict[str, Any]] = {"exactly_once": False, "productions": "weak"}
STAGE, STAGES = _one_stage(Echo), _three_stages(Echo)
WEAK_STAGE, WEAK_STAGES = _one_stage(Relay, **_WEAK), _three_stages(Relay, **_WEAK)
WAITING = _one_stage(Waiting)
