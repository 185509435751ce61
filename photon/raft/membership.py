"""The group's members on one replica: who counts now, how a leader changes them, when the group begins.

A group does not begin before its founders have met each other, all of them, once. Else those that have lost
their disks would found it anew among themselves, and what was decided once would be decided again. Whoever
has met another is remembered by it, under the identity of its directory, and is refused when it comes back
without that directory: so one that forgot never gets to meet everybody again while any other founder still
remembers. A group that has begun needs no more than a majority.
"""

import logging
from collections.abc import Callable, Iterable

from photon.raft.core import RaftCore, now
from photon.raft.port import Change, ChangeKind, Members, RaftTiming, Refusal
from photon.raft.rules.members import changed, command_of, is_majority
from photon.raft.sender import Sender
from photon.raft.store import ReplicaStore

_log = logging.getLogger(__name__)

# A learner that lacks more entries than this is not given a vote: the group would wait for it.
PROMOTED_BEHIND_MAX = 256
# How long founders may take to start, one after the other, before the log says for whom a group waits.
TOLD_AFTER_S = 5.0
_NOBODY = Members()

HasMet = Callable[[str], bool]


def everybody_met(peer: str) -> bool:
    """For those who look after it in another way."""
    return True


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


def still_to_meet(node: str, founders: Iterable[str], has_met: HasMet) -> tuple[str, ...]:
    """The other founders that `node` has never met."""
    return tuple(sorted(other for other in set(founders) - {node} if not has_met(other)))


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
            self._missing = still_to_meet(self._node, self._missing, self._has_met)
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
