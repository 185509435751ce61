"""Placement: which member of a group has which share of its work. Pure and deterministic.

A group is processes that do one kind of work in one place, as the dispatchers of a datacenter; a share is a
part of that work, as some of the log files. Members come with a new life each time they are started. A share
has one owner at a time, under a sequencer that grows with each: what a former owner still says is told from
the present one's by that, and no lease is needed for it (MillWheel 6.2). Leases only say when to act.

The functions are what a replicated log applies; `due` is what its leader proposes next. A share goes from an
owner that is there to its heir when the owner lets go of it, so nothing is under way then.
"""

from collections import Counter
from collections.abc import Container
from typing import Final

import msgspec
from msgspec.structs import replace

MEMBER_LEASE_S: Final = 3.0
"""A member that was not heard for so long has lost its shares."""
BEAT_EVERY_S: Final = 1.0
SHARES_MAX: Final = 4096
MEMBERS_MAX: Final = 256
"""Of a group."""


class Member(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`life`: grows with each start. `leaves`: it is to have no shares any more."""

    life: int
    address: str
    leaves: bool = False


class Share(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`owner`: "" for nobody, as is `heir`, who is to have it once the owner lets go. `written`: the
    sequencer under which what is kept of the share was written last; 0: nothing is."""

    owner: str = ""
    sequencer: int = 0
    heir: str = ""
    written: int = 0


class Group(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Never changed: any thread may keep one."""

    members: dict[str, Member] = {}
    shares: tuple[Share, ...] = ()

    def owned(self, name: str) -> dict[int, Share]:
        """Number -> share, of those of a member."""
        return {number: share for number, share in enumerate(self.shares) if share.owner == name}

    def stands(self, number: int, sequencer: int) -> bool:
        """Whether that is the present owner's."""
        if not 0 <= number < len(self.shares):
            return False
        share = self.shares[number]
        return bool(share.owner) and share.sequencer == sequencer

    def told(self) -> dict[str, object]:
        """Who has which shares, what moves (share -> to whom), and which are nobody's."""
        return {
            "members": {name: sorted(self.owned(name)) for name in sorted(self.members)},
            "leaving": sorted(name for name, member in self.members.items() if member.leaves),
            "moving": {str(n): share.heir for n, share in enumerate(self.shares) if share.heir},
            "unowned": [n for n, share in enumerate(self.shares) if not share.owner],
        }


class Leave(msgspec.Struct, frozen=True):
    """That life of the member has none of its shares any more."""

    name: str
    life: int


class Move(msgspec.Struct, frozen=True):
    """The share, if it still has that sequencer, goes to a member: at once if nobody has it."""

    share: int
    sequencer: int
    to: str


def founded(shares: int) -> Group:
    return Group({}, (Share(),) * shares)


def entered(group: Group, name: str, life: int, address: str) -> Group | None:
    """A member is there, or its new life, which has the shares of the former one under new sequencers. None:
    the life is of the past, or there are too many members."""
    present = group.members.get(name)
    if present is None and len(group.members) >= MEMBERS_MAX:
        return None
    if present is not None and present.life >= life:
        return group if present.life == life else None
    members = {**group.members, name: Member(life, address)}
    return Group(members, tuple(_given(one, name) if one.owner == name else one for one in group.shares))


def left(group: Group, leave: Leave) -> Group:
    name, member = leave.name, group.members.get(leave.name)
    if member is None or member.life != leave.life:
        return group
    members = {one: member for one, member in group.members.items() if one != name}
    return Group(members, tuple(_without(share, name) for share in group.shares))


def drained(group: Group, name: str) -> Group | None:
    """The member is to have no shares, until it enters anew. None: there is none of that name."""
    member = group.members.get(name)
    if member is None:
        return None
    return replace(group, members={**group.members, name: replace(member, leaves=True)})


def moved(group: Group, move: Move) -> Group:
    if move.to not in group.members or not 0 <= move.share < len(group.shares):
        return group
    share = group.shares[move.share]
    if share.sequencer != move.sequencer:
        return group
    if share.owner:
        return _with(group, move.share, replace(share, heir="" if move.to == share.owner else move.to))
    return _with(group, move.share, _given(share, move.to))


def released(group: Group, number: int) -> Group:
    """The owner lets go: the heir has it, or nobody."""
    share = group.shares[number]
    if share.heir:
        return _with(group, number, _given(share, share.heir))
    return _with(group, number, replace(share, owner=""))


def written(group: Group, number: int) -> Group:
    """The present owner has written what is kept of the share."""
    share = group.shares[number]
    return _with(group, number, replace(share, written=share.sequencer))


def due(group: Group, live: Container[str]) -> Leave | Move | None:
    """The next step to where each share has a live owner and none has two more than another; None: it is so,
    or will be when owners let go."""
    for name, member in sorted(group.members.items()):
        if name not in live:
            return Leave(name, member.life)
    staying = sorted(name for name, member in group.members.items() if not member.leaves)
    if not staying:
        return None
    load = Counter(share.heir or share.owner for share in group.shares)
    least = min(staying, key=lambda name: (load[name], name))
    for number, share in enumerate(group.shares):
        if (share.heir or share.owner) not in staying:
            return Move(number, share.sequencer, least)
    most = max(staying, key=lambda name: (load[name], name))
    if load[most] - load[least] < 2:
        return None
    for number, share in enumerate(group.shares):
        if share.owner == most and not share.heir:
            return Move(number, share.sequencer, least)
    return None


def _given(share: Share, name: str) -> Share:
    return Share(name, share.sequencer + 1, written=share.written)


def _without(share: Share, name: str) -> Share:
    share = replace(share, owner="") if share.owner == name else share
    return replace(share, heir="") if share.heir == name or not share.owner else share


def _with(group: Group, number: int, share: Share) -> Group:
    return replace(group, shares=(*group.shares[:number], share, *group.shares[number + 1 :]))
