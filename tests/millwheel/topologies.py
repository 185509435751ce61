"""Topologies that tests run, in memory and as processes.

A worker's wall clock is CLOCK_OFF_S seconds off; a receiver's files are of PUSHED_FILE_BYTES.
"""

import os
import sys
import time

from millwheel import Computation, Input, Logs, LogSink, Push, Stream, Topology, node, push
from millwheel.ready import WindowCounts, Zeitgeist
from millwheel.topology import DEAD_LETTERS
from photon.core.clock import SystemClock

SECOND = 1_000_000


class Counts(Computation[dict]):
    """Records of a key in each second."""

    def process_record(self, record, ctx):
        if record.value == "poison":
            raise RuntimeError("poison")
        second = record.time // SECOND
        ctx.state[second] = ctx.state.get(second, 0) + 1
        ctx.set_timer(second, (second + 1) * SECOND)

    def process_timer(self, timer, ctx):
        ctx.produce("counts", {"key": ctx.key, "second": timer.tag, "count": ctx.state.pop(timer.tag)})
        if not ctx.state:
            ctx.forget()


class Totals(Computation[dict]):
    """All keys of a second together: from many key intervals to one."""

    def process_record(self, record, ctx):
        ctx.state["keys"] = ctx.state.get("keys", 0) + 1
        ctx.state["count"] = ctx.state.get("count", 0) + record.value["count"]
        ctx.set_timer("end", (record.value["second"] + 1) * SECOND + 1)

    def process_timer(self, timer, ctx):
        ctx.produce("totals", {"second": ctx.key, **ctx.state})
        ctx.forget()


class SlowCounts(Counts):
    """A millisecond each."""

    def process_record(self, record, ctx):
        time.sleep(0.001)
        super().process_record(record, ctx)


def two_stages(clicks=Logs("logs/*.jsonl", "ts", lateness_s=2), value="what", counts=Counts, **sinks):
    return Topology(
        {"clicks": clicks},
        {
            "windows": node(
                counts(), Input("clicks", key="user", value=value), Stream("counts"), late="dead-letter"
            ),
            "totals": node(
                Totals(),
                Input("counts", key=lambda value: str(value["second"])),
                Stream("totals"),
                late="dead-letter",
            ),
        },
        {"counts": LogSink("out/counts"), "totals": LogSink("out/totals"), **sinks},
    )


TOPOLOGY = two_stages()
SLOW = two_stages(counts=SlowCounts)
WHOLE_LINES = two_stages(value="*")
PERCENTILE = two_stages(Logs("logs/*.jsonl", "ts", lateness_s=3600, percentile=99))


ANOMALIES = Topology(
    {"searches": Logs("logs/*.jsonl", "ts", expected=("logs/0*", "logs/1*"), silent="hold")},
    {
        "windows": node(
            WindowCounts("windows", 1),
            Input("searches", "query", None),
            Stream("windows"),
            late="dead-letter",
        ),
        "zeitgeist": node(
            Zeitgeist("anomalies", 1), Input("windows"), Stream("anomalies"), late="dead-letter"
        ),
    },
    {"anomalies": LogSink("out/anomalies")},
)
"""The low watermark goes by what was written, not by the clock."""


HELD = two_stages(
    Logs("logs/*.jsonl", "ts", lateness_s=2, expected=("logs/0*", "logs/1*"), silent="hold"),
    totals=LogSink("out/totals", publish=os.environ.get("PUBLISH", ())),
    **{DEAD_LETTERS: LogSink("out/dead-letters")},
)
"""As well by what was written."""
COPIED = two_stages(
    Logs(
        os.environ.get("SOURCE", "kafka://host/topic"),
        "ts",
        lateness_s=1,
        copies=os.environ.get("COPIES", "/copies"),
    ),
    **{DEAD_LETTERS: LogSink("out/dead-letters")},
)
PUSHED = two_stages(Push(os.environ.get("LISTEN", "127.0.0.1:1"), "ts", lateness_s=3600))
PUSHED_SLOW = two_stages(PUSHED.injectors["clicks"], counts=SlowCounts)


class Relay(Computation):
    """Stateless: hands on what it gets."""

    def __init__(self, stream):
        self.stream = stream

    def process_record(self, record, ctx):
        ctx.produce(self.stream, record.value)


class Seen(Computation[dict]):
    """Distinct ids of a key in each second: one that comes again changes nothing."""

    def process_record(self, record, ctx):
        second = record.time // SECOND
        ctx.state.setdefault(second, {})[record.value["id"]] = True
        ctx.set_timer(second, (second + 1) * SECOND)

    def process_timer(self, timer, ctx):
        seen = ctx.state.pop(timer.tag)
        ctx.produce("counts", {"key": ctx.key, "second": timer.tag, "count": len(seen)})
        if not ctx.state:
            ctx.forget()


class Numbers(Computation[int]):
    """What it produces hangs on the order of what comes."""

    state = int

    def process_record(self, record, ctx):
        ctx.state += 1
        ctx.produce("numbered", {"key": ctx.key, "n": ctx.state, "id": record.value["id"]})


WEAK = {"exactly_once": False, "productions": "weak"}


def weak_stages(relay=WEAK, again=WEAK):
    """From an injector through two stages without state to idempotent counts, and to totals, exactly once."""
    return Topology(
        {"clicks": Logs("logs/*.jsonl", "ts", lateness_s=2)},
        {
            "relay": node(Relay("parsed"), Input("clicks", key="id"), Stream("parsed"), late="drop", **relay),
            "again": node(
                Relay("again"),
                Input("parsed", key=lambda value: f"{value['user']}-{value['id']}"),
                Stream("again"),
                late="drop",
                **again,
            ),
            "seen": node(
                Seen(),
                Input("again", key=lambda value: value["user"]),
                Stream("counts"),
                late="drop",
                exactly_once=False,
            ),
            "totals": node(
                Totals(),
                Input("counts", key=lambda value: str(value["second"])),
                Stream("totals"),
                late="dead-letter",
            ),
        },
        {name: LogSink(f"out/{name}") for name in ("again", "counts", "totals")},
    )


def numbered_stages():
    """A weak stage behind one whose productions may be others when its turn is done again."""
    by_number = Input("numbered", key=lambda value: f"{value['key']}-{value['n']}")
    return Topology(
        {"clicks": Logs("logs/*.jsonl", "ts", lateness_s=2)},
        {
            "numbers": node(Numbers(), Input("clicks", key="user"), Stream("numbered")),
            "relay": node(Relay("parsed"), by_number, Stream("parsed"), **WEAK),
            "shown": node(
                Relay("shown"), Input("parsed", key=lambda value: str(value["id"])), Stream("shown"), **WEAK
            ),
        },
        {"parsed": LogSink("out/parsed"), "shown": LogSink("out/shown")},
    )


RELAXED = weak_stages()


def clicks(random, count, users=9, seconds=20):
    """Within a second of their order by time."""
    step = seconds * SECOND // count
    return [
        {
            "user": f"user{random.randrange(users)}",
            "ts": row * step + random.randrange(SECOND),
            "what": "click",
            "id": row,
        }
        for row in range(count)
    ]


def expected(lines):
    """What the sinks must have, counted in plain Python."""
    counts, totals = {}, {}
    for line in lines:
        pair = line["user"], line["ts"] // SECOND
        counts[pair] = counts.get(pair, 0) + 1
    for (_, second), count in counts.items():
        total = totals.setdefault(second, {"second": str(second), "keys": 0, "count": 0})
        total["keys"] += 1
        total["count"] += count
    return {
        "counts": [{"key": key, "second": second, "count": n} for (key, second), n in counts.items()],
        "totals": list(totals.values()),
    }


if "worker" in sys.argv and "CLOCK_OFF_S" in os.environ:
    off_us = int(os.environ["CLOCK_OFF_S"]) * SECOND
    right = SystemClock.now_us
    SystemClock.now_us = lambda clock: right(clock) + off_us
if "PUSHED_FILE_BYTES" in os.environ:
    push.FILE_BYTES_MAX = int(os.environ["PUSHED_FILE_BYTES"])


class Handed(Computation):
    """Hands each record on, after a while."""

    def __init__(self, out):
        self.out = out

    def process_record(self, record, ctx):
        time.sleep(0.05)
        ctx.produce(self.out, record.value)


CHAIN = Topology(
    {"s0": Logs("logs/*", time="ts")},
    {
        f"c{n}": node(
            Handed(f"s{n}"), Input(f"s{n - 1}", key=lambda one, n=n: f"{n} {one['ts']}"), Stream(f"s{n}")
        )
        for n in range(1, 8)
    },
    {"s3": LogSink("out/third"), "s7": LogSink("out/last")},
)
"""Each record goes from worker to worker."""
