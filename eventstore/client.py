"""The only door into this room for others."""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

import grpc
import numpy as np
import numpy.typing as npt

from eventstore.rules.ring import HOME, Ring
from photon.core.clock import Backoff, Pause
from photon.core.columns import join_lines, split_lines, take_ids
from photon.core.errors import UnavailableError
from photon.core.fates import Found
from photon.core.ids import ID_BYTES
from photon.rpc import eventstore_pb2 as pb
from photon.rpc import eventstore_pb2_grpc
from photon.rpc.network import LOOPBACK, Network
from photon.rpc.servers import ask_status, to_photon_error

CACHE_TIMEOUT_S: Final = 0.5
"""A cache that takes longer is passed by: home has the answer."""
ARRIVALS_S_MAX: Final = 30.0
"""Home answers long before, if it can."""
_REFRESH_S: Final = 1.0
_LEFT_OUT: Final = Backoff(0.5, 8.0)

Rows = npt.NDArray[np.intp]


class EventStoreClient:
    """Asks the event store of a datacenter (paper 3.4). For many threads at once.

    `address` is that of the home process. Where there are cache processes it tells of them, and lookups
    are split by the ring: each owner is asked for its own, and home for what owners miss.
    """

    def __init__(
        self,
        address: str,
        timeout_s: float,
        now: Callable[[], float] = time.monotonic,
        network: Network = LOOPBACK,
    ) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._now = now
        self._network = network
        self._channel = network.open(address)
        self._stub: Any = eventstore_pb2_grpc.EventStoreStub(self._channel)  # type: ignore[no-untyped-call]
        self._view = _View(pb.MembersResponse(), {})
        self._lock = threading.Lock()
        self._refreshing = False
        self._next_refresh = float("-inf")
        self._closed = False

    def lookup(self, ids: bytes, timeout_s: float | None = None) -> tuple[bytes, list[bytes]]:
        """16 x N bytes -> core.fates.Found column and N lines without newline, b"" where not found.

        `timeout_s`: where the caller has less time than the settings give. UnavailableError,
        OverloadedError: ask again later.
        """
        deadline = self._now() + (self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s))
        view = self._view
        if not view.caches:
            return self._ask_home(ids, deadline)
        if self._now() >= self._next_refresh:
            self._refresh()
        return self._look_up_split(view, ids, deadline)

    def put(self, ids: bytes, lines: Sequence[bytes]) -> None:
        """Events (16 x N bytes, N lines without newline) into the caches of their owners. Best effort.

        For events that stand in a log already: they are found at once, before the log is read. Returns when
        all have answered, after CACHE_TIMEOUT_S at most.
        """
        view = self._view
        calls = []
        for member, rows in view.ring.split(ids).items() if ids else ():
            events = join_lines(list(map(lines.__getitem__, rows.tolist())))
            request = pb.PutRequest(ids=take_ids(ids, rows), events=events, store=view.store)
            cache = view.caches.get(member)
            timeout_s = min(CACHE_TIMEOUT_S, self._timeout_s)
            call = cache.begin("Put", request) if cache else _begin(self._stub.Put, request, timeout_s)
            calls += [call] if call else []
        for call in calls:
            with suppress(grpc.RpcError, grpc.FutureCancelledError, ValueError):
                if call.result().version not in (0, view.version):
                    self._refresh()

    def arrivals(self, after: int, read_to_us: int) -> tuple[int, int, bytes]:
        """The position now, up to about which time of events (us) the logs are read, and ids (16 x N bytes)
        that lookups asked for before and that have arrived since.

        `after`, `read_to_us`: of the last answer, 0 at first. Waits for some seconds if nothing is new. The
        call ends with `close`. UnavailableError, OverloadedError: ask again later.
        """
        request = pb.ArrivalsRequest(after=after, read_to_us=read_to_us)
        try:
            response = self._stub.Arrivals(request, timeout=ARRIVALS_S_MAX)
        except grpc.RpcError as error:
            raise to_photon_error(error, f"event store {self._address}") from error
        except ValueError as error:
            raise UnavailableError(f"event store {self._address}: this client is closed") from error
        return response.position, response.read_to_us, response.ids

    def status(self) -> dict[str, Any]:
        """What the server says of itself. UnavailableError if it does not answer."""
        return ask_status(
            self._stub.Status, pb.StatusRequest(), self._timeout_s, f"event store {self._address}"
        )

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._channel.close()
        for cache in self._view.caches.values():
            cache.close()

    def _ask_home(self, ids: bytes, deadline: float, missed: bool = False) -> tuple[bytes, list[bytes]]:
        request = pb.LookupRequest(ids=ids, missed=missed)
        try:
            response = self._stub.Lookup(request, timeout=max(0.0, deadline - self._now()))
        except grpc.RpcError as error:
            raise to_photon_error(error, f"event store {self._address}") from error
        if response.version != self._view.version:
            self._refresh()
        return response.outcomes, split_lines(response.events)

    def _look_up_split(self, view: "_View", ids: bytes, deadline: float) -> tuple[bytes, list[bytes]]:
        """The caches side by side, home meanwhile for its own; then home for what was missed."""
        outcomes = np.zeros(len(ids) // ID_BYTES, np.uint8)
        lines = np.full(len(outcomes), b"", object)

        def take(rows: Rows, answer: tuple[bytes, list[bytes]]) -> None:
            outcomes[rows] = np.frombuffer(answer[0], np.uint8)
            lines[rows] = answer[1]

        at_home: list[Rows] = []
        asked = []
        for member, rows in view.ring.split(ids).items():
            cache = view.caches.get(member)
            request = pb.LookupRequest(ids=take_ids(ids, rows), store=view.store)
            call = cache.begin("Lookup", request, deadline) if cache else None
            if cache is None or call is None:
                at_home.append(rows)
            else:
                asked.append((cache, rows, call))
        if at_home:
            rows = np.concatenate(at_home)
            take(rows, self._ask_home(take_ids(ids, rows), deadline))
        missed: list[Rows] = []
        for cache, rows, call in asked:
            found = cache.end(call)
            if found is None:
                self._refresh()
                missed.append(rows)
            else:
                take(rows, found)
                missed.append(rows[np.frombuffer(found[0], np.uint8) != Found.FOUND])
        if any(map(len, missed)):
            rows = np.concatenate(missed)
            take(rows, self._ask_home(take_ids(ids, rows), deadline, missed=True))
        return outcomes.tobytes(), lines.tolist()

    def _refresh(self) -> None:
        """Ask home for the members; the answer is taken up when it comes."""
        with self._lock:
            if self._refreshing or self._closed:
                return
            self._refreshing = True
            self._next_refresh = self._now() + _REFRESH_S
        call = _begin(self._stub.Members, pb.MembersRequest(), min(_REFRESH_S, self._timeout_s))
        if call is None:
            self._refreshing = False
        else:
            call.add_done_callback(self._take_members)

    def _take_members(self, call: Any) -> None:
        try:
            response = call.result()
        except (grpc.RpcError, grpc.FutureCancelledError):
            response = None  # home is away: those that are known may still be there
        with self._lock:
            self._refreshing = False
            old = self._view
            if (
                response is None
                or self._closed
                or (old.version, old.store) == (response.version, response.store)
            ):
                return
            caches = {
                address: old.caches.get(address) or _Cache(self._network.open(address), self._now)
                for address in response.caches
            }
            self._view = _View(response, caches)
            gone = [cache for name, cache in old.caches.items() if name not in self._view.caches]
        for cache in gone:
            cache.close()


class _View:
    """The members as home told of them last. Never changed: a lookup works with one from begin to end."""

    def __init__(self, members: pb.MembersResponse, caches: dict[str, "_Cache"]) -> None:
        self.version = members.version
        self.store = members.store
        self.ring = Ring([HOME, *members.caches], members.virtual_nodes or 1)
        self.caches = caches


class _Cache:
    """A cache process. One that fails is left out for a while, twice as long each time it fails again."""

    def __init__(self, channel: grpc.Channel, now: Callable[[], float]) -> None:
        self._now = now
        self._channel = channel
        self._stub: Any = eventstore_pb2_grpc.EventStoreStub(self._channel)  # type: ignore[no-untyped-call]
        self._left_out = Pause(_LEFT_OUT)

    def begin(self, call: str, request: Any, deadline: float = float("inf")) -> Any:
        """The call under way; None while it is left out."""
        now = self._now()
        if not self._left_out.is_over(now):
            return None
        # Half of the time at most: home is still to be asked.
        timeout_s = max(0.001, min(CACHE_TIMEOUT_S, (deadline - now) / 2))
        return _begin(getattr(self._stub, call), request, timeout_s)

    def end(self, call: Any) -> tuple[bytes, list[bytes]] | None:
        """Outcomes and lines, as EventStoreClient.lookup has them; None if it did not answer."""
        try:
            response = call.result()
        except (grpc.RpcError, grpc.FutureCancelledError):
            self._left_out.failed(self._now())
            return None
        self._left_out.worked()
        return response.outcomes, split_lines(response.events)

    def close(self) -> None:
        self._channel.close()


def _begin(method: Any, request: Any, timeout_s: float) -> Any:
    """The call under way; None if the channel is closed."""
    try:
        return method.future(request, timeout=timeout_s)
    except ValueError:
        return None
