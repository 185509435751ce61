"""Where a group's members and its leader belong, and the steps that bring them there. Pure.

A replica is replaced in a group so: the new one learns, votes, and only then the old one goes, so that at no
moment more than one replica is missing.
"""

from collections.abc import Mapping, Sequence
from typing import Final

from idregistry.view import View
from photon.raft.port import Change, ChangeKind, Members, Status

PROMOTE_BEHIND: Final = 64
"""Entries a learner may lack when its promotion is asked for; the log has a stricter rule of its own."""

HAND_OVER_BEHIND: Final = 1_000
"""A successor that lacks more is not waited for."""


def change_due(
    members: Members, staying: Sequence[str], node: str, behind: Mapping[str, int]
) -> Change | None:
    """The next change that the leader `node` should make, or None.

    `staying`: who is to be a member in the end. `behind`: entries that each other member lacks.
    """
    for name in members.learners:
        if name not in staying:
            return Change(ChangeKind.REMOVE, name)
    for name in staying:
        if name not in members.all:
            return Change(ChangeKind.ADD_LEARNER, name)
    for name in members.learners:
        if name in behind and behind[name] <= PROMOTE_BEHIND:
            return Change(ChangeKind.PROMOTE, name)
    if not members.learners:
        for name in members.voters:
            if name not in staying and name != node:
                return Change(ChangeKind.REMOVE, name)
    return None


def successor(turn: int, status: Status, view: View, leaders: Sequence[str]) -> str | None:
    """Who should lead the group instead of this replica, which leads it; None: nobody, or nobody is ready.

    Groups are spread, by their number `turn`, over `leaders` (those of them that stay), or over all replicas.
    """
    staying = view.staying
    if not staying:
        return None
    wanted = [name for name in leaders if name in staying] or list(staying)
    first = turn % len(wanted)
    # Who is wanted but away or far behind is not waited for, unless this replica must go.
    candidates = [wanted[first]]
    if status.node not in staying:
        candidates += [*wanted[first + 1 :], *wanted[:first], *staying]
    for name in candidates:
        if name == status.node:
            return None
        # Who has acknowledged nothing to this leader lacks everything: it is away.
        near = min(HAND_OVER_BEHIND, status.commit_index)
        if name in status.voters and status.behind.get(name, near) < near:
            return name
    return None


def is_replaced(members: Sequence[Members], leaving: tuple[str, str]) -> bool:
    """Whether every group has the new replica as its voter and the old one no more."""
    old, new = leaving
    return all(old not in of_group.all and new in of_group.voters for of_group in members)
