"""What a client knows of the registry: replicas, sharding configuration, who leads. For many threads at once.

The configuration is fetched when it is first needed, and again when an answer shows that there is a newer
one. Any replica is asked, the nearest first; the newest that was ever seen is kept.

By it a batch is split into parts, one a shard (paper 2.2.2), and their outcomes are put together again. Where
an id is held in several shards, a commit asks them in turn, and every other call at once. After a failed try:
whom to ask next, how long one try may take, with which error to end.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum, auto
from typing import Any, Final

import grpc
import numpy as np
import numpy.typing as npt

from idregistry.rules.sharding import BEGINNING, NOWHERE, Configuration, Route, unpack_configuration
from photon.core.clock import Clock
from photon.core.columns import take_ids, take_times
from photon.core.errors import NoQuorumError, OverloadedError, UnavailableError
from photon.core.ids import ID_BYTES
from photon.rpc import idregistry_pb2 as pb
from photon.rpc.idregistry_pb2_grpc import IdRegistryStub
from photon.rpc.network import LOOPBACK, Network, failure_of

DIRECTORY: Final = -1
"""The directory, where a shard's number is wanted."""
_REDIRECTS_MAX: Final = 2
_TRY_S_MIN: Final = 0.5
_TRIES: Final = 4

_OWN: Final = Route(BEGINNING, False)

Rows = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class ShardPart:
    """The rows of a batch that belong to one shard, in their order. `later`: the places (of
    Configuration.places) to ask when they are won here; `holds`: they are won in another already.
    """

    shard: int
    ids: bytes
    times: bytes
    rows: Rows
    route: Route = _OWN
    later: tuple[int, ...] = ()
    holds: bool = False


def whole(ids: bytes = b"", times: bytes = b"", shard: int = DIRECTORY) -> ShardPart:
    """All of a batch."""
    return ShardPart(shard, ids, times, np.arange(len(ids) // ID_BYTES))


def split(part: ShardPart, configuration: Configuration, in_turn: bool) -> list[ShardPart]:
    """The parts of a part, one a shard that has any. A row that has several places is in a part for each; or,
    `in_turn`, in the one of its first, and that of the others `later`.
    """
    if not part.ids:
        return []
    places, known_us = configuration.places(part.ids, part.times), configuration.newest_us
    if in_turn and places.shape[1] > 1:
        kinds, kind_of = np.unique(places, axis=0, return_inverse=True)
        groups = [
            (kinds[kind].tolist(), np.flatnonzero(kind_of.ravel() == kind)) for kind in range(len(kinds))
        ]
    else:
        rows, columns = np.nonzero(places != NOWHERE)
        of = places[rows, columns]
        order = np.argsort(of, kind="stable")
        ends = np.flatnonzero(np.diff(of[order])) + 1
        groups = [([int(of[group[0]])], rows[group]) for group in np.split(order, ends)]
    parts = []
    for (first, *others), rows in groups:
        later = tuple(place for place in others if place != NOWHERE)
        chosen = part if len(groups) == 1 else take_part(part, rows)
        parts.append(replace(_at(chosen, first, known_us), later=later, holds=False))
    return parts


def _at(part: ShardPart, place: int, known_us: int) -> ShardPart:
    return replace(part, shard=place >> 1, route=Route(known_us, bool(place & 1)))


def take_part(part: ShardPart, chosen: Rows) -> ShardPart:
    """Some rows of a part."""
    ids, times = take_ids(part.ids, chosen), take_times(part.times, chosen)
    return replace(part, ids=ids, times=times, rows=part.rows[chosen])


def merge_outcomes(
    parts: Sequence[ShardPart], outcomes: Sequence[bytes], count: int, rising: Sequence[int] = ()
) -> bytes:
    """The parts' outcome columns -> one of `count` bytes, in the order of the batch before the split.

    `rising`: all outcomes that there may be; of those of one row, the last in it holds.
    """
    if len(parts) == 1:
        return outcomes[0]
    if sum(len(part.rows) for part in parts) == count:
        rising = ()
    rank = np.empty(256, np.uint8)
    rank[list(rising)] = range(len(rising))
    merged = np.zeros(count, np.uint8)
    for part, column in zip(parts, outcomes, strict=True):
        told = np.frombuffer(column, np.uint8)
        merged[part.rows] = np.maximum(merged[part.rows], rank[told]) if rising else told
    return (np.array(rising, np.uint8)[merged] if rising else merged).tobytes()


def segments_of(
    part: ShardPart, tokens: Sequence[bytes], counts: Sequence[int]
) -> tuple[list[bytes], list[int]]:
    """The part's own share of a batch's segments: `tokens[i]` is for the batch's next `counts[i]` rows."""
    ends = np.cumsum(np.asarray(counts, np.int64))
    of = np.searchsorted(ends, part.rows, "right")
    chosen, sizes = np.unique(of, return_counts=True)  # a part's rows are in order, so its segments are too
    return [tokens[i] for i in chosen.tolist()], sizes.tolist()


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


def advance(calls: "Sequence[PartCall]", won: int) -> "tuple[list[PartCall], bool]":
    """Where a part has its outcomes, what has been `won` goes on to the next place, if there is one; the rest
    is through. Whether anything went on.
    """
    after, began = [], False
    for call in calls:
        part = call.part
        if call.outcomes is None or not part.later:
            after.append(call)
            continue
        column = np.frombuffer(call.outcomes, np.uint8)
        onward, through = np.flatnonzero(column == won), np.flatnonzero(column != won)
        if len(onward):
            began = True
            to = _at(take_part(part, onward), part.later[0], part.route.known_us)
            after.append(PartCall(replace(to, later=part.later[1:], holds=True), maybe_done=True))
        if len(through):
            after.append(PartCall(replace(take_part(part, through), later=()), column[through].tobytes()))
    return after, began


def lost_elsewhere(calls: "Sequence[PartCall]", won: int) -> Rows:
    """The rows, of all that are through, which were won in one place and lost in another."""
    lost = [
        call.part.rows[np.frombuffer(call.outcomes or b"", np.uint8) != won]
        for call in calls
        if call.part.holds
    ]
    return np.concatenate(lost) if lost else np.empty(0, np.intp)


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


def split_strays(call: PartCall, misrouted: int | None) -> tuple[list[PartCall], list[PartCall]]:
    """(what stays as it is, what is to be routed anew) of a part after a round."""
    if call.outcomes is None:
        return ([], [call]) if call.misrouted else ([call], [])
    if misrouted is None or misrouted not in call.outcomes:
        return [call], []
    column = np.frombuffer(call.outcomes, np.uint8)
    stray_rows, kept_rows = np.flatnonzero(column == misrouted), np.flatnonzero(column != misrouted)
    failures = [*call.failures, f"shard {call.part.shard}: misrouted"]
    stray = PartCall(
        take_part(call.part, stray_rows),
        maybe_done=call.maybe_done,
        misrouted=True,
        failures=failures[-4:],
    )
    if not len(kept_rows):
        return [], [stray]
    return [PartCall(take_part(call.part, kept_rows), column[kept_rows].tobytes())], [stray]


# A replica that failed an answer is passed over for so long: who hangs would cost every call a time-out.
_AVOID_S: Final = 1.0
_ASK_WHO_EVERY_S: Final = 1.0


class Routes:
    """`given`: gRPC addresses of replicas, the nearest first; others are learned from them. `timeout_s`: of a
    call, with all its tries.
    """

    def __init__(
        self, given: Sequence[str], timeout_s: float, clock: Clock, network: Network = LOOPBACK
    ) -> None:
        self._timeout_s = timeout_s
        self._clock = clock
        self._given = tuple(dict.fromkeys(given))
        self._network = network
        self._lock = threading.Lock()
        self._fetching = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}
        self._stubs: dict[str, Any] = {}
        self._avoid_until: dict[str, float] = {}
        self._leaders: dict[int, str] = {}
        self._ask_who_at = float("-inf")
        self.closed = threading.Event()
        self._learned = False
        self.addresses: tuple[str, ...] = ()
        """Everybody to ask, the nearest first."""
        self.configuration: Configuration | None = None
        self._seen = 0
        """The newest version that an answer spoke of."""
        self._learn(self._given)

    @contextlib.contextmanager
    def calling(self) -> Iterator[None]:
        """UnavailableError once closed, also for what gRPC raises for a channel that was closed meanwhile."""
        self.check_open()
        try:
            yield
        except (ValueError, grpc.FutureCancelledError) as error:
            raise UnavailableError(f"the registry client was closed during a call: {error}") from error

    def check_open(self) -> None:
        if self.closed.is_set():
            raise UnavailableError(
                "the registry client is closed; whether anything was registered is not known"
            )

    def ask(self, method: str, request: Any, address: str, left_s: float) -> Any:
        """One try of a call that has `left_s` left. The response, or the RpcError."""
        with self.calling():
            call = getattr(self.stub(address), method)
            return outcome_of(lambda: call(request, timeout=try_timeout_s(self._timeout_s, left_s)))

    def stub(self, address: str) -> Any:
        """Of any replica, also one that nobody has named."""
        if address not in self._stubs:
            with self._lock:
                self._open(address)
        return self._stubs[address]

    def nearest_first(self) -> list[str]:
        """The replicas in their order, those that failed just now last."""
        now = self._clock.monotonic()
        return sorted(self.addresses, key=lambda address: self._avoid_until.get(address, now) > now)

    def avoid(self, address: str) -> None:
        self._avoid_until[address] = self._clock.monotonic() + _AVOID_S

    def ask_who(self, remaining_s: float) -> None:
        """Learn who the replicas are now: one may have been replaced. Not often, and never an error."""
        now = self._clock.monotonic()
        if now < self._ask_who_at:
            return
        self._ask_who_at = now + _ASK_WHO_EVERY_S
        with contextlib.suppress(UnavailableError):
            known = self.configuration
            self.fetch(known.version - 1 if known is not None else 0, remaining_s, always=True)

    def leader(self, group: int) -> str:
        """Whom to ask for the leader's work of a shard (or DIRECTORY)."""
        return self._leaders.get(group) or self.nearest_first()[0]

    def replace_leader(self, group: int, asked: str, leader: str) -> None:
        """Many threads share what is known of the leader: only who was asked last may be replaced."""
        with self._lock:
            if self._leaders.get(group, asked) == asked:
                self._leaders[group] = leader

    def answered(self, group: int, leader: str) -> None:
        """It does lead."""
        if self._leaders.get(group) != leader:
            with self._lock:
                self._leaders[group] = leader

    def close(self) -> None:
        with self._lock:
            self.closed.set()
            for channel in self._channels.values():
                channel.close()

    def saw(self, version: int) -> None:
        """An answer came from a replica that knows this version."""
        self._seen = max(self._seen, version)

    @property
    def stale(self) -> bool:
        """Whether there is a configuration to fetch."""
        return self.configuration is None or self._seen > self.configuration.version

    def fetch(self, newer_than: int, remaining_s: float, always: bool = False) -> Configuration | None:
        """Ask the replicas in turn until one has a configuration newer than that; the newest known after it.

        One that knows no leader may have been replaced, so the others are asked too.
        No replica is asked where it is known already, unless `always`.

        None while nobody has any. UnavailableError if none answered.
        """
        if not self._fetching.acquire(timeout=remaining_s):
            return self.configuration
        try:
            known = self.configuration
            if known is not None and known.version > newer_than and not always:
                return known  # another thread was faster
            answered, failures = False, []
            for address, answer in self.directories(remaining_s):
                if isinstance(answer, grpc.RpcError):
                    failures.append(f"{address}: {failure_of(answer)}")
                    continue
                answered = True
                self._take(answer)
                if answer.led and self.configuration is not None and self.configuration.version > newer_than:
                    break
            if not answered and self.configuration is None:
                raise UnavailableError(f"no registry replica answered ({'; '.join(failures)})")
            return self.configuration
        finally:
            self._fetching.release()

    def directories(self, within_s: float) -> Iterator[tuple[str, "pb.DirectoryResponse | grpc.RpcError"]]:
        """What each replica says of the directory, the nearest first, one at least; who fails is avoided."""
        until = self._clock.monotonic() + within_s
        for nth, address in enumerate(self.nearest_first()):
            left_s = until - self._clock.monotonic()
            if nth > 0 and left_s <= 0:
                return
            answer = self.ask("GetDirectory", pb.DirectoryRequest(), address, left_s)
            if isinstance(answer, grpc.RpcError):
                self.avoid(address)
            yield address, answer

    def _take(self, answer: pb.DirectoryResponse) -> None:
        """Learn what a replica knows."""
        if answer.configuration:
            configuration = unpack_configuration(answer.configuration)
            self.saw(configuration.version)
            if self.configuration is None or configuration.version > self.configuration.version:
                self.configuration = configuration
                self._leaders |= {
                    n: leader for n, leader in enumerate(answer.leaders) if leader in self._stubs
                }
        if answer.replicas and (answer.led or not self._learned):
            self._learned = True
            self._learn([replica.grpc for replica in answer.replicas])

    def _learn(self, current: Sequence[str]) -> None:
        """Who was given stays nearest, unless it is said to be gone: then it is only asked last."""
        known = [a for a in self._given if a in current]
        others = [a for a in current if a not in known]
        gone = [a for a in self._given if a not in current]
        with self._lock:
            if not self.closed.is_set():
                for address in (*known, *others, *gone):
                    self._open(address)
            self.addresses = tuple(a for a in (*known, *others, *gone) if a in self._stubs)

    def _open(self, address: str) -> None:
        """With the lock held. Once closed, what is opened is closed at once: calls end as on any other."""
        if address in self._stubs:
            return
        channel = self._channels[address] = self._network.open(address)
        self._stubs[address] = IdRegistryStub(channel)  # type: ignore[no-untyped-call]  # generated
        if self.closed.is_set():
            channel.close()


def outcome_of(call: Callable[[], Any]) -> Any:
    """Its response, or the RpcError it raised."""
    try:
        return call()
    except grpc.RpcError as error:
        return error
