"""What a client makes of a failed call: whom to ask next, how long to wait, how to end. Pure."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

import numpy as np

from idregistry.sharding import ShardPart, take_part
from photon.core.errors import NoQuorumError, OverloadedError, UnavailableError

_DELAY_S_MIN: Final = 0.005
_DELAY_S_MAX: Final = 0.25
_REDIRECTS_MAX: Final = 2
_TRY_S_MIN: Final = 0.5
_TRIES: Final = 4


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


def delay_s(attempt: int, uniform: Callable[[float, float], float]) -> float:
    """Exponential backoff with jitter: between half of the step and the step."""
    step = min(_DELAY_S_MAX, _DELAY_S_MIN * (1 << min(attempt, 16)))
    return step * uniform(0.5, 1.0)


def try_timeout_s(timeout_s: float, remaining_s: float) -> float:
    """How long one try may take: a replica that hangs must leave time to ask another."""
    return max(0.001, min(remaining_s, max(_TRY_S_MIN, timeout_s / _TRIES)))


def final_error(calls: Sequence[PartCall], timeout_s: float, version: int) -> UnavailableError:
    """The error of a call whose time is up. OverloadedError only where certainly nothing at all was done.

    `version`: of the sharding configuration that the client went by.
    """
    unsettled = [call for call in calls if call.outcomes is None]
    call = unsettled[0]
    what = f"registry shard {call.part.shard}: no outcome within {timeout_s:g} s ({'; '.join(call.failures)})"
    nothing_done = len(unsettled) == len(calls) and not any(c.maybe_done for c in calls)
    if any(c.leaderless for c in unsettled):
        return NoQuorumError(f"{what}; no leader with a majority: see to it that most replicas run; retry")
    if call.misrouted:
        what += (
            f"; version {version} of the sharding configuration is not the shard's, and no newer one came: "
            "a resharding is under way"
        )
    if nothing_done:
        return OverloadedError(f"{what}; nothing was registered: back off and retry")
    return UnavailableError(f"{what}; it is not known whether it was registered: retry with the same token")


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
