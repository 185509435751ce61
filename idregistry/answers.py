"""What becomes of one waiting request. Pure."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Settled:
    """The command was applied: `outcomes` is the request's own column (core.fates)."""

    outcomes: bytes


@dataclass(frozen=True, slots=True)
class Decided:
    """The directory's command was applied: what it answered (directory_commands)."""

    result: object


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


Answer = Settled | Decided | NotLeader | Overloaded | OutcomeUnknown
