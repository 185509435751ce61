"""A history is what one worker makes of all lines by time; what it leaves goes on as if it had been live."""

import random
from collections import Counter

import msgspec
import pytest

from millwheel import testing
from millwheel.computation import NEVER
from millwheel.engine import replay
from millwheel.engine.plan import numbered
from millwheel.engine.store import Lane, MemoryStore, lane_row
from millwheel.engine.wheel import summed
from millwheel.testing import Bench, in_order, oracle
from millwheel.topology import DEAD_LETTERS
from spark.history.tasks import STATE
from tests.seeds import seeds
from tests.spark import histories
from tests.spark.histories import SECOND, clicks, lines_of, made_here

NAMES = ("VISITS", "CHAIN", "COUNTS", "PAIRS")


def chunked(dice, lines, files=3):
    """As chunks of several files, which overlap in time."""
    of_files = [lines[file::files] for file in range(files)]
    chunks = []
    for of_file in of_files:
        while of_file:
            size = dice.randint(1, 20)
            chunks.append(of_file[:size])
            of_file = of_file[size:]
    return chunks


def letters(lines):
    return Counter(msgspec.json.encode(line) for line in lines)


@pytest.mark.parametrize("name", NAMES)
@seeds(3, 10, 200)
def test_it_is_what_one_worker_makes_of_all_lines_by_time(name, seed, monkeypatch):
    """With batches of any size, in any number of parts; calls that fail are dead letters, the same ones."""
    dice = random.Random(seed)
    monkeypatch.setattr(replay, "_BATCH", dice.choice([1, 7, 1000]))
    topology = getattr(histories, name)
    lines = clicks(dice, 200)
    rows, marks, told = made_here(name, chunked(dice, lines), parts=dice.choice([1, 4]), dice=dice)
    expected = oracle(topology, {"clicks": lines})
    found = {sink: lines_of(rows, sink) for sink in expected}
    assert letters(found.pop(DEAD_LETTERS)) == letters(expected.pop(DEAD_LETTERS))
    assert in_order(found) == in_order(expected)
    assert any(expected.values())
    assert set(marks.values()) == {NEVER}
    counts = summed([{one.name: one.counts} for one in told])
    assert counts["clicks"] == {"records": 200, "dead_letters": 0}
    assert sum(count["dead_letters"] for count in counts.values()) == len(lines_of(rows, DEAD_LETTERS))
    assert all(count.get("late", 0) == 0 for count in counts.values())
    if name == "VISITS":  # whose timers make a visit each
        assert counts["visits"]["timers"] == counts["visits"]["produced"] == len(expected["visits"])


def gone_on(monkeypatch, topology, rows, marks):
    """A worker in memory that goes on from there."""
    left = {lane_row(0): msgspec.msgpack.encode(Lane(marks=marks))}
    for row in rows:
        if row["what"] == STATE:
            left |= msgspec.msgpack.decode(row["blob"], type=dict[bytes, bytes])
    assert numbered(topology, {})  # the same numbers by which the rows go
    monkeypatch.setattr(testing, "MemoryStore", lambda: MemoryStore(left))
    return Bench(topology, now=0)


@pytest.mark.parametrize("name", NAMES)
@seeds(5, 15, 300)
def test_what_it_leaves_goes_on_without_a_gap_or_a_double(name, seed, monkeypatch):
    """Of COUNTS, whose results don't hang on an order, also where the lines that follow are as late as may
    be."""
    dice = random.Random(seed)
    monkeypatch.setattr(replay, "_BATCH", dice.choice([1, 7, 1000]))
    topology = getattr(histories, name)
    lines = clicks(dice, 200)
    cut = dice.randrange(200)
    before, after = lines[:cut], lines[cut:]
    newest = before[-1]["ts"] if before else 0
    low = newest
    if name == "COUNTS":
        low = newest - 2 * SECOND
        late = [line for line in before if line["ts"] >= low and dice.random() < 0.5]
        before, after = [line for line in before if line not in late], late + after
        dice.shuffle(after)
    rows, marks, _ = made_here(name, chunked(dice, before), low=low, dice=dice)
    assert all(mark <= low for mark in marks.values())
    expected = oracle(topology, {"clicks": lines})
    bench = gone_on(monkeypatch, topology, rows, marks)
    if name == "COUNTS":
        bench.send("clicks", *after)
    for line in after if name != "COUNTS" else ():
        bench.watermark(line["ts"])
        bench.now = line["ts"]
        bench.send("clicks", line)
    bench.watermark(NEVER)
    together = {sink: lines_of(rows, sink) + lines for sink, lines in bench.sinks.items()}
    assert letters(together.pop(DEAD_LETTERS)) == letters(expected.pop(DEAD_LETTERS))
    assert in_order(together) == in_order(expected)


def test_timers_on_the_wall_clock_go_by_the_low_watermark():
    lines = [{"user": "a", "ts": SECOND, "what": "x"}, {"user": "f", "ts": 9 * SECOND, "what": "x"}]
    rows, _, _ = made_here("WALL", [lines])
    visits = {line["user"]: line.get("soon") for line in lines_of(rows, "visits")}
    assert visits == {"a": 1_500_000, "f": None}  # the clock of logs that end stands at their last line
