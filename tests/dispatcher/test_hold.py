"""What a dispatcher keeps from expiring: all that it has not read, or not recorded an end for."""

import random
import threading
from dataclasses import replace

import numpy as np
import pytest

from dispatcher.ledger import Entry, Ledger
from dispatcher.rules.events import pack_values
from dispatcher.rules.pacing import Pacing
from dispatcher.rules.verdicts import Totals
from dispatcher.sender import Gate
from dispatcher.worker import Holder
from photon.core.clock import ManualClock, SteadyClock
from photon.core.errors import UnavailableError, UsageError
from photon.core.settings import parse_settings
from photon.core.status import BUCKETS
from tests.dispatcher.fakes import Site, clicks, some_events
from tests.fake_registry import FakeRegistry
from tests.logs.following import Following, append
from tests.waiting import wait_until

DAY_US = 86_400_000_000
LATE_US = DAY_US
"""Of three days."""
T = 100 * DAY_US


class Bench:
    """A holder over a real ledger and a real follower of logs; what is read is recorded on demand."""

    def __init__(self, root) -> None:
        self.log = root / "a.jsonl"
        append(self.log, b"1\n2\n")
        self.registry = FakeRegistry()
        self.registry.reached_us = T
        self.ledger = Ledger(root / "state", root / "dead", 1 << 30)
        self.following = Following(root / "*.jsonl", spool=root / "spool")
        clock, stopping = SteadyClock(ManualClock()), threading.Event()
        gate = Gate(Pacing(4, 10, 1), clock, random.Random(1), stopping, print)
        self.holder = Holder("east", self.registry, self.ledger, self.following.follower, gate, 3.0)

    def report(self):
        self.holder.report()
        return self.registry.reports[-1]

    def read(self) -> None:
        self.following.read()

    def record(self, times=()) -> None:
        """All that was read; events of these times wait."""
        states = list(self.following.states.values())
        events = replace(some_events(len(times)), times=np.array(times, "<i8").tobytes())
        added = Totals(len(times), {}, 0, [0] * BUCKETS)
        due_us = np.full(len(times), 5_000)
        self.ledger.record(Entry(states, added, due_us=due_us, retries=pack_values(events)))

    def read_all(self) -> None:
        self.read()
        self.record()
        self.report()
        assert self.report() == T - LATE_US


@pytest.fixture
def bench(tmp_path):
    made = Bench(tmp_path)
    yield made
    made.ledger.close()
    made.following.follower.close()


def test_until_all_that_was_there_is_recorded_nothing_is_known(bench):
    assert bench.report() is None, "nothing is even found yet"
    bench.read()
    assert bench.report() is None
    append(bench.log, b"3\n")
    assert bench.report() is None, "read, and not recorded"
    bench.record()
    bench.registry.reached_us = T + 5
    assert bench.report() == T - LATE_US, "what was added later is newer"
    assert bench.report() == T - LATE_US, "which is not read yet"
    bench.read()
    bench.record()
    assert bench.report() == T + 5 - LATE_US


def test_a_file_of_which_nothing_is_recorded_yet_is_not_passed_over(bench, tmp_path):
    bench.read_all()
    append(tmp_path / "b.jsonl", b"1\n")
    bench.read()
    bench.registry.reached_us = T + 5
    bench.report()
    bench.report()
    assert bench.report() == T - LATE_US
    bench.record()
    assert bench.report() == T + 5 - LATE_US


def test_the_oldest_event_that_waits_is_held_unless_it_is_expired(bench):
    bench.read_all()
    bench.record([T, T - 9 * DAY_US, T - 2 * DAY_US])
    assert bench.report() == T - 9 * DAY_US
    bench.registry.boundary_us = T - 3 * DAY_US
    bench.report()
    assert bench.report() == T - 2 * DAY_US


def test_a_line_without_an_end_and_a_file_that_is_gone_hold_nothing(bench, tmp_path):
    append(tmp_path / "torn.jsonl", b"1\n2")
    append(tmp_path / "gone.jsonl", b"1\n")
    bench.read()
    bench.report()
    (tmp_path / "gone.jsonl").unlink()
    bench.following.read()
    states = [state for state in bench.following.states.values() if not state.gone]
    bench.ledger.record(Entry(states, Totals(0, {}, 0, [0] * BUCKETS)))
    assert bench.report() == T - LATE_US


def test_while_a_file_cannot_be_read_what_was_held_stays(bench, monkeypatch):
    bench.read_all()
    follower = bench.following.follower
    monkeypatch.setattr(follower, "_unlisted", {"/mount": "not there"})
    bench.registry.reached_us = T + 5
    for _ in range(3):
        assert bench.report() == T - LATE_US


def test_while_the_registry_does_not_know_the_time_nothing_moves(bench):
    bench.read_all()
    bench.registry.reached_us = None
    for _ in range(3):
        assert bench.report() == T - LATE_US


def test_a_report_that_came_to_nothing_is_made_again_soon(bench, monkeypatch):
    waits = []

    class Stopping:
        def is_set(self):
            return len(waits) == 3

        def wait(self, seconds):
            waits.append(seconds)
            bench.registry.reached_us = T if len(waits) == 2 else None

        def clear(self):
            pass

    monkeypatch.setattr(bench.holder._work, "_stopping", Stopping())
    monkeypatch.setattr(bench.holder._work, "_woken", Stopping())
    real, failures = bench.registry.hold, iter([UnavailableError("no leader")])

    def hold(name, oldest_us):
        for error in failures:
            raise error
        return real(name, oldest_us)

    monkeypatch.setattr(bench.registry, "hold", hold)
    bench.registry.reached_us = None
    bench.holder._work._run()
    assert waits == [5.0, 5.0, 300.0], "no leader, no time known, told"


SETTINGS = {"logs": {"scan_interval_s": 0.05, "poll_interval_ms": 5}, "registry": {"retention_days": 1e-5}}


@pytest.mark.parametrize("drain", [True, False])
def test_who_has_nothing_more_to_read_lets_go_when_it_stops(tmp_path, drain):
    site = Site(tmp_path)
    (site.logs / "a.jsonl").write_bytes(clicks(0, 20))
    server = site.server(parse_settings(SETTINGS), drain=drain)
    server.start()
    wait_until(lambda: site.registry.holds == {"d0"} and server.status()["foreign_events"] == 20)
    wait_until(lambda: not drain or server.status()["drained"])
    server.stop()
    assert site.registry.holds == (set() if drain else {"d0"})


def test_where_nothing_expires_nothing_is_held(tmp_path):
    site = Site(tmp_path)
    (site.logs / "a.jsonl").write_bytes(clicks(0, 20))
    site.drain()
    assert site.registry.reports == []


def test_a_registry_that_takes_no_more_holds_is_told_to_the_person_and_reading_goes_on(tmp_path):
    site = Site(tmp_path)

    def refuse(name, oldest_us):
        raise UsageError("10000 dispatchers hold the boundary")

    site.registry.hold = refuse
    (site.logs / "a.jsonl").write_bytes(clicks(0, 20))
    server = site.server(parse_settings(SETTINGS))
    server.start()
    wait_until(lambda: any("10000 dispatchers" in line for line in server.status()["notices"]))
    wait_until(lambda: server.status()["foreign_events"] == 20)
    server.stop()
