"""A group is founded once: by founders that have all met, never anew by those that have lost their disks."""

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from photon.raft.membership import TOLD_AFTER_S, Founding
from photon.raft.port import Applied, Members
from tests.raft.cluster import Cluster
from tests.raft.kit import TIMING, Lone, Make, VirtualClock, everybody_met
from tests.simulation.proxy import Proxy
from tests.waiting import wait_until

# Many elections would have been held in so long.
LONG_S = 1.2
FOUNDERS = Members(("a", "b", "c"))


# -- the rule ---------------------------------------------------------------------------------------------


def test_a_founder_waits_until_it_has_met_all_and_never_after() -> None:
    met: set[str] = set()
    founding = Founding(0, "a", FOUNDERS, met.__contains__, 0.0)
    assert founding.waits()
    met.add("b")
    assert founding.waits()
    met.add("c")
    assert not founding.waits()
    met.clear()
    assert not founding.waits()


def test_a_log_that_goes_on_or_names_nobody_else_waits_for_nobody() -> None:
    for founders in (None, Members(("a",))):
        assert not Founding(0, "a", founders, set[str]().__contains__, 0.0).waits()


def test_a_long_wait_is_told_once_with_who_is_missing(caplog: pytest.LogCaptureFixture) -> None:
    founding = Founding(7, "a", FOUNDERS, {"b"}.__contains__, 100.0)
    assert founding.waits()
    founding.tell(100.0 + TOLD_AFTER_S - 0.1)
    assert not caplog.messages
    for _ in range(3):
        founding.tell(100.0 + TOLD_AFTER_S)
    (line,) = caplog.messages
    assert "raft a: waiting to meet c before founding group 7: all founders must be up once" in line
    assert "replace this node" in line


# -- one replica ------------------------------------------------------------------------------------------


def test_the_first_founder_stands_as_soon_as_all_have_met_and_again_while_others_open_the_group(
    make: Make, clock: VirtualClock
) -> None:
    met = {"b"}
    lone = make(has_met=met.__contains__)
    lone.turn()
    assert not lone.wire.take("request_pre_vote")
    met.add("c")
    lone.replica.peer_up("c")
    for wait in range(3):
        lone.turn()
        assert {peer for peer, _ in lone.wire.take("request_pre_vote")} == {"b", "c"}
        clock.at += 0.99 * 2**wait * TIMING.heartbeat_s / 4
        lone.turn()
        assert not lone.wire.take("request_pre_vote"), "an answer may be on its way"
        clock.at += 0.02 * 2**wait * TIMING.heartbeat_s / 4
    lone.hear_entries([1], term=1)
    lone.turn()
    lone.wire.take()
    clock.at += 2 * TIMING.heartbeat_s
    lone.replica.peer_up("b")
    lone.turn()
    assert not lone.wire.take("request_pre_vote"), "somebody leads"


@pytest.mark.parametrize("founders", [("a", "b", "c"), None])
def test_one_stands_at_once_again_when_all_were_stopped(
    tmp_path: Path, clock: VirtualClock, founders: Sequence[str] | None
) -> None:
    """The first founder; of a group that is opened without its founders, one of the voters."""
    lone = Lone(tmp_path)
    lone.hear_entries([1], term=3, peer="b")
    lone.turn()
    lone.crash()
    lone = Lone(tmp_path, founders=founders, has_listened=False)
    lone.turn()
    assert {peer for peer, _ in lone.wire.take("request_pre_vote")} == {"b", "c"}
    lone.crash()


def test_no_other_founder_hurries(make: Make, clock: VirtualClock) -> None:
    lone = make(founders=("b", "a", "c"))
    clock.at += 2 * TIMING.heartbeat_s
    lone.turn()
    assert not lone.wire.take("request_pre_vote")


def test_one_that_waits_neither_stands_nor_votes_nor_acknowledges(make: Make, clock: VirtualClock) -> None:
    met = {"b"}
    lone = make(has_met=met.__contains__)
    vote = {"term": 3, "last_log_index": 9, "last_log_term": 2}

    def is_asked_everything() -> set[str]:
        lone.pre_vote()
        lone.hear("b", type="request_pre_vote", round=1, **vote)
        lone.hear("b", type="request_vote", transfer=True, **vote)
        lone.turn()
        lone.hear_entries([3], term=3)
        lone.turn()
        return {message["type"] for _, message in lone.wire.take()}

    assert is_asked_everything() == set()
    assert (lone.replica.core.term, lone.terms()) == (0, [])
    met.add("c")
    assert is_asked_everything() == {
        "request_pre_vote",
        "response_pre_vote",
        "response_vote",
        "next_node_idx",
    }
    assert lone.terms() == [3]


def test_one_whose_log_goes_on_waits_for_nobody_though_it_knows_of_no_meeting(tmp_path: Path) -> None:
    first = Lone(tmp_path, has_met=everybody_met)
    first.hear_entries([1])
    first.turn()
    first.crash()
    again = Lone(tmp_path, has_met=set[str]().__contains__)
    again.pre_vote()
    assert again.wire.take("request_pre_vote")
    again.crash()


# -- whole hosts ------------------------------------------------------------------------------------------


def assert_nothing_happens(cluster: Cluster, *names: str) -> None:
    """None of these leads, follows, or has anything in its log but what founds it, for long."""
    until = time.monotonic() + LONG_S
    while time.monotonic() < until:
        for name in names:
            status = cluster.nodes[name].logs[0].status()
            assert (status.leader, status.term, status.log_entries, status.commit_index) == (None, 0, 1, 1)
        time.sleep(0.02)


def wipe(cluster: Cluster, *names: str) -> None:
    cluster.stop(*names)
    for name in names:
        shutil.rmtree(cluster.directory / name)


def test_two_of_three_that_start_for_the_first_time_wait_for_the_third(cluster: Cluster) -> None:
    cluster.start("a", "c")
    assert_nothing_happens(cluster, "a", "c")
    cluster.start("b")
    assert cluster.register(b"x", 1) is True
    cluster.wait_until_equal()


def test_once_all_have_met_two_of_three_are_enough_though_nothing_was_decided_yet(cluster: Cluster) -> None:
    cluster.start()
    cluster.wait_for_leader()
    assert {(cluster.directory / name / "met").exists() for name in "abc"} == {True}
    cluster.stop()
    cluster.start("a", "b")
    assert cluster.register(b"x", 1) is True


def test_a_later_group_is_founded_by_a_majority_since_its_founders_have_met(cluster: Cluster) -> None:
    cluster.start()
    cluster.register(b"x", 1)
    for node in cluster.nodes.values():
        wait_until(lambda node=node: node.host._home._met.keys() == set("abc") - {node.logs[0].status().node})  # type: ignore[misc]
    cluster.stop("c")
    for name in "ab":
        node = cluster.nodes[name]
        node.in_raft_thread(lambda node=node: node.add_group(1, list("abc")))  # type: ignore[misc]
    assert cluster.register(b"x", 2, group=1) is True


@pytest.mark.long
@pytest.mark.parametrize("kept", ["a", "b", "c"])  # the lesser id dials: each refuses in its own way
@pytest.mark.parametrize("there", [True, False], ids=["with the third", "without the third"])
def test_two_that_lost_their_disks_found_nothing_anew(
    cluster: Cluster, kept: str, there: bool, caplog: pytest.LogCaptureFixture
) -> None:
    cluster.start()
    assert cluster.register(b"x", 1) is True
    cluster.wait_until_equal()
    lost = [name for name in "abc" if name != kept]
    wipe(cluster, *lost)
    if not there:
        cluster.stop(kept)
    caplog.clear()
    cluster.start(*lost)
    assert_nothing_happens(cluster, *lost)
    for name in lost:  # nor after a restart, when they have been told who the third is
        cluster.stop(name)
        cluster.start(name)
    if not there:
        cluster.start(kept)
    assert_nothing_happens(cluster, *lost)
    assert not isinstance(cluster.propose(lost[0], b"x" + bytes(8)), Applied)
    remembers = cluster.nodes[kept].logs[0].status()
    assert remembers.log_entries > 1
    assert not remembers.is_leader
    for name in lost:
        line = f"raft {name}: no connection to {kept}: {kept} refuses this node: {name} does not have"
        assert any(said.startswith(line) and "replace this node" in said for said in caplog.messages)


def test_one_that_lost_its_disk_gets_in_nobodys_way(cluster: Cluster) -> None:
    cluster.start()
    cluster.register(b"x", 1)
    wipe(cluster, "b")
    cluster.start("b")
    assert cluster.register(b"x", 2) is False
    assert cluster.register(b"y", 2) is True
    assert_nothing_happens(cluster, "b")


def test_founders_that_reach_each_other_through_proxies_meet(cluster: Cluster) -> None:
    listens = dict(cluster.addresses)
    proxy = Proxy({name: port for name, (_, port) in listens.items()}, lambda port: "a peer")
    try:
        for name in "abc":
            cluster.addresses = {other: ("127.0.0.1", proxy.ports[other]) for other in "abc"}
            cluster.addresses[name] = listens[name]
            cluster.start(name)
        assert cluster.register(b"x", 1) is True
        cluster.wait_until_equal()
    finally:
        cluster.stop()
        proxy.close()
