"""What a shard's leader puts into its log beside commits: what the directory says, and the boundary. Pure.

The garbage collection boundary moves by the clocks of a majority (paper 2.3).
"""

from collections.abc import Iterable, Sequence
from typing import Final

from idregistry.commands import Boundary, Command, Configure, Fence, Prepare
from idregistry.directory import View
from idregistry.state import ShardState

_STEP_US_MIN: Final = 10_000_000
_STEP_SHARE: Final = 1000
DAY_US: Final = 86_400_000_000


def boundary_due(now_us: int, boundary_us: int, retention_days: float) -> int | None:
    """The new boundary to propose, or None while the present one is good enough.

    It moves in steps of a thousandth of the retention, or ten seconds where that is longer (but not longer
    than an eighth of it). 0 days keep all.
    """
    if retention_days <= 0:
        return None
    retention_us = round(retention_days * DAY_US)
    wanted_us = now_us - retention_us
    step_us = max(min(_STEP_US_MIN, retention_us // 8), retention_us // _STEP_SHARE)
    return wanted_us if wanted_us - boundary_us >= step_us else None


def majority_time_us(clocks_us: Iterable[int], replicas: int) -> int | None:
    """The latest time that the clocks of a majority of `replicas` have reached; None if too few are known.

    `clocks_us`: what each clock that is known says now, our own as one among them. A single clock that is far
    ahead, the leader's own above all, then moves no boundary: what it let expire would never be joined.
    """
    latest_first = sorted(clocks_us, reverse=True)
    majority = replicas // 2 + 1
    return latest_first[majority - 1] if len(latest_first) >= majority else None


FENCES_A_STEP: Final = 1_000


def command_due(
    state: ShardState,
    view: View,
    fences: Sequence[int],
    now_us: int,
    trusted_us: int | None,
    retention_days: float,
) -> Command | None:
    """The next one, or None. One at a time: each is seen in `state` when it has been applied.

    Fences come before a new shard's first configuration: it must not let a fenced incarnation win. A
    table comes before the proposal that is to follow it, or what it closed would be open again. The view
    may be old: what it says was true once, and what the state knows better is not proposed. `trusted_us`:
    the time that a majority's clocks have reached, None where that is not known.
    """
    if state.fences < len(fences):
        first = state.fences
        return Fence(now_us, first, tuple(fences[first : first + FENCES_A_STEP]))
    if view.configuration is not None and _version(state) < view.configuration.version:
        return Configure(now_us, view.configuration)
    proposal = view.proposal
    if proposal is not None and state.prepared is None and proposal.version == _version(state) + 1:
        return Prepare(now_us, proposal.version, proposal.start_us)
    if trusted_us is None:
        return None
    boundary_us = boundary_due(trusted_us, state.boundary_us, retention_days)
    return Boundary(now_us, boundary_us) if boundary_us is not None else None


def _version(state: ShardState) -> int:
    return 0 if state.configuration is None else state.configuration.version
