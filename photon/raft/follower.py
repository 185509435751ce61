"""What a replica takes in from its leader, entries and snapshots, and what it may say of them."""

from photon.raft.core import RaftCore
from photon.raft.membership import Elections, Membership
from photon.raft.port import RaftLimits
from photon.raft.rules.codec import APPEND_ENTRIES, NEXT_NODE_IDX, Message, MessageError
from photon.raft.rules.guards import Conflict, conflict_start, fit, is_stale_snapshot
from photon.raft.rules.members import check_lists
from photon.raft.snapshot import Head, Installer
from photon.raft.store import ReplicaStore


class HeldAcks:
    """What a follower will say once what it says is true.

    In order for each peer; successes are cumulative.
    """

    def __init__(self) -> None:
        self._held: dict[str, list[Message]] = {}

    def hold(self, peer: str, ack: Message) -> None:
        """Keep an acknowledgement; a success replaces the success before it in the same term."""
        queue = self._held.setdefault(peer, [])
        if queue and ack["success"] and queue[-1]["success"] and queue[-1]["term"] == ack["term"]:
            further = max(queue[-1]["next_node_idx"], ack["next_node_idx"])
            queue[-1] = {**ack, "next_node_idx": further}
        else:
            queue.append(ack)

    def take(self) -> dict[str, list[Message]]:
        """All that is held; none is held after."""
        held, self._held = self._held, {}
        return held


class Follower:
    """One replica's part as a follower. Raft thread only, but for `leader_committed`."""

    def __init__(
        self,
        core: RaftCore,
        store: ReplicaStore,
        elections: Elections,
        membership: Membership,
        installer: Installer,
        limits: RaftLimits,
    ) -> None:
        self.acks = HeldAcks()
        self.installs = 0  # snapshots of a leader that became this replica's state, since it was opened
        self.leader_committed = 0  # as the leaders said that were heard
        self._core = core
        self._store = store
        self._journal = store.journal
        self._elections = elections
        self._membership = membership
        self._installer = installer
        self._limits = limits
        self._conflict = Conflict()
        self._ack_cap: int | None = None

    def abandon(self) -> None:
        """The replica stops: nothing is acknowledged any more, and what comes in is dropped."""
        self._installer.abandon()
        self.acks.take()

    def receive(self, peer: str, message: Message) -> None:
        """An append_entries. Raises MessageError."""
        if message["term"] >= self._core.term:
            self._on_append_entries(peer, message)
        else:
            # One in a higher term than the leader can follow it only if the leader rises to it.
            self._tell_alive(peer)

    def answered(self, peer: str, message: Message) -> None:
        """The library acknowledges what was delivered to it: hold no more of that than is true."""
        next_index = message["next_node_idx"]
        if message["success"] and self._ack_cap is not None:
            next_index = min(next_index, self._ack_cap + 1)
        if message["reset"]:
            next_index = self._conflict.bound(self._core.term, next_index)
        self._acknowledge(peer, next_index, success=message["success"], reset=message["reset"])

    def take_in(self, now: float) -> int | None:
        """A snapshot that came in may be ready: verified, and made into a state beside the present one.

        The index up to which it is the state now, or None.
        """
        ready = self._installer.poll(now, self._core.connected())
        if ready is None or ready.head is None:
            return None
        core, covers = self._core, ready.head.covers
        if is_stale_snapshot(covers.index, core.commit_index, core.applied_index):
            self._acknowledge(ready.peer, core.commit_index + 1, success=True)
            return None
        self._install(ready.head)
        ready.put_state()
        self.installs += 1
        self._acknowledge(ready.peer, covers.index + 1, success=True)
        return covers.index

    def _install(self, head: Head) -> None:
        """Put a verified snapshot in place, and keep the log's tail where it goes on from there."""
        snapshots, journal, covers = self._store.snapshots, self._journal, head.covers
        newer = snapshots.adopt(snapshots.incoming_temporary, head)
        assert newer, covers
        if journal.term_at(covers.index) == covers.term:
            journal.drop_before(covers.index)
        else:
            journal.reset(covers.index, covers.term)
        self._store.members.restart(covers.index, head.members, journal.entries)
        self._membership.follow()
        self._conflict.clear()  # it was in the log that is gone
        self._core.applied_to(covers.index)

    def _on_append_entries(self, peer: str, message: Message) -> None:
        self._check(message)
        self._elections.heard_leader()
        # Committed is committed, whoever says it: an old leader's word is only less.
        self.leader_committed = max(self.leader_committed, message["commit_index"])
        if "serialized" in message:
            self._on_piece(peer, message)
            return
        commit_index = self._core.commit_index
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
            self._core.deliver(peer, fitted.message)
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
        core = self._core
        self._hear_out(peer, message)
        piece = message["serialized"]
        if is_stale_snapshot(piece.index, core.commit_index, core.applied_index):
            self._installer.drop()
            self._acknowledge(peer, core.commit_index + 1, success=True)
        else:
            self._installer.take(peer, message["term"], piece)
            self._tell_alive(peer)

    def _hear_out(self, peer: str, message: Message) -> None:
        """Follow the leader that sent a message, and no more.

        S1: it proves nothing about this log, so it moves no commit index.
        """
        plain = {"type": APPEND_ENTRIES, "term": message["term"], "commit_index": self._core.commit_index}
        self._core.deliver(peer, plain)

    def _tell_alive(self, peer: str) -> None:
        """Nothing else: but the leader would step down while a snapshot is on its way, or is taken in."""
        self._acknowledge(peer, self._journal.last_index + 1)

    def _acknowledge(self, peer: str, next_index: int, success: bool = False, reset: bool = False) -> None:
        ack = {
            "type": NEXT_NODE_IDX,
            "term": self._core.term,  # S3
            "next_node_idx": next_index,
            "success": success,
            "reset": reset,
        }
        self.acks.hold(peer, ack)
