"""A call that ends its worker each time is given up, and no other; real processes."""

import json

import pytest

from millwheel.engine.calls import ID_BYTES, Calls, EndsWorkerError, shown
from photon.core.suspects import DEATHS_MAX, Suspects
from tests.millwheel.topologies import SECOND

MODULE = """
import ctypes, os, re
from millwheel import Computation, Input, Logs, LogSink, Stream, Topology, node

def poison(what):
    match what:
        case "exit":
            os._exit(1)
        case "segv":
            ctypes.string_at(0)
        case "interrupt":
            raise KeyboardInterrupt
        case "regex":
            re.match(r"(a+)+$", "a" * 60 + "b")

class Seen(Computation[int]):
    state = int
    def process_record(self, record, ctx):
        if record.value.get("when") == "record":
            poison(record.value["what"])
        ctx.state += 1
        ctx.set_timer(record.value["what"] if record.value.get("when") else "end", record.time + 1_000_000)
    def process_timer(self, timer, ctx):
        if timer.tag != "end":
            poison(timer.tag)
        ctx.produce("seen", [ctx.key, ctx.state])

TOPOLOGY = Topology(
    {"lines": Logs("logs/*.jsonl", "ts")},
    {"seen": node(Seen(), Input("lines", key="user"), Stream("seen"))},
    {"seen": LogSink("out/seen")},
)
"""


@pytest.mark.parametrize("when", ["record", pytest.param("timer", marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "what",
    [
        "exit",
        pytest.param("segv", marks=[pytest.mark.long, pytest.mark.soak]),
        pytest.param("interrupt", marks=pytest.mark.long),
        pytest.param("regex", marks=pytest.mark.long),
    ],
)
def test_a_call_in_which_workers_end_again_and_again_becomes_a_dead_letter(system, what, when):
    (system.directory / "deadly.py").write_text(MODULE)
    lines = [{"user": f"user{n % 50}", "ts": SECOND + n // 10} for n in range(2_000)]
    lines.insert(1_005, {"user": "bad", "ts": SECOND + 100, "what": what, "when": when})
    system.write("a.jsonl", lines)
    summary = system.run("--workers", "2", name="deadly:TOPOLOGY", status=1)
    assert summary["ended"] and summary["dead_letters"] == 1 and summary["restarts"] > DEATHS_MAX
    files = (system.directory / "work/dead-letters").glob("*.jsonl")
    (letter,) = [json.loads(line) for file in files for line in file.open()]
    assert letter["key"] == "bad" and f"the worker ended {DEATHS_MAX} times in this call" in letter["reason"]
    assert letter["time"] == SECOND + 100 + SECOND * (when == "timer")
    seen = [tuple(line) for line in system.sink("seen")]
    assert len({*seen}) == len(seen)
    assert dict(sorted(seen)) == {f"user{n}": 40 for n in range(50)}


class Ended(KeyboardInterrupt):
    """As the process does: no code of ours may do anything about it."""


class Life:
    """Of a worker."""

    def __init__(self, directory):
        self.suspects = Suspects(directory, "worker-0", ID_BYTES)
        self.calls = Calls(self.suspects.mark, self.suspects.deaths, self.suspects.clear)
        self.called = []

    def run(self, items, ends=None):
        """Calls for items: a time and a name. It ends in the one for `ends`."""
        mark = self.calls.begin(7)

        def call(item):
            mark[1] = item[0]
            if item == ends:
                raise Ended
            self.called.append(item)

        careful = self.calls.careful(7, call, lambda item: (item[0], item[1]))
        for item in items:
            careful(item)
        self.calls.end()


SAME_TIME = [(5, "a"), (5, "b"), (6, "c")]


def end_at(directory, item):
    with pytest.raises(Ended):
        Life(directory).run(SAME_TIME, item)


def test_of_what_has_the_time_of_a_death_only_the_item_itself_is_given_up(tmp_path):
    for _ in range(DEATHS_MAX + 1):
        end_at(tmp_path, (5, "b"))
    life = Life(tmp_path)
    assert shown(life.suspects.found) == (7, 5)
    with pytest.raises(EndsWorkerError):
        life.run(SAME_TIME)
    assert life.called == [(5, "a")]
    life.run([(5, "c"), (6, "b")])
    assert life.called == [(5, "a"), (5, "c"), (6, "b")]


def test_a_call_that_goes_well_is_suspected_no_more(tmp_path):
    for lives in (DEATHS_MAX, DEATHS_MAX - 1):
        for _ in range(lives):
            end_at(tmp_path, (5, "b"))
        Life(tmp_path).run(SAME_TIME)


def test_a_death_outside_of_calls_or_of_a_worker_that_was_told_to_stop_does_not_count(tmp_path):
    life = Life(tmp_path)
    life.run(SAME_TIME)
    assert Life(tmp_path).suspects.found is None
    life.calls.begin(7)[1] = 5
    life.suspects.forgive()
    assert Life(tmp_path).suspects.found is None
