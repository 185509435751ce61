"""What a group's leader does beside its clients' work: members, leadership, and what its log must hold. Pure.

A replica is replaced in a group so: the new one learns, votes, and only then the old one goes, so that at no
moment more than one replica is missing. `Steward` follows these rules. Beside commits a shard's log holds
what the directory says, and the garbage collection boundary, which moves by the clocks of a majority (paper
2.3).
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from idregistry.rules.commands import Boundary, Command, Configure, Fences, Prepare
from idregistry.rules.directory import View
from idregistry.rules.packing import NO_BOUNDARY
from idregistry.rules.sharding import BEGINNING
from idregistry.rules.state import ShardState
from photon.core.clock import Clock
from photon.core.settings import MAIN_SET
from photon.raft.port import Applied, Change, ChangeKind, Members, Outcome, ReplicatedLog, Status

PROMOTE_BEHIND: Final = 64
"""Entries a learner may lack when its promotion is asked for; the log has a stricter rule of its own."""

HAND_OVER_BEHIND: Final = 1_000
"""A successor that lacks more is not waited for."""


def change_due(
    members: Members,
    staying: Sequence[str],
    node: str,
    behind: Mapping[str, int],
    following: Sequence[str] = (),
) -> Change | None:
    """The next change that the leader `node` should make, or None.

    `staying`: who is to vote in the end. `following`: who is to learn for good. `behind`: entries that each
    other member lacks.
    """
    for name in members.learners:
        if name not in staying and name not in following:
            return Change(ChangeKind.REMOVE, name)
    for name in (*staying, *following):
        if name not in members.all:
            return Change(ChangeKind.ADD_LEARNER, name)
    promoted = [name for name in members.learners if name in staying]
    for name in promoted:
        if name in behind and behind[name] <= PROMOTE_BEHIND:
            return Change(ChangeKind.PROMOTE, name)
    if not promoted:
        for name in members.voters:
            if name not in staying and name != node:
                return Change(ChangeKind.REMOVE, name)
    return None


def in_turn(turn: int, staying: Sequence[str], leaders: Sequence[str]) -> list[str]:
    """Who stays, in the order in which they are to lead a group: groups are spread, by their number `turn`,
    over `leaders` (those that stay), or over all that stay."""
    wanted = [name for name in leaders if name in staying] or list(staying)
    first = turn % max(1, len(wanted))
    order = [*wanted[first:], *wanted[:first]]
    return [*order, *(name for name in staying if name not in order)]


def successor(turn: int, status: Status, staying: Sequence[str], leaders: Sequence[str]) -> str | None:
    """Who should lead the group instead of this replica, which leads it (`in_turn`); None: nobody, or nobody
    is ready."""
    order = in_turn(turn, staying, leaders)
    # Who is wanted but away or far behind is not waited for, unless this replica must go.
    for name in order[:1] if status.node in staying else order:
        if name == status.node:
            return None
        # Who has acknowledged nothing to this leader lacks everything: it is away.
        near = min(HAND_OVER_BEHIND, status.commit_index)
        if name in status.voters and status.behind.get(name, near) < near:
            return name
    return None


def is_replaced(
    of_shards: Iterable[Members], directory: Members, leaving: tuple[str, str], home: str
) -> bool:
    """Whether every group of the set `home` has the new replica as its voter and the old one no more."""
    old, new = leaving
    voting = [*of_shards, *([directory] if home == MAIN_SET else [])]
    return old not in directory.all and all(old not in one.all and new in one.voters for one in voting)


_LOOK_S: Final = 0.2
_HAND_OVER_EVERY_S: Final = 5.0
"""From one try to give leadership away to the next."""
_HOLD_S: Final = 0.3
"""Nothing is proposed for so long at most, so that the successor has everything."""
_CHANGE_TIMEOUT_S: Final = 15.0


class Steward:
    """`shard`: whose group it is; None: the directory's."""

    def __init__(self, shard: int | None, leaders: tuple[str, ...], clock: Clock) -> None:
        self._shard = shard
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
        staying = view.staying(view.home(self._shard))
        if now >= self._changing_until:
            following = view.following if self._shard is None else ()
            change = change_due(log.members, staying, status.node, status.behind, following)
            if change is not None:
                self._changing_until = now + _CHANGE_TIMEOUT_S
                log.change_members(change, self._changed)
                return
        if now >= self._hand_over_at:
            # The directory is led where shard 0 is: one leader less to lose.
            self._successor = successor(self._shard or 0, status, staying, self._leaders)
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


_STEP_US_MIN: Final = 10_000_000
_STEP_SHARE: Final = 1000
DAY_US: Final = 86_400_000_000
LEAP_EVERY_S: Final = 43_200.0
"""A boundary that lags by more than a day moves by a day so often: twice as fast as time, so it catches up,
and clocks and events that are wrong together have forgotten little before somebody has heard the alarm."""


def boundary_due(
    reached_us: int,
    boundary_us: int,
    retention_days: float,
    still_s: float,
    held_us: int | None = None,
    furthest_us: int = NO_BOUNDARY,
) -> int | None:
    """The new boundary to propose, or None while the present one is good enough.

    It moves in steps of a thousandth of the retention, or ten seconds where that is longer (but not longer
    than an eighth of it), and of a day at most. `still_s`: how long the leader has seen it stand. `held_us`:
    what it must not pass. `furthest_us`: where other shards' are; a new shard's begins there, or it could
    leap by years. 0 days keep all.
    """
    if retention_days <= 0:
        return None
    retention_us = round(retention_days * DAY_US)
    wanted_us = reached_us - retention_us
    if boundary_us == NO_BOUNDARY != furthest_us:
        wanted_us = min(wanted_us, furthest_us)
    if held_us is not None and held_us < wanted_us:
        if boundary_us == NO_BOUNDARY:  # a first one far back would take years of days to catch up
            return None
        wanted_us = held_us
    step_us = max(min(_STEP_US_MIN, retention_us // 8), retention_us // _STEP_SHARE)
    if boundary_us != NO_BOUNDARY and wanted_us - boundary_us > DAY_US:
        return boundary_us + DAY_US if still_s >= LEAP_EVERY_S else None
    return wanted_us if wanted_us - boundary_us >= step_us else None


HOLD_STEP_US: Final = 3_600_000_000


def hold_due(
    present_us: int | None,
    oldest_us: int | None,
    boundary_us: int,
    reached_us: int | None,
    retention_days: float,
) -> int | None:
    """The hold to write down for a dispatcher that has `present_us` (None: none), or None if that will do.

    `oldest_us`: of the events that it has not read or not recorded an end for; None while it does not know
    yet. What it does not know may be as old as what is kept now. A hold goes back at once, and on by an hour,
    or a 24th of the retention where that is shorter: idle systems write next to nothing.
    """
    retention_us = round(retention_days * DAY_US)
    if retention_us <= 0:
        return None
    if oldest_us is None:
        if present_us is not None:
            return None
        if boundary_us != NO_BOUNDARY:
            return boundary_us
        return None if reached_us is None else reached_us - retention_us
    if present_us is not None and 0 <= oldest_us - present_us < min(HOLD_STEP_US, retention_us // 24):
        return None
    return oldest_us


def majority_time_us(clocks_us: Iterable[int], replicas: int) -> int | None:
    """The latest time that the clocks of a majority of `replicas` have reached; None if too few are known.

    `clocks_us`: what each clock that is known says now, our own as one among them. A single clock that is far
    ahead, the leader's own above all, then moves no boundary: what it let expire would never be joined.
    """
    latest_first = sorted(clocks_us, reverse=True)
    majority = replicas // 2 + 1
    return latest_first[majority - 1] if len(latest_first) >= majority else None


def reached_us(directory: ReplicatedLog, clocks_us: int | None, newest_us: int) -> int | None:
    """The time that the boundary goes by: both the clocks of a majority and the events seen have reached it.

    Machines of one hypervisor, or of one bad time source, are wrong together, and one event may carry any
    time: neither alone lets the ids of days be forgotten. `newest_us`: the latest time of an event that any
    shard has seen, BEGINNING where there is none. None also where the replica's `directory` is an old one: it
    may lack a hold.
    """
    if directory.leader is None or directory.lag:
        return None
    return None if clocks_us is None or newest_us == BEGINNING else min(clocks_us, newest_us)


FENCES_A_STEP: Final = 1_000


def command_due(
    state: ShardState,
    view: View,
    fences: Sequence[int],
    now_us: int,
    boundary_us: int | None,
) -> Command | None:
    """The next one, or None. One at a time: each is seen in `state` when it has been applied.

    Fences come before a new shard's first configuration: it must not let a fenced incarnation win. A
    table comes before the proposal that is to follow it, or what it closed would be open again. The view
    may be old: what it says was true once, and what the state knows better is not proposed.
    `boundary_us`: as of `boundary_due`.
    """
    if state.fences < len(fences):
        first = state.fences
        return Fences(now_us, first, tuple(fences[first : first + FENCES_A_STEP]))
    if view.configuration is not None and state.version < view.configuration.version:
        return Configure(now_us, view.configuration)
    proposal = view.proposal
    if proposal is not None and state.prepared is None and proposal.version == state.version + 1:
        return Prepare(now_us, proposal.version, proposal.start_us)
    return Boundary(now_us, boundary_us) if boundary_us is not None else None
