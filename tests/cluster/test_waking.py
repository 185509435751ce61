"""Whole systems in which clicks come before their queries: the event store wakes them (paper 3.2.1)."""

import json
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from tests.system import following, joined_pairs, photon
from tests.waiting import wait_until

CLICKS = 40
SLOW = """
[dispatcher]
retry_delay_ms_min = 20000
"""
"""None is tried by backoff before it is woken, on a busy machine neither; what failed there is tried again."""
MANY_PROCESSES = SLOW + "workers = 2\n[eventstore]\nprocesses = 2\n"


def append(path: Path, low: int, high: int, kind: str) -> None:
    with path.open("a") as file:
        for n in range(low, high):
            event = {"id": f"q{n}"} if kind == "q" else {"id": f"c{n}", "primary_id": f"q{n}"}
            file.write(json.dumps(event | {"ts_us": time.time_ns() // 1000}) + "\n")


@pytest.mark.cluster
@pytest.mark.parametrize(
    "tls",
    [
        pytest.param(False, id="plain"),
        pytest.param(True, id="tls, several processes", marks=pytest.mark.long),
    ],
)
def test_clicks_that_precede_their_queries_are_joined_by_an_arrival(
    tmp_path: Path, command: Any, tls: bool
) -> None:
    logs, out, config = tmp_path / "logs", tmp_path / "out", tmp_path / "photon.toml"
    for name in ("queries", "clicks"):
        (logs / name).mkdir(parents=True)
    settings = SLOW
    if tls:
        made = photon("certs", "--out", tmp_path / "certs", "--name", "here")
        assert made.returncode == 0, made.stderr
        settings = made.stdout + MANY_PROCESSES
    config.write_text(settings, "utf-8")

    def statuses(role: str) -> list[dict]:
        """Of all processes of a role, once each of them answers."""
        said = []

        def answered() -> list[dict]:
            done = command("status", "--work", out / ".photon", "--json")
            said[:] = [done]
            shown = json.loads(done.out) if done.out.startswith("{") else {}
            found = [status for name, status in shown.items() if name.startswith(role)]
            return found if all(found) else []

        return wait_until(answered, what=lambda: f"no status: {said}")

    def total(count: str) -> int:
        return sum(status[count] for status in statuses("dispatcher-"))

    def awaited() -> int:
        return sum(
            status["arrivals"]["awaited"] for status in statuses("eventstore-") if "arrivals" in status
        )

    with following(logs, out, "--config", config, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: (out / ".photon" / "topology.json").exists(), 60)
        statuses("eventstore-")  # what finds none fails, and is tried again by backoff only
        for half in ("a", "b"):
            append(logs / "clicks" / f"{half}.jsonl", *((0, 20) if half == "a" else (20, CLICKS)), "c")
        wait_until(lambda: total("pending") == CLICKS and awaited() >= CLICKS, 60, "all clicks wait")
        append(logs / "queries" / "q.jsonl", 0, 1, "q")
        wait_until(lambda: len(joined_pairs(out, growing=True)) == 1, 60, "the first one is joined")
        append(logs / "queries" / "q.jsonl", 1, CLICKS, "q")
        wait_until(lambda: len(joined_pairs(out, growing=True)) == CLICKS, 60, "all are joined")
        wait_until(lambda: not total("pending"), 60, "and counted")
        woken = total("woken")
        assert woken > CLICKS / 2, (woken, statuses("dispatcher-"), statuses("eventstore-"))
    summary = json.loads(process.said[0])
    assert (process.returncode, summary["joined"], summary["pending"]) == (0, CLICKS, 0)
    assert joined_pairs(out) == {(f"q{n}", f"c{n}"): 1 for n in range(CLICKS)}
