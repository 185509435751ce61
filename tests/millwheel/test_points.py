"""Workers that die at each point between two IO steps, in real processes, one after the other."""

import itertools
import random

import pytest

from tests.millwheel.crashing import LEFT, POINTS
from tests.millwheel.topologies import SECOND
from tests.waiting import wait_until

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]
NAME = "tests.millwheel.crashing:TOPOLOGY"
HALF = len(POINTS) // 2


@pytest.mark.parametrize("points", [list(POINTS)[:HALF], list(POINTS)[HALF:]], ids=["commits", "what leaves"])
def test_workers_that_die_at_each_point_lose_and_double_nothing(system, points):
    (system.directory / LEFT).write_text("".join(f"{point}\n" for point in points))
    dice, seconds, lines = random.Random(9), itertools.count(), []

    def write_on():
        second = next(seconds) * SECOND
        for file in ("0.jsonl", "1.jsonl"):
            some = [
                {"user": f"user{dice.randrange(40)}", "ts": second + n, "what": "click"} for n in range(50)
            ]
            system.write(file, some, "a")
            lines.extend(some)

    def reached():
        write_on()
        logs = (system.directory / "work/logs").glob("worker-*")
        died = [line for log in logs for line in log.read_text().splitlines() if line.startswith("dies: ")]
        return len(died) == len(points) and system.status()["restarts"] >= len(points)

    system.start("--follow", "--workers", "2", name=NAME)
    wait_until(system.is_up, 120)  # some die before they are
    wait_until(reached, 300, pause=0.2)
    system.stop()
    assert (system.directory / LEFT).read_text() == ""
    assert system.run("--workers", "2", name=NAME)["dead_letters"] == 0
    system.check(lines)
