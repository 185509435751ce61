"""What the one that leads makes of its workers' words, and what it answers of low watermarks."""

import contextlib
from functools import partial
from types import SimpleNamespace

import pytest

from millwheel import Computation, Input, Logs, Stream, Topology, links, node
from millwheel.computation import NEVER
from millwheel.engine.plan import Plan, numbered
from millwheel.engine.records import SLOTS
from millwheel.engine.shares import Shares, Work, even
from millwheel.links import LostError
from millwheel.machines import Machine, Round
from photon.cli.millwheel import _because, group
from photon.cluster import wheels
from photon.cluster.master import STALL_S, Master


class Relay(Computation):
    def process_record(self, record, ctx):
        ctx.produce("seen", record.value)


TOPOLOGY = Topology(
    {"clicks": Logs("logs/*", "ts")}, {"relay": node(Relay(), Input("clicks", "user"), Stream("seen"))}
)


def master(workers=1, send=lambda *_: None):
    here = Machine("a", "here/a", "", workers)
    running = Round(1, "a", "running", (here,), shares=Shares(even(workers)))
    return Master(Plan(TOPOLOGY, numbered(TOPOLOGY, {})), running, send)


def status(sequencer, done):
    return {
        "pid": 70,
        "sequencer": sequencer,
        "counts": {"relay": {"records": done, "dead_letters": 0}},
        "timers": {},
        "unacked_bytes": 0,
        "notices": [],
        "late": {},
        "hot": None,
        "work": Work(1.0, 0.0, [0.0] * SLOTS),
    }


def test_a_run_that_goes_on_behind_its_end_has_ended_when_none_did_anything_from_one_asking_to_the_next():
    """Marks stand at the end of time then, whatever is under way."""
    sent, workers = [], (0, 1)
    of = [SimpleNamespace(known=False, number=worker) for worker in workers]
    one = master(2, lambda link, kind, _: sent.append((link.number, kind)))

    def asked():
        asked = [worker for worker, kind in sent if kind == links.FINISH]
        sent.clear()
        return asked

    def answers(worker, done, number):
        one.hear(of[worker], links.FINISHED, [worker, status(5 + worker, done), number])

    ended = dict.fromkeys(one.authority.marks, NEVER)
    for worker in workers:
        one.hear(of[worker], links.BEGINS, ["a", 1, worker, 5 + worker, ended])
        one.hear(of[worker], links.REPORT, [worker, 5 + worker, {**ended, "relay": 7}])
        assert asked() == []
    for worker in workers:
        one.hear(of[worker], links.REPORT, [worker, 5 + worker, ended])
    assert asked() == [0, 1]
    for number, (first, second) in enumerate(((1, 1), (1, 2), (3, 2)), 1):
        answers(0, first, number)
        answers(1, second, number - 1)  # as before it was asked again
        assert (one.finished, asked()) == (False, [])
        answers(1, second, number)
        assert (one.finished, asked()) == (False, [0, 1])
    answers(1, 2, 4)
    assert not one.finished
    answers(0, 3, 4)
    assert one.finished and one.summary()["counts"]["relay"]["records"] == 5 and asked() == []


def test_a_run_ends_when_all_is_published_or_a_sink_has_taken_nothing_for_long(monkeypatch):
    now = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    one, link = master(), SimpleNamespace(known=False)
    ended = dict.fromkeys(one.authority.marks, NEVER)
    sink = {"stream": "seen", "sink": "kafka://h/t", "refused": 0, "trouble": "no broker", "behind": True}

    def tells(kind, published, behind, *asked):
        sinks = [
            {**sink, "published": published, "behind": behind},
            {**sink, "published": 1, "behind": False, "trouble": None},  # of another lane
        ]
        one.hear(link, kind, [0, {**status(5, 1), "expects": False, "sinks": sinks}, *asked])

    one.hear(link, links.BEGINS, ["a", 1, 0, 5, ended])
    one.hear(link, links.REPORT, [0, 5, ended])
    tells(links.FINISHED, 0, True, 1)
    tells(links.FINISHED, 0, True, 2)
    assert not one.finished
    assert one.summary()["sinks"] == [{**sink, "published": 1}]
    now[0] += STALL_S - 1
    tells(links.STATUS, 1, True)
    now[0] += STALL_S - 1
    tells(links.STATUS, 1, True)
    assert one.stalled() is None
    now[0] += 1
    held = one.stalled()
    assert _because(held) == "kafka://h/t has not all of 'seen' (no broker)"
    tells(links.STATUS, 2, False)
    assert one.finished and one.stalled() is None


def test_why_takes_the_name_of_a_stream_for_the_computation_that_makes_it():
    (held,) = master().why("seen")["chain"]
    assert held["name"] == "relay"
    assert master().why("seen") == master().why("relay")


def test_why_of_what_is_no_name_says_which_there_are():
    assert master().why("sen") == {"error": "'sen' has no low watermark; there are clicks, relay"}


@pytest.mark.parametrize("is_lost", [True, False])
def test_nothing_is_told_of_a_worker_that_starts_by_what_the_one_before_it_had_said(
    is_lost, monkeypatch, capsys
):
    one, link = master(), SimpleNamespace(known=False)
    held = {"held_by": "injector", "percentile": None}
    up = {**status(5, 3), "why": {"clicks": held}}
    begins = ["a", 1, 0, 5, dict.fromkeys(one.authority.marks, 7)]

    def told():
        answers = {"status": one.status() | {"topology": "it", "machines": [], "restarts": 1, "seconds": 2.0}}
        monkeypatch.setattr(wheels, "ask", lambda _, *question: answers.get(question[0], one.why("clicks")))
        for words in (["status"], ["why", "clicks"]):
            group.main([*words, "--work", "work"], standalone_mode=False)
        *_, row, why = capsys.readouterr().out.splitlines()
        return row.split()[:2], why

    one.hear(link, links.BEGINS, begins)
    one.hear(link, links.STATUS, [0, up])
    assert told() == (["0", "0%"], "clicks: worker 0, its logs (read to their end)")
    if is_lost:
        one.lost(link)
        assert told() == (["0", "starting"], "clicks: worker 0 is starting")
    one.hear(again := SimpleNamespace(known=False), links.BEGINS, begins)
    one.lost(link)
    assert told() == (["0", "starting"], "clicks: worker 0 is starting")
    assert one.summary()["counts"]["relay"]["records"] == 3
    one.hear(again, links.STATUS, [0, up])
    assert told()[0] == ["0", "0%"]


def test_a_worker_that_was_busy_for_longer_than_its_turn_took_to_tell_is_shown_as_always_busy():
    one, link = master(), SimpleNamespace(known=False)
    one.hear(link, links.BEGINS, ["a", 1, 0, 5, {}])
    for at, busy in ((1.0, 0.0), (2.0, 1.73)):
        work = Work(at, busy, [0.0] * SLOTS)
        one.hear(link, links.STATUS, [0, {**status(5, 3), "work": work}])
    assert one.status()["processes"][0]["busy"] == 1.0


class Workers:
    """The processes of a run, without any: `kill` is noted."""

    def __init__(self):
        self.children, self.killed = {"worker-0": SimpleNamespace(process=None)}, []

    def becomes(self, pid):
        kill = partial(self.killed.append, pid)
        self.children["worker-0"].process = pid and SimpleNamespace(pid=pid, kill=kill)


def test_a_worker_is_killed_for_its_own_silence_not_for_that_of_the_one_before_it(tmp_path, monkeypatch):
    now, told, workers = [100.0], [], Workers()
    monkeypatch.setattr(wheels, "time", SimpleNamespace(monotonic=lambda: now[0]))
    run = wheels.WheelRun("tests.millwheel.test_master:TOPOLOGY", tmp_path / "work", 1, True, told.append)
    run._let_go()
    run._supervisor = workers

    def beats(pid):
        link = SimpleNamespace(known=False, send=lambda *_: None)
        with contextlib.suppress(LostError):
            run._on(link, links.BEAT, [0, pid])
        return link.known

    def after(seconds):
        for _ in range(seconds):
            now[0] += 1.0
            run._watch(now[0])

    workers.becomes(1)
    assert beats(1)
    after(3)
    workers.becomes(None)
    assert not beats(1)  # its last words, read late
    after(1)
    workers.becomes(2)
    assert not beats(1)
    after(30)  # it takes its time to start
    assert workers.killed == []
    assert beats(2)
    after(6)
    assert workers.killed == [2] and told == ["worker-0 stands still for 5 s; it is killed"]
