"""Topologies that tests run, in memory and as processes.

A worker's wall clock is CLOCK_OFF_S seconds off.
"""

import os
import sys

from millwheel import Computation, Input, Logs, LogSink, Push, Stream, Topology, node
from millwheel.ready import WindowCounts, Zeitgeist
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


def two_stages(clicks=Logs("logs/*.jsonl", "ts", lateness_s=2), value="what"):
    return Topology(
        {"clicks": clicks},
        {
            "windows": node(
                Counts(), Input("clicks", key="user", value=value), Stream("counts"), late="dead-letter"
            ),
            "totals": node(
                Totals(),
                Input("counts", key=lambda value: str(value["second"])),
                Stream("totals"),
                late="dead-letter",
            ),
        },
        {"counts": LogSink("out/counts"), "totals": LogSink("out/totals")},
    )


TOPOLOGY = two_stages()
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


HELD = two_stages(Logs("logs/*.jsonl", "ts", lateness_s=2, expected=("logs/0*", "logs/1*"), silent="hold"))
"""As well by what was written."""
PUSHED = two_stages(Push(os.environ.get("LISTEN", "127.0.0.1:1"), "ts", lateness_s=3600))


def clicks(random, count, users=9, seconds=20):
    """Within a second of their order by time."""
    step = seconds * SECOND // count
    return [
        {
            "user": f"user{random.randrange(users)}",
            "ts": row * step + random.randrange(SECOND),
            "what": "click",
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
