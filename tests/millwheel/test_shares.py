"""Slots move from workers with much to do to those with less (paper 7.1)."""

import random
import time

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millwheel.engine.records import SLOTS, slot_of_key
from millwheel.engine.shares import WINDOW_S, Load, Shares, Work, balanced, even, fitting, load_of, pays
from millwheel.machines import Round, next_round, stopping
from millwheel.testing import Bench
from tests.millwheel.test_machines import A, B, led_by, machine, seen
from tests.millwheel.topologies import SECOND, TOPOLOGY, clicks
from tests.waiting import wait_until


@st.composite
def loads_of(draw):
    """Most of them small, some large, many none."""
    dice = np.random.default_rng(draw(st.integers(0, 1 << 32)))
    loads = dice.pareto(draw(st.floats(0.1, 3.0)), SLOTS) * (dice.random(SLOTS) < draw(st.floats(0.0, 1.0)))
    return np.minimum(loads, 1e6)


@given(st.integers(1, 8), st.sampled_from([1, 2, 3]), loads_of())
def test_nobody_gets_more_than_the_busiest_had_and_stores_keep_their_slots(workers, stores, loads):
    workers *= stores
    before = even(workers)
    after = balanced(before, loads, stores)
    assert set(after) == set(range(workers))
    assert all(owner % stores == slot % stores for slot, owner in enumerate(after))
    was, is_now = load_of(before, loads), load_of(after, loads)
    assert is_now.max() <= was.max() * (1 + 1e-9)
    assert is_now.sum() == pytest.approx(was.sum())


def test_what_can_be_shared_is_shared_by_few_moves():
    loads = np.where(np.arange(SLOTS) % 4 == 0, 1.0, 0.0)
    after = balanced(even(4), loads)
    assert load_of(after, loads).tolist() == [SLOTS / 16] * 4
    assert sum(was != will for was, will in zip(even(4), after, strict=True)) == 3 * SLOTS // 16


def test_a_slot_that_is_most_of_the_load_is_left_alone():
    loads = np.full(SLOTS, 0.64 / SLOTS)
    loads[5] = 9.0
    assert balanced(even(2), loads) == even(2)


def test_who_can_not_be_relieved_keeps_nobody_else_from_it():
    loads = np.zeros(SLOTS)
    loads[[0, 1, 4]] = 1.0, 0.5, 0.45  # of three workers the first has one, the second two, the third none
    after = balanced(even(3), loads)
    assert load_of(after, loads).tolist() == [1.0, 0.5, 0.45]
    assert pays(load_of(even(3), loads), load_of(after, loads))
    loads[3] = 0.0
    of_stores = balanced(even(4), loads, 2)
    assert load_of(of_stores, loads).tolist() == [1.0, 0.5, 0.45, 0.0]


@pytest.mark.parametrize(
    ("before", "after", "does"),
    [
        ([0.9, 0.1], [0.5, 0.5], True),
        ([0.49, 0.1], [0.3, 0.29], False),  # nobody is busy
        ([0.9, 0.7], [0.8, 0.8], False),
        ([0.9, 0.1], [0.1, 0.9], False),
        ([1.0, 0.9, 0.0], [1.0, 0.45, 0.45], True),
        ([1.0, 0.9, 0.0], [0.95, 0.5, 0.45], True),
        ([1.0, 0.0, 0.4], [0.5, 0.9, 0.0], False),
    ],
)
def test_a_move_pays_if_a_busy_worker_is_relieved_and_nobody_has_its_place(before, after, does):
    assert pays(np.array(before), np.array(after)) is does


class Workers:
    """Two of them, as they report: of each second so much for each slot, and for what is no slot's."""

    def __init__(self, costs, window_s=WINDOW_S, besides=0.0):
        self.costs, self.besides, self.now = np.array(costs), besides, 0.0
        self.load = Load(Shares(even(2), window_s=window_s))
        self.began = [0.0, 0.0]

    def better(self, seconds):
        """The first answer in so long."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            for worker, began in enumerate(self.began):
                spent = (self.now - began) * self.costs * (np.array(even(2)) == worker)
                busy = float(spent.sum()) * (1 + self.besides)
                self.load.report(worker, Work(self.now, busy, spent.tolist()))
            found = self.load.better()
            if found is not None:
                return found
        return None


UNEVEN = np.where(np.arange(SLOTS) % 2 == 0, 1.8 / SLOTS, 0.0)


def test_slots_move_after_a_window_in_which_one_worker_had_much_more_to_do():
    workers = Workers(UNEVEN)
    assert workers.better(WINDOW_S - 1) is None
    assert workers.load.busy == {0: pytest.approx(0.9), 1: 0.0}
    after = workers.better(5)
    assert load_of(after.owners, UNEVEN).tolist() == pytest.approx([0.45, 0.45])
    assert after.loads == pytest.approx(UNEVEN)


def test_what_is_no_slots_counts_for_those_that_had_it_done():
    after = Workers(UNEVEN / 2, besides=1.0).better(WINDOW_S * 2)
    assert after.loads == pytest.approx(UNEVEN)


@pytest.mark.parametrize("costs", [UNEVEN / 2, np.full(SLOTS, 1.8 / SLOTS), np.eye(SLOTS)[6]])
def test_they_stay_where_nobody_is_busy_or_none_would_be_relieved(costs):
    assert Workers(costs).better(WINDOW_S * 5) is None


def test_each_move_makes_the_next_window_twice_as_long_and_quiet_ones_make_it_short_again():
    workers = Workers(UNEVEN, 8 * WINDOW_S)
    assert workers.better(WINDOW_S * 8 - 1) is None
    assert workers.better(5).window_s == 16 * WINDOW_S
    workers = Workers(UNEVEN / 2, 8 * WINDOW_S)
    assert workers.better(WINDOW_S * (8 + 4 + 2) + 1) is None
    workers.costs, workers.began = UNEVEN, [workers.now] * 2
    workers.load.begins(0)
    workers.load.begins(1)
    assert workers.better(WINDOW_S + 1).window_s == 2 * WINDOW_S


def test_a_worker_that_began_again_begins_a_window_and_is_not_yet_busy():
    workers = Workers(UNEVEN)
    workers.better(WINDOW_S / 2)
    workers.began[0] = workers.now
    workers.load.begins(0)
    assert 0 not in workers.load.busy
    assert workers.better(WINDOW_S - 1) is None
    assert workers.better(5) is not None


def test_long_turns_make_nobody_look_idle():
    """They are told of at their ends: of one worker two in the time in which there is one of another."""
    load, costs = Load(Shares(even(2))), np.full(SLOTS, 2 / SLOTS)
    owners = np.array(even(2))
    for now in range(1, 61):
        for worker, turn_s in enumerate((9, 12)):
            ended = float(now // turn_s * turn_s)
            load.report(worker, Work(ended, ended, (costs * (owners == worker) * ended).tolist()))
            assert load.better() is None


def test_a_worker_that_says_nothing_yet_holds_up_the_window():
    load = Load(Shares(even(3)))
    for now in range(100):
        for worker in (0, 1):
            load.report(worker, Work(float(now), 0.9 * now, (UNEVEN * now).tolist()))
        assert load.better() is None


def test_the_next_round_has_the_slots_that_were_moved_and_goes_by_the_load_for_other_workers():
    moved = Shares(balanced(even(2), UNEVEN), tuple(UNEVEN.tolist()), 4 * WINDOW_S)
    following = stopping(led_by(A, "running", A, B), A, moved)
    assert (following.number, following.stage, following.shares) == (8, "stopping", moved)
    running = next_round(A, 8, 7, seen(following, a=8, b=8))
    assert (running.stage, running.shares) == ("running", moved)
    assert stopping(running, A).shares == moved
    alone = next_round(A, 8, 7, seen(following, a=8)).shares
    assert (alone.owners, alone.window_s) == (even(1), WINDOW_S)
    back = fitting(alone, 2).owners
    assert load_of(back, UNEVEN).tolist() == pytest.approx([0.45, 0.45])
    more = machine("c", 3)
    wider = next_round(more, 8, 7, seen(Round(8, "c", "stopping", shares=moved), c=8)).shares
    assert load_of(wider.owners, UNEVEN) == pytest.approx([0.3] * 3, abs=0.03)
    assert fitting(Shares(), 3) == Shares(even(3))


def test_timers_count_as_records_do():
    bench = Bench(TOPOLOGY)
    work = bench._wheel.work
    bench.send("clicks", {"user": "ann", "ts": SECOND, "what": ""}, {"user": "ann", "ts": SECOND, "what": ""})
    found, slot = work(), slot_of_key("ann")
    assert (found[slot], found.sum()) == (2, 2)
    assert work().sum() == 0
    bench.watermark(10 * SECOND)
    found, other = work(), slot_of_key("1")
    assert (found[slot], found[other], found.sum()) == (1, 2, 3)


def on_one_worker(count):
    """Clicks of keys that the first of two workers has, in the order of their times."""
    names = [name for name in map(str, range(1000)) if slot_of_key(name) % 2 == 0][:50]
    lines = clicks(random.Random(7), count, users=len(names), seconds=60)
    users = {user: names[row] for row, user in enumerate(sorted({line["user"] for line in lines}))}
    return sorted(({**line, "user": users[line["user"]]} for line in lines), key=lambda line: line["ts"])


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_worker_with_nearly_all_of_the_load_hands_half_of_it_over_and_no_count_changes(system):
    lines = on_one_worker(60_000)
    for file in range(2):
        system.write(f"{file}.jsonl", lines[file::2])
    run = system.start("--workers", "2", name="tests.millwheel.topologies:SLOW")
    wait_until(lambda: system.is_up() and len(system.status()["processes"]) == 2)
    told = system.status()["processes"].values()
    assert [one["slots"] for one in told] == [SLOTS // 2] * 2
    errors = run.communicate(timeout=200)[1]
    assert run.returncode == 0, errors
    assert "key intervals move to other workers" in errors
    system.check(lines)


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.soak
def test_who_pushes_does_not_notice_that_slots_move(system, tmp_path):
    told = tmp_path / "told"
    system.start("--workers", "2", "--follow", name="tests.millwheel.topologies:PUSHED_SLOW", told=told)
    wait_until(lambda: system.workers(b"receiver"))
    receivers, workers = (system.workers(kind) for kind in (b"receiver", b"worker"))
    now = time.time_ns() // 1_000  # what is hours old would be late
    system.write("a.jsonl", [{**line, "ts": now + line["ts"]} for line in on_one_worker(60_000)])
    wait_until(lambda: system.push(system.listen, tmp_path / "logs" / "a.jsonl"))
    wait_until(lambda: "key intervals move" in told.read_text())
    wait_until(lambda: len({*system.workers()} - {*workers}) == 2)
    assert system.workers(b"receiver") == receivers
    assert system.status()["restarts"] == 0
