"""Writes query and click logs at a steady rate, as a process of its own: what a live measurement is fed with.

    python -m photon.app.bench_feeder ARGUMENTS     (JSON, the fields of Feed; prints the fields of Fed)

Thousands of events a tick are made by C-level maps, so that 100,000 a second cost a tenth of a core, where
`photon generate` makes them one by one.
"""

import itertools
import json
import random
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from photon.app.generate_events import USERS, click_lines, click_payloads, heads, query_lines, query_payloads
from photon.core.clock import SystemClock
from photon.core.settings import Settings
from photon.fastpath.client import FastPath

TICK_S: Final = 0.005
CLICKABLE: Final = 10_000
"""A click is of one of so many queries before it."""


@dataclass(frozen=True, slots=True)
class Feed:
    """What to write, and where. `joiners`: also send every event there by the fast path; none: logs only."""

    logs: str
    queries_per_s: float
    clicks_per_s: float
    seconds: float
    eventstore: str = ""
    joiners: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Fed:
    """What was written, and in how many seconds. `late_ms`: how far the slowest tick was behind its time."""

    queries: int
    clicks: int
    seconds: float
    late_ms: float
    fast_path: dict[str, dict[str, int]]


def feed(plan: Feed) -> Fed:
    """Write until the time is over."""
    sender = None
    if plan.joiners:
        sender = FastPath(plan.eventstore, plan.joiners, Settings(), SystemClock())
    (query_head,), (click_head,) = heads(0, 1), heads(1, 1)
    query_texts, click_texts = query_payloads(1), click_payloads(1)
    rng = random.Random(1)
    clickable: list[str] = []
    queries = clicks = 0
    last_us = 0
    late_s = 0.0
    began = time.monotonic()
    with (
        (Path(plan.logs) / "queries" / "fed.jsonl").open("ab", buffering=0) as query_log,
        (Path(plan.logs) / "clicks" / "fed.jsonl").open("ab", buffering=0) as click_log,
    ):
        for tick in itertools.count(1):
            elapsed = min(tick * TICK_S, plan.seconds)
            wait_s = began + elapsed - time.monotonic()
            time.sleep(max(0.0, wait_s))
            late_s = max(late_s, -wait_s)
            asked = int(plan.queries_per_s * elapsed) - queries
            clicked = int(plan.clicks_per_s * elapsed) - clicks if clickable else 0
            now_us = max(time.time_ns() // 1_000, last_us + 1)
            times = range(now_us, now_us + max(asked, clicked))
            last_us = now_us + max(asked, clicked)
            primary_ids = [f"{query_head}:{time_us}" for time_us in times[:asked]]
            lines = query_lines(
                primary_ids,
                times[:asked],
                rng.choices(range(USERS), k=asked),
                rng.choices(query_texts, k=asked),
            )
            click_ids = [f"{click_head}:{time_us}" for time_us in times[:clicked]]
            of = rng.choices(clickable, k=clicked) if clickable else []
            clicked_lines = click_lines(click_ids, of, times[:clicked], rng.choices(click_texts, k=clicked))
            query_log.write(b"".join(lines))
            if sender is not None:
                sender.primary_many(lines)
            click_log.write(b"".join(clicked_lines))
            if sender is not None:
                sender.foreign_many(clicked_lines)
            clickable = [*clickable, *primary_ids][-CLICKABLE:]
            queries += asked
            clicks += clicked
            if elapsed >= plan.seconds:
                break
    seconds = time.monotonic() - began
    counts: dict[str, dict[str, int]] = {}
    if sender is not None:
        sender.flush(1.0)
        counts = {"primaries": asdict(sender.primaries), "foreigns": asdict(sender.foreigns)}
        sender.close()
    return Fed(queries, clicks, seconds, round(late_s * 1e3, 1), counts)


if __name__ == "__main__":
    sys.stdout.write(json.dumps(asdict(feed(Feed(**json.loads(sys.argv[1]))))) + "\n")
