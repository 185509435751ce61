"""Dispatchers keep the boundary from passing their oldest open events (paper 2.3)."""

import time

import pytest

from idregistry.coordinator import HOLDING_SHOWN, Report
from idregistry.rules.commands import Boundary, Hold, Rejected, encode
from idregistry.rules.directory import HOLDS_MAX, DirectoryState
from idregistry.rules.packing import NO_BOUNDARY
from idregistry.rules.steward import DAY_US, HOLD_STEP_US, boundary_due, hold_due
from photon.core.errors import UsageError
from photon.core.fates import Registered
from photon.core.settings import Registry
from tests.idregistry.cluster import NODES, Cluster
from tests.idregistry.kit import NOW_US, event_ids, same_times, token
from tests.idregistry.test_coordinator import Bench
from tests.idregistry.test_replicas import MakeCluster, retrying
from tests.waiting import wait_until

WANTED_US = NOW_US - 3 * DAY_US


@pytest.mark.parametrize(
    ("held_us", "due_us"),
    [
        (None, WANTED_US),
        (WANTED_US + 5, WANTED_US),
        (WANTED_US - HOLD_STEP_US, WANTED_US - HOLD_STEP_US),
        (WANTED_US - DAY_US + 1_000_000, None),  # where it stands, but for less than a step
        (WANTED_US - 9 * DAY_US, None),
    ],
)
def test_the_boundary_stops_at_the_oldest_hold(held_us: int | None, due_us: int | None) -> None:
    assert boundary_due(NOW_US, WANTED_US - DAY_US, 3.0, 0.0, held_us) == due_us


def test_a_first_boundary_waits_until_nothing_holds_it() -> None:
    """It would be caught up with by days: an event of 1970 that is tried again would cost decades."""
    assert boundary_due(NOW_US, NO_BOUNDARY, 3.0, 0.0, 0) is None
    assert boundary_due(NOW_US, NO_BOUNDARY, 3.0, 0.0, WANTED_US) == WANTED_US


@pytest.mark.parametrize(
    ("present_us", "oldest_us", "due_us"),
    [
        (None, 7, 7),
        (7, 8, None),
        (7, 7 + HOLD_STEP_US - 1, None),
        (7, 7 + HOLD_STEP_US, 7 + HOLD_STEP_US),
        (7, 6, 6),
        (7, None, None),
        (None, None, WANTED_US - 5),
    ],
)
def test_a_hold_goes_back_at_once_and_on_by_an_hour(
    present_us: int | None, oldest_us: int | None, due_us: int | None
) -> None:
    assert hold_due(present_us, oldest_us, WANTED_US - 5, NOW_US, 3.0) == due_us


def test_who_begins_to_read_holds_what_is_kept_now() -> None:
    assert hold_due(None, None, NO_BOUNDARY, NOW_US, 3.0) == WANTED_US
    assert hold_due(None, None, NO_BOUNDARY, None, 3.0) is None
    assert hold_due(None, 5, NO_BOUNDARY, NOW_US, 0.0) is None, "nothing expires"


def test_holds_are_dropped_bounded_and_in_the_snapshot() -> None:
    state = DirectoryState()
    for number in range(HOLDS_MAX):
        assert state.apply(encode(Hold(NOW_US, f"d{number}", 1_000 - number))) is True
    refused = state.apply(encode(Hold(NOW_US, "one-more", 5)))
    assert isinstance(refused, Rejected)
    assert not refused.busy
    assert state.apply(encode(Hold(NOW_US, "d3", 7))) is True
    copy = DirectoryState()
    copy.prepare(list(state.freeze()))()
    assert copy.holds == state.holds
    assert copy.held_us == state.held_us == 1_001 - HOLDS_MAX
    assert copy.apply(encode(Hold(NOW_US, f"d{HOLDS_MAX - 1}", None))) is True
    assert copy.held_us == 1_002 - HOLDS_MAX
    assert copy.apply(encode(Hold(NOW_US, "unknown", None))) is True


def of_days(bench: Bench, days: float) -> Bench:
    bench.coordinator._settings = Registry(retention_days=days)
    bench.coordinator.reached_us = lambda: NOW_US
    return bench


def test_a_report_that_changes_little_is_not_written_down() -> None:
    bench = of_days(Bench(), 3.0)
    for oldest_us in (NOW_US, NOW_US + HOLD_STEP_US - 1, None, NOW_US + HOLD_STEP_US, NOW_US - 1):
        bench.decided(Report("east", oldest_us))
    held = [command for command in bench.log.proposed if b"Hold" in command]
    assert len(held) == 3
    assert bench.state.holds == {"east": NOW_US - 1}


def test_the_status_names_who_holds_the_boundary_back_most() -> None:
    bench = of_days(Bench(), 3.0)
    for number in range(20):
        bench.decided(Report(f"d{number}", WANTED_US - number * 1_000_000))
    bench.decided(Report("up", NOW_US))
    assert bench.coordinator.holding() == {f"d{n}": float(n) for n in range(19, 19 - HOLDING_SHOWN, -1)}


def test_the_boundary_that_is_told_is_the_one_that_every_shard_has() -> None:
    bench = of_days(Bench(), 3.0)
    assert bench.coordinator.boundary_us() == NO_BOUNDARY
    for number, boundary_us in ((0, 5), (1, 9)):
        bench.state_of(number).apply(encode(Boundary(NOW_US, boundary_us)))
    bench.decided(Report("new", None))
    assert bench.state.holds == {"new": 5}


@pytest.mark.long
def test_what_a_dispatcher_holds_does_not_expire_through_restarts_until_it_lets_go(
    make_cluster: MakeCluster,
) -> None:
    kept_s = 4.0
    cluster: Cluster = make_cluster(retention_days=kept_s / 86_400)
    client = cluster.client()
    now_us = time.time_ns() // 1_000
    ids, times = event_ids(*range(20)), same_times(20, now_us)
    retrying(client, ids, times, token("t"))
    wait_until(lambda: client.hold("west", now_us).reached_us)
    for node in NODES:
        cluster.kill(node)
        cluster.start(node)
        wait_until(lambda: cluster.leader(0))
    end_us = now_us + round(2 * kept_s * 1e6)
    wait_until(lambda: time.time_ns() // 1_000 > end_us)
    retrying(client, event_ids(99), same_times(1, end_us), token("u"))  # the newest event is 2 x kept_s later
    wait_until(lambda: client.hold("east", end_us).reached_us == end_us)
    wait_until(lambda: client.hold("west", None).boundary_us == now_us, 20.0)
    assert set(client.lookup(ids, times)) == {Registered.PRESENT}
    assert cluster.status("r0")["directory"]["holding"]["west"] > 0
    with pytest.raises(UsageError, match="name of a process"):
        client.hold("east/1", now_us)
    client.release_hold("west")
    wait_until(lambda: set(client.lookup(ids, times)) == {Registered.EXPIRED}, 20.0)
    assert cluster.status("r0")["directory"]["holds"] == 1
