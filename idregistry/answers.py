"""What becomes of one waiting commit request. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settled:
    """The batch was committed: `outcomes` is the request's own column (core.fates.Committed)."""

    outcomes: bytes


@dataclass(frozen=True, slots=True)
class NotLeader:
    """Nothing was done: `leader` (a node id) is who to ask instead, where one is known."""

    leader: str | None


@dataclass(frozen=True, slots=True)
class Overloaded:
    """Nothing was done: too much waits, or the request's deadline passed before its turn came."""

    why: str


@dataclass(frozen=True, slots=True)
class OutcomeUnknown:
    """It may have been committed, or may yet be: ask again, with the same token."""


Answer = Settled | NotLeader | Overloaded | OutcomeUnknown
