"""What a client knows of the registry: replicas, sharding configuration, who leads. For many threads at once.

The configuration is fetched when it is first needed, and again when an answer shows that there is a newer
one. Any replica is asked, the nearest first; the newest that was ever seen is kept.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import grpc

from idregistry.configuration import Configuration, unpack_configuration
from idregistry.parts import try_timeout_s
from photon.core.clock import Clock
from photon.core.errors import UnavailableError
from photon.wire import idregistry_pb2 as pb
from photon.wire.failures import failure_of
from photon.wire.idregistry_pb2_grpc import IdRegistryStub
from photon.wire.network import LOOPBACK, Network

# A replica that failed an answer is passed over for so long: who hangs would cost every call a time-out.
_AVOID_S: Final = 1.0
_ASK_WHO_EVERY_S: Final = 1.0


class Routes:
    """`given`: gRPC addresses of replicas, the nearest first; others are learned from them."""

    def __init__(self, given: Sequence[str], clock: Clock, network: Network = LOOPBACK) -> None:
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

    # --- calls

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

    def ask(self, method: str, request: Any, address: str, timeout_s: float) -> Any:
        """The response, or the RpcError."""
        with self.calling():
            call = getattr(self.stub(address), method)
            return outcome_of(lambda: call(request, timeout=timeout_s))

    # --- replicas

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

    def ask_who(self, remaining_s: float, timeout_s: float) -> None:
        """Learn who the replicas are now: one may have been replaced. Not often, and never an error."""
        now = self._clock.monotonic()
        if now < self._ask_who_at:
            return
        self._ask_who_at = now + _ASK_WHO_EVERY_S
        with contextlib.suppress(UnavailableError):
            known = self.configuration
            self.fetch(known.version - 1 if known is not None else 0, remaining_s, timeout_s, always=True)

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

    # --- the configuration

    def saw(self, version: int) -> None:
        """An answer came from a replica that knows this version."""
        self._seen = max(self._seen, version)

    @property
    def stale(self) -> bool:
        """Whether there is a configuration to fetch."""
        return self.configuration is None or self._seen > self.configuration.version

    def fetch(
        self, newer_than: int, remaining_s: float, timeout_s: float, always: bool = False
    ) -> Configuration | None:
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
            for address, answer in self.directories(remaining_s, timeout_s):
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

    def directories(
        self, within_s: float, timeout_s: float
    ) -> Iterator[tuple[str, "pb.DirectoryResponse | grpc.RpcError"]]:
        """What each replica says of the directory, the nearest first, one at least; who fails is avoided."""
        until = self._clock.monotonic() + within_s
        for nth, address in enumerate(self.nearest_first()):
            left_s = until - self._clock.monotonic()
            if nth > 0 and left_s <= 0:
                return
            answer = self.ask(
                "GetDirectory", pb.DirectoryRequest(), address, try_timeout_s(timeout_s, left_s)
            )
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
