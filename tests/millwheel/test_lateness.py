"""Percentile low watermarks (paper 4.5, 7.2): how late lines were, and what is left behind for it."""

import random

import numpy as np
import pytest

from millwheel import Logs
from millwheel.computation import BEFORE, NEVER
from millwheel.engine.lateness import Lateness, Stragglers
from millwheel.engine.plan import Plan, numbered
from millwheel.engine.records import Records, slot_of_key
from millwheel.engine.shares import even
from millwheel.engine.store import MemoryStore
from millwheel.engine.wheel import Wheel
from millwheel.errors import TopologyError
from millwheel.testing import World, oracle, run
from tests.millwheel.topologies import SECOND, clicks, two_stages
from tests.seeds import seeds

MOST = 3_600 * SECOND


def disordered(dice, count, late, by_s):
    """A line each millisecond, a share `late` of them by up to so many seconds."""
    times = np.arange(count) * 1_000 + MOST
    for row in range(1, count):
        if dice.random() < late:
            times[row] -= dice.randrange(by_s * SECOND)
    return times


def saw(*times, percentile=99.0, packed=None):
    made = Lateness(percentile, packed)
    for some in times:
        made.saw(np.array(some), BEFORE, NEVER)
    return made


def allowed(*workers, percentile=99.0):
    made = Stragglers(
        {"clicks": Logs("x", "ts", lateness_s=3_600, percentile=percentile), "strict": Logs("x", "ts")}
    )
    for number, counted in enumerate(workers):
        made.report(number, {"clicks": counted.packed(), "gone": b"x"})
    assert set(made.lateness_us) == {"clicks"}
    return made.lateness_us["clicks"]


@pytest.mark.parametrize("percentile", [90.0, 99.0, 99.9])
def test_it_is_the_percentile_of_the_lines_and_at_most_a_fifth_more(percentile):
    times = disordered(random.Random(1), 20_000, 0.05, 60)
    late = np.maximum.accumulate(times) - times
    exact = np.quantile(late, percentile / 100, method="inverted_cdf")
    assert exact <= allowed(saw(times, percentile=percentile), percentile=percentile) <= 1.2 * exact + 1


def test_chunks_make_no_difference():
    times = disordered(random.Random(2), 900, 0.1, 60)
    whole, parts = saw(times), Lateness(99.0)
    for start in range(0, 900, 7):
        parts.saw(times[start : start + 7], int(times[:start].max(initial=BEFORE)), NEVER)
    assert parts.packed() == whole.packed()


def test_until_enough_lines_were_seen_it_is_the_most():
    assert allowed() == allowed(saw([])) == allowed(saw(range(999))) == MOST
    assert allowed(saw(range(1_001))) == 0


def test_it_is_never_more_than_the_most():
    assert allowed(saw([2 * MOST, 0] * 1_000)) == MOST


def test_a_worker_with_few_lines_goes_by_what_others_saw():
    one = saw([10 * SECOND + 1, 1] * 600)
    assert 10 * SECOND <= allowed(one, saw([]), saw([5])) <= 12 * SECOND


def test_what_was_long_ago_is_forgotten():
    counted = saw([10 * SECOND, 0] * 1_000)
    assert allowed(counted) >= 10 * SECOND
    for _ in range(5):
        counted.saw(np.arange(10_000), BEFORE, NEVER)
    assert allowed(counted) == 0
    assert len(counted.packed()) < 100


def test_a_restart_knows_what_was_counted():
    first, second = (disordered(random.Random(n), 30_000, 0.1, 60) for n in range(2))
    assert saw(second, packed=saw(first).packed()).packed() == saw(first, second).packed()


def test_a_line_from_the_future_makes_no_other_late():
    counted = Lateness(99.0)
    counted.saw(np.array([5, NEVER, 6, 7] * 500), BEFORE, 100)
    assert allowed(counted) <= 2


@pytest.mark.parametrize("how", [{"percentile": 100}, {"percentile": 0}, {"percentile": 99, "lateness_s": 0}])
def test_a_percentile_that_says_nothing_is_refused(how):
    with pytest.raises(TopologyError, match="percentile"):
        two_stages(Logs("x", "ts", **{"lateness_s": 5} | how))


def topology(percentile):
    return two_stages(Logs("logs/*", "ts", lateness_s=3_600, percentile=percentile))


def straggling(dice, count):
    """In order but for one of fifty in the second half, and the last ones, a minute late."""
    lines = sorted(clicks(dice, count, seconds=600), key=lambda line: line["ts"])
    for line in [*dice.sample(lines[count // 2 :], count // 50), *lines[-8:]]:
        line["ts"] = max(0, line["ts"] - 60 * SECOND)
    return lines


def halfway(percentile, lines, workers, seed):
    """The world when each worker has read four fifths of its lines and done what follows from them, and how
    many windows are out by then. All stop only afterwards.
    """
    world = World(topology(percentile), {"clicks": lines}, workers, seed)
    left, world.stops_left = (world.stops_left, world.kills_left // 2), 0
    marks = dict(world.authority.marks)

    def step():
        world.step()
        assert all(world.authority.marks[name] >= mark for name, mark in marks.items())
        marks.update(world.authority.marks)

    while min(at for node in world.nodes for at in node.read.values()) < len(lines) * 4 // 5 // workers:
        step()
    world.kills_left = 0
    for worker in world.nodes:
        worker.steps.remove(worker.inject)
    for _ in range(3_000):
        step()
    for worker in world.nodes:
        worker.steps.append(worker.inject)
    world.stops_left, world.kills_left = left
    return world, len(world.sinks["totals"])


@seeds(3, 20, 200)
def test_windows_close_without_waiting_for_stragglers_and_every_line_is_counted_or_a_dead_letter(seed):
    lines = straggling(random.Random(seed), 900)
    for line in lines[-8:]:
        line["ts"] = 0
    workers = 1 + seed % 3
    strict, closed = halfway(None, lines, workers, seed)
    assert closed == 0
    world, closed = halfway(90.0, lines, workers, seed)
    assert closed > 0
    for one in (strict, world):
        one.run()
        counted = sum(count["count"] for count in one.sinks["counts"])
        refused = [letter for letter in one.sinks["dead-letters"] if letter["computation"] == "windows"]
        assert counted + len(refused) == len(lines)
        assert (len(refused) > 0) == (one is world)
    assert len(refused) < len(lines) // 10


def test_the_oracle_has_no_percentile():
    lines = straggling(random.Random(3), 400)
    assert oracle(topology(90.0), {"clicks": lines}) == oracle(topology(None), {"clicks": lines})
    assert run(topology(None), {"clicks": lines})["dead-letters"] == []


def test_a_low_watermark_goes_on_while_there_is_always_a_straggler_under_way():
    """Each frame to the other worker has one, and the next leaves before it is acknowledged."""
    plan = Plan(made := topology(99.0), numbered(made, {}))
    store = MemoryStore().claim([slot for slot, owner in enumerate(even(2)) if owner == 0], 1)
    wheel = Wheel(plan, store, 0, even(2), 1)
    theirs = next(key for key in map(str, range(100)) if even(2)[slot_of_key(key)] == 1)
    (read,) = plan.readers["clicks"]
    lows = []
    for number in range(1, 20):
        late = Records([theirs], np.zeros(1, np.int64), np.zeros(1, np.int64), ["click"])
        wheel.inject("clicks", {read: late}, {})
        wheel.turn(0)
        wheel.bound("clicks", number * SECOND)
        store.commit(wheel.begin_commit())
        lows.append(wheel.committed().lows["clicks"])
        wheel.acked(1, 0, number - 1)
    assert lows[-1] >= 17 * SECOND
