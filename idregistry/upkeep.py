"""What a shard's leader puts into its log beside commits: what the directory says, and the boundary. Pure."""

from collections.abc import Sequence
from typing import Final

from idregistry.boundary import boundary_due
from idregistry.commands import Boundary, Command, Configure, Fence, Prepare
from idregistry.state import ShardState
from idregistry.view import View

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
