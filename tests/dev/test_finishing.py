"""A `photon dev` that was told to stop lets what was written get its fate, and does not wait for ever."""

import signal
from types import SimpleNamespace

import pytest

from photon.cluster.run import Ground
from photon.cluster.statuses import Sample
from photon.cluster.supervisor import FreshLauncher
from photon.cluster.topology import Topology
from photon.core.disk import DirectoryLock
from photon.core.errors import LockedError
from photon.dev import run as dev_run
from photon.dev.links import Links
from photon.dev.run import FED_SETTLED_S, FINISH_S_MAX, SETTLED_S, Finishing, events_seen
from photon.dev.view import View


def row(events, pending=0, silent=(), in_flight=0):
    return {"silent": list(silent), "foreign_events": events, "pending": pending, "in_flight": in_flight}


def test_it_is_over_when_all_that_was_written_is_read_and_nothing_waits():
    finishing = Finishing({"east": 10, "west": 10}, 0.0)
    assert not finishing.is_over({"east": row(10), "west": row(9)}, 1.0)
    assert not finishing.is_over({"east": row(10), "west": row(10, pending=1)}, 2.0)
    assert finishing.is_over({"east": row(10), "west": row(10)}, 3.0)


def test_events_that_wait_for_what_never_comes_are_not_waited_for():
    finishing = Finishing({"east": 10}, 0.0)
    assert not finishing.is_over({"east": row(10, pending=1)}, 1.0)
    assert not finishing.is_over({"east": row(10, pending=1)}, FED_SETTLED_S)
    assert finishing.is_over({"east": row(10, pending=1)}, FED_SETTLED_S + 1.0)


def test_a_datacenter_that_is_starting_is_waited_for_but_not_for_ever():
    finishing = Finishing({"east": 10}, 0.0)
    starting = {"east": row(None, None, silent=["dispatcher-east"])}
    assert not any(finishing.is_over(starting, float(at)) for at in range(int(FINISH_S_MAX)))
    assert finishing.is_over(starting, FINISH_S_MAX)


def test_of_given_logs_it_is_over_when_nothing_waits_and_nothing_more_was_read():
    finishing = Finishing({}, 0.0)
    assert not finishing.is_over({"east": row(10)}, 0.5)
    assert not finishing.is_over({"east": row(12)}, 1.0)
    assert finishing.is_over({"east": row(12)}, 1.5)
    waiting = Finishing({}, 0.0)
    assert not waiting.is_over({"east": row(12, pending=2)}, 0.0)
    assert waiting.is_over({"east": row(12, pending=2)}, SETTLED_S)


def test_of_given_logs_it_is_not_over_while_events_are_in_hand_but_they_are_not_waited_for_for_ever():
    finishing = Finishing({}, 0.0)
    assert not finishing.is_over({"east": row(10, in_flight=7)}, 0.5)
    assert not finishing.is_over({"east": row(10, in_flight=7)}, 1.0)
    assert finishing.is_over({"east": row(10, in_flight=7)}, 0.5 + SETTLED_S)


def test_a_retry_in_hand_is_no_event_more():
    assert events_seen(row(10, in_flight=7)) == 17
    assert events_seen(row(10, pending=7, in_flight=7)) == 10
    assert events_seen(row(None, None, in_flight=None)) is None


class SilentLoop:
    """Its processes never have anything new to say; at the third turn of a phase somebody may say stop."""

    def __init__(self, told_to_stop=None):
        self._told_to_stop = told_to_stop

    def until(self, over, patience_s):
        self.turns = 0
        while not over(None):
            self.turns += 1
            if self.turns == 3 and self._told_to_stop is not None:
                self._told_to_stop.append(signal.SIGINT)


def run_in(tmp_path, told_to_stop, seconds=0.0, told=None):
    topology = Topology({}, [], [], str(tmp_path), "", False, [], [])
    job = dev_run.DevJob(tmp_path, tmp_path, seconds=seconds)
    view = None if told is None else SimpleNamespace(notice=told.append)
    return dev_run._Run(job, Links(topology, proxied=False), Ground(FreshLauncher(), told_to_stop, 0), view)


class FailingFeeder:
    """It has something to say, and fails at once, or at its end."""

    def __init__(self, at_once):
        self.notices, self.failed = ["space is short"], "" if not at_once else "the feeder: no space left"

    def stop(self):
        self.failed = "the feeder: no space left"


@pytest.mark.parametrize("at_once", [True, False])
def test_a_feeder_that_fails_ends_the_feed_and_is_told_of_with_what_it_had_to_say(
    tmp_path, monkeypatch, at_once
):
    monkeypatch.setattr(dev_run, "Feeder", lambda _: FailingFeeder(at_once))
    monkeypatch.setattr(dev_run, "fed_datacenters", lambda *_: ["east"])
    told = []
    run = run_in(tmp_path, [], None if at_once else 0.0, told)
    run._feed(SilentLoop())
    assert run.course.feeder_failed == "the feeder: no space left" and run._feeder is None
    assert told[:2] == ["the feeder: space is short", "the feeder: no space left"]


def test_the_first_ctrl_c_after_the_end_of_for_cuts_the_wait_short(tmp_path):
    told_to_stop = []
    run, loop = run_in(tmp_path, told_to_stop), SilentLoop(told_to_stop)
    run._feed(SilentLoop())
    run._finish(loop)
    assert run.course.cut_short and loop.turns == 3


@pytest.mark.parametrize("has_quorum", [True, False])
def test_it_is_noted_whether_the_registry_has_its_quorums_when_it_is_last_looked_at(tmp_path, has_quorum):
    shard = {"shard": 0, "has_quorum": has_quorum}
    replica = {"directory": {"has_quorum": True}, "shards": [shard], "shards_expected": [0]}
    run = run_in(tmp_path, [])
    run._view = SimpleNamespace(show=lambda _: None)
    sample = Sample(0.0, {"registry-r0": replica})
    run._finish(SimpleNamespace(until=lambda over, patience_s: over(sample)))
    assert run.course.has_quorum == has_quorum


def test_what_was_killed_and_not_restored_stays_so_after_the_feed(tmp_path):
    run = run_in(tmp_path, [])
    run._job.doings.down = {"east": "killed"}
    run._feed(SilentLoop())
    assert run.course.killed == ["east"]


def test_nobody_else_can_run_on_the_output_before_it_is_summed_up(tmp_path, monkeypatch):
    def sum_up(*_):
        for directory in (tmp_path / "work", tmp_path / "out" / "joined"):
            with pytest.raises(LockedError):
                DirectoryLock(directory)
        return {"ok": True}

    monkeypatch.setattr(dev_run._Run, "run", lambda _: None)
    monkeypatch.setattr(dev_run, "summary_of", sum_up)
    job = dev_run.DevJob(tmp_path / "out", tmp_path / "work")
    assert dev_run.run_dev(job, View(as_json=True)) == {"ok": True}
