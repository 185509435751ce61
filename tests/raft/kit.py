"""Parts for the tests of the raft room: a state machine, a wire that remembers, jobs that run when told."""

import hashlib
import random
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from photon.raft.membership import HasMet
from photon.raft.port import Change, ChangeKind, Members, Outcome, RaftLimits, RaftTiming, ReplicatedLog
from photon.raft.replica import NodeContext, Replica
from photon.raft.rules.codec import Message, SnapshotPiece, decode, encode
from photon.raft.rules.members import command_of
from photon.raft.snapshot import Head, SnapshotId, write_snapshot

TIMING = RaftTiming()
ALL_PEERS: Sequence[str] = ("a and its peers",)
# Small enough that a few commands roll segments, start snapshots, and fill the way to a peer.
SMALL = RaftLimits(
    command_bytes_max=64,
    batch_bytes=200,
    outgoing_bytes=1000,
    compact_entries=15,
    tail_entries=3,
    segment_bytes=600,
    snapshot_piece_bytes=100,
    in_flight_max=8,
)


class Register:
    """First token an id is registered with wins. `digests[n]` sums up the first n commands applied."""

    def __init__(self) -> None:
        self.tokens: dict[bytes, int] = {}
        self.count = 0
        self.digest = b""
        self.on_apply: Callable[[int, bytes], None] = lambda count, digest: None

    def apply(self, command: bytes) -> object:
        key, (token,) = command[:-8], struct.unpack("<Q", command[-8:])
        won = self.tokens.setdefault(key, token) == token
        self.count += 1
        self.digest = hashlib.md5(self.digest + command).digest()
        self.on_apply(self.count, self.digest)
        return won

    def freeze(self) -> Iterable[bytes]:
        rows = [key + struct.pack("<Q", token) for key, token in self.tokens.items()]
        head = struct.pack("<Q", self.count) + self.digest
        return iter([head, *rows])

    def prepare(self, chunks: Iterable[bytes]) -> Callable[[], None]:
        head, *rows = chunks

        def put() -> None:
            self.count, self.digest = struct.unpack("<Q", head[:8])[0], head[8:]
            self.tokens = {row[:-8]: struct.unpack("<Q", row[-8:])[0] for row in rows}

        return put


def head(index: int, term: int, voters: str = "abc", learners: str = "") -> Head:
    """What a snapshot begins with."""
    return Head(SnapshotId(index, term), Members(tuple(voters), tuple(learners)))


def snapshot_of(directory: Path, index: int, term: int = 1, voters: str = "abc", learners: str = "") -> bytes:
    """A snapshot's file, of a state that has one id."""
    machine = Register()
    machine.apply(command(b"snap%d" % index, index))
    write_snapshot(directory / "made", head(index, term, voters, learners), machine.freeze())
    return (directory / "made").read_bytes()


def command(key: bytes, token: int) -> bytes:
    return key + struct.pack("<Q", token)


def regular(index: int) -> bytes:
    """A command of the register, as the log has it."""
    return b"\x00" + command(b"%d" % index, index)


def everybody_met(peer: str) -> bool:
    return True


class VirtualClock:
    """Seconds that pass when the test says so; every look takes a little, as in life."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        self.at += 1e-6
        return self.at


class RecordingWire:
    """Keeps what was sent, by peer, in order."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Message]] = []
        self.free = 1 << 20

    def send(self, peer: str, data: bytes) -> None:
        self.sent.append((peer, decode(data)))

    def room(self, peer: str) -> int:
        return self.free

    def take(self, kind: str | None = None) -> list[tuple[str, Message]]:
        sent, self.sent = self.sent, []
        return [(peer, message) for peer, message in sent if kind is None or message["type"] == kind]


class ManualJob:
    def __init__(self, work: Callable[[], None]) -> None:
        self.work = work
        self.finished = False

    def done(self) -> bool:
        return self.finished

    def result(self) -> None:
        self.work()


class ManualJobs:
    """A job runs when the test says `finish`."""

    def __init__(self) -> None:
        self.running: ManualJob | None = None
        self.started = 0

    def busy(self) -> bool:
        return self.running is not None and not self.running.finished

    def start(self, work: Callable[[], None]) -> ManualJob:
        self.started += 1
        self.running = ManualJob(work)
        return self.running

    def finish(self) -> None:
        assert self.running is not None
        self.running.finished = True


class Lone:
    """One replica, whose peers are played by the test."""

    def __init__(
        self,
        directory: Path,
        peers: Iterable[str] = ("b", "c"),
        limits: RaftLimits = SMALL,
        timing: RaftTiming = TIMING,
        founders: Sequence[str] | None = ALL_PEERS,
        has_met: HasMet = everybody_met,
        has_listened: bool = True,
    ) -> None:
        if founders is ALL_PEERS:
            founders = ("a", *peers)
        self.machine = Register()
        self.wire = RecordingWire()
        self.jobs = ManualJobs()
        self.waiting: deque[tuple[bytes, Callable[[Outcome], None]]] = deque()
        self.replica = Replica(
            NodeContext("a", self.jobs, timing, limits, random.Random(1), has_met),
            0,
            directory,
            self.machine,
            self._on_tick,
            self.wire,
            founders,
        )
        for peer in peers:
            self.replica.peer_up(peer)
        if has_listened:  # long enough to vote
            self.replica.core.heard_leader_at = 0.0

    def _on_tick(self, log: ReplicatedLog) -> None:
        while self.waiting:
            log.propose(*self.waiting.popleft())

    def propose(self, body: bytes, token: int = 1) -> list[Outcome]:
        """Queue a command; the list gets its outcome."""
        outcomes: list[Outcome] = []
        self.waiting.append((command(body, token), outcomes.append))
        return outcomes

    def change(self, kind: ChangeKind, node: str) -> list[Outcome]:
        """Ask for a change of the members; the list gets its outcome."""
        outcomes: list[Outcome] = []
        self.replica.change_members(Change(kind, node), outcomes.append)
        return outcomes

    def turn(self) -> None:
        """As the host does it."""
        self.replica.sync()
        self.replica.tick()
        self.replica.sync()

    def hear(self, peer: str, **message: object) -> None:
        self.replica.receive(peer, encode(message))

    def hear_commands(
        self,
        *entries: tuple[bytes, int],
        after: tuple[int, int] = (1, 0),
        term: int = 1,
        commit: int = 1,
        peer: str = "b",
    ) -> None:
        """An append_entries with these commands and their terms; `after` is the (index, term) before them."""
        self.hear(
            peer,
            type="append_entries",
            term=term,
            commit_index=commit,
            prevLogIdx=after[0],
            prevLogTerm=after[1],
            entries=[(body, index, of) for index, (body, of) in enumerate(entries, after[0] + 1)],
        )

    def hear_entries(
        self, terms: Iterable[int], after: tuple[int, int] = (1, 0), term: int = 1, **named: Any
    ) -> None:
        """One command of the register for each of the terms."""
        made = [(regular(index), of) for index, of in enumerate(terms, after[0] + 1)]
        self.hear_commands(*made, after=after, term=term, **named)

    def hear_members(self, *lists: Members, term: int = 1, **named: Any) -> None:
        self.hear_commands(*((command_of(members), term) for members in lists), term=term, **named)

    def hear_snapshot(
        self,
        data: bytes,
        index: int,
        snapshot_term: int = 1,
        begin: int = 0,
        end: int | None = None,
        peer: str = "b",
        term: int = 1,
        commit: int | None = None,
    ) -> None:
        """A piece of it, and a turn."""
        piece = SnapshotPiece(index, snapshot_term, begin, len(data), data[begin:end])
        commit = index if commit is None else commit
        self.hear(peer, type="append_entries", term=term, commit_index=commit, serialized=piece)
        self.turn()

    def take_in(self) -> None:
        """The job ends: a snapshot is written, or one that has come in whole is verified and is the state."""
        if self.jobs.busy():
            self.jobs.finish()
        self.turn()

    def grow(self, commands: int) -> None:
        """Alone, it takes snapshots of all that it commits."""
        for number in range(commands):
            self.propose(b"%d" % number)
            self.take_in()

    def lead(self) -> int:
        """Win an election with the vote of b; returns the term."""
        core = self.replica.core
        self.stand()
        self.hear("b", type="response_vote", term=core.term)
        self.turn()
        assert self.replica.is_leader
        return core.term

    def granted(self, peer: str, asked_in: int = 1, term: int = 0) -> None:
        """The peer would vote for it."""
        self.hear(peer, type="response_pre_vote", term=term, round=asked_in)
        self.turn()

    def pre_vote(self) -> None:
        """Ask whether the others would vote for it."""
        self.replica.core.elect_now()
        self.turn()

    def stand(self, *granting: str) -> None:
        """Stand for election, when those (by default all peers) have said that they would vote for it."""
        self.pre_vote()
        asked = self.wire.take("request_pre_vote")
        for peer, message in asked:
            if peer in granting or not granting:
                self.hear(peer, type="response_pre_vote", term=message["term"], round=message["round"])
        self.turn()

    def acknowledge(self, peer: str, next_index: int, term: int | None = None, **flags: bool) -> None:
        self.hear(
            peer,
            type="next_node_idx",
            term=self.replica.core.term if term is None else term,
            next_node_idx=next_index,
            **{"success": True, "reset": False, **flags},
        )

    def terms(self) -> list[int]:
        """The terms of the entries after the first."""
        return [term for _, _, term in self.replica.store.journal.entries[1:]]

    def crash(self) -> None:
        self.replica.abandon()


Make = Callable[..., Lone]
