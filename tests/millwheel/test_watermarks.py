"""The authority's rules (paper 4.5), and timers."""

import random

from millwheel.computation import BEFORE, NEVER
from millwheel.engine.due import HOLD, WALL, WATERMARK, Due
from millwheel.engine.watermarks import Authority, of_inputs
from tests.seeds import seeds


def authority():
    made = Authority(["a"], 2)
    made.begins(0, 1)
    made.begins(1, 2)
    return made


def test_the_least_of_all_workers_counts_and_none_may_be_missing():
    made = authority()
    assert not made.report(0, 1, {"a": 10})
    assert made.marks["a"] == BEFORE
    assert made.report(1, 2, {"a": 7})
    assert made.marks["a"] == 7
    assert made.holder("a") == 1


def test_a_low_watermark_never_goes_back():
    made = authority()
    made.report(0, 1, {"a": 10})
    made.report(1, 2, {"a": 10})
    made.begins(1, 3)
    assert not made.report(1, 3, {"a": 4})
    assert made.marks["a"] == 10
    assert made.restore({"a": 12, "gone": 99})
    assert made.marks == {"a": 12}


def test_a_former_owner_is_not_believed():
    made = authority()
    made.begins(1, 5)
    made.report(0, 1, {"a": 10})
    assert not made.report(1, 2, {"a": 10})
    assert made.marks["a"] == BEFORE


def test_it_has_ended_when_all_have():
    made = authority()
    made.report(0, 1, {"a": NEVER})
    assert not made.ended
    made.report(1, 2, {"a": NEVER})
    assert made.ended


def test_a_computation_relies_on_the_least_of_its_inputs():
    assert of_inputs(["a", "b"], {"a": 3, "b": 5}) == 3
    assert of_inputs(["a", "new"], {"a": 3}) == BEFORE


def test_a_timer_that_was_set_again_fires_at_its_last_time():
    due = Due()
    due.set("ann", WATERMARK, "t", 10)
    due.set("ann", WATERMARK, "t", 20)
    assert due.take(WATERMARK, 15, 100) == []
    due.set("ann", HOLD, "", 3)
    assert due.earliest(WATERMARK) == 20
    assert [(one.time, one.tag) for one in due.take(WATERMARK, 20, 100)] == [(20, "t")]
    assert due.take(WATERMARK, 100, 100) == []
    assert due.earliest(HOLD) == 3


def test_a_timer_that_was_set_back_fires_once():
    due = Due()
    for time in (10, 20, 10):
        due.set("ann", WATERMARK, 1, time)
    assert len(due.take(WATERMARK, 30, 100)) == 1
    assert len(due) == 0


class Naive:
    """All timers, looked through each time."""

    def __init__(self):
        self.timers = {}

    def take(self, clock, upto):
        due = sorted(
            (time, key, type(tag) is str, tag)
            for (key, its, tag), time in self.timers.items()
            if its == clock and time <= upto
        )
        for _, key, _, tag in due:
            del self.timers[key, clock, tag]
        return due

    def earliest(self, clock):
        return min((time for (_, its, _), time in self.timers.items() if its == clock), default=None)


@seeds(8, 60, 2_000)
def test_timers_are_those_of_a_list_that_is_looked_through(seed):
    dice = random.Random(seed)
    due, naive = Due(), Naive()
    keys, tags = "abcd"[: dice.randrange(1, 5)], [1, 2, "x", "y"][: dice.randrange(1, 5)]
    for _ in range(300):
        key, tag, clock = dice.choice(keys), dice.choice(tags), dice.choice([WATERMARK, WALL])
        time = dice.randrange(12)
        match dice.randrange(6):
            case 0 | 1 | 2:
                due.set(key, clock, tag, time)
                naive.timers[key, clock, tag] = time
            case 3:
                due.drop(key, clock, tag)
                naive.timers.pop((key, clock, tag), None)
            case 4:
                assert [tuple(one) for one in due.take(clock, time, 1_000)] == naive.take(clock, time)
            case 5:
                timers = {(clock, tag): time}
                due.restore(key, timers)
                for old in [old for old in naive.timers if old[0] == key]:
                    del naive.timers[old]
                naive.timers[key, clock, tag] = time
        assert due.earliest(clock) == naive.earliest(clock)
        which = due.which(clock)
        assert which is None or naive.timers[which[1], clock, which[2]] == which[0] == due.earliest(clock)
        of_key = {(its, tag): at for (name, its, tag), at in naive.timers.items() if name == key}
        assert due.of(key) == of_key
        assert due.time_of(key, clock, tag) == of_key.get((clock, tag))
        assert len(due) == len({name for name, _, _ in naive.timers})


def test_a_time_at_which_many_timers_fire_takes_several_turns():
    due = Due()
    for key in range(100):
        due.set(f"key{key}", WATERMARK, "end", 5)
    fired = []
    for _ in range(10):
        assert due.earliest(WATERMARK) == 5
        part = due.take(WATERMARK, 5, 10)
        assert len(part) == 10
        fired += [firing.key for firing in part]
    assert sorted(fired) == sorted(f"key{key}" for key in range(100))
    assert due.earliest(WATERMARK) is None
