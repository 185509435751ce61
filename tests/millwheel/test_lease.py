"""Whoever has the lease runs what is in a store: one run at a time, the next one by itself."""

import contextlib
import random
import signal
import threading
import time
import uuid

import pytest

from millwheel import lease as module
from millwheel.errors import ZombieError
from millwheel.lease import Lease
from photon.core.clock import SystemClock
from photon.core.errors import StorageError, UsageError
from tests.millwheel.running import HELD, LOSES, System
from tests.millwheel.topologies import clicks
from tests.waiting import wait_until

postgresql = pytest.importorskip("millwheel.postgresql", reason="the postgresql extra is not installed")


@pytest.fixture
def uri(server):
    return f"{server.uri}?schema=s{uuid.uuid4().hex}&{LOSES}"


@pytest.fixture
def store(uri):
    with contextlib.ExitStack() as held:

        def make(holder=""):
            made = postgresql.PostgresqlStore(uri, 5.0, holder)
            held.callback(made.close)
            return made

        yield make


class Store:
    """A server whose clock is that of the test."""

    shown = "the store"

    def __init__(self):
        self.now, self.held, self.answers, self.asked = 0.0, None, True, 0

    def hold(self, holder, shown, seconds):
        self.asked += 1
        if not self.answers:
            raise StorageError("no answer")
        if self.held is not None and self.held[0] != holder and self.held[2] >= self.now:
            return self.held[1:]
        self.held = (holder, shown, self.now + seconds)
        return None

    def let_go(self, holder):
        if self.held is not None and self.held[0] == holder:
            self.held = None

    def close(self):
        pass


class Clock(SystemClock):
    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(module, "RENEW_S", 0.01)


def test_it_holds_shorter_here_than_on_the_server_and_counts_from_before_it_asked(tmp_path, quick):
    store, clock = Store(), Clock()
    answers = store.hold

    def slow(*given):
        clock.now += 2
        return answers(*given)

    store.hold = slow
    one = Lease(store, tmp_path, clock)
    one.take(False, print)
    assert one.until <= 100 + module.LEASE_S - module.SKEW_S + 2 * store.asked
    one.end()
    assert store.held is None


def test_while_the_server_does_not_answer_it_is_not_lost_and_not_longer(tmp_path, quick):
    store, clock = Store(), Clock()
    one = Lease(store, tmp_path, clock)
    one.take(False, print)
    store.answers, before = False, one.until
    clock.now += 60
    asked = store.asked
    wait_until(lambda: store.asked > asked + 3)
    assert (one.until, one.lost_to) == (before, "")
    store.answers = True
    wait_until(lambda: one.until > clock.now)
    one.end()


def test_one_that_is_renewed_elsewhere_is_refused_and_one_that_is_not_is_taken(tmp_path, quick):
    store, clock = Store(), Clock()
    first, second = (Lease(store, tmp_path / name, clock) for name in "ab")
    first.take(False, print)
    ticking = threading.Event()

    def tick():
        while not ticking.wait(0.005):
            store.now += 0.005

    thread = threading.Thread(target=tick)
    thread.start()
    with pytest.raises(UsageError, match="--standby"):
        second.take(False, print)
    ticking.set()
    thread.join()
    first._over.set()  # as if it had been killed
    first._thread.join()
    store.now += module.LEASE_S + 1
    second.take(False, print)
    assert str(tmp_path / "b") in store.held[1]
    again = Lease(store, tmp_path / "a", clock)
    told = []
    waiting = threading.Thread(target=again.take, args=(True, told.append))
    waiting.start()
    wait_until(lambda: told)
    second.end()
    waiting.join(20)
    assert str(tmp_path / "a") in store.held[1] and len(told) == 1
    again.end()


def test_who_lost_it_knows_to_whom(tmp_path, quick):
    store, clock = Store(), Clock()
    one = Lease(store, tmp_path, clock)
    one.take(False, print)
    store.held = ("x", "another:run", store.now + 5)
    wait_until(lambda: one.lost_to == "another:run")
    one.end()
    assert store.held[0] == "x"


def test_in_postgresql_one_has_it_until_it_ends_or_is_let_go(store):
    one, two = store(), store()
    assert one.hold("a", "A", 0.4) is None
    who, until = two.hold("b", "B", 5.0)
    assert who == "A" and time.time() - 1 < until < time.time() + 1
    assert one.hold("a", "A", 0.4) is None
    wait_until(lambda: two.hold("b", "B", 5.0) is None)
    assert one.hold("a", "A", 5.0)[0] == "B"
    one.let_go("a")
    assert one.hold("a", "A", 5.0)[0] == "B"
    two.let_go("b")
    assert one.hold("a", "A", 5.0) is None


def test_in_postgresql_only_the_holder_claims(store):
    keeper, mine, other = store(), store("a"), store("b")
    with pytest.raises(ZombieError, match="another run"):
        mine.claim(range(4), 0, 1)
    keeper.hold("a", "A", 5.0)
    assert mine.claim(range(4), 0, 1) == 1
    mine.commit({b"x": b"1"})
    with pytest.raises(ZombieError):
        other.claim(range(4), 0, 1)
    mine.commit({b"x": b"2"})
    keeper.let_go("a")
    keeper.hold("b", "B", 5.0)
    other.claim(range(4), 0, 1)
    with pytest.raises(ZombieError):
        mine.commit({b"x": b"3"})
    with pytest.raises(ZombieError):
        mine.claim(range(4), 0, 1)
    assert other.read([b"x"]) == [b"2"]


@pytest.fixture
def system(tmp_path):
    one = System(tmp_path)
    yield one
    for work in ("one", "two"):
        one.signal(work, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_who_waits_takes_over_from_a_machine_that_is_gone_or_frozen_and_each_line_is_there_once(
    uri, system, tmp_path
):
    """Two machines: two work directories, over the same logs, sinks and store. All processes of the one that
    runs are killed, then those of the other are frozen, and go on when the first has long taken over."""
    lines = sorted(clicks(random.Random(5), 30_000, users=200, seconds=60), key=lambda line: line["ts"])

    def start(name):
        words = ("--store", uri, "--workers", "2", "--follow", "--standby")
        told = tmp_path / f"{name}.told"
        return system.start(*words, name=HELD, told=told, work=name), told

    def serves(name):
        return lambda: len(system.workers(work=name)) == 2 and (tmp_path / name / "control.sock").exists()

    def feed(start, end):
        """Until more is known of it."""
        before = len(system.sink("counts"))
        for part in range(start, end):
            for file in (0, 1):
                system.write(f"{file}.jsonl", lines[part * 1000 + file : (part + 1) * 1000 : 2], "a")
            time.sleep(0.02)
        wait_until(lambda: len(system.sink("counts")) > before + 500, what=lambda: str(before))

    one, _ = start("one")
    wait_until(serves("one"))
    two, told = start("two")
    wait_until(lambda: "waiting to take over" in told.read_text())
    feed(0, 10)
    system.signal("one", signal.SIGKILL)
    killed = time.monotonic()
    wait_until(serves("two"))
    assert time.monotonic() - killed < 20
    one, told = start("one")
    wait_until(lambda: "waiting to take over" in told.read_text())
    feed(10, 20)
    system.signal("two", signal.SIGSTOP)
    wait_until(serves("one"))
    feed(20, 30)
    system.signal("two", signal.SIGCONT)
    told = tmp_path / "two.told"
    wait_until(lambda: "runs this now" in told.read_text() and told.read_text().count("waiting") == 2)
    assert two.poll() is None
    two.send_signal(signal.SIGTERM)
    two.wait(30)
    refused = system.refused("run", HELD, "--work", "three", "--store", uri)
    assert "wait for its end with --standby" in refused
    one.send_signal(signal.SIGTERM)
    assert one.wait(60) == 0
    summary = system.run("--store", uri, name=HELD)
    assert summary["ended"] and summary["dead_letters"] == 0
    system.check(lines)
