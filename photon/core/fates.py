"""Every foreign event has one fate (design invariant 3).

Each RPC answers with an outcome column, a byte an event, in a vocabulary of its own. This module holds the
vocabularies and the tables from one to the next, in the order in which an event meets them:

    Registered (lookup) -> Verdict        Found (event store) -> Joined        Committed (commit) -> Joined
    Joined (joiner's answer) is a Verdict                                      Verdict -> Fate, or a retry

A new fate is a line in `Fate`, one in the outcome that tells of it, and one in the tables below. Pure.
"""

from collections.abc import Mapping
from enum import IntEnum, StrEnum
from typing import Final


class Fate(StrEnum):
    """What became of a foreign event. The counts of all fates add up to the events read."""

    JOINED = "joined"
    DUPLICATE = "duplicate"
    UNJOINABLE = "unjoinable"
    FILTERED = "filtered"
    ADAPTER_ERROR = "adapter_error"
    """The adapter raised, hung, killed its joiner, or returned what is no joined line."""
    EXPIRED = "expired"
    LATE = "late"
    """Its primary event was said to be unmatched before."""
    MALFORMED = "malformed"
    PENDING = "pending"


class Differing(StrEnum):
    """How a duplicate differs from the line of its id that was joined, or seen first; the worst first."""

    PRIMARY = "primary"
    """It names another primary event."""
    TIME = "time"
    """Its time is further away than `ids.time_spread_max_s`: around a resharding both may be joined."""
    CONTENT = "content"


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
    ADAPTER_ERROR = 5
    LATE = 6
    RETRY_ABSENT = 7
    """The primary event is not there yet."""
    RETRY_UNAVAILABLE = 8
    """A server on the way could not answer; the outcome is unknown or nothing was done."""


class Verdict(IntEnum):
    """What a dispatcher knows of an event beside the Joined outcomes, which are verdicts too."""

    REGISTERED = 100
    """The registry had the event before it was sent."""
    TOO_OLD = 101
    """The registry no longer remembers events of its time."""
    UNDER_WAY = 102
    """No verdict yet: a joiner is registering it."""
    HEDGED = 103
    """No verdict yet: it is left to its home datacenter until the hedge is over."""
    SEND = 255
    """No verdict yet."""


# --- tables


def _table(default: int, known: Mapping[int, int]) -> bytes:
    """For bytes.translate: a whole column of outcomes in one call."""
    table = bytearray([default]) * 256
    for outcome, becomes in known.items():
        table[outcome] = becomes
    return bytes(table)


VERDICT_OF_REGISTERED: Final = _table(
    Verdict.SEND,
    {
        Registered.PRESENT: Verdict.REGISTERED,
        Registered.EXPIRED: Verdict.TOO_OLD,
        Registered.PENDING: Verdict.UNDER_WAY,
    },
)

JOINED_OF_FOUND: Final = _table(
    Joined.RETRY_UNAVAILABLE,
    {Found.FOUND: Joined.JOINED, Found.ABSENT: Joined.RETRY_ABSENT, Found.BEHIND: Joined.RETRY_ABSENT},
)
"""JOINED: the primary was found, so the event goes on to the adapter."""

JOINED_OF_COMMITTED: Final = _table(
    Joined.RETRY_UNAVAILABLE,
    {
        Committed.WON: Joined.JOINED,
        Committed.DUPLICATE: Joined.DUPLICATE,
        Committed.EXPIRED: Joined.EXPIRED,
    },
)
"""A FENCED id has no owner yet: the dispatcher keeps its event, for another joiner or another life."""

FATE_OF_VERDICT: Final[Mapping[int, Fate]] = {
    Joined.JOINED: Fate.JOINED,
    Joined.DUPLICATE: Fate.DUPLICATE,
    Verdict.REGISTERED: Fate.DUPLICATE,
    Joined.FILTERED: Fate.FILTERED,
    Joined.ADAPTER_ERROR: Fate.ADAPTER_ERROR,
    Joined.LATE: Fate.LATE,
    Joined.EXPIRED: Fate.EXPIRED,
    Verdict.TOO_OLD: Fate.EXPIRED,
    Joined.UNJOINABLE: Fate.UNJOINABLE,
}
"""Verdicts that end an event; all others keep it pending."""

RETRIED: Final = (Joined.RETRY_ABSENT, Joined.RETRY_UNAVAILABLE)

LETTER_REASONS: Final[Mapping[Fate, str]] = {
    Fate.UNJOINABLE: "its primary event was not found",
    Fate.FILTERED: "the adapter skipped it",
    Fate.ADAPTER_ERROR: "the adapter failed at it",
    Fate.EXPIRED: "older than the registry remembers: a duplicate could not be told",
    Fate.LATE: "its primary event was said to be unmatched before",
}
"""Fates that another try may change, and the reason of their dead letters where nobody gave a better one."""

DIFFERING_REASONS: Final[Mapping[Differing, str]] = {
    Differing.PRIMARY: "its id was registered by a line that names another primary event",
    Differing.TIME: "its id was registered by a line whose time is more than 'ids.time_spread_max_s' away",
    Differing.CONTENT: "its id was registered by another line",
}
"""Of the dead letters of such duplicates."""

LETTERS: Final = (*LETTER_REASONS, Fate.MALFORMED)
"""Fates whose events are kept as dead letters."""
