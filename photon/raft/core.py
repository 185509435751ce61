"""pysyncobj's Raft rules, held at arm's length: the only file that knows the library's private names.

What is left of the library here: elections, the commit rule, and the handlers of the five messages. What it
does with disks, sockets, pickles, snapshots, applying and sending is replaced by `CoreRules`, which
`replica` implements. Who its majorities are made of is set from outside (`set_members`), and it stands for
election only when told to (`elect`). The version is pinned; a test compares the names that
are used with the library's.
"""

import _socket
import math
import random
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol, cast

from pysyncobj import SyncObj, SyncObjConf, syncobj
from pysyncobj.node import Node
from pysyncobj.transport import Transport
from pysyncobj.version import VERSION

from photon.core.errors import PhotonError
from photon.raft.port import Members, RaftTiming
from photon.raft.rules.codec import RESPONSE_VOTE, Message
from photon.raft.store import ReplicaStore

# The library puts one for Windows in its place, on every system: whoever else is in the process needs it.
socket.inet_ntop = _socket.inet_ntop

PINNED_VERSION = "0.3.17"
_FOLLOWER, _LEADER = 0, 2


def now() -> float:
    """The library's clock (seconds, monotonic), which all deadlines here are on.

    A simulation replaces it there.
    """
    return cast(float, syncobj.monotonicTime())


class CoreRules(Protocol):
    """What the core asks of its owner, all in the raft thread and within `RaftCore.tick` or `deliver`."""

    def send(self, peer: str, message: Message) -> None:
        """The core answers a peer, or asks for its vote."""

    def election_due(self) -> None:
        """No leader was heard of for an election timeout."""

    def append_entries_due(self) -> None:
        """The leader's heartbeat is due, or it has just been elected."""

    def apply_committed(self) -> None:
        """Apply what is committed and not applied."""

    def exchange(self) -> None:
        """What a turn may apply is applied: take new commands, send what is new."""

    def compact(self) -> None:
        """The end of a tick: look after snapshots."""

    def leadership_lost(self) -> None:
        """This replica led and does not any more."""


class RaftCore(SyncObj):  # type: ignore[misc]  # the library is not typed
    """One replica's Raft state.

    Nothing in it touches a disk (but through `store`) or a socket.
    """

    def __init__(
        self,
        store: ReplicaStore,
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
        self._hard_state = store.hard_state
        self.node = store.hard_state.node
        self._nodes: dict[str, Node] = {}
        self.members = Members()
        # There may well be a leader, which speaks as soon as there is a connection: it is heard out first.
        self.heard_leader_at = now() - timing.election_s_min + timing.heartbeat_s / 2
        self._link = _Link(rules)
        super().__init__(
            Node(self.node),
            [],
            _configuration(timing, self._on_state),
            transport=self._link,
        )
        self._poller = _NoPoller()
        # The library has made a log in memory; ours takes its place. The commit index is never read from disk
        # (S10): what is committed beyond the snapshot is learnt again from the leader.
        self._SyncObj__raftLog = _LibraryLog(store)
        self._SyncObj__raftCurrentTerm = store.hard_state.term
        self._SyncObj__votedForNodeId = store.hard_state.vote
        self.applied_to(applied_index)

    # -- what the owner asks ----------------------------------------------------------------------------

    def tick(self) -> None:
        """One turn of the library: elections, commit rule, fallback, then the rules in order."""
        if not self.is_leader and self._deadline < now():
            self._SyncObj__generateRaftTimeout()
            self._SyncObj__raftLeader = None
            self._rules.election_due()
        if not self.may_stand or not (self.alone or self._SyncObj__connectedNodes):
            self._stay_put()
        self._onTick(0.0)

    def deliver(self, peer: str, message: Message) -> None:
        """Give a peer's message, made harmless, to the library's handler. The term that it brings and the
        vote that it gets are one write."""
        with self._link.votes_held(), self._hard_state.gathered():
            super()._SyncObj__onMessageReceived(self._node_of(peer), message)

    def elect(self, term: int) -> None:
        """Stand for election within this `tick` or the next, in a term above `term` and the present one."""
        assert self.may_stand
        self._raise_term(term)
        self._SyncObj__raftElectionDeadline = 0.0

    def step_down(self, term: int) -> None:
        """Somebody of the group is in a higher term: lead, and follow, no longer in this one."""
        self._raise_term(term)
        self._SyncObj__setState(_FOLLOWER)
        self._SyncObj__raftLeader = None

    def set_members(self, members: Members) -> None:
        """Whose votes and acknowledgements count from now on, and who is sent entries besides."""
        self.members = members
        voters, learners = (
            {self._node_of(name) for name in names if name != self.node}
            for names in (members.voters, members.learners)
        )
        self._SyncObj__otherNodes = voters
        self._SyncObj__readonlyNodes = learners  # the library's name for who counts in no majority
        end = self._SyncObj__raftLog[-1][1] + 1
        fresh = (self._SyncObj__raftNextIndex, end), (self._SyncObj__raftMatchIndex, 0)
        for known, value in (*fresh, (self._SyncObj__lastResponseTime, now())):
            for node in known.keys() - voters - learners:
                del known[node]
            for node in (voters | learners) - known.keys():
                known[node] = value

    @property
    def may_stand(self) -> bool:
        """Whether this replica is a voter."""
        return self.node in self.members.voters

    @property
    def alone(self) -> bool:
        """Whether it is the only one."""
        return self.members.voters == (self.node,)

    def hears_leader(self) -> bool:
        """Whether there is a live leader, for all this replica knows: then it helps nobody to depose it."""
        return self.is_leader or now() - self.heard_leader_at < self._timing.election_s_min

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
        """Leader only, of a member: the entry to send to it next."""
        return cast(int, self._SyncObj__raftNextIndex[self._node_of(peer)])

    def set_next_index(self, peer: str, index: int) -> None:
        self._SyncObj__raftNextIndex[self._node_of(peer)] = index

    def match_index(self, peer: str) -> int:
        """Leader only: up to where the peer has acknowledged, in this term and on this connection.

        Any thread; 0 where nothing is known.
        """
        return cast(int, self._SyncObj__raftMatchIndex.get(Node(peer), 0))

    def heard_from(self, peer: str) -> float:
        """When the peer last answered this leader; 0 where it never did. Any thread."""
        return cast(float, self._SyncObj__lastResponseTime.get(Node(peer), 0.0))

    def connected(self) -> list[str]:
        """The other members that messages can be sent to now."""
        up = self._SyncObj__connectedNodes
        return [name for name in self.members.all if name != self.node and self._node_of(name) in up]

    def peer_up(self, peer: str) -> None:
        """A connection to the peer is there."""
        up = self._SyncObj__connectedNodes
        if not up and not self.is_leader:
            # Alone until now, so the deadline passed long ago: hear the leader out before starting an
            # election.
            self._SyncObj__generateRaftTimeout()
        up.add(self._node_of(peer))
        self._SyncObj__newAppendEntriesTime = 0.0

    def peer_down(self, peer: str) -> None:
        """It is gone."""
        node = self._node_of(peer)
        self._SyncObj__connectedNodes.discard(node)
        if self.is_leader and node in self._SyncObj__raftNextIndex:
            # What was under way is lost, and the peer may come back with less than it had: ask it anew.
            self._SyncObj__raftNextIndex[node] = self._SyncObj__raftLog[-1][1] + 1
            self._SyncObj__raftMatchIndex[node] = 0

    def leader_gone(self, is_next: bool) -> None:
        """Its connection ended, most likely with its process, so no election timeout need pass: one of the
        followers is next and stands at once, the others when it has had time to.

        Where only a connection broke, nobody who still hears the leader votes for another.
        """
        self.heard_leader_at = -math.inf
        self._SyncObj__raftLeader = None
        spread = self._timing.election_s_max - self._timing.election_s_min
        self.elect_now(0.0 if is_next else self._rng.uniform(spread / 2, spread))

    def elect_now(self, after_s: float = 0.0) -> None:
        """Wait for so long, not for the election timeout."""
        self._deadline = now() + after_s

    def hand_over(self, peer: str) -> None:
        """Leader only: ask a voter that has everything to stand for election at once."""
        self.transferLeadership(self._node_of(peer))

    def append_entries_sent(self) -> None:
        """The next heartbeat is due within a period: at its multiples, so that many groups share a turn."""
        period = self._timing.heartbeat_s
        self._SyncObj__newAppendEntriesTime = (now() // period + 1) * period

    def send_within(self, seconds: float) -> None:
        """Leader only: the next heartbeat is due by then."""
        self._SyncObj__newAppendEntriesTime = min(self._SyncObj__newAppendEntriesTime, now() + seconds)

    def deadline(self) -> float:
        """When `tick` must be called again, whatever happens."""
        if self.is_leader:
            return self._SyncObj__newAppendEntriesTime
        return min(self._deadline, self._SyncObj__raftElectionDeadline)

    def _node_of(self, peer: str) -> Node:
        node = self._nodes.get(peer)
        if node is None:
            node = self._nodes[peer] = Node(peer)
        return node

    def _raise_term(self, term: int) -> None:
        if term > self.term:
            self._SyncObj__setCurrentTerm(term, None)

    def _stay_put(self) -> None:
        """Stand for no election, though one was asked for."""
        self._SyncObj__raftElectionDeadline = math.inf
        self._SyncObj__transferInProgress = False

    # -- what replaces the library's own ----------------------------------------------------------------

    def _SyncObj__generateRaftTimeout(self) -> float:
        """The library puts its election off. It never comes to one by itself: `tick` asks the rules first."""
        self._deadline = now() + self._rng.uniform(self._timing.election_s_min, self._timing.election_s_max)
        return math.inf

    def _SyncObj__onMessageReceived(self, node: Node, message: Message) -> None:
        raise AssertionError("messages come through deliver")

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
        if after == _LEADER:
            self._stay_put()
        if before == _LEADER:
            self._rules.leadership_lost()


class _LibraryLog:
    """Journal and hard state as the library's `Journal`: positions instead of indexes, and its names."""

    def __init__(self, store: ReplicaStore) -> None:
        self._journal = store.journal
        self._hard_state = store.hard_state
        self._members = store.members
        self._entries = store.journal.entries  # always the same list

    def __getitem__(self, at: Any) -> Any:
        return self._entries[at]

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, command: bytes, index: int, term: int) -> None:
        self._members.appended(command, index)
        self._journal.append(command, index, term)

    def deleteEntriesFrom(self, at: int) -> None:
        index = self._journal.first_index + at
        self._members.truncated(index)
        self._journal.truncate(index)

    def setCurrentTerm(self, term: int, vote: str | None) -> None:
        self._hard_state.store(term, vote)

    def setRaftCommitIndex(self, index: int) -> None:
        """Not kept: after a power loss it could lie beyond the log (S10)."""

    def onOneSecondTimer(self) -> None:
        """Nothing waits for it."""


class _Link(Transport):  # type: ignore[misc]
    """What the library sends goes to the rules; it never opens a socket."""

    def __init__(self, rules: CoreRules) -> None:
        super().__init__(None, None, [])
        self._rules = rules
        self._votes: list[tuple[str, Message]] | None = None

    @contextmanager
    def votes_held(self) -> Iterator[None]:
        """A vote that is given within leaves at the end of the block, unless that fails."""
        self._votes = []
        try:
            yield
            votes, self._votes = self._votes, None
        finally:
            self._votes = None
        for vote in votes:
            self._rules.send(*vote)

    def send(self, node: Node, message: Message) -> bool:
        if self._votes is not None and message["type"] == RESPONSE_VOTE:
            self._votes.append((node.id, message))
        else:
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
