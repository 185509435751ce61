"""A key with half of all records, disks without room, a clock an hour off; real processes."""

import contextlib
import itertools
import os
import random
import time
from pathlib import Path

import pytest

from tests.faults.test_disks import full, small_disk
from tests.millwheel.running import HELD
from tests.millwheel.topologies import SECOND, clicks
from tests.waiting import wait_until

TOLD = "no space left"


def anonymous_mib(pid):
    """What a process has of its own in memory; 0 if it is gone."""
    with contextlib.suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) // 1024
    return 0


@pytest.mark.long
def test_a_key_with_half_of_all_records_is_counted_and_memory_stays_bounded(system):
    """Whole lines, 80 MiB: those of the one key go to one worker, from both."""
    lines = clicks(random.Random(11), 80_000, users=500, seconds=40)
    for line in lines[::2]:
        line["user"] = "hot"
    pad = "x" * 1_000
    for part in range(4):
        system.write(f"{part}.jsonl", [line | {"pad": pad} for line in lines[part::4]])
    process = system.start("--workers", "2", name="tests.millwheel.topologies:WHOLE_LINES")
    wait_until(lambda: len(system.workers()) == 2)
    peak, workers = 0, system.workers()
    while process.poll() is None:
        peak = max(peak, *map(anonymous_mib, workers))
        time.sleep(0.1)
    process.communicate()
    assert process.returncode == 0
    assert 0 < peak < 250
    system.check(lines)


@pytest.mark.parametrize("off_s", [pytest.param(-3_600, marks=pytest.mark.long), 3_600])
def test_a_clock_an_hour_off_loses_and_doubles_nothing(system, off_s):
    """Ahead, a file that was read to its end promises an hour too much: what comes then is late, and told."""
    system.environment["CLOCK_OFF_S"] = str(off_s)
    now = time.time_ns() // 1_000 // SECOND * SECOND - 10 * SECOND
    lines = [{"user": f"user{n % 7}", "ts": now + n * 10_000, "what": "click"} for n in range(1_000)]
    system.write("a.jsonl", lines[:500])
    system.start("--follow", "--workers", "2")
    wait_until(system.is_up)
    if off_s > 0:
        wait_until(lambda: sum(count["count"] for count in system.sink("counts")) == 500)
    system.write("b.jsonl", lines[500:])
    wait_until(lambda: system.status()["counts"].get("windows", {}).get("records") == 1_000, pause=0.5)
    status = 1 if off_s > 0 else 0
    system.stop(status)
    summary = system.run(status=status)
    counted = sum(count["count"] for count in system.sinks()["counts"])
    assert counted + system.dead_letters() == len(lines)
    assert summary["counts"]["windows"]["late"] == system.dead_letters() == (500 if off_s > 0 else 0)
    if off_s < 0:
        system.check(lines)


@pytest.mark.faults
@pytest.mark.timeout(600)
@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system can be mounted by root alone")
@pytest.mark.parametrize("disk", ["work/state", "out/counts"])
def test_a_full_disk_is_told_and_loses_nothing(system, disk):
    dice, seconds, lines = random.Random(12), itertools.count(), []
    told = system.directory / "told"

    def write_on():
        second = next(seconds) * SECOND
        for file in ("0.jsonl", "1.jsonl"):
            some = [
                {"user": f"user{dice.randrange(900)}", "ts": second + n, "what": "click"} for n in range(200)
            ]
            system.write(file, some, "a")
            lines.extend(some)

    def counted():
        write_on()
        return len(system.sinks()["totals"]) > seen + 3

    def is_told():
        write_on()
        return TOLD in told.read_text()

    with small_disk(system.directory / disk) as mounted:
        write_on()
        system.start("--follow", "--workers", "2", name=HELD, told=told)
        seen = 0
        wait_until(counted, 120, pause=0.1)
        with full(mounted):
            wait_until(is_told, 120, pause=0.1)
        seen = len(system.sinks()["totals"])
        wait_until(counted, 120, pause=0.1)
        system.stop()
        assert system.run("--workers", "2", name=HELD)["dead_letters"] == 0
        system.check(lines)
