"""Groups and members that change while whole hosts run: threads, sockets, disks."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from photon.core.errors import LockedError
from photon.raft.port import ChangeKind, Members, RaftLimits
from tests.raft.cluster import Cluster, MakeCluster
from tests.raft.kit import command
from tests.waiting import wait_until

ADD, PROMOTE, REMOVE = ChangeKind.ADD_LEARNER, ChangeKind.PROMOTE, ChangeKind.REMOVE


class Client(threading.Thread):
    """Registers one id after the other."""

    def __init__(self, cluster: Cluster) -> None:
        super().__init__(daemon=True)
        self.count = 0
        self._cluster = cluster
        self._stop_asked = threading.Event()

    def run(self) -> None:
        while not self._stop_asked.is_set():
            assert self._cluster.register(b"c%d" % self.count, 1) is True
            self.count += 1

    def wait_for(self, more: int) -> None:
        until = self.count + more
        wait_until(lambda: self.count >= until or not self.is_alive())
        assert self.is_alive()

    def end(self) -> None:
        self._stop_asked.set()
        self.join(15.0)


@contextmanager
def committing(cluster: Cluster) -> Iterator[Client]:
    client = Client(cluster)
    client.start()
    try:
        yield client
        client.wait_for(5)
    finally:
        client.end()


def promote_when_ready(cluster: Cluster, name: str) -> None:
    cluster.change(ADD, name)
    cluster.change(PROMOTE, name)


def test_a_dead_node_of_three_is_replaced_by_an_empty_one_while_commands_are_committed(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster(limits=RaftLimits(compact_entries=40, tail_entries=5, segment_bytes=2000))
    cluster.start()
    with committing(cluster) as client:
        client.wait_for(60)
        dead, left = (name for name in "abc" if name != cluster.leader())
        cluster.stop(dead)
        cluster.add_address("d")
        cluster.start("d")
        promote_when_ready(cluster, "d")
        cluster.change(REMOVE, dead)
        del cluster.addresses[dead]
        cluster.tell_peers()
        client.wait_for(20)
    cluster.wait_until_equal()
    for node in cluster.nodes.values():
        assert node.logs[0].members == Members(tuple(sorted({*"abcd"} - {dead})))
    cluster.stop(left)
    assert cluster.register(b"with the new one's vote", 1) is True
    cluster.wait_until_equal()
    assert cluster.nodes["d"].machines[0].tokens[b"c0"] == 1


def test_a_learner_far_behind_catches_up_by_snapshot_while_commits_go_on(make_cluster: MakeCluster) -> None:
    limits = RaftLimits(compact_entries=50, tail_entries=5, snapshot_piece_bytes=1000, segment_bytes=2000)
    cluster = make_cluster(limits=limits)
    cluster.start()
    with committing(cluster) as client:
        client.wait_for(200)
        cluster.add_address("d")
        cluster.start("d")
        cluster.change(ADD, "d")
        wait_until(lambda: b"c199" in cluster.nodes["d"].machines[0].tokens)
    cluster.wait_until_equal()
    assert (cluster.directory / "d" / "group-0000" / "snapshot").exists()
    assert cluster.nodes["d"].logs[0].members == Members(("a", "b", "c"), ("d",))
    cluster.stop("d")
    cluster.start("d")
    cluster.wait_until_equal()


def test_a_removed_replica_is_taken_in_again_with_what_it_has_on_disk(cluster: Cluster) -> None:
    cluster.start()
    leader = cluster.wait_for_leader()
    removed, other = (name for name in "abc" if name != leader)
    cluster.change(REMOVE, removed)
    cluster.register(b"x", 1)
    promote_when_ready(cluster, removed)
    cluster.wait_until_equal()
    cluster.stop(other)
    assert cluster.register(b"with its vote", 1) is True


def test_leadership_is_handed_to_the_one_that_is_named(cluster: Cluster) -> None:
    cluster.start()
    for _ in range(3):
        leader = cluster.wait_for_leader()
        to = next(name for name in "abc" if name != leader)
        node = cluster.nodes[leader]
        wait_until(lambda node=node, to=to: node.in_raft_thread(lambda: node.logs[0].hand_over(to)))
        wait_until(lambda to=to: cluster.leader() == to)
        cluster.register(b"x", 1)


def test_groups_come_and_go_while_the_host_runs(cluster: Cluster) -> None:
    cluster.start()
    cluster.register(b"first", 1)
    cluster.wait_until_equal()  # all are connected
    for name, node in cluster.nodes.items():
        node.in_raft_thread(lambda node=node: node.add_group(1, ["a", "b", "c"]))
        assert (cluster.directory / name / "group-0001").is_dir()
    for group in (0, 1):
        assert cluster.register(b"x", group, group=group) is True
    cluster.wait_until_equal(1)
    for node in cluster.nodes.values():
        with pytest.raises(LockedError):
            node.in_raft_thread(
                lambda node=node: node.host.add_group(1, node.machines[1], lambda log: None, None)
            )
        node.in_raft_thread(lambda node=node: node.host.remove_group(1))
    assert cluster.register(b"y", 7) is True
    for name, node in cluster.nodes.items():
        wait_until(lambda name=name: not list((cluster.directory / name).glob("group-0001*")))
        assert node.in_raft_thread(node.host.groups_on_disk) == [0]
        assert not node.fatal
    cluster.stop()
    cluster.start()
    assert cluster.register(b"y", 8) is False


def test_a_group_may_remove_itself_and_who_waits_there_is_told(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(names="a", groups=2)
    cluster.start()
    node = cluster.nodes["a"]
    cluster.register(b"x", 1, group=1)
    outcomes: list[object] = []

    def last_act() -> None:
        node.logs[1].propose(command(b"y", 1), outcomes.append)
        node.host.remove_group(1)

    node.machines[1].on_apply = lambda count, digest: last_act()
    node.waiting[1].append((command(b"z", 1), outcomes.append))
    node.host.wake()
    wait_until(lambda: len(outcomes) == 2)
    wait_until(lambda: node.host.groups_on_disk() == [0])
    assert cluster.register(b"x", 1) is True
    assert not node.fatal


def test_a_group_that_joins_at_run_time_follows_when_it_is_added(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(names="ab")
    cluster.start()
    for node in cluster.nodes.values():
        node.in_raft_thread(
            lambda node=node: node.add_group(1, ["a"] if node is cluster.nodes["a"] else None)
        )
    cluster.register(b"x", 1, group=1)
    assert cluster.nodes["b"].logs[1].members == Members()
    cluster.change(ADD, "b", group=1)
    cluster.wait_until_equal(1)
    cluster.change(PROMOTE, "b", group=1)
    wait_until(lambda: cluster.nodes["b"].logs[1].members == Members(("a", "b")))
