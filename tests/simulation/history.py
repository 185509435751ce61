"""What happened, as a list of events: of a simulation or of real processes. Pure data.

Times are seconds on one clock (of the world, or of the machine the clients run on). `op` numbers what a
client wants; it may ask for it several times, with the same token.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Commit:
    """Register the ids by `token`, whose owner is `incarnation`. Outcomes: core.fates.Committed."""

    ids: tuple[bytes, ...]
    times: tuple[int, ...]
    token: bytes
    incarnation: int = 0


@dataclass(frozen=True, slots=True)
class Release:
    """Take the ids out where `token` holds them. Outcomes: core.fates.Released."""

    ids: tuple[bytes, ...]
    times: tuple[int, ...]
    token: bytes


@dataclass(frozen=True, slots=True)
class GiveBack:
    """A client lost the ids in one shard and lets go of what `token` has in others. Outcomes: none."""

    ids: tuple[bytes, ...]
    token: bytes


@dataclass(frozen=True, slots=True)
class Lookup:
    """Which of the ids are registered, by any one replica. Outcomes: core.fates.Registered."""

    ids: tuple[bytes, ...]
    times: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Fence:
    """Nothing more from the tokens of `incarnations`. Outcomes: none."""

    incarnations: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Raise:
    """Raise the boundary: events before it are expired. Outcomes: none."""

    boundary_us: int


Act = Commit | Release | GiveBack | Lookup | Fence | Raise


@dataclass(frozen=True, slots=True)
class Asked:
    """A client wants this, for the first time or again."""

    at: float
    op: int
    act: Act


@dataclass(frozen=True, slots=True)
class Told:
    """It was told the outcomes, one an id."""

    at: float
    op: int
    outcomes: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Moved:
    """A replica has applied `count` commands; `digest` sums up these and what their proposers are told."""

    at: float
    node: str
    count: int
    digest: bytes


@dataclass(frozen=True, slots=True)
class Led:
    """A replica began to lead."""

    at: float
    node: str
    term: int


@dataclass(frozen=True, slots=True)
class Bounded:
    """The boundary as a replica has it, in one life of its process."""

    at: float
    node: str
    life: int
    boundary_us: int


@dataclass(frozen=True, slots=True)
class Versioned:
    """A replica of a group (0: the directory) has this sharding configuration now, in one life of its
    process."""

    at: float
    node: str
    life: int
    group: int
    version: int
    configuration: bytes


@dataclass(frozen=True, slots=True)
class Founded:
    """The directory made a group with this version of the configuration."""

    at: float
    group: int
    version: int


@dataclass(frozen=True, slots=True)
class Kept:
    """What is kept of a share was read (`taken`) or written by the life of a member, under a sequencer: a
    count that grows. It was told so."""

    at: float
    share: int
    sequencer: int
    member: str
    count: int
    taken: bool


@dataclass(frozen=True, slots=True)
class Turned:
    """A turn of a process's one thread had so many syncs, more than any before in its life."""

    at: float
    node: str
    syncs: int


@dataclass(frozen=True, slots=True)
class Seen:
    """What no legal run shows, and the world itself sees: the rule of this name is broken, and how.

    crowded        a snapshot of one group leaves too little room on the way for the entries of the others
    leapt          clocks and events that are wrong together let much be forgotten at once
    passed_a_hold  an event is expired that a dispatcher has said it may yet come with
    stopped        a replica ended itself, or would not start, without a cause from outside
    unserved       long after all is healed, nobody has a share
    unfinished     long after all is healed, replicas do not agree on a leader and a log
    """

    at: float
    rule: str
    what: str


@dataclass(frozen=True, slots=True)
class Ended:
    """A replica's state at the end: who holds each id that is not expired."""

    node: str
    held: Mapping[bytes, bytes]
    boundary_us: int
    digest: bytes


Event = Asked | Told | Moved | Led | Bounded | Versioned | Founded | Kept | Turned | Seen | Ended
History = list[Event]
