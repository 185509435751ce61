"""Whole hosts on loopback: threads, sockets, disks."""

import pickle
import random
import shutil
import socket
import threading
import time
from pathlib import Path

import pytest

from photon.core import disk
from photon.core.errors import AddressInUseError, DiskFullError
from photon.raft.addresses import Endpoint
from photon.raft.host import RaftHost
from photon.raft.port import RaftLimits, RaftTiming
from tests.raft.cluster import Cluster, MakeCluster
from tests.raft.kit import Register, command
from tests.waiting import wait_until


def test_a_killed_and_restarted_leader_loses_nothing_and_no_id_is_won_twice(cluster: Cluster) -> None:
    cluster.start()
    for number in range(20):
        assert cluster.register(b"id%d" % number, 1) is True
    first = cluster.wait_for_leader()
    cluster.stop(first)
    for number in range(40):
        assert cluster.register(b"id%d" % number, 2) is (number >= 20)
    cluster.start(first)
    for number in range(40):
        assert cluster.register(b"id%d" % number, 3) is False
    cluster.wait_until_equal()
    assert cluster.nodes[first].machines[0].tokens[b"id7"] == 1


def test_a_replica_whose_disk_was_put_back_from_a_copy_stops_and_grants_nothing(cluster: Cluster) -> None:
    directory, copy = cluster.directory / "b", cluster.directory / "copy"
    cluster.start()
    cluster.register(b"warm", 1)
    cluster.stop("b")
    shutil.copytree(directory, copy)
    cluster.start("b")
    b, c = (cluster.nodes[name].host._home for name in "bc")
    wait_until(lambda: c.last_life("b") == b.life)
    cluster.stop("c")
    assert cluster.register(b"X", 1) is True
    cluster.stop("a", "b")
    shutil.rmtree(directory)
    copy.rename(directory)
    cluster.start("b", "c")
    fatal = cluster.nodes["b"].fatal
    wait_until(lambda: fatal)
    assert "c remembers a later life of this replica: its disk was put back" in str(fatal[0])
    cluster.stop("b")
    cluster.start("a")
    assert cluster.register(b"X", 2) is False


def test_many_groups_share_one_port_and_one_thread(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(groups=4)
    cluster.start()
    for group in range(4):
        assert cluster.register(b"same", group, group=group) is True
    for group in range(4):
        cluster.wait_until_equal(group)
        assert {node.machines[group].tokens[b"same"] for node in cluster.nodes.values()} == {group}


def test_a_group_of_one_leads_itself_at_once(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(names="a")
    before = time.monotonic()
    cluster.start()
    assert cluster.register(b"x", 1) is True
    assert time.monotonic() - before < 1.0


def test_nothing_is_ever_unpickled(make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object, **named: object) -> object:
        raise AssertionError("something was unpickled")

    for name in ("loads", "load", "Unpickler", "_loads", "_load", "_Unpickler"):
        monkeypatch.setattr(pickle, name, refuse)
    monkeypatch.setattr("pysyncobj.pickle.loads", refuse)
    monkeypatch.setattr("pysyncobj.pickle.load", refuse)
    cluster = make_cluster(limits=RaftLimits(compact_entries=20, tail_entries=2))
    cluster.start()
    cluster.wait_for_leader()
    cluster.stop("c")
    for number in range(60):
        cluster.register(b"id%d" % number, 1)
    cluster.start("c")
    cluster.wait_until_equal()
    cluster.stop()
    cluster.start()
    cluster.register(b"after", 1)
    cluster.wait_until_equal()
    assert not any(node.fatal for node in cluster.nodes.values())


def test_a_disk_that_fails_stops_the_host_and_nothing_is_acknowledged(
    make_cluster: MakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = make_cluster(names="a")
    cluster.start()
    cluster.register(b"before", 1)

    def full(fd: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk, "sync_data", full)
    outcome = cluster.propose("a", command(b"x", 1))
    assert not hasattr(outcome, "result")
    node = cluster.nodes["a"]
    wait_until(lambda: bool(node.fatal))
    assert isinstance(node.fatal[0], DiskFullError)
    monkeypatch.undo()
    cluster.stop()
    cluster.start()
    assert cluster.register(b"before", 2) is False


@pytest.fixture
def pair(make_cluster: MakeCluster) -> Cluster:
    """a and b, which have committed something."""
    cluster = make_cluster(names="ab")
    cluster.start()
    cluster.register(b"before", 1)
    cluster.wait_until_equal()
    return cluster


def test_a_follower_acknowledges_what_came_before_it_applies_what_is_committed(pair: Cluster) -> None:
    """Else leader and follower take turns: one waits while the other applies."""
    leader = pair.wait_for_leader()
    (follower,) = set("ab") - {leader}
    node, log = pair.nodes[leader], pair.nodes[leader].logs[0]
    decided = threading.Event()
    in_time: list[bool] = []

    def slow(body: bytes) -> object:
        in_time.append(decided.wait(0.5))
        return Register.apply(machine, body)

    machine = pair.nodes[follower].machines[0]
    machine.apply = slow  # type: ignore[method-assign]

    def first_is_applied(outcome: object) -> None:
        # Proposed here, the second goes to the follower in one message with the news that the first is
        # committed, and needs its acknowledgement to be applied.
        log.propose(command(b"second", 1), lambda outcome: decided.set())

    node.waiting[0].append((command(b"first", 1), first_is_applied))
    node.host.wake()
    pair.wait_until_equal()
    wait_until(lambda: len(in_time) == 2)
    assert in_time == [True, True]


def test_a_turn_syncs_only_what_it_has_written(pair: Cluster, monkeypatch: pytest.MonkeyPatch) -> None:
    syncs: list[int] = []
    sync_data = disk.sync_data
    monkeypatch.setattr(disk, "sync_data", lambda fd: (syncs.append(fd), sync_data(fd))[1])
    for number in range(10):
        pair.register(b"id%d" % number, 1)
    pair.wait_until_equal()
    assert len(syncs) == 2 * 10


def test_a_leaders_entries_are_on_their_way_while_its_own_disk_works(
    pair: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    leader = pair.wait_for_leader()
    (follower,) = set("ab") - {leader}
    journal = pair.nodes[follower].logs[0].store.journal  # type: ignore[attr-defined]
    last, came = journal.last_index, []
    sync_data = disk.sync_data

    def sync(fd: int) -> None:
        if threading.current_thread().name == f"raft-{leader}":
            deadline = time.monotonic() + 0.5
            while journal.last_index == last and time.monotonic() < deadline:
                time.sleep(0.001)
            came.append(journal.last_index > last)
        sync_data(fd)

    monkeypatch.setattr(disk, "sync_data", sync)
    pair.register(b"id", 1)
    assert came == [True]


def lone_host(directory: Path, port: int = 0) -> RaftHost:
    return RaftHost(
        Endpoint("a", ("127.0.0.1", port), b""),
        {},
        directory,
        RaftTiming(),
        RaftLimits(),
        rng=random.Random(1),
        on_fatal=lambda error: None,
    )


def test_stopping_is_clean_before_the_start_and_twice(tmp_path: Path) -> None:
    host = lone_host(tmp_path)
    host.add_group(0, Register(), lambda log: None, ["a"])
    host.stop()
    host.stop()
    host.wake()
    again = lone_host(tmp_path)
    again.add_group(0, Register(), lambda log: None, ["a"])
    again.start()
    again.stop()
    again.stop()
    again.wake()
    assert not [thread for thread in threading.enumerate() if thread.name == "raft-a"]


def test_an_address_that_is_taken_is_an_error_at_the_start(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        host = lone_host(tmp_path, taken.getsockname()[1])
        with pytest.raises(AddressInUseError):
            host.start()
        host.stop()


def test_waking_gets_on_tick_called_and_an_idle_host_sleeps(tmp_path: Path) -> None:
    host = lone_host(tmp_path)
    ticks: list[float] = []
    host.add_group(0, Register(), lambda log: ticks.append(time.monotonic()), ["a"])
    host.start()
    try:
        wait_until(lambda: len(ticks) > 3)
        for _ in range(20):
            before = len(ticks)
            asked = time.monotonic()
            host.wake()
            wait_until(lambda: len(ticks) > before)
            assert ticks[before] - asked < 0.5
        # Idle: a turn for each heartbeat, no more.
        start, began = len(ticks), time.monotonic()
        wait_until(lambda: len(ticks) >= start + 8)
        assert time.monotonic() - began > 0.2
    finally:
        host.stop()
