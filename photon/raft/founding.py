"""When a group begins: not before its founders have met each other, all of them, once.

Else those that have lost their disks would found it anew among themselves, and what was decided once would
be decided again. Whoever has met another is remembered by it, under the identity of its directory, and is
refused when it comes back without that directory: so one that forgot never gets to meet everybody again while
any other founder still remembers. A group that has begun needs no more than a majority.
"""

import logging
from collections.abc import Callable, Iterable

from photon.raft.port import Members

_log = logging.getLogger(__name__)

# How long founders may take to start, one after the other, before the wait is told.
TOLD_AFTER_S = 5.0

HasMet = Callable[[str], bool]


def everybody_met(peer: str) -> bool:
    """For those who look after it in another way."""
    return True


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
