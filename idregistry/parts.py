"""A batch's parts, one a shard: how they are split and merged, and what a client makes of their failures.

A sharding configuration says which id is whose (paper 2.2.2). After a failed try: whom to ask next, how long
one try may take, with which error to end. Pure.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

import numpy as np
import numpy.typing as npt

from idregistry.configuration import Configuration
from photon.core.columns import take_ids, take_times
from photon.core.errors import NoQuorumError, OverloadedError, UnavailableError

DIRECTORY: Final = -1
"""The directory, where a shard's number is wanted."""
_REDIRECTS_MAX: Final = 2
_TRY_S_MIN: Final = 0.5
_TRIES: Final = 4

Rows = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class ShardPart:
    """The rows of a batch that belong to one shard, in their order. `rows` is None where all do."""

    shard: int
    ids: bytes
    times: bytes
    rows: Rows | None


def split_by_shard(
    ids: bytes, times: bytes, configuration: Configuration, rows: Rows | None = None
) -> list[ShardPart]:
    """The parts of a batch, one a shard that has any; of its `rows` only, where they are given."""
    if rows is not None:
        parts = split_by_shard(take_ids(ids, rows), take_times(times, rows), configuration)
        return [ShardPart(p.shard, p.ids, p.times, rows if p.rows is None else rows[p.rows]) for p in parts]
    if not ids:
        return []
    if configuration.shards == 1:
        return [ShardPart(0, ids, times, None)]
    of = configuration.shard_of(ids, times)
    order = np.argsort(of, kind="stable")
    ordered = of[order]
    parts = []
    for of_shard in np.split(order, np.flatnonzero(np.diff(ordered)) + 1):
        shard = int(of[of_shard[0]])
        if len(of_shard) == len(of):
            return [ShardPart(shard, ids, times, None)]
        parts.append(ShardPart(shard, take_ids(ids, of_shard), take_times(times, of_shard), of_shard))
    return parts


def merge_outcomes(parts: Sequence[ShardPart], outcomes: Sequence[bytes], count: int) -> bytes:
    """The parts' outcome columns -> one of `count` bytes, in the order of the batch before the split."""
    if len(parts) == 1 and parts[0].rows is None:
        return outcomes[0]
    merged = np.zeros(count, np.uint8)
    for part, column in zip(parts, outcomes, strict=True):
        merged[part.rows] = np.frombuffer(column, np.uint8)
    return merged.tobytes()


def take_part(part: ShardPart, chosen: Rows) -> ShardPart:
    """Some rows of a part."""
    rows = chosen if part.rows is None else part.rows[chosen]
    return ShardPart(part.shard, take_ids(part.ids, chosen), take_times(part.times, chosen), rows)


def segments_of(
    part: ShardPart, tokens: Sequence[bytes], counts: Sequence[int]
) -> tuple[list[bytes], list[int]]:
    """The part's own share of a batch's segments: `tokens[i]` is for the batch's next `counts[i]` rows."""
    if part.rows is None:
        return list(tokens), list(counts)
    ends = np.cumsum(np.asarray(counts, np.int64))
    of = np.searchsorted(ends, part.rows, "right")
    chosen, sizes = np.unique(of, return_counts=True)  # a part's rows are in order, so its segments are too
    return [tokens[i] for i in chosen.tolist()], sizes.tolist()


# --- failures


class Failure(Enum):
    """Why a call gave no outcomes."""

    NOT_LEADER = auto()  # nothing was done; the leader may have been named
    OVERLOADED = auto()  # nothing was done
    MISROUTED = auto()  # nothing was done: not this shard's, or the shard is not there
    UNKNOWN = auto()  # it may have been done


@dataclass(slots=True)
class PartCall:
    """One shard's part of a client call, over all its tries."""

    part: ShardPart
    outcomes: bytes | None = None
    redirects: int = 0
    """Redirects to a named leader since the last wait."""
    maybe_done: bool = False
    leaderless: bool = False
    """A replica answered that it knows no leader."""
    misrouted: bool = False
    """The last answer was that the configuration it was routed by is not the shard's."""
    lost: bool = False
    """The last replica asked was away, or knew no leader that we know: others may have come."""
    failures: list[str] = field(default_factory=list)
    """The last one of each replica, for the message."""

    def failed(self, failure: Failure, address: str, details: str, leader: str | None) -> bool:
        """Note a failed try; whether to go on at once, to the leader named, without a wait."""
        self.failures = [f for f in self.failures if not f.startswith(f"{address}: ")]
        self.failures.append(f"{address}: {details}")
        self.maybe_done |= failure is Failure.UNKNOWN
        self.leaderless |= failure is Failure.NOT_LEADER and leader is None
        self.misrouted = failure is Failure.MISROUTED
        self.lost = leader is None and failure in (Failure.NOT_LEADER, Failure.UNKNOWN)
        if leader is None or self.redirects >= _REDIRECTS_MAX:
            self.redirects = 0
            return False
        self.redirects += 1
        return True


def next_address(addresses: Sequence[str], asked: str, failure: Failure, leader: str | None) -> str:
    """Whom to ask after `asked` gave no outcomes: the leader named, else the next in the list.

    Who is overloaded is still the leader: the others could only send us back to it.
    """
    if failure is Failure.OVERLOADED:
        return asked
    if leader is not None:
        return leader
    at = addresses.index(asked) + 1 if asked in addresses else 0
    return addresses[at % len(addresses)]


def named_leader(details: str, prefix: str, addresses: Sequence[str], asked: str) -> str | None:
    """The leader's address in an answer, if it is one of ours to follow and not the one who said it."""
    leader = details.removeprefix(prefix) if details.startswith(prefix) else ""
    return leader if leader in addresses and leader != asked else None


def try_timeout_s(timeout_s: float, remaining_s: float) -> float:
    """How long one try may take: a replica that hangs must leave time to ask another."""
    return max(0.001, min(remaining_s, max(_TRY_S_MIN, timeout_s / _TRIES)))


def final_error(calls: Sequence[PartCall], timeout_s: float, version: int) -> UnavailableError:
    """The error of a call whose time is up. OverloadedError only where certainly nothing at all was done.

    `version`: of the sharding configuration that the client went by.
    """
    unsettled = [call for call in calls if call.outcomes is None]
    call = unsettled[0]
    of_ids = call.part.shard != DIRECTORY
    whose = f"shard {call.part.shard}: no outcome" if of_ids else "directory: no answer"
    done, again = ("registered", "retry with the same token") if of_ids else ("done", "retry")
    what = f"registry {whose} within {timeout_s:g} s ({'; '.join(call.failures)})"
    nothing_done = len(unsettled) == len(calls) and not any(c.maybe_done for c in calls)
    if any(c.leaderless for c in unsettled):
        return NoQuorumError(f"{what}; no leader with a majority: see to it that most replicas run; retry")
    if call.misrouted and of_ids:
        what += (
            f"; version {version} of the sharding configuration is not the shard's, and no newer one came: "
            "a resharding is under way"
        )
    if nothing_done:
        return OverloadedError(f"{what}; nothing was {done}: back off and retry")
    return UnavailableError(f"{what}; it is not known whether it was {done}: {again}")


def split_strays(call: PartCall, misrouted: int) -> tuple[list[PartCall], list[PartCall]]:
    """(what has its outcomes, what was misrouted) of an answered part."""
    assert call.outcomes is not None
    if misrouted not in call.outcomes:
        return [call], []
    column = np.frombuffer(call.outcomes, np.uint8)
    stray_rows, kept_rows = np.flatnonzero(column == misrouted), np.flatnonzero(column != misrouted)
    failures = [*call.failures, f"shard {call.part.shard}: misrouted"]
    stray = PartCall(
        take_part(call.part, stray_rows), maybe_done=call.maybe_done, misrouted=True, failures=failures[-4:]
    )
    if not len(kept_rows):
        return [], [stray]
    return [PartCall(take_part(call.part, kept_rows), column[kept_rows].tobytes())], [stray]
