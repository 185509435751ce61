"""One replica of one group: proposals in, commands applied, snapshots, and every message through the guards.

No thread, no socket, no clock of its own: the host (or a simulation) calls `receive` for each message, then
`sync`, `tick`, and `sync` again, in one thread. Only `sync` lets acknowledgements out, after the journal is
on disk.
"""

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from photon.core.clock import Backoff
from photon.raft.core import RaftCore, now
from photon.raft.files import FileShelf, delete
from photon.raft.follower import Follower
from photon.raft.journal import NO_OP, DamagedError
from photon.raft.membership import Elections, Founding, HasMet, Membership
from photon.raft.port import (
    Applied,
    Change,
    Members,
    Outcome,
    RaftLimits,
    RaftTiming,
    Refusal,
    Refused,
    ReplicatedLog,
    StateMachine,
    Status,
    Unknown,
)
from photon.raft.rules.codec import (
    APPEND_ENTRIES,
    ASK_FILE,
    FILE_PIECE,
    NEXT_NODE_IDX,
    Message,
    decode,
    encode,
)
from photon.raft.rules.guards import is_stale_ack, next_index_of
from photon.raft.rules.members import command_of, founding
from photon.raft.sender import SNAPSHOT_SHARE, Sender, Wire
from photon.raft.snapshot import Compactor, Installer, Jobs, StateMachineError, read_chunks
from photon.raft.store import FIRST_INDEX, ReplicaStore

REGULAR = b"\x00"  # what pysyncobj puts before a command; its no-op is 0x01
UNAPPLIED_MAX = 128  # more than is under way at busy times; a replica that is behind has more
# How soon to try again when a peer's way was full.
RETRY_S = 0.005
# So long may the word that entries are committed wait for entries to go with: followers answer nobody by it.
TELL_COMMIT_S = 0.05


Done = Callable[[Outcome], None]


@dataclass(frozen=True, slots=True)
class _Waiting:
    term: int
    deadline: float
    done: Done


class Proposals:
    """Raft thread only, but for `len`. Entries wait only while their proposer leads, in one term."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Waiting] = {}  # by index, oldest first
        self._lost: list[Done] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, index: int, term: int, deadline: float, done: Done) -> None:
        """The command stands in the log at `index`; by `deadline` its proposer is told `Unknown`."""
        self._waiting[index] = _Waiting(term, deadline, done)

    def applied(self, index: int, term: int, result: object) -> None:
        """The entry at `index` was applied: tell who waits for it, if it is the one that was proposed."""
        waiting = self._waiting.pop(index, None)
        if waiting is not None:
            waiting.done(Applied(index, result) if waiting.term == term else Unknown())

    def lose(self) -> None:
        """Nothing is known any more of what waits.

        It is told by the next `tell_lost`, not from within a message.
        """
        self._lost += [waiting.done for waiting in self._waiting.values()]
        self._waiting.clear()

    def expire(self, now: float) -> None:
        """Give up on what waits for too long."""
        while self._waiting:
            index, oldest = next(iter(self._waiting.items()))
            if oldest.deadline > now:
                return
            del self._waiting[index]
            self._lost.append(oldest.done)

    def tell_lost(self) -> None:
        """Tell `Unknown` to all that were given up."""
        while self._lost:
            lost, self._lost = self._lost, []
            for done in lost:
                done(Unknown())


@dataclass(frozen=True, slots=True)
class NodeContext:
    """What all replicas of one node share. `has_met`: which founders have met this node (`membership`)."""

    name: str
    jobs: Jobs
    timing: RaftTiming
    limits: RaftLimits
    rng: random.Random
    has_met: HasMet


class Replica:
    """Implements `port.ReplicatedLog` and `core.CoreRules`."""

    def __init__(
        self,
        context: NodeContext,
        group: int,
        directory: Path,
        machine: StateMachine,
        on_tick: Callable[[ReplicatedLog], None],
        wire: Wire,
        founders: Sequence[str] | None,
    ) -> None:
        """Open what is on disk and restore the machine.

        `founders`: who founds the group where nothing is on disk yet, this node among them, and the first to
        lead it first. None: this replica joins a group that has been founded. Raises CorruptStateError,
        LockedError, StorageError.
        """
        self.group = group
        self.node = node = context.name
        self._machine = machine
        self._on_tick = on_tick
        self._wire = wire
        self._timing, self._limits = context.timing, context.limits
        first = NO_OP if founders is None else command_of(founding(founders))
        self.store = ReplicaStore(directory, node, group, self._limits.segment_bytes, first)
        try:
            self._shelf = FileShelf(directory, machine)
            restored = self._restore()
        except BaseException:
            self.store.abandon()
            raise
        store, jobs = self.store, context.jobs
        self.core = core = RaftCore(store, restored, context.timing, context.rng, self)
        self._journal = journal = store.journal
        self._sender = Sender(core, store, wire, context.limits)
        self._compactor = Compactor(
            machine, journal, store.snapshots, store.members, self._shelf, jobs, context.limits
        )
        self._elections = Elections(core, store, wire)
        named = store.members.newest if journal.last_index == FIRST_INDEX else None
        self._founding = Founding(group, node, named, context.has_met, now())
        if named is not None and core.term == 0:
            core.heard_leader_at = -math.inf  # nobody can have led yet whom this replica has heard
        self._opened_at = now()
        self._hurry = Backoff(context.timing.heartbeat_s / 4, context.timing.election_s_min)
        self._hurried = 0
        self._membership = Membership(core, store, self._sender, context.timing)
        self._is_next = self._in_turn(self.members.voters) if founders is None else founders[0] == node
        incoming = store.snapshots.incoming_temporary
        self._installer = Installer(machine, incoming, self._shelf, jobs, self._say_of_file, context.limits)
        self._follower = Follower(
            core, store, self._elections, self._membership, self._installer, context.limits
        )
        self._proposals = Proposals()
        self._heartbeat_due = False
        self._sent = (0, 0)  # last index and commit index that the followers were sent
        self._stopped = False
        self._membership.follow()
        if core.alone:
            core.elect_now()

    # -- the port ---------------------------------------------------------------------------------------

    @property
    def is_leader(self) -> bool:
        return not self._stopped and self.core.is_leader

    @property
    def leader(self) -> str | None:
        return None if self._stopped else self.core.leader

    @property
    def members(self) -> Members:
        return self._membership.newest

    @property
    def committed_members(self) -> Members:
        return self._membership.committed

    @property
    def lag(self) -> int:
        core = self.core
        alone = core.is_leader or core.leader is None  # all in its own log may be committed, too
        known = max(self._follower.leader_committed, self._journal.last_index if alone else 0)
        return max(0, known - core.applied_index)

    def unapplied(self) -> list[tuple[int, int, memoryview]]:
        newest = self._journal.entries[-UNAPPLIED_MAX:]  # in one step: the raft thread changes the list
        applied = self.core.applied_index
        return [
            (index, term, memoryview(command)[len(REGULAR) :])
            for command, index, term in newest
            if index > applied and command.startswith(REGULAR)
        ]

    @property
    def installs(self) -> int:
        """Snapshots of a leader that became this replica's state, since it was opened."""
        return self._follower.installs

    @property
    def in_flight(self) -> int:
        return len(self._proposals)

    def status(self) -> Status:
        core, members = self.core, self.members
        leads = self.is_leader
        return Status(
            group=self.group,
            node=self.node,
            leader=self.leader,
            is_leader=leads,
            term=core.term,
            commit_index=core.commit_index,
            applied_index=core.applied_index,
            log_entries=len(self._journal.entries),
            has_quorum=self._membership.hears_majority() if leads else self.leader is not None,
            voters=members.voters,
            learners=members.learners,
            behind=self._membership.behind() if leads else {},
        )

    def propose(self, command: bytes, done: Callable[[Outcome], None]) -> None:
        if len(command) > self._limits.command_bytes_max:
            raise ValueError(
                f"a command of {len(command)} bytes; cut it to RaftLimits.command_bytes_max = "
                f"{self._limits.command_bytes_max} or less"
            )
        if not self.is_leader:
            self._refuse(done)
        elif len(self._proposals) >= self._limits.in_flight_max:
            done(Refused(Refusal.OVERLOADED, self.node))
        else:
            index = self._journal.last_index + 1
            self._journal.append(REGULAR + command, index, self.core.term)
            self._proposals.add(index, self.core.term, now() + self._timing.proposal_s, done)

    def change_members(self, change: Change, done: Done) -> None:
        if not self.is_leader:
            self._refuse(done)
        elif isinstance(planned := self._membership.plan(change), Refusal):
            done(Refused(planned, self.node))
        elif planned == self.members:
            done(Applied(self._membership.newest_index, None))
        else:
            index = self._membership.append(planned)
            self._proposals.add(index, self.core.term, now() + self._timing.proposal_s, done)

    def _refuse(self, done: Done) -> None:
        done(Refused(Refusal.STOPPED if self._stopped else Refusal.NOT_LEADER, self.leader))

    def hand_over(self, to: str | None = None) -> bool:
        core = self.core
        if not self.is_leader:
            return False
        last = self._journal.last_index
        ready = [peer for peer in core.connected() if core.match_index(peer) == last]
        for peer in ready if to is None else [to]:
            if peer in ready and peer in self.members.voters:
                core.hand_over(peer)
                return True
        return False

    # -- what the host calls ----------------------------------------------------------------------------

    def receive(self, peer: str, data: bytes) -> bool:
        """A message of a peer; whether a turn is due because of it. Raises MessageError for bytes that are
        none."""
        message = decode(data)
        if self._founding.waits():
            return True  # as if it were lost on its way: a leader, where there is one, will send it again
        kind = message["type"]
        if kind == NEXT_NODE_IDX:
            self._on_ack(peer, message)
            return not self._has_all(peer)
        elif kind == APPEND_ENTRIES:
            self._follower.receive(peer, message)
        elif kind == ASK_FILE:
            self._send_file(peer, message)
            return False
        elif kind == FILE_PIECE:
            self._installer.take_file(now(), peer, message)
        else:
            self._elections.receive(peer, message)
        return True

    def _has_all(self, peer: str) -> bool:
        """It follows this leader to the end of the log, and all of that is applied here, as after most
        heartbeats."""
        core, last = self.core, self._journal.last_index
        return core.is_leader and last == core.applied_index == core.match_index(peer)

    def tick(self) -> None:
        """One turn. Raises StorageError, StateMachineError: then the replica must be abandoned."""
        if self._journal.dirty and self.core.is_leader:
            self._journal.sync()  # the commit rule counts this replica: only what it has on disk
        installed = self._follower.take_in(now())
        if installed is not None:
            self._compactor.installed(installed)
        self.core.tick()

    def sync(self) -> None:
        """Make the turn's entries durable, then let out what may be said because they are.

        Costs nothing where there are none. Raises StorageError.
        """
        self._journal.sync()
        for peer, acks in self._follower.acks.take().items():
            for ack in acks:
                self._wire.send(peer, encode(ack))

    def deadline(self) -> float:
        """When `tick` must be called, by the clock of `core.now`, even if nothing happens."""
        core = self.core
        if core.commit_index > core.applied_index or (
            core.is_leader and core.alone and self._journal.last_index > core.commit_index
        ):
            return 0.0
        soon = now() + RETRY_S if core.is_leader and self._sender.behind else core.deadline()
        return min(soon, core.deadline())

    def peer_up(self, peer: str) -> None:
        """A connection to the peer is there; messages flow."""
        self.core.peer_up(peer)
        if self._need_not_wait():
            self.core.elect_now()

    def peer_down(self, peer: str) -> None:
        """It is gone, with all that was under way on it."""
        self._sender.forget(peer)
        self.core.peer_down(peer)
        if peer == self.core.leader:
            self._is_next = self._in_turn([name for name in self.members.voters if name != peer])
            self._hurried = 0
            self.core.leader_gone(self._is_next)

    def stop(self) -> None:
        """Sync and close; tell everybody who waits. Raises StorageError."""
        self._end()
        try:
            self.store.close()
        finally:
            self._proposals.tell_lost()

    def abandon(self) -> None:
        """Close as a crash would, but tell everybody who waits."""
        self._end()
        self.store.abandon()
        self._proposals.tell_lost()

    def _end(self) -> None:
        self._stopped = True
        self._compactor.abandon()
        self._sender.forget_all()
        self._follower.abandon()
        self._proposals.lose()

    # -- what the core asks (core.CoreRules) ------------------------------------------------------------

    def send(self, peer: str, message: Message) -> None:
        if message["type"] == NEXT_NODE_IDX:
            self._follower.answered(peer, message)
        else:
            self._wire.send(peer, encode(self._elections.sent(message)))

    def election_due(self) -> None:
        if self._founding.waits():
            self._founding.tell(now())
        else:
            self._elections.due()
            if self._need_not_wait():  # some may not have opened it yet, or be far away
                self._hurried += 1
                self.core.elect_now(self._hurry.delay_s(self._hurried))

    def _in_turn(self, voters: Sequence[str]) -> bool:
        """Each group has another one of them."""
        return bool(voters) and voters[self.group % len(voters)] == self.node

    def _need_not_wait(self) -> bool:
        """It is this replica's turn to lead, and it has heard of no leader since it was opened or the last
        one went."""
        knows_none = self.core.heard_leader_at < self._opened_at
        return self._is_next and knows_none and not self._founding.waits()

    def append_entries_due(self) -> None:
        self._heartbeat_due = True

    def apply_committed(self) -> None:
        core, entries = self.core, self._journal.entries
        if core.commit_index <= core.applied_index:
            return
        until = now() + self._limits.apply_turn_s
        first = self._journal.first_index
        for at in range(core.applied_index + 1 - first, core.commit_index + 1 - first):
            command, index, term = entries[at]
            result = self._apply(command, index)
            core.applied_index = index
            self._proposals.applied(index, term, result)
            if now() >= until:
                break

    def exchange(self) -> None:
        self._proposals.expire(now())
        self._proposals.tell_lost()
        self._on_tick(self)
        if not self.core.is_leader:
            return
        news = (self._journal.last_index, self.core.commit_index)
        if self._heartbeat_due or news[0] != self._sent[0]:
            self._sender.send_all(heartbeat=True)
            self._sent = news
            self._heartbeat_due = False
            self.core.append_entries_sent()
            return
        if news != self._sent:
            self.core.send_within(TELL_COMMIT_S)
        if self._sender.behind:
            self._sender.send_all(heartbeat=False)

    def compact(self) -> None:
        transferring = self._sender.transferring
        self._compactor.tick(now(), self.core.applied_index, self._needed_by_followers, transferring)

    def _needed_by_followers(self) -> int | None:
        if not self.is_leader:
            return None
        return min(map(self.core.match_index, self._membership.live(self.members.all)), default=None)

    def leadership_lost(self) -> None:
        self._sender.forget_all()
        self._proposals.lose()

    # -- messages ---------------------------------------------------------------------------------------

    def _on_ack(self, peer: str, message: Message) -> None:
        core = self.core
        if not core.is_leader or peer not in self.members.all:
            return
        if message["term"] > core.term:
            core.step_down(message["term"])
            return
        if is_stale_ack(message, core.term):
            return
        acked = next_index_of(message["next_node_idx"], self._journal.last_index)
        sent = core.next_index(peer)
        core.deliver(
            peer,
            {
                **message,
                "next_node_idx": acked,
                "reset": message["reset"] and acked > core.match_index(peer),
            },
        )
        if message["success"]:
            # The library would go back and send what is under way once more.
            core.set_next_index(peer, max(sent, acked))

    def _say_of_file(self, peer: str, message: Message) -> None:
        self._wire.send(peer, encode({**message, "term": self.core.term}))

    def _send_file(self, peer: str, message: Message) -> None:
        """What finds no room is asked for again."""
        limits = self._limits
        if self._wire.room(peer) >= limits.outgoing_bytes - limits.outgoing_bytes // SNAPSHOT_SHARE:
            self._say_of_file(peer, self._shelf.piece(message, limits.snapshot_piece_bytes))

    # -- the state --------------------------------------------------------------------------------------

    def _restore(self) -> int:
        """Bring the machine to the snapshot, where there is one; returns the index it is at."""
        head = self.store.snapshots.head
        if head is None:
            return FIRST_INDEX
        for file in self._shelf.lacks(head.files):
            raise DamagedError(self._shelf.path(file.name), "a file of the snapshot is missing or cut")
        self._machine.prepare(read_chunks(self.store.snapshots.path))()
        delete(self._shelf.needless(head.files))
        return head.covers.index

    def _apply(self, command: bytes, index: int) -> object:
        if command[:1] != REGULAR:
            return None
        self._compactor.applied(len(command))
        try:
            return self._machine.apply(command[1:])
        except Exception as error:
            raise StateMachineError(
                f"group {self.group}, entry {index}: the state machine raised {error!r}; the replica stops"
            ) from error
