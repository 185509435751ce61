"""The authority's rules (paper 4.5), and timers."""

from millwheel.computation import BEFORE, NEVER
from millwheel.engine.due import HOLD, WATERMARK, Due
from millwheel.engine.watermarks import Authority, of_inputs


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
    due.set("ann", HOLD, "", 3)
    assert due.take(WATERMARK, 15, 100) == []
    assert due.earliest(WATERMARK) == 20
    assert [(one.time, one.tag) for one in due.take(WATERMARK, 20, 100)] == [(20, "t")]
    assert due.take(WATERMARK, 100, 100) == []
    assert due.earliest(HOLD) == 3


def test_a_timer_that_was_set_back_fires_once():
    due = Due()
    for time in (10, 20, 10):
        due.set("ann", WATERMARK, 1, time)
    assert len(due.take(WATERMARK, 30, 100)) == 1
    assert due.pending == {}
