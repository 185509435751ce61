"""One replica of one group: proposals in, commands applied, snapshots, and every message through the guards.

No thread, no socket, no clock of its own: the host (or a simulation) calls `receive` for each message, then
`sync`, `tick`, and `sync` again, in one thread. Only `sync` lets acknowledgements out, after the journal is
on disk.
"""

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from photon.raft.acks import HeldAcks
from photon.raft.codec import (
    APPEND_ENTRIES,
    NEXT_NODE_IDX,
    Message,
    MessageError,
    decode,
    encode,
)
from photon.raft.compaction import Compactor, Jobs, StateMachineError
from photon.raft.core import RaftCore, now
from photon.raft.elections import Elections
from photon.raft.founding import Founding, HasMet, everybody_met
from photon.raft.guards import (
    Conflict,
    conflict_start,
    fit,
    is_stale_ack,
    is_stale_snapshot,
    next_index_of,
)
from photon.raft.incoming import Incoming
from photon.raft.installing import Installer
from photon.raft.journal import NO_OP
from photon.raft.membership import Membership
from photon.raft.port import (
    Applied,
    Change,
    Members,
    Outcome,
    Refusal,
    Refused,
    ReplicatedLog,
    StateMachine,
    Status,
)
from photon.raft.proposals import Done, Proposals
from photon.raft.roster import check_lists, command_of, founding
from photon.raft.sender import Sender, Wire
from photon.raft.settings import RaftLimits, RaftTiming
from photon.raft.snapshot import Head, SnapshotId
from photon.raft.store import FIRST_INDEX, ReplicaStore

REGULAR = b"\x00"  # what pysyncobj puts before a command; its no-op is 0x01
UNAPPLIED_MAX = 128  # more than is under way at busy times; a replica that is behind has more
# How soon to try again when a peer's way was full.
RETRY_S = 0.005


class Replica:
    """Implements `port.ReplicatedLog` and `core.CoreRules`."""

    def __init__(
        self,
        group: int,
        node: str,
        machine: StateMachine,
        on_tick: Callable[[ReplicatedLog], None],
        directory: Path,
        wire: Wire,
        jobs: Jobs,
        timing: RaftTiming,
        limits: RaftLimits,
        rng: random.Random,
        founders: Sequence[str] | None,
        has_met: HasMet = everybody_met,
    ) -> None:
        """Open what is on disk and restore the machine.

        `founders`: who founds the group where nothing is on disk yet, this node among them. None: this
        replica joins a group that has been founded. `has_met`: which of them have met this node (`founding`).
        Raises CorruptStateError, LockedError, StorageError.
        """
        self.group = group
        self.node = node
        self._machine = machine
        self._on_tick = on_tick
        self._wire = wire
        self._timing = timing
        self._limits = limits
        first = NO_OP if founders is None else command_of(founding(founders))
        self.store = ReplicaStore(directory, node, group, limits.segment_bytes, first)
        try:
            restored = self._restore()
        except BaseException:
            self.store.abandon()
            raise
        journal, snapshots, roster = self.store.journal, self.store.snapshots, self.store.roster
        self.core = RaftCore(node, journal, self.store.ballot, roster, restored, timing, rng, self)
        self._journal = journal
        self._sender = Sender(self.core, journal, snapshots, wire, limits)
        self._compactor = Compactor(machine, journal, snapshots, roster, jobs, limits)
        self._elections = Elections(node, self.core, journal, roster, wire)
        begun = journal.last_index > FIRST_INDEX
        self._founding = Founding(group, node, None if begun else roster.newest, has_met, now())
        self._membership = Membership(node, self.core, journal, roster, self._sender, timing)
        self._incoming = Incoming(snapshots.incoming_temporary)
        self._installer = Installer(machine, snapshots.incoming_temporary, jobs)
        self.installs = 0  # snapshots of a leader that became this replica's state, since it was opened
        self._proposals = Proposals()
        self._acks = HeldAcks()
        self._conflict = Conflict()
        self._ack_cap: int | None = None
        self._heartbeat_due = False
        self._leader_committed = 0  # as the leaders said that were heard
        self._sent = (0, 0)  # last index and commit index that the followers were sent
        self._stopped = False
        self._membership.follow()
        if self.core.alone:
            self.core.elect_now()

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
    def lag(self) -> int:
        core = self.core
        alone = core.is_leader or core.leader is None  # all in its own log may be committed, too
        known = max(self._leader_committed, self._journal.last_index if alone else 0)
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
        if self._stopped:
            done(Refused(Refusal.STOPPED, None))
        elif not self.core.is_leader:
            done(Refused(Refusal.NOT_LEADER, self.core.leader))
        elif len(self._proposals) >= self._limits.in_flight_max:
            done(Refused(Refusal.OVERLOADED, self.node))
        else:
            index = self._journal.last_index + 1
            self._journal.append(REGULAR + command, index, self.core.term)
            self._proposals.add(index, self.core.term, now() + self._timing.proposal_s, done)

    def change_members(self, change: Change, done: Done) -> None:
        if self._stopped:
            done(Refused(Refusal.STOPPED, None))
        elif not self.core.is_leader:
            done(Refused(Refusal.NOT_LEADER, self.core.leader))
        elif isinstance(planned := self._membership.plan(change), Refusal):
            done(Refused(planned, self.node))
        elif planned == self.members:
            done(Applied(self._membership.newest_index, None))
        else:
            index = self._membership.append(planned)
            self._proposals.add(index, self.core.term, now() + self._timing.proposal_s, done)

    def hand_over(self, to: str | None = None) -> bool:
        core = self.core
        if self._stopped or not core.is_leader:
            return False
        last = self._journal.last_index
        ready = [peer for peer in core.connected() if core.match_index(peer) == last]
        for peer in ready if to is None else [to]:
            if peer in ready and peer in self.members.voters:
                core.hand_over(peer)
                return True
        return False

    # -- what the host calls ----------------------------------------------------------------------------

    def receive(self, peer: str, data: bytes) -> None:
        """A message of a peer. Raises MessageError for bytes that are none."""
        message = decode(data)
        if self._founding.waits():
            return  # as if it were lost on its way: a leader, where there is one, will send it again
        kind = message["type"]
        if kind == NEXT_NODE_IDX:
            self._on_ack(peer, message)
        elif kind == APPEND_ENTRIES:
            if message["term"] >= self.core.term:
                self._on_append_entries(peer, message)
            else:
                # One in a higher term than the leader can follow it only if the leader rises to it.
                self._acknowledge(peer, self._journal.last_index + 1)
        else:
            self._elections.receive(peer, message)

    def tick(self) -> None:
        """One turn. Raises StorageError, StateMachineError: then the replica must be abandoned."""
        if self._journal.dirty and self.core.is_leader:
            self._journal.sync()  # the commit rule counts this replica: only what it has on disk
        self._take_in()
        self.core.tick()

    def sync(self) -> None:
        """Make the turn's entries durable, then let out what may be said because they are.

        Costs nothing where there are none. Raises StorageError.
        """
        self._journal.sync()
        for peer, acks in self._acks.take().items():
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

    def peer_down(self, peer: str) -> None:
        """It is gone, with all that was under way on it."""
        self._sender.forget(peer)
        self.core.peer_down(peer)

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
        self._incoming.drop()
        self._installer.abandon()
        self._acks.take()
        self._proposals.lose()

    # -- what the core asks (core.CoreRules) ------------------------------------------------------------

    def send(self, peer: str, message: Message) -> None:
        if message["type"] != NEXT_NODE_IDX:
            self._wire.send(peer, encode(self._elections.sent(message)))
            return
        next_index = message["next_node_idx"]
        if message["success"] and self._ack_cap is not None:
            next_index = min(next_index, self._ack_cap + 1)
        if message["reset"]:
            next_index = self._conflict.bound(self.core.term, next_index)
        self._acknowledge(peer, next_index, success=message["success"], reset=message["reset"])

    def election_due(self) -> None:
        if self._founding.waits():
            self._founding.tell(now())
        else:
            self._elections.due()

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
        if self._heartbeat_due or news != self._sent:
            self._sender.send_all(heartbeat=True)
            self._sent = news
            self._heartbeat_due = False
            self.core.append_entries_sent()
        elif self._sender.behind:
            self._sender.send_all(heartbeat=False)

    def compact(self) -> None:
        self._compactor.tick(self.core.applied_index, self._needed_by_followers, self._sender.transferring)

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

    def _on_append_entries(self, peer: str, message: Message) -> None:
        self._check(message)
        self._elections.heard_leader()
        # Committed is committed, whoever says it: an old leader's word is only less.
        self._leader_committed = max(self._leader_committed, message["commit_index"])
        if "serialized" in message:
            self._on_piece(peer, message)
            return
        commit_index = self.core.commit_index
        fitted = fit(self._journal, commit_index, message)
        if fitted.verified is None and self._installer.busy:
            self._hear_out(peer, message)  # it follows the snapshot, which will be there soon
            self._tell_alive(peer)
            return
        if fitted.verified is not None:
            self._conflict.clear()
        else:
            start = conflict_start(self._journal, commit_index, message["prevLogIdx"])
            if start is not None:
                self._conflict.note(message["term"], start)
        self._ack_cap = fitted.verified
        try:
            self.core.deliver(peer, fitted.message)
        finally:
            self._ack_cap = None
            self._membership.follow()

    def _check(self, message: Message) -> None:
        """Before anything of it is taken. Raises MessageError."""
        check_lists(message.get("entries", ()))
        piece = message.get("serialized")
        if piece is not None and piece.total > self._limits.snapshot_bytes_max:
            raise MessageError(
                f"a snapshot of {piece.total} bytes, more than RaftLimits.snapshot_bytes_max = "
                f"{self._limits.snapshot_bytes_max}: where the state is that large, raise it on every node"
            )

    def _on_piece(self, peer: str, message: Message) -> None:
        core = self.core
        self._hear_out(peer, message)
        piece = message["serialized"]
        if is_stale_snapshot(piece.index, core.commit_index, core.applied_index):
            self._incoming.drop()
            self._acknowledge(peer, core.commit_index + 1, success=True)
        else:
            if not self._installer.busy and self._incoming.take(peer, message["term"], piece):
                self._installer.begin(peer, SnapshotId(piece.index, piece.term))
            self._tell_alive(peer)

    def _hear_out(self, peer: str, message: Message) -> None:
        """Follow the leader that sent a message, and no more.

        S1: it proves nothing about this log, so it moves no commit index.
        """
        plain = {"type": APPEND_ENTRIES, "term": message["term"], "commit_index": self.core.commit_index}
        self.core.deliver(peer, plain)

    def _tell_alive(self, peer: str) -> None:
        """Nothing else: but the leader would step down while a snapshot is on its way, or is taken in."""
        self._acknowledge(peer, self._journal.last_index + 1)

    def _acknowledge(self, peer: str, next_index: int, success: bool = False, reset: bool = False) -> None:
        ack = {
            "type": NEXT_NODE_IDX,
            "term": self.core.term,  # S3
            "next_node_idx": next_index,
            "success": success,
            "reset": reset,
        }
        self._acks.hold(peer, ack)

    # -- the state --------------------------------------------------------------------------------------

    def _restore(self) -> int:
        """Bring the machine to the snapshot, where there is one; returns the index it is at."""
        covers = self.store.snapshots.current
        if covers is None:
            return FIRST_INDEX
        self._machine.restore(self.store.snapshots.chunks())
        return covers.index

    def _take_in(self) -> None:
        """A snapshot that came in may be ready: verified, and made into a state beside the present one."""
        ready = self._installer.poll()
        if ready is None or ready.head is None:
            return
        core, covers = self.core, ready.head.covers
        if is_stale_snapshot(covers.index, core.commit_index, core.applied_index):
            self._acknowledge(ready.peer, core.commit_index + 1, success=True)
            return
        self._install(ready.head)
        ready.put_state(self.store.snapshots.path)
        self.installs += 1
        self._acknowledge(ready.peer, covers.index + 1, success=True)

    def _install(self, head: Head) -> None:
        """Put a verified snapshot in place, and keep the log's tail where it goes on from there."""
        snapshots, journal, covers = self.store.snapshots, self._journal, head.covers
        newer = snapshots.adopt(snapshots.incoming_temporary, head)
        assert newer, covers
        if journal.term_at(covers.index) == covers.term:
            journal.drop_before(covers.index)
        else:
            journal.reset(covers.index, covers.term)
        self.store.roster.restart(covers.index, head.members, journal.entries)
        self._membership.follow()
        self._conflict.clear()  # it was in the log that is gone
        self.core.applied_to(covers.index)
        self._compactor.installed(covers.index)

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
