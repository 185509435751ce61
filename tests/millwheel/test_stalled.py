"""A run whose logs grow no more ends, and says what it has left undone; real workers."""

import gzip
import json
import sys

import pytest

from tests.millwheel.topologies import SECOND

MODULE = """
from millwheel import Computation, Input, Logs, LogSink, Stream, Topology, node

class Seen(Computation):
    def process_record(self, record, ctx):
        match record.value.get("what"):
            case "hold":
                ctx.hold(record.time)
            case "later":
                ctx.hold(record.time)
                ctx.set_timer("release", ctx.now + 6_000_000, clock="wall")
            case "wall":
                ctx.set_timer("later", 4_000_000_000_000_000, clock="wall")
        ctx.produce("seen", record.value)

    def process_timer(self, timer, ctx):
        ctx.release()

TOPOLOGY = Topology(
    {"lines": Logs("logs/*", "ts")},
    {"seen": node(Seen(), Input("lines", key="user"), Stream("seen"))},
    {"seen": LogSink("out")},
)
"""
LINES = [{"user": f"user{n}", "ts": SECOND + n} for n in range(50)]


@pytest.fixture
def run(tmp_path, monkeypatch, command):
    """The command, over these lines and what else is in logs/."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("photon.cluster.master.STALL_S", 3.0)
    monkeypatch.delitem(sys.modules, "stalling", raising=False)
    (tmp_path / "stalling.py").write_text(MODULE)
    (tmp_path / "logs").mkdir()

    def run(*lines):
        (tmp_path / "logs/a.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        status, _, errors = command("millwheel", "run", "stalling:TOPOLOGY", "--work", "work")
        seen = [json.loads(line) for file in (tmp_path / "out").glob("*.jsonl") for line in file.open()]
        assert sorted(one["user"] for one in seen) == sorted(line["user"] for line in lines)
        return status, errors

    return run


def test_a_hold_that_nobody_releases(run):
    status, errors = run(*LINES, {"user": "ann", "ts": 2 * SECOND, "what": "hold"})
    assert status == 1
    assert "nothing has moved for 3 s: seen: worker 0, a hold of key 'ann'" in errors


@pytest.mark.long
def test_a_hold_that_a_timer_on_the_wall_clock_releases_is_waited_for(run):
    assert run(*LINES, {"user": "ann", "ts": 2 * SECOND, "what": "later"}) == (0, "")


@pytest.mark.long
def test_an_archive_that_is_broken(run, tmp_path):
    whole = gzip.compress(b'{"user":"bob","ts":7}\n' * 1_000)
    (tmp_path / "logs/b.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    status, errors = run(*LINES)
    assert status == 1
    assert "nothing has moved for 3 s: lines: worker 0, its logs" in errors
    assert "b.jsonl.gz" in errors


def test_timers_on_the_wall_clock_that_are_not_due(run):
    status, errors = run(*LINES, {"user": "ann", "ts": 2 * SECOND, "what": "wall"})
    assert status == 0
    assert "1 keys have timers on the wall clock that are not due yet" in errors
