"""What is checked while `photon dev` runs, and the outages that it is asked for."""

import subprocess
import sys
import threading

import pytest

from photon.core.errors import UnavailableError, UsageError
from photon.dev.doings import Doings, Outage
from photon.dev.pairs import LiveCheck, PairsReport
from tests.waiting import wait_until


def test_what_is_wrong_is_told_when_it_is_found_again(monkeypatch):
    reports = [
        PairsReport(),
        PairsReport(3),
        PairsReport(4, repeated=1),
        PairsReport(5, repeated=1),
        PairsReport(6),
    ]
    monkeypatch.setattr("photon.dev.pairs.check_pairs", lambda *_, **__: reports.pop(0))
    check = LiveCheck("joined")
    told = []
    while reports:
        check.step()
        told.append([(one["ok"], one["text"][:9]) for one in check.told()])
    fine, wrong = [(True, "3 joined ")], [(False, "1 lines j")]
    assert told == [[(None, "nothing i")], fine, fine, wrong, [(True, "6 joined ")]]


class Cluster:
    """One process a datacenter: a real one, which writes what it is told to."""

    def __init__(self, nap):
        self.done, self._nap = [], nap

    def processes_of(self, datacenter):
        if datacenter == "mars":
            raise UsageError("no such datacenter")
        return [f"joiner-{datacenter}"]

    def pid_of(self, process):
        return self._nap.pid if process == "joiner-west" else None

    def __getattr__(self, name):
        def does(datacenter):
            self.processes_of(datacenter)
            self.done.append((name.partition("_")[0], datacenter))

        return does


WRITES = """
import sys
for line in sys.stdin:
    try:
        with open(line.strip(), "ab", buffering=0) as file:
            file.write(b"x")
        print("written", flush=True)
    except OSError as error:
        print(error.strerror, flush=True)
"""


@pytest.fixture
def nap():
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", WRITES], **pipes, text=True, bufsize=1) as process:
        yield process
        process.stdin.close()


class FakeLinks:
    def __init__(self):
        self.states = {"east-west": ""}

    def told(self):
        return [{"between": name.split("-"), "state": state} for name, state in self.states.items()]

    def cut(self, between):
        self.states["-".join(sorted(between))] = "cut"
        return "is cut"

    def delay(self, between, ms):
        self.states["-".join(sorted(between))] = f"{ms} ms"
        return "is slower"

    def mend(self, between):
        self.states["-".join(sorted(between))] = ""
        return "is mended"


@pytest.fixture
def outages(monkeypatch, nap):
    cluster = Cluster(nap)
    acts = {
        "kill": (lambda c, d: c.kill_(d), "killed"),
        "freeze": (lambda c, d: c.freeze_(d), "frozen"),
        "fill": (Cluster.processes_of, "full"),
    }
    monkeypatch.setattr("photon.dev.doings._OUTAGES", acts)
    doings, over, notices = Doings(), threading.Event(), []
    links = FakeLinks()

    def run():
        while not over.wait(0.005):
            notices.extend(doings.step(cluster, links, 0.0))

    thread = threading.Thread(target=run)
    thread.start()
    yield doings, cluster, links, notices
    over.set()
    thread.join()


def of(datacenter):
    return {"datacenter": datacenter}


def test_outages_are_done_by_the_thread_of_the_run_and_answered(outages):
    doings, cluster, links, notices = outages
    assert doings.ask("kill", of("east")) == "datacenter east is killed"
    assert doings.ask("freeze", of("west")) == "datacenter west is frozen"
    assert doings.down == {"east": "killed", "west": "frozen"}
    with pytest.raises(UsageError, match="no such datacenter"):
        doings.ask("kill", of("mars"))
    with pytest.raises(UsageError, match="east is killed already"):
        doings.ask("fill", of("east"))
    doings.end(cluster, links)
    assert doings.down == {"east": "killed"}
    assert doings.ask("restore", of("east")) == "datacenter east is restored"
    assert cluster.done == [("kill", "east"), ("freeze", "west"), ("restore", "west"), ("restore", "east")]
    wait_until(lambda: len(notices) == 3)


@pytest.mark.parametrize("restore_after_s", [10.0, None])
def test_a_planned_outage_kills_and_restores_once_each_when_their_times_have_come(
    nap, monkeypatch, restore_after_s
):
    monkeypatch.setattr("photon.dev.doings._OUTAGES", {"kill": (lambda c, d: c.kill_(d), "killed")})
    outage, cluster = Outage("east", 20.0, restore_after_s), Cluster(nap)
    doings = Doings(outage)
    times = (0.0, 19.9, 20.0, 20.1, 29.9, 30.0, 31.0)
    told = {at: said for at in times for said in doings.step(cluster, FakeLinks(), at)}
    killed, restored = {20.0: "datacenter east is killed"}, {30.0: "datacenter east is restored"}
    if restore_after_s is None:
        assert told == killed and doings.silent == ["east"] and outage.ends_s == 20.0
        doings.end(cluster, FakeLinks())
        assert doings.silent == ["east"] and cluster.done == [("kill", "east")]
    else:
        assert told == killed | restored and not doings.silent and outage.ends_s == 30.0
        assert cluster.done == [("kill", "east"), ("restore", "east")]


def test_a_full_disk_is_one_to_each_process_of_the_datacenter_until_it_is_restored(outages, nap, tmp_path):
    doings, cluster, links, _ = outages

    def says():
        nap.stdin.write(f"{tmp_path / 'log'}\n")
        return nap.stdout.readline().strip()

    assert says() == "written"
    assert doings.ask("fill", of("west")) == "datacenter west is full"
    wait_until(lambda: says() == "File too large")
    assert doings.silent == [] and doings.down == {"west": "full"}
    doings.ask("restore", of("west"))
    assert says() == "written"
    doings.ask("fill", of("west"))
    wait_until(lambda: says() == "File too large")
    doings.end(cluster, links)
    assert says() == "written"


def test_links_are_cut_slowed_down_and_mended(outages):
    doings, cluster, links, _ = outages
    between = {"between": ["west", "east"]}
    for what, asked, state in (
        ("cut", between, "cut"),
        ("delay", {**between, "ms": 20}, "20 ms"),
        ("mend", between, ""),
    ):
        doings.ask(what, asked)
        assert links.states == {"east-west": state}
    for what, asked in (("cut", {}), ("cut", {"between": "east"}), ("delay", {**between, "ms": "5"})):
        with pytest.raises(UsageError, match=r"two datacenters|ms = "):
            doings.ask(what, asked)
    doings.ask("cut", between)
    wait_until(lambda: doings.links == [{"between": ["east", "west"], "state": "cut"}])
    doings.end(cluster, links)
    assert links.states == {"east-west": ""}


def test_a_run_that_is_at_its_end_does_nothing(monkeypatch, nap):
    monkeypatch.setattr("photon.dev.doings.DOING_S_MAX", 0.01)
    doings = Doings()
    with pytest.raises(UnavailableError, match="starts, or ends"):
        doings.ask("kill", of("east"))
    assert list(doings.step(Cluster(nap), FakeLinks(), 0.0)) == [] and doings.down == {}
