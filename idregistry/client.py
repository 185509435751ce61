"""The only door into the registry for other rooms (paper 2.1, 2.2.2).

Lookups go to the nearest replica that answers, commits to the shard's leader. A commit is tried again with
the same token until the time is up: the registry tells a retry of the winner that it won.
"""

import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import grpc

from idregistry.messages import LEADER_DETAILS, columns_mistake, token_mistake
from idregistry.retries import (
    Failure,
    PartCall,
    delay_s,
    final_error,
    named_leader,
    next_address,
    try_timeout_s,
)
from idregistry.sharding import ShardPart, merge_outcomes, split_by_shard
from photon.core.clock import Clock
from photon.core.errors import UnavailableError, UsageError
from photon.core.ids import ID_BYTES
from photon.wire import idregistry_pb2 as pb
from photon.wire.idregistry_pb2_grpc import IdRegistryStub
from photon.wire.rpc import ask_status, open_channel

# A replica that failed a lookup is passed over for so long: who hangs would cost every lookup a time-out.
_AVOID_S: Final = 1.0

_NOTHING_DONE: Final = {
    grpc.StatusCode.FAILED_PRECONDITION: Failure.NOT_LEADER,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Failure.OVERLOADED,
}
_CALLERS_FAULT: Final = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)

Send = Callable[[ShardPart, str], tuple[Any, Any]]
"""(part, address) -> (the stub's method, its request)."""

Failed = Callable[[PartCall, Failure, str, str | None], None]
"""(call, why, the address asked, the leader named): what to remember of a failed try."""


class RegistryClient:
    """For many threads at once. `addresses`: gRPC `host:port` of every replica, the nearest first."""

    def __init__(
        self, addresses: Sequence[str], shards: int, timeout_s: float, clock: Clock, rng: random.Random
    ) -> None:
        """`shards` as the servers have it; `timeout_s` bounds every call, with all its tries."""
        if not addresses or shards < 1:
            raise UsageError("the registry client needs at least one replica's address and one shard")
        self._addresses = list(dict.fromkeys(addresses))
        self._shards = shards
        self._timeout_s = timeout_s
        self._clock = clock
        self._rng = rng
        self._channels = {address: open_channel(address) for address in self._addresses}
        self._stubs = {address: _stub(channel) for address, channel in self._channels.items()}
        self._leaders = [self._addresses[0]] * shards
        self._avoid_until = dict.fromkeys(self._addresses, clock.monotonic())
        self._closed = threading.Event()

    def lookup(self, ids: bytes, times: bytes) -> bytes:
        """16 x N, 8 x N bytes -> core.fates.Registered column. "Absent" may be stale, "present" is final.

        UnavailableError if no replica answered in time.
        """
        self._check(ids, times)
        calls = [PartCall(part) for part in split_by_shard(ids, times, self._shards)]
        order = self._nearest_first()
        asked = 0

        def choose(_part: ShardPart) -> str:
            return order[asked % len(order)]

        def send(part: ShardPart, address: str) -> tuple[Any, Any]:
            request = pb.LookupRequest(shard=part.shard, ids=part.ids, times=part.times)
            return self._stubs[address].Lookup, request

        def failed(_call: PartCall, _why: Failure, address: str, _leader: str | None) -> None:
            self._avoid_until[address] = self._clock.monotonic() + _AVOID_S

        def another() -> bool:
            nonlocal asked
            asked += 1
            return asked % len(order) != 0

        return self._run(calls, choose, send, failed, another)

    def commit(self, ids: bytes, times: bytes, token: bytes) -> bytes:
        """16 x N, 8 x N bytes -> core.fates.Committed column. At most messages.IDS_MAX ids a call.

        WON is also what a retry with the winner's token is told. An id that stands twice: the first WON,
        the others DUPLICATE. Raises OverloadedError (nothing was done), NoQuorumError or UnavailableError
        (outcome unknown: call again with the same token), ValueError for columns or a token that can't be.
        """
        self._check(ids, times, token)
        calls = [PartCall(part) for part in split_by_shard(ids, times, self._shards)]

        def choose(part: ShardPart) -> str:
            return self._leaders[part.shard]

        def send(part: ShardPart, address: str) -> tuple[Any, Any]:
            request = pb.CommitRequest(shard=part.shard, ids=part.ids, times=part.times, token=token)
            return self._stubs[address].Commit, request

        def failed(call: PartCall, why: Failure, address: str, leader: str | None) -> None:
            # Many threads share what is known of the leader: only who was asked last may be replaced.
            if self._leaders[call.part.shard] == address:
                self._leaders[call.part.shard] = next_address(self._addresses, address, why, leader)

        return self._run(calls, choose, send, failed, lambda: False)

    def status(self, address: str) -> dict[str, Any]:
        """What the replica at `address` says of itself. UnavailableError if it does not answer."""
        call = self._stubs[address].Status
        return ask_status(call, pb.StatusRequest(), self._timeout_s, f"registry replica {address}")

    def close(self) -> None:
        """Close the channels; calls under way end with UnavailableError."""
        self._closed.set()
        for channel in self._channels.values():
            channel.close()

    def _run(
        self,
        calls: list[PartCall],
        choose: Callable[[ShardPart], str],
        send: Send,
        failed: Failed,
        another: Callable[[], bool],
    ) -> bytes:
        """Rounds over the parts without outcomes, those of a round side by side, until all have theirs."""
        deadline = self._clock.monotonic() + self._timeout_s
        waits = 0
        while unsettled := [call for call in calls if call.outcomes is None]:
            remaining_s = deadline - self._clock.monotonic()
            if remaining_s <= 0:
                raise final_error(calls, self._timeout_s)
            timeout_s = try_timeout_s(self._timeout_s, remaining_s)
            if not self._round(unsettled, choose, send, failed, timeout_s) and not another():
                self._closed.wait(
                    min(delay_s(waits, self._rng.uniform), max(0.0, deadline - self._clock.monotonic()))
                )
                waits += 1
        count = sum(len(call.part.ids) for call in calls) // ID_BYTES
        outcomes = [call.outcomes for call in calls if call.outcomes is not None]
        return merge_outcomes([call.part for call in calls], outcomes, count) if calls else b""

    def _round(
        self,
        calls: list[PartCall],
        choose: Callable[[ShardPart], str],
        send: Send,
        failed: Failed,
        timeout_s: float,
    ) -> bool:
        """Send every part once; whether the next round may start without a wait."""
        at_once = True
        targets = [choose(call.part) for call in calls]
        for call, address, result in zip(
            calls, targets, self._send(calls, targets, send, timeout_s), strict=True
        ):
            if not isinstance(result, grpc.RpcError):
                call.outcomes = result.outcomes
                continue
            code, details = result.code(), result.details() or ""
            if code in _CALLERS_FAULT:
                raise UsageError(f"registry replica {address}: {details}") from result
            failure = _NOTHING_DONE.get(code, Failure.UNKNOWN)
            leader = named_leader(details, LEADER_DETAILS, self._addresses, address)
            failed(call, failure, address, leader)
            what = "is not the leader" if failure is Failure.NOT_LEADER else f"{code.name.lower()}: {details}"
            at_once &= call.failed(failure, address, what, leader)
        return at_once

    def _send(self, calls: list[PartCall], targets: list[str], send: Send, timeout_s: float) -> list[Any]:
        """One response or RpcError a part."""
        if self._closed.is_set():
            raise UnavailableError(
                "the registry client is closed; whether anything was registered is not known"
            )
        try:
            if len(calls) == 1:  # in the caller's own thread: gRPC's futures cost one more
                method, request = send(calls[0].part, targets[0])
                return [_outcome_of(lambda: method(request, timeout=timeout_s))]
            pending = []
            for call, address in zip(calls, targets, strict=True):
                method, request = send(call.part, address)
                pending.append(method.future(request, timeout=timeout_s))
            return [_outcome_of(future.result) for future in pending]
        except (
            ValueError,
            grpc.FutureCancelledError,
        ) as error:  # gRPC's way to say that the channel was closed
            raise UnavailableError(f"the registry client was closed during a call: {error}") from error

    def _nearest_first(self) -> list[str]:
        """The replicas in the order given, those that failed just now last."""
        now = self._clock.monotonic()
        return sorted(self._addresses, key=lambda address: self._avoid_until[address] > now)

    @staticmethod
    def _check(ids: bytes, times: bytes, token: bytes | None = None) -> None:
        mistake = columns_mistake(ids, times) or (token_mistake(token) if token is not None else None)
        if mistake is not None:
            raise ValueError(mistake)


def _stub(channel: grpc.Channel) -> Any:
    return IdRegistryStub(channel)  # type: ignore[no-untyped-call]  # generated


def _outcome_of(call: Callable[[], Any]) -> Any:
    """Its response, or the RpcError it raised."""
    try:
        return call()
    except grpc.RpcError as error:
        return error
