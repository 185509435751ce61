"""The port: what a replicated log promises to who uses it, whatever engine is behind it."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, runtime_checkable


class StateMachine(Protocol):
    """What the log drives. Two replicas that applied the same commands are in the same state.

    All methods are called in the raft thread, except that what `freeze` returned is consumed in another one.
    """

    def apply(self, command: bytes) -> object:
        """Apply one committed command and return what its proposer is told (any object, kept as it is).

        Deterministic: reads no clock, no dice, no other machine. Never raises: a raise stops the replica for
        good (going on would let the replicas differ).
        """

    def freeze(self) -> Iterable[bytes]:
        """Take a consistent cut of the state, in milliseconds.

        The chunks (each up to a few MB, at most `snapshot.CHUNK_BYTES_MAX`) are drawn later, in a background
        thread, WHILE `apply` goes on: copy on write is the state machine's matter.
        """

    def restore(self, chunks: Iterable[bytes]) -> None:
        """Replace the whole state by the chunks of a `freeze`, in order and with the same borders."""


@runtime_checkable
class Preparing(Protocol):
    """A state machine that can take a snapshot in beside the work. One that can't is restored in a turn."""

    def prepare(self, chunks: Iterable[bytes]) -> Callable[[], None]:
        """Build the state that `restore` would, beside the present one; what is returned puts it in place.

        Called in a background thread WHILE `apply` goes on; what it returns is called in the raft thread, if
        at all, and takes milliseconds.
        """


@dataclass(frozen=True, slots=True)
class Applied:
    """Committed for ever, at `index`; `result` is what the state machine's `apply` returned."""

    index: int
    result: object


class Refusal(Enum):
    """Why a command certainly is not in the log."""

    NOT_LEADER = "not_leader"
    OVERLOADED = "overloaded"
    STOPPED = "stopped"
    # Only of changes of the members:
    BUSY = "busy"  # another one is not committed yet, or the leader is new: ask again
    BEHIND = "behind"  # the learner, or the majority that would remain, is away or lacks too much: later
    UNFIT = "unfit"  # it can never be made as it stands (a leader that is to remove itself, say)


@dataclass(frozen=True, slots=True)
class Refused:
    """The command certainly is not in the log. `leader` is the node to go to instead, where one is known."""

    reason: Refusal
    leader: str | None


@dataclass(frozen=True, slots=True)
class Unknown:
    """The command may or may not be in the log, now or later: repeat it, idempotent, at the leader."""


Outcome = Applied | Refused | Unknown


@dataclass(frozen=True, slots=True)
class Members:
    """Who belongs to a group: voters make its majorities, learners only follow. Sorted; nobody is both."""

    voters: tuple[str, ...] = ()
    learners: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[str, ...]:
        return self.voters + self.learners


class ChangeKind(Enum):
    """The steps in which a group changes: a new replica learns first, then votes; an old one goes."""

    ADD_LEARNER = "add_learner"
    PROMOTE = "promote"
    REMOVE = "remove"


@dataclass(frozen=True, slots=True)
class Change:
    """One step, of one node."""

    kind: ChangeKind
    node: str


@dataclass(frozen=True, slots=True)
class Status:
    """What one replica knows of its group, read at one moment (fields may be a turn apart from each other).

    `has_quorum`: a leader has heard from a majority within its fallback timeout; a follower knows a leader.
    """

    group: int
    node: str
    leader: str | None
    is_leader: bool
    term: int
    commit_index: int
    applied_index: int
    log_entries: int
    has_quorum: bool
    voters: tuple[str, ...] = ()
    learners: tuple[str, ...] = ()
    # Entries that each other member lacks, as far as the leader knows; empty on the others.
    behind: Mapping[str, int] = field(default_factory=dict)


class ReplicatedLog(Protocol):
    """One group's log, seen from one of its replicas."""

    def propose(self, command: bytes, done: Callable[[Outcome], None]) -> None:
        """Offer a command to the log. Raft thread only: call it from `on_tick` (or from a `done`).

        `done` is called exactly once, in the raft thread, in bounded time: possibly before this returns (when
        refused), with `Unknown` as soon as leadership is lost. It must not raise. Raises ValueError when the
        command is larger than the settings allow: it could never be accepted, so a retry would be in vain.
        """

    def hand_over(self, to: str | None = None) -> bool:
        """Ask a follower to lead at once (default: the one that has most). Raft thread only.

        False, and nothing is done, where this replica does not lead, or `to` is not a voter that is connected
        and has every entry: propose nothing for a moment and ask again. True says that it was asked.
        """

    def change_members(self, change: Change, done: Callable[[Outcome], None]) -> None:
        """Change the group by one node, through the log. Raft thread only; `done` as with `propose`.

        What holds already is told as `Applied` at once, so it may be asked for again after `Unknown`.
        """

    @property
    def members(self) -> Members:
        """The newest in this replica's log, committed or not; nobody where it is new. Any thread."""

    @property
    def is_leader(self) -> bool:
        """Whether this replica believes it leads. Any thread."""

    @property
    def leader(self) -> str | None:
        """The node id of the leader this replica knows of. Any thread."""

    @property
    def lag(self) -> int:
        """Entries that are committed, for all this replica knows, and that it has not applied. Any thread."""

    def unapplied(self) -> list[tuple[int, int, memoryview]]:
        """(index, term, command) of what stands in this replica's log and is not applied: committed some day,
        or never. Only the newest, where that is much. Any thread."""

    @property
    def in_flight(self) -> int:
        """How many proposed commands still wait for their outcome. Any thread."""

    def status(self) -> Status:
        """Any thread."""
