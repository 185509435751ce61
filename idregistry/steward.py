"""Keeps one group's members and leader where the directory says. Raft thread of one replica only."""

from typing import Final

from idregistry.placement import change_due, successor
from idregistry.view import View
from photon.core.clock import Clock
from photon.raft.port import Applied, Outcome, ReplicatedLog

_LOOK_S: Final = 0.2
_HAND_OVER_EVERY_S: Final = 5.0
"""From one try to give leadership away to the next."""
_HOLD_S: Final = 0.3
"""Nothing is proposed for so long at most, so that the successor has everything."""
_CHANGE_TIMEOUT_S: Final = 15.0


class Steward:
    """`turn`: the group's place in the row of those that are spread over the replicas."""

    def __init__(self, turn: int, leaders: tuple[str, ...], clock: Clock) -> None:
        self._turn = turn
        self._leaders = leaders
        self._monotonic = clock.monotonic
        self._look_at = 0.0
        self._changing_until = 0.0
        self._hand_over_at = 0.0
        self._successor: str | None = None
        self._hold_until = 0.0

    def on_tick(self, log: ReplicatedLog, view: View) -> bool:
        """Take the next step that is due. Whether proposals may go on; if not, they soon may."""
        now = self._monotonic()
        if not log.is_leader or view.configuration is None:
            self._successor = None
            # Time for a new leader to hear how far everybody is.
            self._hand_over_at = now + 2 * _LOOK_S
            return True
        if self._successor is not None:
            return self._give_away(log, now)
        if now >= self._look_at:
            self._look_at = now + _LOOK_S
            self._look(log, view, now)
        return True

    def _look(self, log: ReplicatedLog, view: View, now: float) -> None:
        status = log.status()
        if now >= self._changing_until:
            change = change_due(log.members, view.staying, status.node, status.behind)
            if change is not None:
                self._changing_until = now + _CHANGE_TIMEOUT_S
                log.change_members(change, self._changed)
                return
        if now >= self._hand_over_at:
            self._successor = successor(self._turn, status, view, self._leaders)
            self._hold_until = now + _HOLD_S

    def _changed(self, outcome: Outcome) -> None:
        # Whatever came of it, the next look sees what is still due; a refusal is asked again a while later.
        self._changing_until = self._monotonic() + (0.0 if isinstance(outcome, Applied) else _LOOK_S)

    def _give_away(self, log: ReplicatedLog, now: float) -> bool:
        """Hold proposals until the successor has everything, for a moment at most."""
        if log.hand_over(self._successor) or now >= self._hold_until:
            self._successor = None
            self._hand_over_at = now + _HAND_OVER_EVERY_S
            return True
        return False
