"""What becomes of one waiting request. Pure."""

from dataclasses import dataclass

from photon.raft.port import Refusal, Refused, Unknown


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


def answer_unapplied(outcome: Refused | Unknown) -> Answer:
    """For a command that was not applied, or of which that is not known."""
    match outcome:
        case Refused(Refusal.OVERLOADED):
            return Overloaded("the log has too many commands in flight; back off and retry")
        case Refused(_, leader):
            return NotLeader(leader)
        case Unknown():
            return OutcomeUnknown()
