"""The port: what a replicated log promises to who uses it, whatever engine is behind it."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Protocol, runtime_checkable

# What mends a replica that has lost anything: it may have forgotten a vote, or what it acknowledged.
REPLACE_IT = (
    "replace this node: start an empty one under a new name and have it take this one's place, "
    "or, where it was the only one, restore a backup (a replica that forgot must never come back "
    "to the others under its old name)"
)


class StateMachine(Protocol):
    """What the log drives. Two replicas that applied the same commands are in the same state.

    All methods are called in the raft thread but `prepare`; what `freeze` returned is consumed in another.
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

    def prepare(self, chunks: Iterable[bytes]) -> Callable[[], None]:
        """Build a state beside the present one, of the chunks of a `freeze`, in order and with the same
        borders; what is returned puts it in place.

        Called in a background thread WHILE `apply` goes on; what it returns is called in the raft thread, if
        at all, and takes milliseconds.
        """


@dataclass(frozen=True, slots=True)
class FileId:
    """A file of a state machine. Of one name all replicas have the same bytes, `crc` stands for them."""

    name: str
    size: int
    crc: int


@runtime_checkable
class Filing(Protocol):
    """A state machine that keeps a part of its state in files beside the snapshot. They never change, and a
    follower that takes in a snapshot fetches those that it lacks.

    All methods are called in the raft thread but `verify`, and what `work` returned.
    """

    def open_in(self, directory: Path) -> None:
        """Where the files are, once, before anything else. What ends in `.tmp` there is no replica's yet."""

    def work(self) -> Callable[[], None] | None:
        """The next piece of what is to be written, for a background thread, while `apply` goes on; None where
        nothing is. `worked` follows when it has ended, or `gave_up` where the disk was full."""

    def pressure(self) -> float:
        """How much what is to be written piles up: 0, there is time; 1, no rest between pieces."""

    def worked(self) -> None:
        """The piece of work is done."""

    def gave_up(self) -> None:
        """It is to be begun anew some time."""

    def files(self) -> Sequence[FileId] | None:
        """Those that the snapshot of this moment would name; None while it can't be taken yet."""

    def verify(self, path: Path, file: FileId) -> bool:
        """Whether what has come in at `path` is the file. Any thread."""


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
    def committed_members(self) -> Members:
        """The newest that are committed, for all this replica knows. Raft thread only."""

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


# --- The bounds and times of the log.

MIB = 1 << 20
GIB = 1 << 30
# Room in a frame beside the commands: headers of the entries and of the message.
FRAME_SLACK_BYTES = MIB


@dataclass(frozen=True, slots=True)
class RaftTiming:
    """Times in seconds. For links of 100 ms: election 1-2, fallback 2-5.

    An election and the fallback take more than three heartbeats, silence more than four.
    """

    election_s_min: float = 0.25
    election_s_max: float = 0.5
    heartbeat_s: float = 0.05
    # A leader that has not heard from a majority for so long steps down.
    leader_fallback_s: float = 1.0
    # From one try to connect to the next; the waits double.
    reconnect_s_min: float = 0.02
    reconnect_s_max: float = 0.3
    # A proposal is answered `Unknown` after so long, whatever else happens.
    proposal_s: float = 10.0
    # A link is closed when the peer said nothing for so long (it says something every quarter of it).
    silence_s: float = 5.0


@dataclass(frozen=True, slots=True)
class RaftLimits:
    """Sizes and counts. `*_bytes` count the commands themselves."""

    # A larger command is refused; it always fits one AppendEntries.
    command_bytes_max: int = 2 * MIB
    # Commands proposed and not yet decided, a group.
    in_flight_max: int = 64
    # An AppendEntries carries entries up to this size: above command_bytes_max.
    batch_bytes: int = 4 * MIB
    # Bytes that may wait for one peer's socket, a quarter of them of snapshots; past it no more entries are
    # queued, far past it the link drops. Holds a batch and a piece of a snapshot.
    outgoing_bytes: int = 16 * MIB
    # Compaction: a snapshot is due when this much was applied since the last one.
    compact_entries: int = 10_000
    compact_bytes: int = 64 * MIB
    # Entries before a snapshot that are kept for followers which lag a little.
    tail_entries: int = 1_000
    tail_bytes: int = 16 * MIB
    segment_bytes: int = 16 * MIB
    # A piece of a snapshot on the wire.
    snapshot_piece_bytes: int = MIB
    # A longer snapshot of a leader is refused: a faulty one must not fill the disk.
    snapshot_bytes_max: int = 64 * GIB
    # One turn applies no longer than this (and at least one command), so that neither heartbeats nor new
    # commands wait for a replay. A turn costs so little beside it that the replay takes no longer.
    apply_turn_s: float = 0.004

    @property
    def frame_bytes_max(self) -> int:
        """The largest frame a peer may send."""
        return max(self.batch_bytes + self.command_bytes_max, self.snapshot_piece_bytes) + FRAME_SLACK_BYTES
