"""What a leader sends when the way to a peer is narrow, and all groups share it."""

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from photon.core.errors import CorruptStateError
from photon.raft.core import RaftCore
from photon.raft.journal import Journal
from photon.raft.port import MIB, RaftLimits
from photon.raft.rules.codec import Message, decode
from photon.raft.sender import Sender
from photon.raft.snapshot import SnapshotId, write_snapshot
from photon.raft.store import ReplicaStore
from tests.raft.kit import head

LIMITS = RaftLimits()
TURN_BYTES = 64 << 10  # what 100 Mbit/s take in 5 ms


class SharedWay:
    """One budget for all groups, as the transport has it."""

    def __init__(self) -> None:
        self.queued = 0
        self.sent: list[tuple[int, Message]] = []

    def wire(self, group: int) -> "GroupWay":
        return GroupWay(self, group)


class GroupWay:
    def __init__(self, way: SharedWay, group: int) -> None:
        self._way = way
        self._group = group

    def send(self, peer: str, data: bytes) -> None:
        self._way.queued += len(data)
        self._way.sent.append((self._group, decode(data)))

    def room(self, peer: str) -> int:
        return LIMITS.outgoing_bytes - self._way.queued


class Peer:
    """What the core knows of a follower."""

    term = 1
    commit_index = 1

    def __init__(self, next_index: int) -> None:
        self.next = next_index

    def connected(self) -> list[str]:
        return ["b"]

    def next_index(self, peer: str) -> int:
        return self.next

    def set_next_index(self, peer: str, index: int) -> None:
        self.next = index


class Group:
    """A leader's log, and one follower of it."""

    def __init__(self, directory: Path, way: SharedWay, number: int, first: int, next_index: int) -> None:
        directory.mkdir()
        self.journal = Journal(directory, 1 << 40)
        self.journal.append(b"\1", first, 1)
        self.peer = Peer(next_index)
        self.snapshot = snapshot = directory / "snapshot"
        write_snapshot(snapshot, head(first, 1), [bytes(MIB)] * 20)
        store = SimpleNamespace(
            journal=self.journal, snapshots=SimpleNamespace(path=snapshot, current=SnapshotId(first, 1))
        )
        self.sender = Sender(cast(RaftCore, self.peer), cast(ReplicaStore, store), way.wire(number), LIMITS)

    def append(self, size: int) -> None:
        self.journal.append(bytes(size), self.journal.last_index + 1, 1)

    def close(self) -> None:
        self.sender.forget_all()
        self.journal.abandon()


@pytest.fixture
def way() -> SharedWay:
    return SharedWay()


@pytest.fixture
def behind(tmp_path: Path, way: SharedWay) -> Iterator[Group]:
    """Its follower needs the snapshot."""
    group = Group(tmp_path / "1", way, 1, first=100, next_index=5)
    yield group
    group.close()


@pytest.fixture
def level(tmp_path: Path, way: SharedWay) -> Iterator[Group]:
    """Its follower has all there is."""
    group = Group(tmp_path / "2", way, 2, first=1, next_index=2)
    yield group
    group.close()


@pytest.mark.parametrize("size", [1000, LIMITS.command_bytes_max])
def test_a_snapshot_on_a_slow_link_holds_no_other_groups_entries_back(
    way: SharedWay, behind: Group, level: Group, size: int
) -> None:
    behind.sender.send_all(heartbeat=True)
    assert way.queued > MIB, "the snapshot is on its way"
    level.append(size)
    level.sender.send_all(heartbeat=True)
    assert level.peer.next == 3
    assert way.queued < LIMITS.outgoing_bytes // 2, "and it does not wait behind much of it"


def test_a_snapshot_on_a_slow_link_arrives_though_another_group_is_busy(
    way: SharedWay, behind: Group, level: Group
) -> None:
    for _ in range(1000):
        behind.sender.send_all(heartbeat=False)
        level.append(TURN_BYTES // 2)
        level.sender.send_all(heartbeat=False)
        assert level.peer.next == level.journal.last_index + 1, "the other's entries go at once"
        way.queued = max(0, way.queued - TURN_BYTES)
        if behind.peer.next > 100:
            return
    pytest.fail(f"{way.queued} bytes wait, and the snapshot has not left")


def test_a_snapshot_is_sent_as_it_stands_on_the_disk(way: SharedWay, behind: Group) -> None:
    while behind.peer.next <= 100:
        behind.sender.send_all(heartbeat=False)
        way.queued = 0
    pieces = [message["serialized"] for _, message in way.sent]
    sent = b"".join(piece.data for piece in pieces)
    assert sent == behind.snapshot.read_bytes()
    assert {piece.total for piece in pieces} == {len(sent)}
    assert max(len(piece.data) for piece in pieces) == LIMITS.snapshot_piece_bytes


def test_a_leader_whose_own_snapshot_has_rotted_stops_instead_of_sending_it_for_ever(
    way: SharedWay, behind: Group
) -> None:
    with behind.snapshot.open("r+b") as file:
        file.seek(10 * MIB)
        file.write(b"\1")
    with pytest.raises(CorruptStateError, match="chunk 9 of the snapshot is damaged"):
        while behind.peer.next <= 100:
            behind.sender.send_all(heartbeat=False)
            way.queued = 0


def test_entries_go_as_far_as_there_is_room_and_the_rest_follows(way: SharedWay, level: Group) -> None:
    for _ in range(5):
        level.append(MIB)
    way.queued = LIMITS.outgoing_bytes - 2 * MIB
    level.sender.send_all(heartbeat=True)
    assert level.peer.next == 4 and level.sender.behind
    way.queued = 0
    level.sender.send_all(heartbeat=False)
    assert level.peer.next == 7 and not level.sender.behind


def test_what_stands_for_a_snapshots_last_entry_is_never_sent(way: SharedWay, behind: Group) -> None:
    """The place holder's command is lost, and so is the term before it: the snapshot is sent instead."""
    behind.append(10)
    behind.peer.next = 100
    behind.sender.send_all(heartbeat=True)
    assert all("serialized" in message for _, message in way.sent)
    behind.sender.forget("b")
    behind.peer.next = 101
    way.sent.clear()
    way.queued = 0
    behind.sender.send_all(heartbeat=True)
    ((_, message),) = way.sent
    assert (message["prevLogIdx"], message["prevLogTerm"], len(message["entries"])) == (100, 1, 1)


def test_entries_go_with_the_term_of_the_one_before_them(level: Group, way: SharedWay) -> None:
    level.journal.append(b"\0", 2, 4)
    level.peer.term = 4
    level.sender.send_all(heartbeat=False)
    ((_, message),) = way.sent
    assert (message["prevLogIdx"], message["prevLogTerm"]) == (1, 1)
