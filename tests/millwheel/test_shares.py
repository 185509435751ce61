"""Slots move from workers with much to do to those with less (paper 7.1)."""

import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millwheel.engine.records import slot_of_key
from millwheel.engine.shares import GAIN_MIN, WINDOW_S, Load, balanced, even, load_of
from millwheel.machines import Round, next_round, stopping
from photon.logs.shares import SLOTS
from tests.millwheel.test_machines import A, B, led_by, machine, seen
from tests.millwheel.topologies import clicks
from tests.waiting import wait_until

LOADS = st.lists(st.floats(0, 1e6) | st.just(0.0), min_size=SLOTS, max_size=SLOTS).map(np.array)


@given(st.integers(1, 8), st.sampled_from([1, 2, 3]), LOADS)
def test_nobody_gets_more_than_the_busiest_had_and_stores_keep_their_slots(workers, stores, loads):
    workers *= stores
    before = even(workers)
    after = balanced(before, loads, stores)
    assert set(after) == set(range(workers))
    assert all(owner % stores == slot % stores for slot, owner in enumerate(after))
    was, is_now = load_of(before, loads), load_of(after, loads)
    assert is_now.max() <= was.max() * (1 + 1e-9)
    assert is_now.sum() == pytest.approx(was.sum())
    again = balanced(after, loads, stores)
    assert again == after


def test_what_can_be_shared_is_shared_by_few_moves():
    loads = np.where(np.arange(SLOTS) % 4 == 0, 1.0, 0.0)
    after = balanced(even(4), loads)
    assert load_of(after, loads).tolist() == [4.0] * 4
    assert sum(was != will for was, will in zip(even(4), after, strict=True)) == 12


def test_a_slot_that_is_most_of_the_load_is_left_alone():
    loads = np.full(SLOTS, 0.01)
    loads[5] = 9.0
    assert balanced(even(2), loads) == even(2)


class Workers:
    """Two of them, as they report: seconds spent on each slot, by what a second costs."""

    def __init__(self, costs, moves=0):
        self.costs, self.now, self.spent = np.array(costs), 0.0, [np.zeros(SLOTS), np.zeros(SLOTS)]
        self.load = Load(even(2), moves=moves)

    def better(self, seconds):
        """Of that time, the first answer, and when."""
        end = self.now + seconds
        while self.now < end:
            self.now += 0.5
            for worker, spent in enumerate(self.spent):
                spent += 0.5 * self.costs * (np.array(even(2)) == worker)
                self.load.report(worker, spent.tolist(), self.now)
            found = self.load.better()
            if found is not None:
                return found
        return None


UNEVEN = np.where(np.arange(SLOTS) % 2 == 0, 0.9 / 32, 0.0)


def test_slots_move_after_a_window_in_which_one_worker_had_much_more_to_do():
    workers = Workers(UNEVEN)
    assert workers.better(WINDOW_S - 1) is None
    assert workers.load.busy == {0: pytest.approx(0.9), 1: 0.0}
    after = workers.better(5)
    assert load_of(after, UNEVEN).tolist() == pytest.approx([0.45, 0.45])


@pytest.mark.parametrize("costs", [UNEVEN / 2, np.full(SLOTS, 0.9 / 32), np.eye(SLOTS)[6]])
def test_they_stay_where_nobody_is_busy_or_none_would_be_relieved(costs):
    assert Workers(costs).better(WINDOW_S * 5) is None


def test_each_move_makes_the_next_window_twice_as_long():
    workers = Workers(UNEVEN, moves=3)
    assert workers.better(WINDOW_S * 8 - 1) is None
    assert workers.better(5) is not None


def test_long_turns_make_nobody_look_idle():
    """They are told of at their ends: of one worker two in the time in which there is one of another."""
    load, costs = Load(even(2)), np.full(SLOTS, 1 / 32)
    owners = np.array(even(2))
    for now in range(1, 41):
        for worker, turn_s in enumerate((9, 12)):
            ended = now // turn_s * turn_s
            load.report(worker, (costs * (owners == worker) * ended).tolist(), float(ended))
            assert load.better() is None


def test_a_worker_that_began_again_begins_a_window():
    workers = Workers(UNEVEN)
    workers.better(WINDOW_S / 2)
    workers.spent[0][:] = 0
    assert workers.better(WINDOW_S - 1) is None
    assert workers.better(5) is not None


def test_a_worker_that_says_nothing_yet_holds_up_the_window():
    load = Load(even(3))
    for now in range(100):
        load.report(0, (UNEVEN * now).tolist(), float(now))
        load.report(1, (UNEVEN * now).tolist(), float(now))
        assert load.better() is None


def test_the_next_round_has_the_slots_that_were_moved_unless_there_are_other_workers():
    moved = (1, *even(2)[1:])
    assert GAIN_MIN > 0
    following = stopping(led_by(A, "running", A, B), A, moved)
    assert (following.number, following.stage, following.owners) == (8, "stopping", moved)
    running = next_round(A, 8, 7, seen(following, a=8, b=8))
    assert (running.stage, running.owners) == ("running", moved)
    assert stopping(running, A).owners == moved
    alone = next_round(A, 8, 7, seen(following, a=8))
    assert alone.owners == even(1)
    more = machine("c", 3)
    wider = next_round(more, 8, 7, seen(Round(8, "c", "stopping", owners=moved), c=8))
    assert wider.owners == even(3)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_worker_with_nearly_all_of_the_load_hands_half_of_it_over_and_no_count_changes(system):
    names = [name for name in map(str, range(1000)) if slot_of_key(name) % 2 == 0][:50]
    lines = clicks(random.Random(7), 60_000, users=len(names), seconds=60)
    users = {user: names[row] for row, user in enumerate(sorted({line["user"] for line in lines}))}
    lines = sorted(({**line, "user": users[line["user"]]} for line in lines), key=lambda line: line["ts"])
    for file in range(2):
        system.write(f"{file}.jsonl", lines[file::2])
    run = system.start("--workers", "2", name="tests.millwheel.topologies:SLOW")
    wait_until(lambda: system.is_up() and len(system.status()["processes"]) == 2)
    told = system.status()["processes"].values()
    assert [one["slots"] for one in told] == [32, 32]
    errors = run.communicate(timeout=200)[1]
    assert run.returncode == 0, errors
    assert "key intervals move to other workers" in errors
    system.check(lines)
