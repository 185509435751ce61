"""pysyncobj's Raft rules, held at arm's length: the only file that knows the library's private names.

What is left of the library here: elections, the commit rule, and the handlers of the five messages. What it
does with disks, sockets, pickles, snapshots, applying and sending is replaced by `CoreRules`, which
`replica` implements. The version is pinned; `PRIVATE_NAMES` is what a test compares with the library.
"""

import random
from collections.abc import Callable, Iterable
from typing import Any, Protocol, cast

from pysyncobj import SyncObj, SyncObjConf, syncobj
from pysyncobj.node import Node
from pysyncobj.transport import Transport
from pysyncobj.version import VERSION

from photon.core.errors import PhotonError
from photon.raft.ballot import Ballot
from photon.raft.codec import Message
from photon.raft.journal import Entry, Journal
from photon.raft.settings import RaftTiming

PINNED_VERSION = "0.3.17"
# Attributes the library sets and we read or set, and methods of it we call or replace.
PRIVATE_ATTRIBUTES = (
    "connectedNodes",
    "lastResponseTime",
    "leaderCommitIndex",
    "newAppendEntriesTime",
    "otherNodes",
    "raftCommitIndex",
    "raftCurrentTerm",
    "raftElectionDeadline",
    "raftLastApplied",
    "raftLeader",
    "raftLog",
    "raftMatchIndex",
    "raftNextIndex",
    "raftState",
    "votedForNodeId",
)
REPLACED_METHODS = (
    "_SyncObj__applyLogEntries",
    "_SyncObj__doApplyCommand",
    "_SyncObj__generateRaftTimeout",
    "_SyncObj__loadDumpFile",
    "_SyncObj__onMessageReceived",
    "_SyncObj__onNodeConnected",
    "_SyncObj__onNodeDisconnected",
    "_SyncObj__sendAppendEntries",
    "_SyncObj__tryLogCompaction",
    "_checkCommandsToApply",
)
_LEADER = 2


def now() -> float:
    """The library's clock (seconds, monotonic), which all deadlines here are on.

    A simulation replaces it there.
    """
    return cast(float, syncobj.monotonicTime())


class CoreRules(Protocol):
    """What the core asks of its owner, all in the raft thread and within `RaftCore.tick` or `deliver`."""

    def send(self, peer: str, message: Message) -> None:
        """The core answers a peer, or asks for its vote."""

    def append_entries_due(self) -> None:
        """The leader's heartbeat is due, or it has just been elected."""

    def apply_committed(self) -> None:
        """Apply what is committed and not applied."""

    def exchange(self) -> None:
        """Everything is applied: take new commands, send what is new."""

    def compact(self) -> None:
        """The end of a tick: look after snapshots."""

    def leadership_lost(self) -> None:
        """This replica led and does not any more."""


class RaftCore(SyncObj):  # type: ignore[misc]  # the library is not typed
    """One replica's Raft state.

    Nothing in it touches a disk (but through `journal`, `ballot`) or a socket.
    """

    def __init__(
        self,
        node: str,
        peers: Iterable[str],
        journal: Journal,
        ballot: Ballot,
        applied_index: int,
        timing: RaftTiming,
        rng: random.Random,
        rules: CoreRules,
    ) -> None:
        """`applied_index`: what the restored snapshot covers, hence committed (1 without one)."""
        if VERSION != PINNED_VERSION:
            raise PhotonError(f"pysyncobj {VERSION} is installed; install pysyncobj=={PINNED_VERSION}")
        self._rules = rules
        self._rng = rng
        self._timing = timing
        self.nodes = {peer: Node(peer) for peer in peers}
        super().__init__(
            Node(node),
            list(self.nodes.values()),
            _configuration(timing, self._on_state),
            transport=_Link(rules),
        )
        self._poller = _NoPoller()
        # The library has made a log in memory; ours takes its place. The commit index is never read from disk
        # (S10): what is committed beyond the snapshot is learnt again from the leader.
        self._SyncObj__raftLog = _LibraryLog(journal, ballot)
        self._SyncObj__raftCurrentTerm = ballot.term
        self._SyncObj__votedForNodeId = ballot.vote
        self.applied_to(applied_index)

    # -- what the owner asks ----------------------------------------------------------------------------

    def tick(self) -> None:
        """One turn of the library: elections, commit rule, fallback, then the rules in order."""
        self._onTick(0.0)

    def deliver(self, peer: str, message: Message) -> None:
        """Give a peer's message, made harmless, to the library's handler."""
        super()._SyncObj__onMessageReceived(self.nodes[peer], message)

    @property
    def is_leader(self) -> bool:
        return bool(self._SyncObj__raftState == _LEADER)

    @property
    def leader(self) -> str | None:
        leader = self._SyncObj__raftLeader
        return None if leader is None else cast(str, leader.id)

    @property
    def term(self) -> int:
        return self._SyncObj__raftCurrentTerm

    @property
    def commit_index(self) -> int:
        return self._SyncObj__raftCommitIndex

    @property
    def applied_index(self) -> int:
        return self._SyncObj__raftLastApplied

    @applied_index.setter
    def applied_index(self, index: int) -> None:
        self._SyncObj__raftLastApplied = index

    def applied_to(self, index: int) -> None:
        """A snapshot up to `index` is now the state: it is applied, and committed."""
        self._SyncObj__raftLastApplied = index
        self._SyncObj__raftCommitIndex: int = max(index, self.commit_index)

    def next_index(self, peer: str) -> int:
        """Leader only: the entry to send to the peer next."""
        return cast(int, self._SyncObj__raftNextIndex[self.nodes[peer]])

    def set_next_index(self, peer: str, index: int) -> None:
        self._SyncObj__raftNextIndex[self.nodes[peer]] = index

    def match_index(self, peer: str) -> int:
        """Leader only: up to where the peer has acknowledged, in this term and on this connection."""
        return cast(int, self._SyncObj__raftMatchIndex[self.nodes[peer]])

    def heard_from(self, peer: str) -> float:
        """When the peer last answered this leader; 0 where it never did. Any thread."""
        return cast(float, self._SyncObj__lastResponseTime.get(self.nodes[peer], 0.0))

    def connected(self) -> list[str]:
        """The peers that messages can be sent to now."""
        up = self._SyncObj__connectedNodes
        return [peer for peer, node in self.nodes.items() if node in up]

    def peer_up(self, peer: str) -> None:
        """A connection to the peer is there."""
        self._SyncObj__onNodeConnected(self.nodes[peer])

    def peer_down(self, peer: str) -> None:
        """It is gone."""
        self._SyncObj__onNodeDisconnected(self.nodes[peer])

    def elect_now(self) -> None:
        """Do not wait for the election timeout."""
        self._SyncObj__raftElectionDeadline = 0.0

    def append_entries_sent(self) -> None:
        """The next heartbeat is due within a period: at its multiples, so that many groups share a turn."""
        period = self._timing.heartbeat_s
        self._SyncObj__newAppendEntriesTime = (now() // period + 1) * period

    def deadline(self) -> float:
        """When `tick` must be called again, whatever happens."""
        if self.is_leader:
            return self._SyncObj__newAppendEntriesTime
        if self.nodes and not self._SyncObj__connectedNodes:
            return now() + self._timing.election_s_max  # nobody to ask: no election
        return self._SyncObj__raftElectionDeadline

    # -- what replaces the library's own ----------------------------------------------------------------

    def _SyncObj__generateRaftTimeout(self) -> float:
        return self._rng.uniform(self._timing.election_s_min, self._timing.election_s_max)

    def _SyncObj__onMessageReceived(self, node: Node, message: Message) -> None:
        raise AssertionError("messages come through deliver")

    def _SyncObj__onNodeConnected(self, node: Node) -> None:
        up = self._SyncObj__connectedNodes
        if not up and not self.is_leader:
            # Alone until now, so the deadline passed long ago: hear the leader out before starting an
            # election.
            self._SyncObj__raftElectionDeadline = now() + self._SyncObj__generateRaftTimeout()
        up.add(node)
        self._SyncObj__newAppendEntriesTime = 0.0

    def _SyncObj__onNodeDisconnected(self, node: Node) -> None:
        self._SyncObj__connectedNodes.discard(node)
        if self.is_leader:
            # What was under way is lost, and the peer may come back with less than it had: ask it anew.
            self._SyncObj__raftNextIndex[node] = self._SyncObj__raftLog[-1][1] + 1
            self._SyncObj__raftMatchIndex[node] = 0

    def _SyncObj__sendAppendEntries(self) -> None:
        self._rules.append_entries_due()

    def _SyncObj__applyLogEntries(self) -> bool:
        self._rules.apply_committed()
        return False

    def _SyncObj__doApplyCommand(self, command: bytes) -> None:
        raise AssertionError("commands are applied by the replica")  # the library would unpickle it

    def _SyncObj__tryLogCompaction(self) -> None:
        self._rules.compact()

    def _SyncObj__loadDumpFile(self, clearJournal: bool) -> None:
        raise AssertionError("snapshots are installed by the replica")

    def _checkCommandsToApply(self) -> None:
        self._rules.exchange()

    def _on_state(self, before: int, after: int) -> None:
        if before == _LEADER:
            self._rules.leadership_lost()


class _LibraryLog:
    """The journal and the ballot as the library's `Journal`: positions instead of indexes, and its names."""

    def __init__(self, journal: Journal, ballot: Ballot) -> None:
        self._journal = journal
        self._ballot = ballot
        self._entries = journal.entries  # always the same list

    def __getitem__(self, at: Any) -> Any:
        return self._entries[at]

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, command: bytes, index: int, term: int) -> None:
        self._journal.append(command, index, term)

    def deleteEntriesFrom(self, at: int) -> None:
        self._journal.truncate(self._journal.first_index + at)

    def setCurrentTerm(self, term: int, vote: str | None) -> None:
        self._ballot.store(term, vote)

    def setRaftCommitIndex(self, index: int) -> None:
        """Not kept: after a power loss it could lie beyond the log (S10)."""

    def onOneSecondTimer(self) -> None:
        """Nothing waits for it."""


class _Link(Transport):  # type: ignore[misc]
    """What the library sends goes to the rules; it never opens a socket."""

    def __init__(self, rules: CoreRules) -> None:
        super().__init__(None, None, [])
        self._rules = rules

    def send(self, node: Node, message: Message) -> bool:
        self._rules.send(node.id, message)
        return True


class _NoPoller:
    """The host waits for sockets, not the library."""

    def poll(self, seconds: float) -> None:
        pass


def _configuration(timing: RaftTiming, on_state: Callable[[int, int], None]) -> SyncObjConf:
    return SyncObjConf(
        autoTick=False,
        appendEntriesUseBatch=True,  # else the library makes a pipe of its own
        appendEntriesPeriod=timing.heartbeat_s,
        raftMinTimeout=timing.election_s_min,
        raftMaxTimeout=timing.election_s_max,
        connectionTimeout=timing.election_s_max,
        leaderFallbackTimeout=timing.leader_fallback_s,
        dynamicMembershipChange=False,
        onStateChanged=on_state,
    )


__all__ = ["CoreRules", "Entry", "RaftCore", "now"]
