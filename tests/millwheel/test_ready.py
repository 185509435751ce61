"""The ready-made computations against plain Python, under faults."""

import random

import pytest

from millwheel import Input, Logs, LogSink, Stream, Topology, node
from millwheel.computation import NEVER
from millwheel.engine.store import STATE
from millwheel.ready import Attribution, Deduplicate, Sessions, Unmatched, WindowCounts, Zeitgeist
from millwheel.testing import Bench, in_order, oracle, run
from tests.millwheel.topologies import SECOND, clicks


def with_one(computation, *inputs):
    logs = {read.stream: Logs(f"{read.stream}/*", "ts") for read in inputs}
    return Topology(logs, {"it": node(computation, *inputs, Stream("out"))}, {"out": LogSink("out")})


CLICKS = Input("clicks", key="user", value=None)
UNMATCHED = with_one(
    Unmatched("out", "shown", 30), Input("shown", key="id"), Input("clicks", key="of", value=None)
)
ATTRIBUTION = with_one(
    Attribution("out", "touches", 10),
    Input("touches", key="user", value="ad"),
    Input("buys", key="user", value="id"),
)


@pytest.mark.parametrize(("length", "every"), [(3, None), (4, 2)])
def test_window_counts(length, every):
    lines = clicks(random.Random(1), 150)
    step = (every or length) * SECOND
    wanted = {}
    for line in lines:
        for back in range(length * SECOND // step):
            start = (line["ts"] // step - back) * step
            wanted[line["user"], start] = wanted.get((line["user"], start), 0) + 1
    found = run(with_one(WindowCounts("out", length, every), CLICKS), {"clicks": lines}, workers=3, seed=5)
    assert {(one["key"], one["start_us"]): one["count"] for one in found["out"]} == wanted
    assert len(found["out"]) == len(wanted)


def test_sessions():
    lines = clicks(random.Random(2), 120, users=12, seconds=120)
    wanted = []
    for user in sorted({line["user"] for line in lines}):
        times = sorted(line["ts"] for line in lines if line["user"] == user)
        spans = []
        for time in times:
            if spans and time - spans[-1]["end_us"] < 8 * SECOND:
                spans[-1]["end_us"] = time
                spans[-1]["count"] += 1
            else:
                spans.append({"key": user, "start_us": time, "end_us": time, "count": 1})
        wanted += spans
    found = run(with_one(Sessions("out", 8), CLICKS), {"clicks": lines}, workers=2, seed=6)
    assert in_order({"out": found["out"]}) == in_order({"out": wanted})


def test_zeitgeist_finds_what_was_planted_and_nothing_else():
    dice = random.Random(3)
    lines = []
    for second in range(100):
        for user, rate in (
            ("even", 10),
            ("spike", 60 if 70 <= second < 75 else 10),
            ("dip", 0 if 80 <= second < 90 else 10),
        ):
            for _ in range(rate + dice.randrange(-1, 2) if rate else 0):
                lines.append({"user": user, "ts": second * SECOND + dice.randrange(SECOND)})
    lines.sort(key=lambda line: line["ts"] + dice.randrange(SECOND))
    topology = Topology(
        {"clicks": Logs("clicks/*", "ts")},
        {
            "windows": node(WindowCounts("counts", 1), CLICKS, Stream("counts")),
            "zeitgeist": node(Zeitgeist("odd", 1, learn=30), Input("counts"), Stream("odd")),
        },
        {"odd": LogSink("out")},
    )
    for workers, seed in ((1, None), (2, 7), (3, 8)):
        found = run(topology, {"clicks": lines}, workers=workers, seed=seed)["odd"]
        planted = {(one["key"], one["kind"], one["start_us"] // SECOND) for one in found}
        planted = {one for one in planted if one[2] < 100}  # then the log ends, and all keys are silent
        assert {("spike", "spike", 72), ("dip", "dip", 82)} <= planted
        assert {key for key, _, _ in planted} == {"spike", "dip"}


def test_unmatched():
    shown = [{"id": str(n), "ts": n * SECOND} for n in range(40)]
    answers = [{"of": str(n), "ts": n * SECOND + (5 if n % 3 else 29) * SECOND} for n in range(0, 40, 2)]
    found = run(UNMATCHED, {"shown": shown, "clicks": answers}, workers=2, seed=9)["out"]
    assert sorted(int(one["id"]) for one in found) == list(range(1, 40, 2))


def test_an_answer_at_the_very_moment_is_decided_once():
    bench = Bench(UNMATCHED)
    bench.send("shown", {"id": "a", "ts": 0})
    bench.send("clicks", {"of": "a", "ts": 30 * SECOND - 1})
    bench.watermark(NEVER)
    assert bench.lines("out") == []


def test_an_answer_after_the_end_is_none_though_it_is_read_before_it():
    """As in a backlog, where the low watermark has still to come; and the first of several answers counts."""
    bench = Bench(UNMATCHED)
    for name in "ab":
        bench.send("shown", {"id": name, "ts": 0})
        bench.send("clicks", {"of": name, "ts": 60 * SECOND})
    bench.send("clicks", {"of": "b", "ts": 30 * SECOND - 1})
    bench.watermark(NEVER)
    assert [one["id"] for one in bench.lines("out")] == ["a"]


def test_answers_in_any_order_are_remembered_for_as_long_as_the_last_of_them_counts():
    bench = Bench(UNMATCHED)
    for second in (60, 0):
        bench.send("clicks", {"of": "a", "ts": second * SECOND})
    bench.watermark(50 * SECOND)
    bench.send("shown", {"id": "a", "ts": 50 * SECOND})
    bench.watermark(NEVER)
    assert bench.lines("out") == []


@pytest.mark.parametrize("seed", range(4))
def test_each_that_asks_is_answered_or_not_by_time_alone(seed):
    """Also of a key that asks again and again, and has answers from before and after."""
    topology = with_one(
        Unmatched("out", "shown", 30), Input("shown", key="id"), Input("clicks", key="of", value=None)
    )
    dice = random.Random(seed)
    shown = [{"id": dice.choice("abcd"), "n": n, "ts": dice.randrange(600) * SECOND} for n in range(60)]
    answers = [{"of": dice.choice("abcd"), "ts": dice.randrange(600) * SECOND} for _ in range(40)]
    wanted = [
        one["n"]
        for one in shown
        if not any(
            one["id"] == answer["of"] and -30 * SECOND <= answer["ts"] - one["ts"] < 30 * SECOND
            for answer in answers
        )
    ]
    given = {"shown": shown, "clicks": answers}
    for found in (oracle(topology, given), run(topology, given, workers=1 + seed % 3, seed=seed)):
        assert sorted(one["n"] for one in found["out"]) == wanted
    assert 0 < len(wanted) < len(shown)


def test_attribution():
    dice = random.Random(4)
    touches = [{"user": f"u{dice.randrange(5)}", "ad": n, "ts": n * SECOND} for n in range(100)]
    buys = [{"user": f"u{dice.randrange(5)}", "id": n, "ts": n * 3 * SECOND + 1} for n in range(33)]
    wanted = {}
    for buy in buys:
        near = [t for t in touches if t["user"] == buy["user"] and 0 <= buy["ts"] - t["ts"] <= 10 * SECOND]
        wanted[buy["id"]] = max(near, key=lambda t: t["ts"])["ad"] if near else None
    found = run(ATTRIBUTION, {"touches": touches, "buys": buys}, workers=3, seed=2)["out"]
    assert {one["conversion"]: one["touch"] for one in found} == wanted
    assert len(found) == len(buys)


def test_a_user_who_never_ceases_to_touch_keeps_no_more_touches_than_a_conversion_may_have():
    bench = Bench(ATTRIBUTION)
    sizes = []
    for n in range(1000):
        bench.send("touches", {"user": "a", "ad": n, "ts": n * SECOND})
        bench.watermark(n * SECOND)
        sizes.append(sum(len(row) for name, row in bench._store.rows.items() if name.startswith(STATE)))
    assert max(sizes) < 5 * sizes[10]
    bench.send("buys", {"user": "a", "id": 1, "ts": 1005 * SECOND})
    bench.watermark(NEVER)
    assert [(one["conversion"], one["touch"]) for one in bench.lines("out")] == [(1, 999)]


def test_deduplicate():
    lines = [{"id": str(n % 30), "ts": n * SECOND // 10} for n in range(300)]
    found = run(
        with_one(Deduplicate("out", 60), Input("clicks", key="id")), {"clicks": lines}, workers=2, seed=1
    )["out"]
    assert sorted(int(one["id"]) for one in found) == list(range(30))
