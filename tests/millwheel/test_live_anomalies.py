"""Zeitgeist over logs that grow (paper 2): what is planted is found once the low watermark is past it, and
nothing else, though a worker is killed in the middle of a spike.
"""

import os
import signal
import time

from photon.dev.demo import odd_windows
from tests.millwheel.topologies import SECOND
from tests.waiting import wait_until

QUERIES = [f"query{n}" for n in range(12)]
RATE, LEARN, ROW = 10, 20, 3
PLANTED = {
    "query3": ("spike", 25, 60),
    "query7": ("dip", 33, 0),
    "query0": ("spike", 41, 45),
    "query11": ("dip", 49, 1),
}
"""Kind, its first second, and what is searched in each of five seconds."""
KILL_IN = 42
SECONDS = 60


def searches(query, second):
    _, first, odd = PLANTED.get(query, ("", SECONDS, 0))
    return odd if first <= second < first + 5 else RATE


def test_planted_anomalies_are_found_while_the_logs_grow_and_nothing_else(system):
    begin = time.time_ns() // 1_000 // SECOND - 2 * SECONDS
    system.start("--follow", "--workers", "2", name="tests.millwheel.topologies:ANOMALIES")
    pending = dict(PLANTED)

    def found():
        return {
            (one["key"], one["kind"], one["start_us"] // SECOND - begin) for one in system.sink("anomalies")
        }

    for second in range(SECONDS):
        for part in range(4):
            lines = [
                {"query": query, "ts": (begin + second) * SECOND + part * SECOND // 4 + n}
                for query in QUERIES
                for n in range(searches(query, second))
                if n % 4 == part
            ]
            system.write(f"{part % 2}.jsonl", lines, "a")
        if second == KILL_IN:
            wait_until(lambda: len(system.workers()) == 2)
            os.kill(system.workers()[0], signal.SIGKILL)
        for query, (kind, first, _) in list(pending.items()):
            if second == first + ROW:  # the odd seconds are over, one is not yet
                wait_until(lambda told=(query, kind, first + ROW - 1): told in found())
                del pending[query]
    assert not pending
    last = {"query": "the end", "ts": (begin + SECONDS + 1) * SECOND}
    for part in range(2):
        system.write(f"{part}.jsonl", [last], "a")
    mark = (begin + SECONDS) * SECOND
    wait_until(lambda: system.status()["low_watermarks"]["zeitgeist"]["low_watermark_us"] > mark)
    summary = system.stop()
    assert (summary["restarts"], summary["dead_letters"]) == (1, 0)
    planted = {(query, kind, first + ROW - 1) for query, (kind, first, _) in PLANTED.items()}
    assert len(system.sink("anomalies")) == len(planted)
    assert found() == planted
    anew = {
        (query, kind, second)
        for query in QUERIES
        for second, kind in odd_windows(
            {second: searches(query, second) for second in range(SECONDS)}, LEARN, 3.0, ROW
        )
        if second < SECONDS
    }
    assert anew == planted
