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
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, Final

import grpc
import msgspec
import numpy as np
import numpy.typing as npt

from idregistry.rules.sharding import BEGINNING, NOWHERE, Configuration, Route
from photon.core.clock import Clock
from photon.core.columns import take_ids, take_times
from photon.core.errors import NoQuorumError, OverloadedError, UnavailableError
from photon.core.ids import ID_BYTES
from photon.core.settings import MAIN_SET
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


class Failure(Enum):
    """Why a call gave no outcomes."""

    NOT_LEADER = auto()  # nothing was done; the leader may have been named
    OVERLOADED = auto()  # nothing was done
    MISROUTED = auto()  # nothing was done: not this shard's, or the shard is not there
    UNKNOWN = auto()  # it may have been done


@dataclass(slots=True, eq=False)
class Part:
    """The rows of a batch that one shard is asked about, in their order, and what came of it over all tries.

    `later`: the places (of Configuration.places) to ask when they are won here; `holds`: they are won in
    another already.
    """

    shard: int
    ids: bytes
    times: bytes
    rows: Rows
    route: Route = _OWN
    later: tuple[int, ...] = ()
    holds: bool = False
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


def whole(ids: bytes = b"", times: bytes = b"", shard: int = DIRECTORY) -> Part:
    """All of a batch."""
    return Part(shard, ids, times, np.arange(len(ids) // ID_BYTES))


def split(part: Part, configuration: Configuration, in_turn: bool) -> list[Part]:
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
    for (place, *others), rows in groups:
        later = tuple(other for other in others if other != NOWHERE)
        taken = _taken(part, rows, place, known_us, later, False)
        taken.failures, taken.maybe_done = part.failures, part.maybe_done
        parts.append(taken)
    return parts


def _taken(
    part: Part, rows: Rows, place: int, known_us: int, later: tuple[int, ...] = (), holds: bool = False
) -> Part:
    """Some of a part's rows, to be asked about at a place."""
    columns = part.ids, part.times, part.rows
    if len(rows) < len(part.rows):
        columns = take_ids(part.ids, rows), take_times(part.times, rows), part.rows[rows]
    return Part(place >> 1, *columns, Route(known_us, bool(place & 1)), later, holds)


def sort_out(part: Part, misrouted: int | None, won: int | None) -> list[Part]:
    """What an answer makes of a part: what is through; what has been `won` goes on to the next place, if
    there is one; what is `misrouted` is to be routed anew.
    """
    if part.outcomes is None:
        return [part]
    column = np.frombuffer(part.outcomes, np.uint8)
    astray = column == (-1 if misrouted is None else misrouted)
    onward = (column == won) & bool(part.later)
    through = ~(astray | onward)
    if through.all():
        return [part]
    place, known_us, parts = part.shard << 1 | part.route.guard, part.route.known_us, []
    if through.any():
        done = _taken(part, np.flatnonzero(through), place, known_us, (), part.holds)
        done.outcomes = column[through].tobytes()
        parts.append(done)
    if onward.any():
        next_one = _taken(part, np.flatnonzero(onward), part.later[0], known_us, part.later[1:], True)
        next_one.maybe_done = True
        parts.append(next_one)
    if astray.any():
        stray = _taken(part, np.flatnonzero(astray), place, known_us, part.later, part.holds)
        stray.maybe_done, stray.misrouted = part.maybe_done, True
        stray.failures = [*part.failures, f"shard {part.shard}: misrouted"][-4:]
        parts.append(stray)
    return parts


def merge_outcomes(parts: Sequence[Part], count: int, rising: Sequence[int] = ()) -> bytes:
    """The outcomes of parts that are through -> `count` bytes, in the order of the batch before the split.

    `rising`: all outcomes that there may be; of those of one row, the last in it holds.
    """
    if len(parts) == 1:
        return parts[0].outcomes or b""
    if sum(len(part.rows) for part in parts) == count:
        rising = ()
    rank = np.empty(256, np.uint8)
    rank[list(rising)] = range(len(rising))
    merged = np.zeros(count, np.uint8)
    for part in parts:
        told = np.frombuffer(part.outcomes or b"", np.uint8)
        merged[part.rows] = np.maximum(merged[part.rows], rank[told]) if rising else told
    return (np.array(rising, np.uint8)[merged] if rising else merged).tobytes()


def lost_elsewhere(parts: Sequence[Part], won: int | None) -> Rows:
    """The rows, of all that are through, which were won in one place and lost in another."""
    lost = [part.rows[np.frombuffer(part.outcomes or b"", np.uint8) != won] for part in parts if part.holds]
    return np.concatenate(lost) if lost else np.empty(0, np.intp)


def segments_of(part: Part, tokens: Sequence[bytes], counts: Sequence[int]) -> tuple[list[bytes], list[int]]:
    """The part's own share of a batch's segments: `tokens[i]` is for the batch's next `counts[i]` rows."""
    ends = np.cumsum(np.asarray(counts, np.int64))
    of = np.searchsorted(ends, part.rows, "right")
    chosen, sizes = np.unique(of, return_counts=True)  # a part's rows are in order, so its segments are too
    return [tokens[i] for i in chosen.tolist()], sizes.tolist()


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


def final_error(parts: Sequence[Part], timeout_s: float, version: int) -> UnavailableError:
    """The error of a call whose time is up. OverloadedError only where certainly nothing at all was done.

    `version`: of the sharding configuration that the client went by.
    """
    unsettled = [part for part in parts if part.outcomes is None]
    first = unsettled[0]
    of_ids = first.shard != DIRECTORY
    whose = f"shard {first.shard}: no outcome" if of_ids else "directory: no answer"
    done, again = ("registered", "retry with the same token") if of_ids else ("done", "retry")
    what = f"registry {whose} within {timeout_s:g} s ({'; '.join(first.failures)})"
    nothing_done = len(unsettled) == len(parts) and not any(part.maybe_done for part in parts)
    if any(part.leaderless for part in unsettled):
        return NoQuorumError(f"{what}; no leader with a majority: see to it that most replicas run; retry")
    if first.misrouted and of_ids:
        what += (
            f"; version {version} of the sharding configuration is not the shard's, and no newer one came: "
            "a resharding is under way"
        )
    if nothing_done:
        return OverloadedError(f"{what}; nothing was {done}: back off and retry")
    return UnavailableError(f"{what}; it is not known whether it was {done}: {again}")


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
        self._hosts: dict[int, tuple[str, ...]] = {}
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

    def hosts(self, shard: int) -> tuple[str, ...]:
        """Who has a replica of a shard (or of DIRECTORY), the nearest first; all where that is not known."""
        return self._hosts.get(shard) or self.addresses

    def nearest_first(self, shard: int | None = None) -> list[str]:
        """The replicas in their order, or those of a shard, those that failed just now last."""
        now = self._clock.monotonic()
        addresses = self.addresses if shard is None else self.hosts(shard)
        return sorted(addresses, key=lambda address: self._avoid_until.get(address, now) > now)

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
        return self._leaders.get(group) or self.nearest_first(group)[0]

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
            configuration = msgspec.msgpack.decode(answer.configuration, type=Configuration)
            self.saw(configuration.version)
            if self.configuration is None or configuration.version > self.configuration.version:
                self.configuration = configuration
                self._leaders |= {
                    n: leader for n, leader in enumerate(answer.leaders) if leader in self._stubs
                }
        if answer.replicas and (answer.led or not self._learned):
            self._learned = True
            self._learn([replica.grpc for replica in answer.replicas])
            self._place(answer)

    def _place(self, answer: pb.DirectoryResponse) -> None:
        set_of = {replica.grpc: replica.set for replica in answer.replicas}
        homes = {DIRECTORY: MAIN_SET, **dict(zip(answer.shards, answer.homes, strict=True))}
        of_set = {
            name: tuple(address for address in self.addresses if set_of.get(address) == name)
            for name in {*homes.values()}
        }
        self._hosts = {shard: of_set[name] for shard, name in homes.items()}

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
