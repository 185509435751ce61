"""Batches go to joiners in turn; those that fail are left out while others answer (joiner/spreading.py)."""

from hypothesis import given
from hypothesis import strategies as st

from joiner.spreading import COOL_DOWN_S_MAX, COOL_DOWN_S_MIN, Turns


def take(turns, now_s, count):
    return [turns.next(now_s) for _ in range(count)]


def test_healthy_joiners_take_turns():
    assert take(Turns(3), 0.0, 7) == [0, 1, 2, 0, 1, 2, 0]


def test_one_that_fails_is_left_out_for_a_while_that_grows():
    turns = Turns(3)
    now_s, waits = 0.0, []
    for _ in range(10):
        turns.failed(1, now_s)
        left_out = 0.0
        while 1 not in take(turns, now_s + left_out, 3):
            left_out += COOL_DOWN_S_MIN
        waits.append(left_out)
        now_s += left_out
    assert waits[:3] == [COOL_DOWN_S_MIN, 2 * COOL_DOWN_S_MIN, 4 * COOL_DOWN_S_MIN]
    assert COOL_DOWN_S_MAX <= waits[-1] <= COOL_DOWN_S_MAX + COOL_DOWN_S_MIN


def test_one_that_works_again_is_as_good_as_any():
    turns = Turns(2)
    for now_s in (0.0, 1.0, 2.0):
        turns.failed(0, now_s)
    turns.worked(0)
    assert take(turns, 2.0, 4) == [0, 1, 0, 1]
    turns.failed(0, 3.0)
    assert 0 in take(turns, 3.0 + COOL_DOWN_S_MIN, 2)


def test_calls_that_failed_together_count_as_one_failure():
    turns = Turns(2)
    for _ in range(20):
        turns.failed(0, 0.0)
    assert 0 in take(turns, COOL_DOWN_S_MIN, 2)


def test_one_that_refused_is_left_out_for_a_moment_that_does_not_grow():
    turns = Turns(2)
    for step in range(20):
        turns.refused(0, step * 1.0)
        assert take(turns, step * 1.0, 3) == [1, 1, 1]
    assert 0 in take(turns, 19.0 + COOL_DOWN_S_MIN, 2)


def test_where_all_cool_down_the_one_that_is_soonest_ready_is_asked():
    turns = Turns(3)
    for number, now_s in ((2, 0.0), (0, 0.01), (1, 0.02)):
        turns.failed(number, now_s)
    assert turns.next(0.02) == 2
    alone = Turns(1)
    alone.failed(0, 0.0)
    assert alone.next(0.0) == 0


@given(st.integers(1, 5), st.lists(st.tuples(st.integers(0, 4), st.booleans(), st.floats(0, 1)), max_size=40))
def test_while_one_is_ready_none_that_cools_down_is_asked(joiners, steps):
    turns = Turns(joiners)
    now_s = 0.0
    for number, works, later_s in steps:
        now_s += later_s
        asked = turns.next(now_s)
        until = [joiner.left_out_until_s for joiner in turns._all]
        assert until[asked] <= now_s or (min(until) > now_s and until[asked] == min(until))
        if works:
            turns.worked(number % joiners)
        else:
            turns.failed(number % joiners, now_s)
