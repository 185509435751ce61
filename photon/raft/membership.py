"""One replica's part in its group: who counts now, how a leader changes that, when it begins, who may lead.

A group does not begin before its founders have met each other, all of them, once. Else those that have lost
their disks would found it anew among themselves, and what was decided once would be decided again. Whoever
has met another is remembered by it, under the identity of its directory, and is refused when it comes back
without that directory: so one that forgot never gets to meet everybody again while any other founder still
remembers. A group that has begun needs no more than a majority.

Every message about elections goes through here before the library hears of it. A replica asks whether it
would be voted for before it raises its term (pre-vote), and a vote is given only where no live leader is
known: one that was cut off, or removed, disturbs nobody (Ongaro's dissertation, 4.2.3 and 9.6). A leader that
hands over has its successor left out of both rules.
"""

import logging
from collections.abc import Callable, Iterable

from photon.raft.core import RaftCore, now
from photon.raft.port import Change, ChangeKind, Members, RaftTiming, Refusal
from photon.raft.rules.codec import (
    REQUEST_PRE_VOTE,
    REQUEST_VOTE,
    RESPONSE_PRE_VOTE,
    RESPONSE_VOTE,
    TIMEOUT_NOW,
    Message,
    encode,
)
from photon.raft.rules.members import changed, command_of, is_majority
from photon.raft.sender import Sender, Wire
from photon.raft.store import ReplicaStore

_log = logging.getLogger(__name__)

# A learner that lacks more entries than this is not given a vote: the group would wait for it.
PROMOTED_BEHIND_MAX = 256
# How long founders may take to start, one after the other, before the log says for whom a group waits.
TOLD_AFTER_S = 5.0
_NOBODY = Members()

HasMet = Callable[[str], bool]


class Membership:
    """Raft thread only, but for what says otherwise."""

    def __init__(self, core: RaftCore, store: ReplicaStore, sender: Sender, timing: RaftTiming) -> None:
        self._node = core.node
        self._core = core
        self._journal = store.journal
        self._log = store.members
        self._sender = sender
        self._timing = timing

    @property
    def newest(self) -> Members:
        """As the log has them, committed or not. Any thread."""
        return self._log.newest or _NOBODY

    @property
    def committed(self) -> Members:
        """The newest of which it is known that no other leader can undo them."""
        return self._log.at(self._core.commit_index) or _NOBODY

    @property
    def newest_index(self) -> int:
        return self._log.newest_index

    def follow(self) -> None:
        """The newest in the log count at once."""
        members = self.newest
        if members is not self._core.members:
            self._sender.forget_others(members.all)
            self._core.set_members(members)

    def plan(self, change: Change) -> Members | Refusal:
        """What the members are after the change, or why the leader does not make it now."""
        committed = self._core.commit_index
        if self.newest_index > committed or self._journal.term_at(committed) != self._core.term:
            # Two lists that are both uncommitted, of two leaders, could have majorities that do not meet.
            return Refusal.BUSY
        if change.kind is ChangeKind.REMOVE and change.node == self._node:
            return Refusal.UNFIT
        members = changed(self.newest, change)
        if members is None:
            return Refusal.UNFIT
        if members != self.newest and self._is_behind(change, members):
            return Refusal.BEHIND
        return members

    def append(self, members: Members) -> int:
        """Put them in the leader's log, where they count at once; returns the index."""
        index, command = self._journal.last_index + 1, command_of(members)
        self._log.appended(command, index)
        self._journal.append(command, index, self._core.term)
        self.follow()
        return index

    def behind(self) -> dict[str, int]:
        """Entries that each other member lacks, as far as the leader knows. Any thread."""
        last, core = self._journal.last_index, self._core
        return {peer: max(0, last - core.match_index(peer)) for peer in self.newest.all if peer != self._node}

    def live(self, peers: Iterable[str]) -> list[str]:
        """Those that the leader has heard of within its fallback timeout. Any thread."""
        heard = now() - self._timing.leader_fallback_s
        return [peer for peer in peers if peer != self._node and self._core.heard_from(peer) > heard]

    def hears_majority(self) -> bool:
        """Whether the leader does. Any thread."""
        voters = self.newest.voters
        return is_majority(len(self.live(voters)) + 1, len(voters))

    def _is_behind(self, change: Change, members: Members) -> bool:
        """Whether the group could stand still after the change."""
        if change.kind is ChangeKind.PROMOTE:
            match = self._core.match_index(change.node)
            far = self._journal.last_index - match > PROMOTED_BEHIND_MAX
            # It must have come to where it is a member at all: else it would not vote when it is needed.
            return far or match < self.newest_index
        if change.kind is ChangeKind.REMOVE:
            return not is_majority(len(self.live(members.voters)) + 1, len(members.voters))
        return False


class Founding:
    """One replica's wait: while it `waits`, it does not stand, vote or acknowledge. Raft thread only."""

    def __init__(
        self, group: int, node: str, founders: Members | None, has_met: HasMet, started_at: float
    ) -> None:
        """`founders`: of a log that holds just the entry which names them; None of any other log.

        `has_met`: whether this host and that peer remember each other, durably. `started_at`: seconds.
        """
        self._group = group
        self._node = node
        self._has_met = has_met
        self._started_at = started_at
        self._told = False
        self._missing: tuple[str, ...] = () if founders is None else founders.voters

    def waits(self) -> bool:
        """Whether somebody is still to be met; once it is not so, it is never so again."""
        if self._missing:
            others = sorted({*self._missing} - {self._node})
            self._missing = tuple(other for other in others if not self._has_met(other))
        return bool(self._missing)

    def tell(self, now: float) -> None:
        """Say once whom this replica waits for, when it has waited long."""
        if self._missing and not self._told and now - self._started_at >= TOLD_AFTER_S:
            self._told = True
            _log.warning(
                "raft %s: waiting to meet %s before founding group %d: all founders must be up once. Start "
                "them, and check the peer addresses. Where one refuses this node because it has lost its "
                "disk, replace this node by an empty one under a new name",
                self._node,
                ", ".join(self._missing),
                self._group,
            )


# --- Who may lead.


class Elections:
    """One replica's part in its group's elections. Raft thread only."""

    def __init__(self, core: RaftCore, store: ReplicaStore, wire: Wire) -> None:
        self._core = core
        self._journal = store.journal
        self._members = store.members
        self._wire = wire
        self._asking = False  # whether it would be voted for, in rounds, until there is a leader, or a vote
        self._asked_in = 0
        self._granted: dict[str, int] = {}  # in this round: peer -> the term it is in
        self._voted: tuple[int, set[str]] = (-1, set())  # who has voted in which term
        self._handed_over_in = -1  # the term in which a leader asked this replica to take over

    def due(self) -> None:
        """No leader was heard of for an election timeout: ask the voters, of which this must be one."""
        core = self._core
        if not core.may_stand:
            return
        self._asking = True
        self._asked_in += 1
        self._granted.clear()
        term, index = self._last_entry()
        question = encode(
            {
                "type": REQUEST_PRE_VOTE,
                "term": core.term,
                "round": self._asked_in,
                "last_log_index": index,
                "last_log_term": term,
            }
        )
        for peer in core.connected():
            if peer in core.members.voters:
                self._wire.send(peer, question)
        self._stand_if_wanted()

    def heard_leader(self) -> None:
        """A leader of this term, or a later one, has spoken."""
        self._core.heard_leader_at = now()
        self._asking = False

    def receive(self, peer: str, message: Message) -> None:
        """A peer's message about an election."""
        kind = message["type"]
        if kind == REQUEST_PRE_VOTE:
            if self._would_vote(message):
                self._grant(peer, message["round"])
        elif kind == RESPONSE_PRE_VOTE:
            if self._asking and message["round"] == self._asked_in:
                self._granted[peer] = message["term"]
                self._stand_if_wanted()
        elif kind == REQUEST_VOTE:
            if self._would_vote(message):
                self._core.deliver(peer, message)
        elif kind == RESPONSE_VOTE:
            if self._counts(peer, message["term"]):
                self._core.deliver(peer, message)
        elif kind == TIMEOUT_NOW and self._core.may_stand and peer == self._core.leader:
            self._handed_over_in = self._core.term
            self._core.deliver(peer, message)

    def sent(self, message: Message) -> Message:
        """The library asks for a vote, or gives one: what to send for it."""
        if message["type"] == RESPONSE_VOTE:
            # Who would have voted for this replica may say so only now: standing on that would depose the one
            # that it has just voted for.
            self._asking = False
        elif message["type"] == REQUEST_VOTE:
            return {**message, "transfer": message["term"] == self._handed_over_in + 1}
        return message

    def _would_vote(self, message: Message) -> bool:
        """Whether to hear out one who stands, or would: else nothing changes here, not even the term.

        A replica whose log names nobody has no vote. One whose log does not name it as a voter has: it may
        just not have come to the entry that made it one, and be needed.
        """
        if self._members.newest is None:
            return False
        if self._core.hears_leader() and not message.get("transfer", False):
            return False
        # Its log may hold all that is committed.
        last: tuple[int, int] = (message["last_log_term"], message["last_log_index"])
        return last >= self._last_entry()

    def _grant(self, peer: str, asked_in: int) -> None:
        answer = {"type": RESPONSE_PRE_VOTE, "term": self._core.term, "round": asked_in}
        self._wire.send(peer, encode(answer))

    def _stand_if_wanted(self) -> None:
        core = self._core
        would = {core.node, *self._granted}.intersection(core.members.voters)
        wanted = is_majority(len(would), len(core.members.voters))
        if wanted and core.may_stand and not core.is_leader:
            self._asking = False
            core.elect(max(self._granted.values(), default=0))

    def _counts(self, peer: str, term: int) -> bool:
        """The library counts messages, whoever they are of: only a voter's first one shall count."""
        if term < self._voted[0]:
            return False  # late, and no reason to forget who has voted since
        if term > self._voted[0]:
            self._voted = (term, set())
        counts = peer in self._core.members.voters and peer not in self._voted[1]
        self._voted[1].add(peer)
        return counts

    def _last_entry(self) -> tuple[int, int]:
        _, index, term = self._journal.entries[-1]
        return term, index
