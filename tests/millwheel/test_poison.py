"""What user code hands over and nobody can keep or send is the failure of that call alone."""

import asyncio
from collections import defaultdict
from enum import StrEnum

import msgspec
import numpy as np
import pytest

from millwheel import BatchComputation, Computation, Input, Logs, LogSink, Stream, Topology, node
from millwheel.testing import Bench, in_order, run
from photon import UnavailableError
from tests.millwheel.topologies import SECOND

HALF = "\ud800"
LINES = [{"user": user, "ts": ts} for ts, user in enumerate(("ann", "bad", "bob", "bad", "ann"))]


def poisoned(poison, kind=dict, on_timer=False):
    """The key "bad" does it, in a record or in a timer."""

    class It(Computation):
        state = kind

        def process_record(self, record, ctx):
            if ctx.key == "bad" and not on_timer:
                poison(ctx)
            ctx.set_timer("end", record.time + SECOND)
            ctx.produce("out", [ctx.key, record.time])

        def process_timer(self, timer, ctx):
            if ctx.key == "bad" and on_timer:
                poison(ctx)

    return topology_of(It())


def topology_of(it):
    return Topology(
        {"clicks": Logs("logs/*", "ts")},
        {
            "it": node(it, Input("clicks", key="user"), Stream("out")),
            "then": node(Relay(), Input("out"), Stream("again")),
        },
        {"out": LogSink("out"), "again": LogSink("again")},
    )


class Relay(Computation):
    def process_record(self, record, ctx):
        ctx.produce("again", record.value)


def setting(state):
    return lambda ctx: setattr(ctx, "state", state)


def putting(key, value):
    return lambda ctx: ctx.state.__setitem__(key, value)


def cancel(ctx):
    raise asyncio.CancelledError


def unavailable(ctx):
    raise UnavailableError("a server that the user's code asks")


def holding_itself(ctx):
    ctx.state["me"] = ctx.state


CASES = {
    "a number of numpy": (setting(np.int64(3)), int),
    "a number of numpy within": (putting("x", np.float64(3)), dict),
    "no value": (putting("x", object()), dict),
    "a large number": (setting(2**70), int),
    "a large number within": (putting("x", 2**70), dict),
    "half a surrogate": (putting("x", HALF), dict),
    "an object as a key": (putting(object(), 1), dict),
    "a cycle": (holding_itself, dict),
    "a timer in 2**70": (lambda ctx: ctx.set_timer("a", 2**70), dict),
    "a tag of half a surrogate": (lambda ctx: ctx.set_timer(HALF, 9 * SECOND), dict),
    "a tag of 2**70": (lambda ctx: ctx.set_timer(2**70, 9 * SECOND), dict),
    "a hold at 2**70": (lambda ctx: ctx.hold(2**70), dict),
    "a hold at half": (lambda ctx: ctx.hold(SECOND + 0.5), dict),
    "a production in 2**70": (lambda ctx: ctx.produce("out", 1, time=2**70), dict),
    "a production of half a surrogate": (lambda ctx: ctx.produce("out", HALF), dict),
    "a production of 2**70": (lambda ctx: ctx.produce("out", 2**70), dict),
    "a production that is no JSON": (lambda ctx: ctx.produce("out", {"x": {("a", "b"): 1}}), dict),
    "a production that is no number": (lambda ctx: ctx.produce("out", float("nan")), dict),
    "an endless number within": (lambda ctx: ctx.produce("out", {"x": [1.5, float("-inf")]}), dict),
    "a production for half a surrogate": (lambda ctx: ctx.produce("out", 1, key=HALF), dict),
    "a production for a number": (lambda ctx: ctx.produce("out", 1, key=7), dict),
    "an error of ours": (unavailable, dict),
    "exit()": (lambda ctx: exit(3), dict),
    "what asyncio cancels by": (cancel, dict),
}


class Name(str):
    pass


class Colour(StrEnum):
    RED = "red"


NAMES = {"numpy's": np.str_("red"), "a class's": Name("red"), "an enum's": Colour.RED}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("name", NAMES)
def test_a_key_that_is_a_text_of_another_class_is_a_text_as_any(name, workers):
    class One(Computation):
        def process_record(self, record, ctx):
            ctx.produce("out", record.time, key=NAMES[name])

    class Many(BatchComputation):
        def process_batch(self, batch, ctx):
            ctx.produce("out", [NAMES[name]] * len(batch), batch.times, batch.times)

    class Then(Computation):
        def process_record(self, record, ctx):
            ctx.set_timer(0, SECOND)
            ctx.produce("again", [type(ctx.key).__name__, ctx.key, record.value])

    for it in (One(), Many()):
        made = topology_of(it).computations
        then = node(Then(), Input("out"), Stream("again"))
        topology = Topology(
            {"clicks": Logs("logs/*", "ts")},
            {"it": made["it"], "then": then},
            {"again": LogSink("again")},
        )
        found = run(topology, {"clicks": LINES}, workers=workers)
        assert sorted(found["again"]) == [["str", "red", line["ts"]] for line in LINES]


def users(letters):
    return sorted((letter["computation"], letter["key"], letter["time"]) for letter in letters)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("on_timer", [False, True], ids=["record", "timer"])
@pytest.mark.parametrize("case", CASES)
def test_what_cannot_be_kept_or_sent_fails_its_call_alone(case, on_timer, workers):
    found = run(poisoned(*CASES[case], on_timer=on_timer), {"clicks": LINES}, workers=workers)
    produced = [[line["user"], line["ts"]] for line in LINES if on_timer or line["user"] != "bad"]
    assert in_order({"out": found["out"], "again": found["again"]}) == in_order(
        {"out": produced, "again": produced}
    )
    times = [3 + SECOND] if on_timer else [1, 3]
    assert users(found["dead-letters"]) == [("it", "bad", time) for time in times]


def test_a_dead_letter_says_why():
    bench = Bench(poisoned(*CASES["a number of numpy"]))
    bench.send("clicks", LINES[1])
    (letter,) = bench.dead_letters
    assert letter["reason"] == "TypeError: Encoding objects of type numpy.int64 is unsupported"
    assert letter["value"] == LINES[1]


REASONS = {
    "produce(key=17): a key is a text": lambda ctx: ctx.produce("out", 1, key=17),
    "produce at 1.5: a time is in whole us": lambda ctx: ctx.produce("out", 1, time=1.5),
    "produce at 1e+18: a time is in whole us": lambda ctx: ctx.produce("out", 1, time=1e18),
    "produce at '5': a time is in whole us": lambda ctx: ctx.produce("out", 1, time="5"),
    "hold at 1.5: a time is in whole us": lambda ctx: ctx.hold(1.5),
}


@pytest.mark.parametrize("reason", REASONS)
def test_a_key_is_a_text_and_a_time_is_whole(reason):
    bench = Bench(poisoned(REASONS[reason]))
    bench.send("clicks", LINES[1])
    assert [letter["reason"] for letter in bench.dead_letters] == [f"TypeError: {reason}"]


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("path", ["n", "more", ("n", "more"), "more.n"])
def test_a_line_with_a_number_beyond_64_bits_holds_up_no_other(path, workers):
    class Told(Computation):
        def process_record(self, record, ctx):
            ctx.produce("out", [ctx.key, repr(record.value)])

    topology = Topology(
        {"clicks": Logs("logs/*", "ts")},
        {"told": node(Told(), Input("clicks", "user", path), Stream("out"))},
        {"out": LogSink("out")},
    )
    numbers = (1, 2**70, -(2**63) - 1, 2**64, 2**63)
    lines = [{"user": f"u{n}", "ts": 1, "n": n, "more": {"n": n}} for n in numbers]
    found = run(topology, {"clicks": lines}, workers=workers)
    shown = {"n": lambda n: n, "more": lambda n: {"n": n}, "more.n": lambda n: n}
    values = shown.get(path, lambda n: {"n": n, "more": {"n": n}})
    assert sorted(found["out"]) == sorted([f"u{n}", repr(values(n))] for n in numbers)
    assert found["dead-letters"] == []


class Seen(msgspec.Struct):
    page: str


def test_a_value_that_cannot_be_decoded_is_shown_as_it_came():
    class Untyped(Computation):
        def process_record(self, record, ctx):
            ctx.produce("seen", {"page": 7})

    topology = Topology(
        {"clicks": Logs("logs/*", "ts")},
        {
            "of_lines": node(Untyped(), Input("clicks", "user"), Stream("seen")),
            "of_typed_lines": node(Relay(), Input("clicks", "user", type=Seen), Stream("again")),
            "of_values": node(Relay(), Input("seen", type=Seen)),
        },
    )
    bench = Bench(topology)
    bench.send("clicks", b'{"user": "ann", "ts": 1, "n": 1e999}', {"user": "bob", "ts": 2})
    found = {(letter["computation"], letter["key"]): letter["value"] for letter in bench.dead_letters}
    assert found == {
        ("of_lines", "ann"): '{"user": "ann", "ts": 1, "n": 1e999}',
        ("of_typed_lines", "ann"): '{"user": "ann", "ts": 1, "n": 1e999}',
        ("of_typed_lines", "bob"): {"user": "bob", "ts": 2},
        ("of_values", "bob"): {"page": 7},
    }


class MuteError(Exception):
    def __str__(self):
        raise TypeError


@pytest.mark.parametrize(
    ("error", "reason"), [(ValueError(HALF), "ValueError: \\ud800"), (MuteError(), "MuteError")]
)
def test_an_error_that_says_nothing_readable_is_a_reason_all_the_same(error, reason):
    def fail(ctx):
        raise error

    bench = Bench(poisoned(fail))
    bench.send("clicks", LINES[1])
    assert [letter["reason"] for letter in bench.dead_letters] == [reason]


def adding(amounts):
    return lambda ctx: ctx.add(["bad"], np.zeros(1, np.int64), np.zeros(1, np.int64), amounts)


BATCHES = {
    "a time of numpy": lambda ctx: ctx.set_timers(["bad"], [1], np.array([9 * SECOND])),
    "a tag that is half": lambda ctx: ctx.set_timers(["bad"], [1.5], [9 * SECOND]),
    "a time of 2**70": lambda ctx: ctx.set_timers(["bad"], [1], [2**70]),
    "a large number": adding([2**63]),
    "an object": adding(np.array([object()])),
    "half a surrogate": lambda ctx: ctx.produce("out", ["bad"], [HALF], [9 * SECOND]),
    "a column with no number": lambda ctx: ctx.produce("out", ["bad"], np.array([np.nan]), [9 * SECOND]),
    "a column of objects": lambda ctx: ctx.produce("out", ["bad"], np.array([object()]), [9 * SECOND]),
    "a production in 2**70": lambda ctx: ctx.produce("out", ["bad"], [1], [2**70]),
    "a production in the past": lambda ctx: ctx.produce("out", ["bad"], [1], [-1]),
    "a production at half": lambda ctx: ctx.produce("out", ["bad"], [1], [5.5]),
    "a production at no number": lambda ctx: ctx.produce("out", ["bad"], [1], np.array([np.nan])),
    "no JSON": lambda ctx: ctx.produce("out", ["bad"], [{"x": {("a", "b"): 1}}], [9 * SECOND]),
    "a key of half a surrogate": lambda ctx: ctx.produce("out", [HALF], [1], [9 * SECOND]),
    "a key that is a number": lambda ctx: ctx.produce("out", [7], [1], [9 * SECOND]),
    "an error of ours": unavailable,
    "exit()": lambda ctx: exit(3),
    "what asyncio cancels by": cancel,
}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("on_timer", [False, True], ids=["record", "timer"])
@pytest.mark.parametrize("case", BATCHES)
def test_so_it_is_of_batches(case, on_timer, workers):
    class It(BatchComputation):
        def process_batch(self, batch, ctx):
            ctx.set_timers(batch.names, [0] * len(batch.names), [SECOND] * len(batch.names))
            keys = [batch.names[code] for code in batch.codes.tolist()]
            ctx.produce("out", keys, batch.times, batch.times)
            if "bad" in keys and not on_timer:
                BATCHES[case](ctx)
                BATCHES[case](ctx)

        def process_timers(self, fired, ctx):
            if "bad" in fired.names and on_timer:
                BATCHES[case](ctx)
                BATCHES[case](ctx)

    found = run(topology_of(It()), {"clicks": LINES}, workers=workers)
    produced = [line["ts"] for line in LINES if on_timer or line["user"] != "bad"]
    assert sorted(found["out"]) == sorted(found["again"]) == produced
    times = [SECOND] if on_timer else [1, 3]
    assert users(found["dead-letters"]) == [("it", "bad", time) for time in times]


class Sum(msgspec.Struct):
    total: int = 0


class Named(msgspec.Struct):
    total: str = ""


STATES = {
    "a text as a number": (int, "text", "TypeError: state is no int: Expected `int`, got `str`"),
    "a field of another type": (Sum, Sum("text"), "TypeError: state is no Sum: Expected `int`, got `str`"),
    "a set as a list": (
        dict,
        {"seen": {1}},
        "TypeError: state of type dict: {'seen': {1}} would come back as {'seen': [1]}. Declare",
    ),
    "a tuple as a list": (
        list,
        [(1, 2)],
        "TypeError: state of type list: [(1, 2)] would come back as [[1, 2]]. Declare",
    ),
}


@pytest.mark.parametrize("case", STATES)
def test_a_state_that_would_not_be_read_back_as_it_was_fails_its_call(case):
    kind, state, reason = STATES[case]
    bench = Bench(poisoned(setting(state), kind))
    bench.send("clicks", *LINES)
    letters = bench.dead_letters
    assert users(letters) == [("it", "bad", 1), ("it", "bad", 3)]
    assert all(letter["reason"].startswith(reason) for letter in letters)


def test_a_state_is_after_each_batch_what_a_restart_would_find():
    """A dict that makes its entries compares as a dict, and comes back as one."""

    class Counting(Computation):
        def process_record(self, record, ctx):
            if "n" not in ctx.state:
                ctx.state["n"] = defaultdict(int)
            ctx.produce("out", type(ctx.state["n"]).__name__)

    bench = Bench(topology_of(Counting()))
    for line in LINES[:2] + LINES[3:4]:
        bench.send("clicks", line)
    assert bench.lines("out") == ["defaultdict", "defaultdict", "dict"]


@pytest.mark.parametrize(
    ("kind", "state"),
    [
        (dict, {"x": float("nan"), 3: None, "y": [1.5, {"z": b"raw"}]}),
        (dict[str, set[int]], {"seen": {1, 2}}),
        (tuple[int, str], (1, "a")),
        (Sum, Sum(3)),
        (float, 3),
    ],
)
def test_what_reads_back_as_it_was_is_kept(kind, state):
    class Setting(Computation):
        def process_record(self, record, ctx):
            ctx.state = state
            ctx.produce("out", 1)

    Setting.state = kind
    bench = Bench(topology_of(Setting()))
    bench.send("clicks", *LINES)
    assert bench.dead_letters == []
    assert len(bench.lines("out")) == len(LINES)
