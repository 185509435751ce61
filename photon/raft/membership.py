"""The group's members on one replica: who counts now, and how a leader changes them, one at a time."""

from collections.abc import Iterable

from photon.raft.canvass import is_majority
from photon.raft.core import RaftCore, now
from photon.raft.journal import Journal
from photon.raft.port import Change, ChangeKind, Members, Refusal
from photon.raft.roster import Roster, changed, command_of
from photon.raft.sender import Sender
from photon.raft.settings import RaftTiming

# A learner that lacks more entries than this is not given a vote: the group would wait for it.
PROMOTED_BEHIND_MAX = 256
_NOBODY = Members()


class Membership:
    """Raft thread only, but for what says otherwise."""

    def __init__(
        self, node: str, core: RaftCore, journal: Journal, roster: Roster, sender: Sender, timing: RaftTiming
    ) -> None:
        self._node = node
        self._core = core
        self._journal = journal
        self._roster = roster
        self._sender = sender
        self._timing = timing

    @property
    def newest(self) -> Members:
        """As the log has them, committed or not. Any thread."""
        return self._roster.newest or _NOBODY

    @property
    def newest_index(self) -> int:
        return self._roster.newest_index

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
        self._roster.appended(command, index)
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
