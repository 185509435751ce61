"""One replica of one group: proposals in, commands applied, snapshots, and every message through the guards.

No thread, no socket, no clock of its own: the host (or a simulation) calls `receive` for each message, then
`tick`, then `sync`, in one thread. Only `sync` lets acknowledgements out, after the journal is on disk.
"""

import random
from collections.abc import Callable
from pathlib import Path

from photon.raft.acks import HeldAcks
from photon.raft.codec import (
    APPEND_ENTRIES,
    NEXT_NODE_IDX,
    RESPONSE_VOTE,
    Message,
    decode,
    encode,
)
from photon.raft.compaction import Compactor, Jobs, StateMachineError
from photon.raft.core import RaftCore, now
from photon.raft.guards import (
    Conflict,
    conflict_start,
    fit,
    is_stale_ack,
    is_stale_snapshot,
    next_index_of,
)
from photon.raft.incoming import Incoming
from photon.raft.port import Outcome, Refusal, Refused, ReplicatedLog, StateMachine, Status
from photon.raft.proposals import Proposals
from photon.raft.sender import Sender, Wire
from photon.raft.settings import RaftLimits, RaftTiming
from photon.raft.snapshot import SnapshotId
from photon.raft.store import FIRST_INDEX, ReplicaStore

REGULAR = b"\x00"  # what pysyncobj puts before a command; its no-op is 0x01
# How soon to try again when a peer's way was full.
RETRY_S = 0.005


class Replica:
    """Implements `port.ReplicatedLog` and `core.CoreRules`."""

    def __init__(
        self,
        group: int,
        node: str,
        peers: list[str],
        machine: StateMachine,
        on_tick: Callable[[ReplicatedLog], None],
        directory: Path,
        wire: Wire,
        jobs: Jobs,
        timing: RaftTiming,
        limits: RaftLimits,
        rng: random.Random,
    ) -> None:
        """Open what is on disk and restore the machine.

        Raises CorruptStateError, LockedError, StorageError.
        """
        self.group = group
        self.node = node
        self._machine = machine
        self._on_tick = on_tick
        self._wire = wire
        self._timing = timing
        self._limits = limits
        self.store = ReplicaStore(directory, node, group, limits.segment_bytes)
        try:
            restored = self._restore()
        except BaseException:
            self.store.abandon()
            raise
        journal, snapshots = self.store.journal, self.store.snapshots
        self.core = RaftCore(node, peers, journal, self.store.ballot, restored, timing, rng, self)
        self._journal = journal
        self._sender = Sender(self.core, journal, snapshots, wire, limits)
        self._compactor = Compactor(machine, journal, snapshots, jobs, limits)
        self._incoming = Incoming(snapshots.incoming_temporary)
        self._proposals = Proposals()
        self._acks = HeldAcks()
        self._conflict = Conflict()
        self._ack_cap: int | None = None
        self._voters: tuple[int, set[str]] = (-1, set())
        self._heartbeat_due = False
        self._sent = (0, 0)  # last index and commit index that the followers were sent
        self._stopped = False
        if not peers:
            self.core.elect_now()

    # -- the port ---------------------------------------------------------------------------------------

    @property
    def is_leader(self) -> bool:
        return not self._stopped and self.core.is_leader

    @property
    def leader(self) -> str | None:
        return None if self._stopped else self.core.leader

    @property
    def in_flight(self) -> int:
        return len(self._proposals)

    def status(self) -> Status:
        core = self.core
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
            has_quorum=self._hears_majority() if leads else self.leader is not None,
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

    # -- what the host calls ----------------------------------------------------------------------------

    def receive(self, peer: str, data: bytes) -> None:
        """A message of a peer. Raises MessageError for bytes that are none."""
        message = decode(data)
        kind = message["type"]
        if kind == NEXT_NODE_IDX:
            self._on_ack(peer, message)
        elif kind == APPEND_ENTRIES:
            if message["term"] >= self.core.term:
                self._on_append_entries(peer, message)
        elif kind != RESPONSE_VOTE or self._is_first_vote(peer, message["term"]):
            self.core.deliver(peer, message)

    def tick(self) -> None:
        """One turn. Raises StorageError, StateMachineError: then the replica must be abandoned."""
        if self._journal.dirty and self.core.is_leader:
            self._journal.sync()  # the commit rule counts this replica: only what it has on disk
        self.core.tick()

    def sync(self) -> None:
        """Make the turn's entries durable, then let out what may be said because they are.

        Raises StorageError.
        """
        self._journal.sync()
        for peer, acks in self._acks.take().items():
            for ack in acks:
                self._wire.send(peer, encode(ack))

    def deadline(self) -> float:
        """When `tick` must be called, by the clock of `core.now`, even if nothing happens."""
        core = self.core
        if core.commit_index > core.applied_index or (
            core.is_leader and not core.nodes and self._journal.last_index > core.commit_index
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

    def hand_over(self) -> None:
        """Before a planned stop: ask the follower that has everything to lead at once, if there is one."""
        if self.core.is_leader and self.core.nodes:
            self.core.transferLeadership()

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
        self._acks.take()
        self._proposals.lose()

    # -- what the core asks (core.CoreRules) ------------------------------------------------------------

    def send(self, peer: str, message: Message) -> None:
        if message["type"] != NEXT_NODE_IDX:
            self._wire.send(peer, encode(message))
            return
        next_index = message["next_node_idx"]
        if message["success"] and self._ack_cap is not None:
            next_index = min(next_index, self._ack_cap + 1)
        if message["reset"]:
            next_index = self._conflict.bound(self.core.term, next_index)
        self._acknowledge(peer, next_index, success=message["success"], reset=message["reset"])

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
        needed = min(map(self.core.match_index, self._live_peers()), default=None) if self.is_leader else None
        self._compactor.tick(self.core.applied_index, needed, self._sender.transferring)

    def leadership_lost(self) -> None:
        self._sender.forget_all()
        self._proposals.lose()

    # -- messages ---------------------------------------------------------------------------------------

    def _on_ack(self, peer: str, message: Message) -> None:
        core = self.core
        if not core.is_leader or is_stale_ack(message, core.term):
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

    def _is_first_vote(self, peer: str, term: int) -> bool:
        """The library counts messages, not voters."""
        if self._voters[0] != term:
            self._voters = (term, set())
        first = peer not in self._voters[1]
        self._voters[1].add(peer)
        return first

    def _on_append_entries(self, peer: str, message: Message) -> None:
        if "serialized" in message:
            self._on_piece(peer, message)
            return
        commit_index = self.core.commit_index
        fitted = fit(self._journal, commit_index, message)
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

    def _on_piece(self, peer: str, message: Message) -> None:
        core = self.core
        # S1: a piece of a snapshot proves nothing about this log, so it moves no commit index.
        plain = {"type": APPEND_ENTRIES, "term": message["term"], "commit_index": core.commit_index}
        core.deliver(peer, plain)
        piece = message["serialized"]
        if is_stale_snapshot(piece.index, core.commit_index, core.applied_index):
            self._incoming.drop()
            self._acknowledge(peer, core.commit_index + 1, success=True)
        elif self._incoming.take(peer, message["term"], piece):
            self._install(SnapshotId(piece.index, piece.term))
            self._acknowledge(peer, piece.index + 1, success=True)
        else:
            # It only says that this replica is alive: else the leader would step down during a long transfer.
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

    def _install(self, covers: SnapshotId) -> None:
        """Replace the state by a verified snapshot, and keep the log's tail where it goes on from there."""
        snapshots, journal = self.store.snapshots, self._journal
        newer = snapshots.adopt(snapshots.incoming_temporary, covers)
        assert newer, covers
        if journal.term_at(covers.index) == covers.term:
            journal.drop_before(covers.index)
        else:
            journal.reset(covers.index, covers.term)
        self._restore()
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

    def _live_peers(self) -> list[str]:
        heard = now() - self._timing.leader_fallback_s
        return [peer for peer in self.core.nodes if self.core.heard_from(peer) > heard]

    def _hears_majority(self) -> bool:
        return 2 * (len(self._live_peers()) + 1) > len(self.core.nodes) + 1
