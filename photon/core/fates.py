"""Every foreign event has one fate (design invariant 3); the wire's outcome columns, a byte an event."""

from enum import IntEnum, StrEnum


class Fate(StrEnum):
    """What became of a foreign event. The counts of all fates add up to the events read."""

    JOINED = "joined"
    DUPLICATE = "duplicate"
    UNJOINABLE = "unjoinable"
    FILTERED = "filtered"
    EXPIRED = "expired"
    MALFORMED = "malformed"
    PENDING = "pending"


class Registered(IntEnum):
    """Outcome column of IdRegistry.Lookup (paper 2.1, 2.3)."""

    ABSENT = 0
    PRESENT = 1
    EXPIRED = 2
    PENDING = 3
    """Absent, and in a commit that is under way: soon present, or absent after all. Only who asks is told."""


class Committed(IntEnum):
    """Outcome column of IdRegistry.Commit. WON is also the answer to a retry with the winner's token."""

    WON = 0
    DUPLICATE = 1
    EXPIRED = 2
    FENCED = 3
    """The token's incarnation is fenced: what it registered is recovery's, it may write nothing more."""
    MISROUTED = 4
    """Another shard's by the shard's configuration, or not to be decided yet: nothing was done. Never leaves
    the registry's client, which fetches the configuration and asks again."""


class Released(IntEnum):
    """Outcome column of IdRegistry.Release, the compare-and-delete of recovery (paper 3.3.3)."""

    RELEASED = 0
    ABSENT = 1
    """Not registered (any more): a release that is repeated is told so."""
    OTHER = 2
    """Registered by another token: left alone."""
    NOT_FENCED = 3
    """The token's incarnation is not fenced in this shard yet, so it may still write: left alone."""
    MISROUTED = 4


class Found(IntEnum):
    """Outcome column of EventStore.Lookup (paper 3.4)."""

    FOUND = 0
    ABSENT = 1
    """Not in the logs as far as they go now: every byte that was there has been read."""
    BEHIND = 2
    """Not found, but the reader has not read all that is in the logs: ask again."""
    UNREADABLE = 3
    """A log that may hold it could not be read: ask again."""


class Joined(IntEnum):
    """Outcome column of Joiner.Join (paper 3.3.1). From RETRY on, the dispatcher keeps the event."""

    JOINED = 0
    DUPLICATE = 1
    """Another joiner had registered it first: a wasted join."""
    FILTERED = 2
    EXPIRED = 3
    UNJOINABLE = 4
    RETRY_ABSENT = 5
    """The primary event is not there yet."""
    RETRY_UNAVAILABLE = 6
    """A server on the way could not answer; the outcome is unknown or nothing was done."""
