"""What is checked while `photon dev` runs, and the outages that it is asked for."""

import threading

import pytest

from photon.core.errors import UnavailableError, UsageError
from photon.dev.pairs import LiveCheck, PairsReport
from photon.dev.run import Doings
from tests.waiting import wait_until


def test_what_is_wrong_is_told_when_it_is_found_again():
    reports = [
        PairsReport(),
        PairsReport(3),
        PairsReport(4, repeated=1),
        PairsReport(5, repeated=1),
        PairsReport(6),
    ]
    check = LiveCheck("joined", lambda _: reports.pop(0))
    told = []
    while reports:
        check.step()
        told.append([(one["ok"], one["text"][:9]) for one in check.told()])
    fine, wrong = [(True, "3 joined ")], [(False, "1 lines j")]
    assert told == [[(None, "nothing i")], fine, fine, wrong, [(True, "6 joined ")]]


class Cluster:
    def __init__(self):
        self.done = []

    def __getattr__(self, name):
        def does(datacenter):
            if datacenter == "mars":
                raise UsageError("no such datacenter")
            self.done.append((name.partition("_")[0], datacenter))

        return does


@pytest.fixture
def outages(monkeypatch):
    cluster = Cluster()
    acts = {"kill": (lambda c, d: c.kill_(d), "killed"), "freeze": (lambda c, d: c.freeze_(d), "frozen")}
    monkeypatch.setattr("photon.dev.run._OUTAGES", acts)
    doings, over, notices = Doings(), threading.Event(), []

    def run():
        while not over.wait(0.005):
            notices.extend(doings.step(cluster))

    thread = threading.Thread(target=run)
    thread.start()
    yield doings, cluster, notices
    over.set()
    thread.join()


def test_outages_are_done_by_the_thread_of_the_run_and_answered(outages):
    doings, cluster, notices = outages
    assert doings.ask("kill", "east") == "datacenter east is killed"
    assert doings.ask("freeze", "west") == "datacenter west is frozen"
    assert doings.down == {"east": "killed", "west": "frozen"}
    with pytest.raises(UsageError, match="no such datacenter"):
        doings.ask("kill", "mars")
    assert doings.ask("restore", "east") == "datacenter east is restored"
    doings.thaw(cluster)
    assert doings.down == {}
    assert cluster.done == [("kill", "east"), ("freeze", "west"), ("restore", "east"), ("restore", "west")]
    wait_until(lambda: len(notices) == 3)


def test_a_run_that_is_at_its_end_does_nothing(monkeypatch):
    monkeypatch.setattr("photon.dev.run.DOING_S_MAX", 0.01)
    doings = Doings()
    with pytest.raises(UnavailableError, match="starts, or ends"):
        doings.ask("kill", "east")
    assert list(doings.step(Cluster())) == [] and doings.down == {}
