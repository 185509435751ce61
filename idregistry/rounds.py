"""The tries of a client call: rounds over its parts, side by side, until all have outcomes or time is up."""

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
import numpy as np

from idregistry.calling import ClosedMeanwhile, outcome_of
from idregistry.configuration import Configuration
from idregistry.messages import LEADER_DETAILS
from idregistry.retries import (
    Failure,
    PartCall,
    delay_s,
    final_error,
    named_leader,
    next_address,
    split_strays,
    try_timeout_s,
)
from idregistry.routes import DIRECTORY, Routes
from idregistry.sharding import ShardPart, merge_outcomes, split_by_shard
from photon.core.clock import Clock
from photon.core.errors import NoQuorumError, OverloadedError, UnavailableError, UsageError
from photon.core.ids import ID_BYTES
from photon.wire import idregistry_pb2 as pb
from photon.wire.failures import failure_of
from photon.wire.network import LOOPBACK, Network

_NOTHING_DONE: Final = {
    grpc.StatusCode.FAILED_PRECONDITION: Failure.NOT_LEADER,
    grpc.StatusCode.RESOURCE_EXHAUSTED: Failure.OVERLOADED,
    grpc.StatusCode.NOT_FOUND: Failure.MISROUTED,
}
_CALLERS_FAULT: Final = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)


class RefusedAfterUnknownError(UsageError):
    """Refused, perhaps only because an earlier try of the same call was done and its answer was lost."""


@dataclass(frozen=True, slots=True)
class Operation:
    """A call about ids. `misrouted`: the outcome of an id that is to be routed anew."""

    method: str
    by_leader: bool
    misrouted: int | None
    request: Callable[[ShardPart], Any]


class Rounds:
    """The engine of a client. For many threads at once."""

    def __init__(
        self,
        addresses: Sequence[str],
        timeout_s: float,
        clock: Clock,
        rng: random.Random,
        network: Network = LOOPBACK,
    ) -> None:
        self.routes = Routes(addresses, clock, network)
        self._timeout_s = timeout_s
        self._clock = clock
        self._rng = rng
        self._closed = threading.Event()

    def close(self) -> None:
        self._closed.set()
        self.routes.close()

    def wait(self, seconds: float) -> None:
        """Sleep, but not past `close`."""
        self._closed.wait(seconds)

    # --- about ids

    def run(self, operation: Operation, ids: bytes, times: bytes) -> bytes:
        """16 x N, 8 x N bytes -> outcome column. UnavailableError and its kin, UsageError."""
        if not ids:
            return b""
        deadline = self._clock.monotonic() + self._timeout_s
        configuration = self._configuration(deadline)
        calls = [PartCall(part) for part in split_by_shard(ids, times, configuration)]
        order = self.routes.nearest_first()
        waits = asked = 0
        while unsettled := [call for call in calls if call.outcomes is None]:
            remaining_s = deadline - self._clock.monotonic()
            if remaining_s <= 0:
                raise final_error(calls, self._timeout_s, configuration.version)
            targets = [
                self.routes.leader(call.part.shard) if operation.by_leader else order[asked % len(order)]
                for call in unsettled
            ]
            at_once = self._round(operation, unsettled, targets, try_timeout_s(self._timeout_s, remaining_s))
            asked += 1
            if any(call.lost for call in unsettled):
                self.routes.ask_who(max(0.0, deadline - self._clock.monotonic()), self._timeout_s)
            if any(call.misrouted or call.outcomes is not None for call in unsettled):
                calls, configuration, rerouted = self._reroute(
                    operation, calls, ids, times, configuration, deadline
                )
                at_once |= rerouted
            if not at_once and (operation.by_leader or asked % len(order) == 0):
                self._pause(waits, deadline)
                waits += 1
        return merge_outcomes(
            [call.part for call in calls], [call.outcomes or b"" for call in calls], len(ids) // ID_BYTES
        )

    def _round(
        self, operation: Operation, calls: list[PartCall], targets: list[str], timeout_s: float
    ) -> bool:
        """Send every part once; whether the next round may start without a wait."""
        at_once = True
        routes = self.routes
        for call, address, result in zip(
            calls, targets, self._send(operation, calls, targets, timeout_s), strict=True
        ):
            if not isinstance(result, grpc.RpcError):
                call.outcomes = result.outcomes
                routes.saw(result.version)
                if operation.by_leader:
                    routes.answered(call.part.shard, address)
                continue
            failure, details, leader = self._failure(result, address)
            if not operation.by_leader:
                routes.avoid(address)
            else:
                routes.replace_leader(
                    call.part.shard, address, next_address(routes.addresses, address, failure, leader)
                )
            at_once &= call.failed(failure, address, details, leader)
        return at_once

    def _send(
        self, operation: Operation, calls: list[PartCall], targets: list[str], timeout_s: float
    ) -> list[Any]:
        """One response or RpcError a part."""
        with ClosedMeanwhile(self._closed):
            methods = [getattr(self.routes.stub(address), operation.method) for address in targets]
            if len(calls) == 1:  # in the caller's own thread: gRPC's futures cost one more
                request = operation.request(calls[0].part)
                return [outcome_of(lambda: methods[0](request, timeout=timeout_s))]
            pending = [
                method.future(operation.request(call.part), timeout=timeout_s)
                for call, method in zip(calls, methods, strict=True)
            ]
            return [outcome_of(future.result) for future in pending]

    def _reroute(
        self,
        operation: Operation,
        calls: list[PartCall],
        ids: bytes,
        times: bytes,
        configuration: Configuration,
        deadline: float,
    ) -> tuple[list[PartCall], Configuration, bool]:
        """Split anew, by a newer configuration, what was misrouted; whether there was a newer one."""
        kept: list[PartCall] = []
        strays: list[PartCall] = []
        for call in calls:
            if call.outcomes is not None and operation.misrouted is not None:
                settled, astray = split_strays(call, operation.misrouted)
                kept += settled
                strays += astray
            else:
                (strays if call.misrouted and call.outcomes is None else kept).append(call)
        if not strays:
            return calls, configuration, False
        remaining_s = max(0.0, deadline - self._clock.monotonic())
        newest = self.routes.fetch(configuration.version, remaining_s, self._timeout_s) or configuration
        if newest.version <= configuration.version:
            return kept + strays, configuration, False
        for stray in strays:
            rows = stray.part.rows
            for part in split_by_shard(
                ids, times, newest, np.arange(len(ids) // ID_BYTES) if rows is None else rows
            ):
                kept.append(PartCall(part, maybe_done=stray.maybe_done, failures=stray.failures))
        return kept, newest, True

    # --- about the directory

    def ask_directory(self, method: str, request: Any) -> Any:
        """The answer of the directory's leader. Tried again until the time is up.

        UsageError if it is refused: RefusedAfterUnknownError where an earlier try may have been done.
        """
        deadline = self._clock.monotonic() + self._timeout_s
        call = PartCall(ShardPart(DIRECTORY, b"", b"", None))
        waits = 0
        while (remaining_s := deadline - self._clock.monotonic()) > 0:
            address = self.routes.leader(DIRECTORY)
            result = self._ask(method, request, address, try_timeout_s(self._timeout_s, remaining_s))
            if not isinstance(result, grpc.RpcError):
                self.routes.answered(DIRECTORY, address)
                return result
            try:
                failure, details, leader = self._failure(result, address)
            except UsageError as error:
                if call.maybe_done:
                    raise RefusedAfterUnknownError(str(error)) from error
                raise
            target = next_address(self.routes.addresses, address, failure, leader)
            self.routes.replace_leader(DIRECTORY, address, target)
            if not call.failed(failure, address, details, leader):
                if call.lost:
                    self.routes.ask_who(max(0.0, deadline - self._clock.monotonic()), self._timeout_s)
                self._pause(waits, deadline)
                waits += 1
        what = f"registry directory: no answer within {self._timeout_s:g} s ({'; '.join(call.failures)})"
        if call.leaderless:
            raise NoQuorumError(f"{what}; no leader with a majority: see to it that most replicas run; retry")
        if not call.maybe_done:
            raise OverloadedError(f"{what}; nothing was done: back off and retry")
        raise UnavailableError(f"{what}; it is not known whether it was done: retry")

    def ask_for_directory(self) -> pb.DirectoryResponse:
        """The answer of the nearest replica that knows a leader, or else of any. UnavailableError."""
        deadline = self._clock.monotonic() + self._timeout_s
        failures = []
        unled: pb.DirectoryResponse | None = None
        for address in self.routes.nearest_first():
            remaining_s = max(0.0, deadline - self._clock.monotonic())
            result = self._ask(
                "GetDirectory", pb.DirectoryRequest(), address, try_timeout_s(self._timeout_s, remaining_s)
            )
            if not isinstance(result, grpc.RpcError):
                answer: pb.DirectoryResponse = result
                if answer.led:
                    return answer
                unled = unled or answer
                continue
            self.routes.avoid(address)
            failures.append(f"{address}: {self._failure(result, address)[1]}")
        if unled is None:
            raise UnavailableError(f"no registry replica answered ({'; '.join(failures)})")
        return unled

    def identity(self) -> bytes:
        """The registry's, as any replica knows it: once there is one it never changes. UnavailableError."""
        deadline = self._clock.monotonic() + self._timeout_s
        waits = 0
        why = "it has none yet: its replicas are starting, or most of them are down"
        while self._clock.monotonic() < deadline and not self._closed.is_set():
            try:
                if identity := self.ask_for_directory().identity:
                    return identity
            except UnavailableError as error:
                why = str(error)
            self._pause(waits, deadline)
            waits += 1
        raise UnavailableError(f"no identity of the registry within {self._timeout_s:g} s: {why}; retry")

    def stream(
        self, method: str, request: Any, address: str | None, timeout_s: float, led: int | None = None
    ) -> Iterator[Any]:
        """The messages of one replica: the one named, or the nearest that answers at all, or, where none is
        named, the leader of shard `led`.

        UnavailableError if they are not all drawn within `timeout_s`.
        """
        deadline = self._clock.monotonic() + timeout_s
        if led is not None and address is None:
            yield from self._stream_of_leader(method, request, led, deadline)
            return
        failures = []
        for target in [address] if address is not None else self.routes.nearest_first():
            begun = False
            remaining_s = max(0.0, deadline - self._clock.monotonic())
            if address is None:
                # One that hangs would hold up a long call to its end.
                answer = self._ask(
                    "GetDirectory", pb.DirectoryRequest(), target, try_timeout_s(self._timeout_s, remaining_s)
                )
                if isinstance(answer, grpc.RpcError):
                    self.routes.avoid(target)
                    failures.append(f"{target}: {self._failure(answer, target)[1]}")
                    continue
                remaining_s = max(0.0, deadline - self._clock.monotonic())
            try:
                with ClosedMeanwhile(self._closed):
                    for message in getattr(self.routes.stub(target), method)(request, timeout=remaining_s):
                        begun = True
                        yield message
                return
            except grpc.RpcError as error:
                failures.append(f"{target}: {failure_of(error)}")
                if begun:
                    break
        raise UnavailableError(f"registry: {method} ended early ({'; '.join(failures)}); begin it again")

    def _stream_of_leader(self, method: str, request: Any, shard: int, deadline: float) -> Iterator[Any]:
        """It is looked for as long as any call may take; once it has begun, nobody else is asked."""
        look_until = min(deadline, self._clock.monotonic() + self._timeout_s)
        call = PartCall(ShardPart(shard, b"", b"", None))
        waits = 0
        while (remaining_s := look_until - self._clock.monotonic()) > 0:
            address = self.routes.leader(shard)
            begun = False
            # One that hangs would hold up a long call to its end.
            error = self._ask(
                "GetDirectory", pb.DirectoryRequest(), address, try_timeout_s(self._timeout_s, remaining_s)
            )
            if not isinstance(error, grpc.RpcError):
                try:
                    left_s = deadline - self._clock.monotonic()
                    with ClosedMeanwhile(self._closed):
                        for message in getattr(self.routes.stub(address), method)(request, timeout=left_s):
                            if not begun:
                                self.routes.answered(shard, address)
                            begun = True
                            yield message
                    return
                except grpc.RpcError as failed:
                    error = failed
            failure, details, leader = self._failure(error, address)
            if begun:
                raise UnavailableError(
                    f"registry: {method} ended early ({address}: {details}); begin it again"
                )
            target = next_address(self.routes.addresses, address, failure, leader)
            self.routes.replace_leader(shard, address, target)
            if not call.failed(failure, address, details, leader):
                if call.lost:
                    self.routes.ask_who(max(0.0, remaining_s), self._timeout_s)
                self._pause(waits, look_until)
                waits += 1
        raise UnavailableError(
            f"registry shard {shard}: no leader began {method} in time ({'; '.join(call.failures)}); retry"
        )

    def newer_configuration(self, version: int, fetch: bool = False) -> Configuration:
        """The newest that replicas know, where one newer than `version` is of interest. UnavailableError."""
        newest = self.routes.fetch(version, self._timeout_s, self._timeout_s, always=fetch)
        if newest is None:
            raise NoQuorumError(
                "the registry has no sharding configuration yet: its replicas are starting; retry"
            )
        return newest

    # --- parts of these

    def _configuration(self, deadline: float) -> Configuration:
        """What to route by: fetched where there is none, or a newer one."""
        known = self.routes.configuration
        if not self.routes.stale and known is not None:
            return known
        waits = 0
        why = "its replicas are starting"
        while (remaining_s := deadline - self._clock.monotonic()) > 0 and not self._closed.is_set():
            try:
                newest = self.routes.fetch(known.version if known else 0, remaining_s, self._timeout_s)
            except UnavailableError as error:
                newest, why = known, str(error)
            if newest is not None:
                return newest
            self._pause(waits, deadline)
            waits += 1
        if self._closed.is_set():
            raise UnavailableError("the registry client is closed")
        kind = NoQuorumError if why.startswith("its") else UnavailableError
        raise kind(f"no sharding configuration of the registry within {self._timeout_s:g} s: {why}; retry")

    def _ask(self, method: str, request: Any, address: str, timeout_s: float) -> Any:
        """The response, or the RpcError."""
        with ClosedMeanwhile(self._closed):
            call = getattr(self.routes.stub(address), method)
            return outcome_of(lambda: call(request, timeout=timeout_s))

    def _failure(self, error: grpc.RpcError, address: str) -> tuple[Failure, str, str | None]:
        """(its kind, in words, the leader it names). UsageError where the caller is at fault."""
        code, details = error.code(), error.details() or ""
        if code in _CALLERS_FAULT:
            raise UsageError(f"registry replica {address}: {details}") from error
        failure = _NOTHING_DONE.get(code, Failure.UNKNOWN)
        leader = named_leader(details, LEADER_DETAILS, self.routes.addresses, address)
        what = "is not the leader" if failure is Failure.NOT_LEADER else failure_of(error)
        return failure, what, leader

    def _pause(self, waits: int, deadline: float) -> None:
        left_s = max(0.0, deadline - self._clock.monotonic())
        self._closed.wait(min(delay_s(waits, self._rng.uniform), left_s))
