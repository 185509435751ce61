"""Who belongs to the group, as the log has it: pure rules, no IO.

The members are entries of the log, each with the whole list. The newest one counts as soon as it is in the
log, committed or not, and what is truncated is undone (Ongaro's dissertation, 4.1). Lists that follow each
other differ by one voter, so that any two majorities of them meet.
"""

import struct
from collections.abc import Iterable

from photon.raft.journal import Entry
from photon.raft.port import Change, ChangeKind, Members
from photon.raft.rules.codec import MessageError

MEMBERS = b"\x10"  # the kind of such an entry, beside pysyncobj's
_COUNTS = struct.Struct("<HH")  # voters, learners; then each name, its length before it
NAME_BYTES_MAX = 255
MEMBERS_MAX = 64  # of a group, learners and all


def is_majority(count: int, voters: int) -> bool:
    return 2 * count > voters


def founding(founders: Iterable[str]) -> Members:
    """Raises ValueError for what can't found a group."""
    voters = tuple(sorted(founders))
    if not voters or len(set(voters)) != len(voters):
        raise ValueError(f"{voters} can't found a group: name each founder once")
    return Members(voters)


def command_of(members: Members) -> bytes:
    """The entry's bytes."""
    names = [name.encode() for name in members.all]
    assert all(0 < len(name) <= NAME_BYTES_MAX for name in names)
    counts = _COUNTS.pack(len(members.voters), len(members.learners))
    return MEMBERS + counts + b"".join(bytes([len(name)]) + name for name in names)


def members_of(command: bytes) -> Members | None:
    """The members in an entry, None in one of another kind. Raises MessageError where it is cut or wrong."""
    if command[:1] != MEMBERS:
        return None
    try:
        voters, learners = _COUNTS.unpack_from(command, 1)
        names, at = [], 1 + _COUNTS.size
        for _ in range(voters + learners):
            end = at + 1 + command[at]
            names.append(command[at + 1 : end].decode())
            at = end
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise MessageError("a list of members that is cut or no text") from error
    if at != len(command) or not voters or "" in names or len(set(names)) != len(names):
        raise MessageError("a list of members that does not add up")
    return Members(tuple(names[:voters]), tuple(names[voters:]))


def check_lists(entries: Iterable[Entry]) -> None:
    """Raises MessageError where an entry is a list of members that is cut or wrong."""
    for command, _, _ in entries:
        members_of(command)


def changed(members: Members, change: Change) -> Members | None:
    """The members after the change; None where it makes no sense."""
    node, voters, learners = change.node, set(members.voters), set(members.learners)
    if change.kind is ChangeKind.ADD_LEARNER:
        if node in voters or not 0 < len(node.encode()) <= NAME_BYTES_MAX:
            return None
        learners.add(node)
    elif change.kind is ChangeKind.PROMOTE:
        if node not in voters | learners:
            return None
        voters.add(node)
        learners.discard(node)
    else:
        voters.discard(node)
        learners.discard(node)
    if not voters or len(voters) + len(learners) > MEMBERS_MAX:
        return None
    return Members(tuple(sorted(voters)), tuple(sorted(learners)))


class MemberLog:
    """The lists of members in one replica's log. Raft thread only, but for `newest`."""

    def __init__(self) -> None:
        self.newest: Members | None = None  # None where the log names nobody: no member of anything
        self._known: list[tuple[int, Members]] = []  # oldest first

    @property
    def newest_index(self) -> int:
        """Where the newest list stands; 0 where there is none."""
        return self._known[-1][0] if self._known else 0

    def at(self, index: int) -> Members | None:
        """The members when the entry at `index` was the last."""
        return next((members for at, members in reversed(self._known) if at <= index), None)

    def appended(self, command: bytes, index: int) -> None:
        """An entry is about to be in the log. Raises MessageError."""
        members = members_of(command)
        if members is not None:
            self._known.append((index, members))
            self.newest = members

    def truncated(self, index: int) -> None:
        """The entries from `index` on are gone."""
        self._keep([known for known in self._known if known[0] < index])

    def restart(self, index: int, members: Members, entries: Iterable[Entry]) -> None:
        """A snapshot up to `index` is the ground now; `entries` is what the log holds."""
        self._keep([(index, members)])
        for command, at, _ in entries:
            if at > index:
                self.appended(command, at)

    def forget_before(self, index: int) -> None:
        """Nobody asks any more for the members before `index` (a snapshot covers it)."""
        ground = [known for known in self._known if known[0] <= index][-1:]
        self._keep(ground + [known for known in self._known if known[0] > index])

    def _keep(self, known: list[tuple[int, Members]]) -> None:
        self._known = known
        self.newest = known[-1][1] if known else None
