"""Groups, members and shares in the directory: by rules, and with real replicas."""

import time

import msgspec
import pytest

from idregistry.coordinator import Beat
from idregistry.rules.commands import Drain, Enter, Leave, Move, Rejected, Write, encode
from idregistry.rules.directory import ROWS_BYTES_MAX, DirectoryState
from photon.core.errors import UsageError
from photon.raft.rules.placement import MEMBER_LEASE_S, SHARES_MAX
from tests.idregistry.kit import NOW_US
from tests.idregistry.test_coordinator import Bench
from tests.idregistry.test_replicas import MakeCluster
from tests.waiting import wait_until

GROUP = "east-dispatchers"


class Directory:
    def __init__(self):
        self.state = DirectoryState()

    def put(self, command):
        return self.state.apply(encode(command))

    def enter(self, name, life=1, shares=2):
        return self.put(Enter(NOW_US, GROUP, name, life, f"{name}:1", shares))

    def give(self, share, name):
        sequencer = self.state.groups[GROUP].shares[share].sequencer
        assert self.put(Move(NOW_US, GROUP, share, sequencer, name)) is True
        return sequencer + 1

    def write(self, share, sequencer, rows=(), removed=(), release=False):
        return self.put(Write(NOW_US, GROUP, share, sequencer, dict(rows), tuple(removed), release))


def test_only_the_present_owner_writes_and_its_successor_reads_what_it_wrote():
    directory = Directory()
    directory.enter("a")
    directory.enter("b")
    first = directory.give(0, "a")
    assert directory.write(0, first, {b"x": b"1", b"y": b"2"}).stands
    assert directory.write(0, first, {b"x": b"3"}, [b"y"]).rows == {b"x": b"3"}
    assert not directory.write(0, first + 1, {b"x": b"9"}).stands
    assert directory.give(0, "b") == first + 1  # an heir only
    assert directory.write(0, first, {b"z": b"4"}, release=True).stands
    assert not directory.write(0, first, {b"x": b"9"}).stands
    read = directory.write(0, first + 1)
    assert (read.stands, read.rows, read.written) == (True, {b"x": b"3", b"z": b"4"}, first)
    assert directory.write(0, first + 1, {}).written == first, "reading is no writing"
    directory.write(0, first + 1, {b"x": b"5"})
    assert directory.write(0, first + 1).written == first + 1


def test_what_is_kept_outlives_its_owner_and_a_snapshot():
    directory = Directory()
    directory.enter("a")
    sequencer = directory.give(1, "a")
    directory.write(1, sequencer, {b"k": b"v"})
    assert directory.put(Leave(NOW_US, GROUP, "a", 1)).members == {}
    assert not directory.write(1, sequencer).stands
    copy = DirectoryState()
    copy.prepare(directory.state.freeze())()
    assert (copy.groups, copy.rows) == (directory.state.groups, directory.state.rows)
    directory.state = copy
    directory.enter("b")
    assert directory.write(1, directory.give(1, "b")).rows == {b"k": b"v"}


def test_what_there_can_be_is_bounded():
    directory = Directory()
    assert isinstance(directory.enter("a", shares=0), Rejected)
    assert isinstance(directory.enter("a", shares=SHARES_MAX + 1), Rejected)
    assert isinstance(directory.put(Drain(NOW_US, GROUP, "a")), Rejected)
    assert isinstance(directory.put(Leave(NOW_US, GROUP, "a", 1)), Rejected)
    directory.enter("a", life=2)
    assert isinstance(directory.enter("a", life=1), Rejected)
    sequencer = directory.give(0, "a")
    full = {bytes([n]): bytes(ROWS_BYTES_MAX // 8) for n in range(7)}
    assert directory.write(0, sequencer, full).stands
    assert isinstance(directory.write(0, sequencer, {b"more": bytes(ROWS_BYTES_MAX // 8)}), Rejected)
    assert directory.write(0, sequencer).rows == full


def test_the_leader_gives_shares_to_who_is_heard_and_takes_them_from_who_is_not():
    bench = Bench()
    group = beat(bench, "a", shares=4)
    assert group.members["a"].address == "a:1"
    assert owners(bench) == ["a"] * 4
    beat(bench, "b", shares=9)
    ticks(bench, 9)
    assert len(bench.state.groups[GROUP].shares) == 4
    assert [share.heir for share in bench.state.groups[GROUP].shares].count("b") == 2
    for _ in range(5):
        bench.clock.advance(MEMBER_LEASE_S / 2)
        beat(bench, "b")
    assert owners(bench) == ["b"] * 4


def test_a_new_leader_takes_all_for_heard_just_now():
    bench = Bench()
    beat(bench, "a")
    bench.log.lose_leadership(None)
    bench.clock.advance(10 * MEMBER_LEASE_S)
    ticks(bench, 2)
    bench.log.lose_leadership("r0")
    ticks(bench, 5)
    assert owners(bench) == ["a", "a"]
    bench.clock.advance(2 * MEMBER_LEASE_S)
    ticks(bench, 5)
    assert owners(bench) == ["", ""]


def test_a_beat_that_says_nothing_new_stands_in_no_log():
    bench = Bench()
    beat(bench, "a")
    before = len(bench.log.proposed)
    for _ in range(10):
        beat(bench, "a")
    assert len(bench.log.proposed) == before


def test_who_alone_can_have_the_shares_is_not_drained_and_goes_on_with_them():
    bench = Bench()
    beat(bench, "a")
    drain = Drain(0, GROUP, "a")
    assert bench.decided(drain).why.startswith(f"no other member of {GROUP} is there")
    assert not bench.state.groups[GROUP].members["a"].leaves
    beat(bench, "b")
    bench.decided(drain)
    ticks(bench, 9)
    assert "no other member" in bench.decided(Drain(0, GROUP, "b")).why, "a has been drained"
    assert [share.heir for share in bench.state.groups[GROUP].shares] == ["b", "b"]
    assert isinstance(bench.decided(Drain(0, GROUP, "c")), Rejected)


def owners(bench):
    return [share.owner for share in bench.state.groups[GROUP].shares]


def ticks(bench, count):
    for _ in range(count):
        bench.tick()


def beat(bench, name, shares=2, life=1):
    group = bench.decided(Beat(GROUP, name, life, f"{name}:1", shares))
    ticks(bench, 8)
    return group


@pytest.mark.cluster
def test_shares_move_between_members_of_real_replicas(make_cluster: MakeCluster):
    cluster = make_cluster()
    client = cluster.client()
    client.configuration()  # it is founded
    wait_until(lambda: client.beat(GROUP, "a", 1, "a:1", 3).owned("a").keys() == {0, 1, 2})
    group = client.beat(GROUP, "a", 1, "a:1", 3)
    sequencer = group.shares[0].sequencer
    assert client.write_share(GROUP, 0, sequencer, {b"k": b"v"}).stands
    with pytest.raises(UsageError, match="life"):
        client.beat(GROUP, "a", 0, "a:1", 3)
    with pytest.raises(UsageError, match="rows"):
        client.write_share(GROUP, 0, sequencer, {b"k": bytes(ROWS_BYTES_MAX)})
    # More than a command may have, of nothing.
    with pytest.raises(UsageError, match="rows"):
        client.write_share(GROUP, 0, sequencer, {}, [b""] * 1_500_000)
    with pytest.raises(UsageError, match="name of a process"):
        client.write_share("g" * (3 << 20), 0, sequencer, {})
    client.beat(GROUP, "b", 1, "b:1", 3)
    began = time.monotonic()
    wait_until(lambda: client.beat(GROUP, "b", 1, "b:1", 3).owned("b").keys() == {0, 1, 2})
    assert time.monotonic() - began < 3 * MEMBER_LEASE_S
    group = client.beat(GROUP, "b", 1, "b:1", 3)
    assert not client.write_share(GROUP, 0, sequencer, {b"k": b"w"}).stands
    read = client.write_share(GROUP, 0, group.shares[0].sequencer, {}, read=True)
    assert (read.stands, read.rows, read.written) == (True, {b"k": b"v"}, sequencer)
    client.beat(GROUP, "c", 1, "c:1", 3)
    assert client.drain(GROUP, "b").members["b"].leaves
    with pytest.raises(UsageError, match="no member"):
        client.drain(GROUP, "z")
    assert msgspec.to_builtins(client.drain(GROUP, "b", 1)).pop(0).keys() == {"c"}
