"""What a user's code may rely on (paper 4.4 to 4.6), a record and a batch at a time."""

import datetime
import json
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest

from millwheel import (
    BatchComputation,
    Computation,
    Input,
    Logs,
    LogSink,
    Stream,
    Topology,
    TopologyError,
    node,
)
from millwheel.computation import NEVER
from millwheel.engine import stage
from millwheel.testing import Bench, run
from tests.millwheel.topologies import SECOND


def of_one(computation, late="process", value="*", tries=3):
    return Bench(
        Topology(
            {"clicks": Logs("logs/*", "ts")},
            {
                "it": node(
                    computation,
                    Input("clicks", key="user", value=value),
                    Stream("out"),
                    late=late,
                    tries=tries,
                )
            },
            {"out": LogSink("out")},
        )
    )


class Sum(msgspec.Struct):
    total: int = 0
    calls: list[str] = []


class Adding(Computation[Sum]):
    state = Sum

    def process_record(self, record, ctx):
        ctx.state.total += record.value["add"]
        ctx.set_timer("tell", record.time + SECOND)
        if record.value["add"] < 0:
            raise ValueError("nothing below 0")
        ctx.produce("out", {"seen": record.value["add"]})

    def process_timer(self, timer, ctx):
        ctx.produce("out", {"key": ctx.key, "total": ctx.state.total, "at": timer.time})


def test_no_more_keys_than_the_cache_may_have_stay_in_memory(monkeypatch):
    monkeypatch.setattr(stage, "CACHED_KEYS", 10)
    bench = of_one(Adding())
    for count in (100, 7):
        bench.send("clicks", *({"user": f"user{n}", "ts": n, "add": 1} for n in range(count)))
        assert len(bench._wheel.stages["it"]._cache) <= 10
    bench.watermark(NEVER)
    totals = {line["key"]: line["total"] for line in bench.lines("out") if "key" in line}
    assert totals == {f"user{n}": 2 if n < 7 else 1 for n in range(100)}


def test_what_the_next_timers_need_stays_in_memory(monkeypatch):
    """Windows: what was changed last is needed last, so a cache by age reads each key again (paper 8.3)."""
    monkeypatch.setattr(stage, "CACHED_KEYS", 20)
    bench = of_one(Adding())
    it = bench._wheel.stages["it"]
    read, rows = it._read, []
    it._read = lambda wanted: rows.extend(wanted) or read(wanted)
    for n in range(300):
        bench.send("clicks", {"user": f"user{n}", "ts": n * SECOND // 30, "add": 1})
        bench.watermark(n * SECOND // 30)
    bench.watermark(NEVER)
    assert sum("total" in line for line in bench.lines("out")) == 300
    assert len(rows) - 300 < 200  # of 300 timers; a cache by age needs as many rows


def test_state_stays_and_a_timer_fires_once_the_low_watermark_is_there():
    bench = of_one(Adding())
    bench.send("clicks", {"user": "ann", "ts": 0, "add": 2}, {"user": "ann", "ts": 5, "add": 3})
    assert bench.lines("out") == [{"seen": 2}, {"seen": 3}]
    bench.watermark(SECOND + 4)
    assert bench.lines("out") == []
    bench.watermark(SECOND + 5)
    assert bench.lines("out") == [{"key": "ann", "total": 5, "at": SECOND + 5}]
    bench.watermark(NEVER)
    assert bench.lines("out") == []


def test_what_raises_is_undone_alone_tried_again_and_becomes_a_dead_letter():
    bench = of_one(Adding())
    lines = [{"user": "ann", "ts": ts, "add": add} for ts, add in ((0, 2), (1, -1), (2, 5))]
    bench.send("clicks", *lines)
    assert bench.lines("out") == [{"seen": 2}, {"seen": 5}]
    bench.watermark(NEVER)
    assert bench.lines("out") == [{"key": "ann", "total": 7, "at": SECOND + 2}]
    (letter,) = bench.dead_letters
    assert letter["reason"] == "ValueError: nothing below 0"
    assert letter["computation"] == "it"
    assert letter["value"] == lines[1]


def test_a_call_that_fails_for_a_moment_counts_once():
    class Shaky(Computation[dict]):
        failures = 2

        def process_record(self, record, ctx):
            ctx.state["n"] = ctx.state.get("n", 0) + 1
            if Shaky.failures:
                Shaky.failures -= 1
                raise OSError("not now")
            ctx.produce("out", ctx.state["n"])

    bench = of_one(Shaky())
    bench.send("clicks", {"user": "ann", "ts": 0})
    assert bench.lines("out") == [1]
    assert bench.dead_letters == []


def test_timers_of_a_key_fire_by_time_also_one_that_a_timer_sets():
    class Ticking(Computation[list]):
        state = list

        def process_record(self, record, ctx):
            ctx.set_timer("a", 10)
            ctx.set_timer("c", 30)
            ctx.set_timer("never", 15)
            ctx.drop_timer("never")

        def process_timer(self, timer, ctx):
            ctx.state.append(timer.tag)
            if timer.tag == "a":
                ctx.set_timer("b", 20)
            if timer.tag == "c":
                ctx.produce("out", ctx.state)

    bench = of_one(Ticking())
    bench.send("clicks", {"user": "ann", "ts": 0})
    bench.watermark(100)
    assert bench.lines("out") == [["a", "b", "c"]]


def test_a_wall_timer_fires_by_the_wall_clock_whatever_the_low_watermark_is():
    class Waiting(Computation[dict]):
        def process_record(self, record, ctx):
            ctx.set_timer("t", ctx.now + 3 * SECOND, clock="wall")

        def process_timer(self, timer, ctx):
            ctx.produce("out", timer.clock)

    bench = of_one(Waiting())
    bench.send("clicks", {"user": "ann", "ts": 0})
    bench.wait(2.9)
    assert bench.lines("out") == []
    bench.wait(0.2)
    assert bench.lines("out") == ["wall"]


def test_a_timer_and_a_hold_hold_the_low_watermark_of_what_is_produced():
    class Holding(Computation[dict]):
        def process_record(self, record, ctx):
            if record.value["do"] == "hold":
                ctx.hold(record.time)
            elif record.value["do"] == "timer":
                ctx.set_timer("t", record.time + 50)
            else:
                ctx.produce("out", "held", time=10)
                ctx.release()

        def process_timer(self, timer, ctx):
            pass

    bench = of_one(Holding())
    bench.send("clicks", {"user": "ann", "ts": 10, "do": "hold"}, {"user": "bob", "ts": 20, "do": "timer"})
    bench.watermark(60)
    assert bench.low_watermark("it") == 10
    bench.send("clicks", {"user": "ann", "ts": 65, "do": "release"})
    assert bench.lines("out") == ["held"]
    assert bench.low_watermark("it") == 60
    bench.watermark(90)
    assert bench.low_watermark("it") == 90


def test_what_the_low_watermark_is_past_cannot_be_produced():
    class Early(Computation[dict]):
        def process_record(self, record, ctx):
            ctx.produce("out", 1, time=record.time - 1)

    bench = of_one(Early(), tries=1)
    bench.send("clicks", {"user": "ann", "ts": 10})
    (letter,) = bench.dead_letters
    assert "the low watermark may be past it" in letter["reason"]


@pytest.mark.parametrize(
    ("late", "told", "letters"), [("process", [True], 0), ("drop", [], 0), ("dead-letter", [], 1)]
)
def test_a_late_record_goes_where_it_is_declared_to_go(late, told, letters):
    class Telling(Computation[dict]):
        def process_record(self, record, ctx):
            ctx.produce("out", record.late)

    bench = of_one(Telling(), late=late)
    bench.watermark(100)
    bench.send("clicks", {"user": "ann", "ts": 99})
    assert bench.lines("out") == told
    assert len(bench.dead_letters) == letters
    bench.send("clicks", {"user": "ann", "ts": 100})
    assert bench.lines("out") == [False]


@pytest.mark.parametrize(
    ("mark", "reason"), [(1_000_099, "late by 1 s"), (NEVER, "late: all logs had ended")]
)
def test_a_dead_letter_says_how_late_its_record_was(mark, reason):
    class Silent(Computation[dict]):
        def process_record(self, record, ctx):
            raise AssertionError

    bench = of_one(Silent(), late="dead-letter")
    bench.watermark(mark)
    bench.send("clicks", {"user": "ann", "ts": 99})
    assert [letter["reason"] for letter in bench.dead_letters] == [reason]


class Cells(BatchComputation):
    def process_batch(self, batch, ctx):
        if any(value == "poison" for value in batch.values):
            raise RuntimeError("poison")
        names, cells = ctx.add(batch.names, batch.codes, batch.times // 10)
        ctx.set_timers(names, cells, [cell * 10 + 10 for cell in cells])

    def process_timers(self, fired, ctx):
        counts = ctx.take(fired.names, fired.tags)
        values = [
            [name, tag, count] for name, tag, count in zip(fired.names, fired.tags, counts, strict=True)
        ]
        ctx.produce("out", fired.names, values, fired.times)


def test_a_batch_counts_in_cells_and_a_poison_record_is_cut_out():
    bench = of_one(Cells(), value="what")
    bench.send(
        "clicks",
        *({"user": "ann", "ts": ts, "what": "poison" if ts == 4 else "click"} for ts in range(15)),
        {"user": "bob", "ts": 3, "what": "click"},
    )
    bench.watermark(NEVER)
    assert sorted(bench.lines("out")) == [["ann", 0, 9], ["ann", 1, 5], ["bob", 0, 1]]
    (letter,) = bench.dead_letters
    assert (letter["time"], letter["reason"], letter["value"]) == (4, "RuntimeError: poison", "poison")


def test_numbers_travel_as_columns():
    class Doubling(BatchComputation):
        def process_batch(self, batch, ctx):
            keys = [batch.names[code] for code in batch.codes.tolist()]
            ctx.produce("doubled", keys, np.array(batch.values) * 2, batch.times)

    class Telling(Computation[dict]):
        def process_record(self, record, ctx):
            ctx.produce("out", [ctx.key, record.value])

    bench = Bench(
        Topology(
            {"clicks": Logs("logs/*", "ts")},
            {
                "double": node(Doubling(), Input("clicks", key="user", value="n"), Stream("doubled", int)),
                "tell": node(Telling(), Input("doubled"), Stream("out")),
            },
            {"out": LogSink("out")},
        )
    )
    bench.send("clicks", {"user": "ann", "ts": 1, "n": 4}, {"user": "bob", "ts": 2, "n": 5})
    assert bench.lines("out") == [["ann", 8], ["bob", 10]]


COLUMNS = {
    "pairs": (lambda n: np.stack([n, n + 1], axis=1), lambda n: [n, n + 1]),
    "fields": (lambda n: np.array([(one, 0.5) for one in n], "i8,f8"), lambda n: [n, 0.5]),
    "a mask": (lambda n: np.ma.masked_array(n, n > 2), lambda n: None if n > 2 else n),
    "times": (lambda n: n.astype("M8[us]"), lambda n: f"1970-01-01T00:00:00.00000{n}"),
    "texts": (lambda n: n.astype(str), str),
}


@pytest.mark.parametrize("workers", [1, 4])
@pytest.mark.parametrize("column", COLUMNS)
def test_a_column_is_the_same_at_other_workers(column, workers):
    class Making(BatchComputation):
        def process_batch(self, batch, ctx):
            keys = [batch.names[code] for code in batch.codes.tolist()]
            turned = [f"{key} turned" for key in keys]
            ctx.produce("made", turned, COLUMNS[column][0](np.array(batch.values)), batch.times)

    class Telling(Computation[dict]):
        def process_record(self, record, ctx):
            ctx.produce("out", record.value)

    topology = Topology(
        {"clicks": Logs("logs/*", "ts")},
        {
            "make": node(Making(), Input("clicks", key="user", value="n"), Stream("made")),
            "tell": node(Telling(), Input("made"), Stream("out")),
        },
        {"out": LogSink("out")},
    )
    lines = [{"user": f"u{n}", "ts": n, "n": n} for n in range(1, 6)]
    found = run(topology, {"clicks": lines}, workers=workers)
    assert sorted(map(str, found["out"])) == sorted(str(COLUMNS[column][1](n)) for n in range(1, 6))
    assert found["dead-letters"] == []


def test_lines_that_are_none_are_dead_letters_and_the_others_go_on():
    bench = of_one(Adding())
    bench.send(
        "clicks",
        b'{"user": "ann", "ts": 0, "add": 1}',
        b"nonsense",
        b'{"ts": 3}',
        {"user": 7, "ts": 1, "add": 2},
    )
    assert bench.lines("out") == [{"seen": 1}, {"seen": 2}]
    assert [letter["injector"] for letter in bench.dead_letters] == ["clicks", "clicks"]


def test_lines_that_are_none_are_all_dead_letters_where_no_other_follows_them():
    class Silent(Computation[None]):
        def process_record(self, record, ctx):
            pass

    topology = Topology({"clicks": Logs("*", "ts")}, {"it": node(Silent(), Input("clicks", key="user"))})
    lines = [{"user": "ann", "ts": 1}, *[b"nonsense"] * 200]
    for seed in range(3):
        assert len(run(topology, {"clicks": lines}, seed=seed)["dead-letters"]) == 200


@pytest.mark.parametrize(
    ("computations", "sinks", "message"),
    [
        ({"a": node(Cells(), Input("nobody", key="x"))}, {}, "which nobody produces; there are 'clicks'"),
        ({"a": node(Cells(), Input("clicks"))}, {}, "needs a key"),
        ({"a": node(Cells())}, {}, "reads nothing"),
        ({"a": node(Cells, Input("clicks", key="x"))}, {}, "an instance, not the class"),
        ({"a": node(Cells(), Input("clicks", key="x.", value=None))}, {}, "empty part"),
        ({}, {"nowhere": LogSink("out")}, "no computation produces to that stream; there are none"),
        ({}, {"clicks": LogSink("out")}, "no computation produces to that stream; there are none"),
        (
            {
                "a": node(Cells(), Input("y"), Stream("x")),
                "b": node(Cells(), Input("x"), Stream("y")),
            },
            {},
            "a cycle",
        ),
    ],
)
def test_a_topology_that_cannot_be_is_refused_with_its_mend(computations, sinks, message):
    with pytest.raises(TopologyError, match=message.replace(".", r"\.")):
        Topology({"clicks": Logs("logs/*", "ts")}, computations, sinks)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lateness_s": -1}, "a lateness_s of 0 or more"),
        ({"unit": "h"}, "unit is one of"),
        ({"lateness_s": float("nan")}, "a lateness_s of 0 or more seconds, not nan"),
        ({"lateness_s": float("inf")}, "a lateness_s of 0 or more seconds, not inf"),
        ({"lateness_s": "60"}, "a lateness_s of 0 or more seconds, not '60'"),
        ({"skew_max_s": float("nan")}, "a skew_max_s of 0 or more seconds, not nan"),
        ({"paths": ""}, "needs paths (globs, or Path objects)"),
        ({"paths": 5}, "needs paths (globs, or Path objects)"),
        ({"time": 5}, "a field's path is a text ('object.field'), not 5"),
        ({"percentile": "99"}, "a percentile is between 0 and 100"),
        ({"silent": "wait"}, "silent is advance or hold, not 'wait'"),
        ({"expected": "logs/0*"}, "expected is a tuple of globs: ('logs/0*',)"),
        ({"percentile": 100, "lateness_s": 1}, "a percentile is between 0 and 100"),
    ],
)
def test_an_injector_that_cannot_be_is_refused_with_its_mend(given, message):
    with pytest.raises(TopologyError, match=re.escape(message)):
        Topology({"clicks": Logs(**{"paths": "logs/*", "time": "ts", **given})}, {}, {})


class Whole(Computation[dict]):
    def process_record(self, record, ctx):
        ctx.produce("again", record.value)


def test_logs_are_named_by_path_objects_too():
    assert Logs(Path("logs") / "*", "ts").patterns == ("logs/*",)
    assert Logs((Path("a"), "b/*"), "ts").patterns == ("a", "b/*")
    Topology({"clicks": Logs(Path("logs"), "ts")}, {})


class Asynchronous(Computation):
    async def process_record(self, record, ctx):
        pass


class Generating(Whole):
    def process_timer(self, timer, ctx):
        yield


class Misnamed(Computation):
    def process_records(self, record, ctx):
        pass


class MisnamedBatch(BatchComputation):
    def process(self, batch, ctx):
        pass


class AsynchronousBatch(Cells):
    async def process_timers(self, fired, ctx):
        pass


class Needy(msgspec.Struct):
    first: int


class Since(Whole):
    state = datetime.datetime


class OfNeedy(Whole):
    state = Needy


async def later(value):
    return value


CLICKS = Input("clicks", key="user")
MISTAKES = {
    "computation 'it': process_record is called": lambda: node(Asynchronous(), CLICKS),
    "computation 'it': process_timer is called": lambda: node(Generating(), CLICKS),
    "computation 'it': process_timers is called": lambda: node(AsynchronousBatch(), CLICKS),
    "Misnamed has no process_record of its own": lambda: node(Misnamed(), CLICKS),
    "MisnamedBatch has no process_batch of its own": lambda: node(MisnamedBatch(), CLICKS),
    "state of a new key is datetime(), which fails": lambda: node(Since(), CLICKS),
    "state of a new key is Needy(), which fails": lambda: node(OfNeedy(), CLICKS),
    "tries is a whole number, at least 1, not '3'": lambda: node(Whole(), CLICKS, tries="3"),
    "key of 'clicks' is a field's path or a function, not 5": lambda: node(Whole(), Input("clicks", key=5)),
    "key of 'clicks' is called": lambda: node(Whole(), Input("clicks", key=later)),
    "value of 'clicks' is a field's path, several, or None, not 5": lambda: node(
        Whole(), Input("clicks", "user", value=5)
    ),
    "'it' of 'clicks': a field's path is a text ('object.field'), not 5": lambda: node(
        Whole(), Input("clicks", "user", value=("a", 5))
    ),
    "node(..., 'again'): give Input(...) and Stream(...) only": lambda: node(Whole(), CLICKS, "again"),
}


@pytest.mark.parametrize("message", MISTAKES)
def test_a_computation_that_cannot_be_called_is_refused_with_its_mend(message):
    with pytest.raises(TopologyError, match=re.escape(message)) as refused:
        Topology({"clicks": Logs("logs/*", "ts")}, {"it": MISTAKES[message]()})
    assert "\n" not in str(refused.value)


def test_a_computation_may_keep_no_state_and_have_its_call_from_elsewhere():
    class Stateless(Computation):
        state = None

        def __init__(self):
            self.process_record = lambda record, ctx: ctx.produce("out", 1)

    bench = of_one(Stateless())
    bench.send("clicks", {"user": "ann", "ts": 0})
    assert bench.lines("out") == [1]


@pytest.mark.parametrize(
    ("sink", "message"),
    [
        ("out", "sink 'again' is a str: give LogSink(DIRECTORY)"),
        (LogSink(""), "directory is the path of one, not ''"),
        (LogSink("out", file_bytes_max=-1), "file_bytes_max is a whole number, at least 1, not -1"),
        (LogSink("logs"), "directory 'logs' has its files where injector 'clicks' reads (logs/*)"),
        (LogSink("./x/../logs/"), "where injector 'clicks' reads (logs/*)"),
        (LogSink("deep/er"), "where injector 'all' reads (deep/**/*.jsonl)"),
        (LogSink("whole"), "where injector 'all' reads (whole)"),
    ],
)
def test_a_sink_that_cannot_be_is_refused_with_its_mend(sink, message):
    with pytest.raises(TopologyError, match=re.escape(message)):
        Topology(
            {"clicks": Logs("logs/*", "ts"), "all": Logs(("deep/**/*.jsonl", "whole", "shallow/*"), "ts")},
            {"it": node(Whole(), CLICKS, Stream("again"))},
            {"again": sink},
        )


def test_a_sink_below_a_directory_of_logs_is_none_of_them():
    Topology(
        {"clicks": Logs(("logs/*.jsonl", "again-*"), "ts")},
        {"it": node(Whole(), CLICKS, Stream("again"))},
        {"again": LogSink("logs/again")},
    )


class Keys(Computation[dict]):
    def __init__(self, stream):
        self._stream = stream

    def process_record(self, record, ctx):
        ctx.produce(self._stream, [ctx.key, record.value["n"]])


NO_KEYS = {
    "the key function returns None": {"n": 1, "user": None},
    "the key function fails: KeyError: 'user'": {"n": 2},
    "the key function fails: UnicodeEncodeError": {"n": 3, "user": "half"},
    "the key function fails: MuteError": {"n": 5, "user": "mute"},
}


class MuteError(Exception):
    def __str__(self):
        raise TypeError


def key_of(value):
    if value["user"] == "mute":
        raise MuteError
    return "\ud83d" if value["user"] == "half" else value["user"]


def test_a_record_without_a_key_is_a_dead_letter_of_the_input_that_wants_one():
    """Of a log's line, and of what a computation produced."""
    bench = Bench(
        Topology(
            {"clicks": Logs("x", "ts")},
            {
                "all": node(Whole(), Input("clicks", key="n"), Stream("again")),
                "of_lines": node(Keys("seen"), Input("clicks", key=key_of), Stream("seen")),
                "of_values": node(Keys("seen2"), Input("again", key=key_of), Stream("seen2")),
            },
            {name: LogSink("out") for name in ("again", "seen", "seen2")},
        )
    )
    lines = [{"ts": 5, **line} for line in ({"n": 0, "user": 7}, *NO_KEYS.values(), {"n": 4, "user": "ann"})]
    bench.send("clicks", *lines)
    assert bench.lines("again") == lines
    assert bench.lines("seen") == bench.lines("seen2") == [["7", 0], ["ann", 4]]
    letters = bench.dead_letters
    of_lines = [letter for letter in letters if letter.get("injector") == "clicks"]
    of_values = [letter for letter in letters if letter.get("computation") == "of_values"]
    for reason, line, letter, later in zip(NO_KEYS, lines[1:5], of_lines, of_values, strict=True):
        assert letter["reason"].startswith(reason)
        assert json.loads(letter["line"]) == line
        assert later["reason"].startswith(reason)
        assert (later["key"], later["time"], later["value"]) == (str(line["n"]), 5, line)


def test_a_line_whose_key_is_null_is_a_dead_letter():
    bench = Bench(
        Topology(
            {"clicks": Logs("x", "ts")}, {"all": node(Whole(), Input("clicks", "user"), Stream("again"))}
        )
    )
    bench.send("clicks", {"ts": 5, "user": None})
    (letter,) = bench.dead_letters
    assert "got `null` in `user`" in letter["reason"]
