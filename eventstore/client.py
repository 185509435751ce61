"""The only door into this room for others."""

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, Final

import grpc
import numpy as np
import numpy.typing as npt

from eventstore.rules.ring import Ring, version_of
from photon.core.clock import Backoff, Pause
from photon.core.columns import join_lines, split_lines, take_ids
from photon.core.errors import PhotonError, UnavailableError
from photon.core.ids import ID_BYTES
from photon.rpc import eventstore_pb2 as pb
from photon.rpc import eventstore_pb2_grpc
from photon.rpc.network import LOOPBACK, Network
from photon.rpc.servers import to_photon_error

OWNER_TIMEOUT_S: Final = 2.0
"""One that takes longer is passed by: any other has the answer."""
PUT_TIMEOUT_S: Final = 0.5
ARRIVALS_S_MAX: Final = 30.0
"""It answers long before, if it can."""
_REFRESH_S: Final = 1.0
_LEFT_OUT: Final = Backoff(0.5, 8.0)
_VIRTUAL_NODES: Final = 64
"""Until a member has told."""

Rows = npt.NDArray[np.intp]


class EventStoreClient:
    """Asks the event stores of a datacenter (paper 3.4). For many threads at once.

    `addresses`: of some of them, at least one that is there; it tells of the others. Each can answer for all.
    A lookup is split by the ring, so that each is asked for what its cache holds; where an owner does not
    answer, another one is asked in its place.
    """

    def __init__(
        self,
        addresses: Sequence[str],
        timeout_s: float,
        network: Network = LOOPBACK,
    ) -> None:
        assert not isinstance(addresses, str), "several addresses"
        self._timeout_s = timeout_s
        self._network = network
        self._known = tuple(addresses)
        self._view = _View(self._known, _VIRTUAL_NODES, {a: _Member(a, network) for a in self._known})
        self._lock = threading.Lock()
        self._refreshing = False
        self._next_refresh = float("-inf")
        self._is_behind = False
        """Asked for too soon after the last time."""
        self._closed = False

    @property
    def addresses(self) -> tuple[str, ...]:
        """Of the members, as far as is known."""
        return self._view.ring.members

    def lookup(self, ids: bytes, timeout_s: float | None = None) -> tuple[bytes, list[bytes]]:
        """16 x N bytes -> core.fates.Found column and N lines without newline, b"" where not found.

        `timeout_s`: where the caller has less time than the settings give. UnavailableError,
        OverloadedError: ask again later.
        """
        deadline = time.monotonic() + (
            self._timeout_s if timeout_s is None else min(timeout_s, self._timeout_s)
        )
        view = self._view
        if len(view.members) == 1:
            # Waited for in the caller's own thread: gRPC's futures cost one more.
            [member] = view.members.values()
            request, left_s = pb.LookupRequest(ids=ids), self._left_s(deadline)
            response = self._answer(member, lambda: member.stub.Lookup(request, timeout=left_s))
            return response.outcomes, split_lines(response.events)
        return self._look_up_split(view, ids, deadline)

    def put(self, ids: bytes, lines: Sequence[bytes]) -> None:
        """Events (16 x N bytes, N lines without newline) into the caches of their owners. Best effort.

        For events that stand in a log already: they are found at once, before the log is read. Returns when
        all have answered, after PUT_TIMEOUT_S at most.
        """
        view = self._view
        calls = []
        for address, rows in view.ring.split(ids).items() if ids else ():
            events = join_lines(list(map(lines.__getitem__, rows.tolist())))
            call = view.members[address].put(take_ids(ids, rows), events, min(PUT_TIMEOUT_S, self._timeout_s))
            calls += [(view.members[address], call)] if call else []
        for member, call in calls:
            with suppress(grpc.RpcError, grpc.FutureCancelledError, ValueError):
                self._heed(member, call.result().version)

    def arrivals(self, address: str, after: int, read_to_us: int) -> tuple[int, int, bytes]:
        """Of one member: the position now, up to about which time of events (us) the logs are read, and ids
        (16 x N bytes) that lookups asked it for before and that have arrived since.

        `after`, `read_to_us`: of its last answer, 0 at first. Waits for some seconds if nothing is new. The
        call ends with `close`. UnavailableError, OverloadedError: ask again later.
        """
        member = self._view.members.get(address)
        if member is None:
            raise UnavailableError(f"event store {address}: it is gone")
        request = pb.ArrivalsRequest(after=after, read_to_us=read_to_us)
        response = self._answer(member, lambda: member.stub.Arrivals(request, timeout=ARRIVALS_S_MAX))
        return response.position, response.read_to_us, response.ids

    def keep_up(self) -> None:
        """Ask for the members, if that was put off. For who may hear nothing of them for long otherwise."""
        if self._is_behind:
            self._refresh()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        for member in self._view.members.values():
            member.close()

    def _answer(self, member: "_Member", call: Callable[[], Any]) -> Any:
        """What the member says; of other members it is asked for them. UnavailableError, OverloadedError."""
        try:
            response = call()
        except grpc.RpcError as error:
            self._refresh()
            raise to_photon_error(error, f"event store {member.address}") from error
        except ValueError as error:
            raise UnavailableError(f"event store {member.address}: this client is closed") from error
        self._heed(member, response.version)
        return response

    def _left_s(self, deadline: float) -> float:
        return max(0.001, deadline - time.monotonic())

    def _look_up_split(self, view: "_View", ids: bytes, deadline: float) -> tuple[bytes, list[bytes]]:
        """The owners side by side; in the place of one that does not answer, the others one by one."""
        outcomes = np.zeros(len(ids) // ID_BYTES, np.uint8)
        lines = np.full(len(outcomes), b"", object)
        parts: list[tuple[Rows, str | None]] = [(rows, one) for one, rows in view.ring.split(ids).items()]
        failed: set[str] = set()
        error: PhotonError | None = None
        while parts:
            asked = []
            for rows, owner in parts:
                member = view.choose(owner, failed, time.monotonic())
                if member is None:
                    raise error or UnavailableError("no event store answers; ask again later")
                hurried = min(deadline, time.monotonic() + OWNER_TIMEOUT_S)
                last = len(failed) + 1 >= len(view.members)
                left_s = self._left_s(deadline if last else hurried)
                request = pb.LookupRequest(ids=take_ids(ids, rows))
                asked.append((rows, member, member.call(member.stub.Lookup, request, left_s)))
            parts = []
            for rows, member, call in asked:
                try:
                    found = self._answer(member, call.result)
                except PhotonError as failure:
                    member.left_out.failed(time.monotonic())
                    failed.add(member.address)
                    parts.append((rows, None))
                    error = failure
                else:
                    member.left_out.worked()
                    outcomes[rows] = np.frombuffer(found.outcomes, np.uint8)
                    lines[rows] = split_lines(found.events)
            if parts and time.monotonic() >= deadline:
                assert error is not None
                raise error
        return outcomes.tobytes(), lines.tolist()

    def _heed(self, member: "_Member", version: int) -> None:
        """Where it knows of other members, ask it for them."""
        if version != self._view.version:
            self._refresh(member)

    def _refresh(self, member: "_Member | None" = None) -> None:
        """Ask for the members, at most once a second; the answer is taken up when it comes."""
        now = time.monotonic()
        with self._lock:
            if self._refreshing or self._closed or now < self._next_refresh:
                self._is_behind = True
                return
            self._refreshing, self._is_behind = True, False
            self._next_refresh = now + _REFRESH_S
        if member is None:
            member = self._view.choose(None, set(), now) or next(iter(self._view.members.values()))
        call = member.call(member.stub.Members, pb.MembersRequest(), min(_REFRESH_S, self._timeout_s))
        call.add_done_callback(self._take_members)

    def _take_members(self, call: Any) -> None:
        try:
            response = call.result()
        except (grpc.RpcError, grpc.FutureCancelledError, ValueError):
            response = None  # those that are known may still be there, and those that were known at first
        with self._lock:
            self._refreshing, self._is_behind = False, self._is_behind or response is None
            old = self._view
            addresses = {*old.members, *self._known} if response is None else set(response.members)
            if self._closed or not addresses or addresses == old.members.keys():
                return
            members = {
                address: old.members.get(address) or _Member(address, self._network)
                for address in sorted(addresses)
            }
            virtual_nodes = response.virtual_nodes if response else old.ring.virtual_nodes
            self._view = _View(tuple(members), max(1, virtual_nodes), members)
            gone = [member for address, member in old.members.items() if address not in members]
        for member in gone:
            member.close()


class _View:
    """The members as one of them told last. Never changed: a lookup works with one from begin to end."""

    def __init__(self, addresses: Sequence[str], virtual_nodes: int, members: "dict[str, _Member]") -> None:
        self.version = version_of(addresses)
        self.ring = Ring(addresses, virtual_nodes)
        self.members = members

    def choose(self, owner: str | None, failed: set[str], now: float) -> "_Member | None":
        """The owner, unless it is left out; else the next on that is not, or that has not failed just now."""
        if owner is not None and self.members[owner].left_out.is_over(now):
            return self.members[owner]
        others = [member for address, member in self.members.items() if address not in failed]
        return next((one for one in others if one.left_out.is_over(now)), next(iter(others), None))


class _Member:
    """An event store. One that fails is left out for a while, twice as long each time it fails again."""

    def __init__(self, address: str, network: Network) -> None:
        self.address = address
        self._channel = network.open(address)
        self.stub: Any = eventstore_pb2_grpc.EventStoreStub(self._channel)  # type: ignore[no-untyped-call]
        self.left_out = Pause(_LEFT_OUT)

    def put(self, ids: bytes, events: bytes, timeout_s: float) -> Any:
        """As `call`; None while it is left out."""
        if not self.left_out.is_over(time.monotonic()):
            return None
        return self.call(self.stub.Put, pb.PutRequest(ids=ids, events=events), timeout_s)

    def call(self, method: Any, request: Any, timeout_s: float) -> Any:
        """A future, which has failed with a ValueError where the channel is closed."""
        try:
            return method.future(request, timeout=timeout_s)
        except ValueError as error:
            failed = Future[Any]()
            failed.set_exception(error)
            return failed

    def close(self) -> None:
        self._channel.close()
