"""The tries of a client call: rounds over its parts, side by side, until all have outcomes or time is up."""

import random
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import grpc
import numpy as np

from idregistry.routes import (
    DIRECTORY,
    Failure,
    Part,
    Routes,
    Rows,
    final_error,
    lost_elsewhere,
    merge_outcomes,
    named_leader,
    next_address,
    outcome_of,
    sort_out,
    split,
    try_timeout_s,
    whole,
)
from idregistry.rules.packing import LEADER_DETAILS
from idregistry.rules.sharding import Configuration
from photon.core.clock import Attempts, Backoff, Clock
from photon.core.errors import NoQuorumError, UnavailableError, UsageError
from photon.core.ids import ID_BYTES
from photon.rpc import idregistry_pb2 as pb
from photon.rpc.network import failure_of

_WAITS: Final = Backoff(0.005, 0.25)
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
    """A call about ids. `misrouted`: the outcome of an id that is to be routed anew. Where an id is held in
    several shards, they are asked in turn, the next one only if it is `won`; or, without it, all at once, and
    of what they say what comes last in `rising` holds.
    """

    method: str
    by_leader: bool
    request: Callable[[Part], Any]
    misrouted: int | None = None
    won: int | None = None
    rising: Sequence[int] = ()


class Rounds:
    """The engine of a client. For many threads at once."""

    def __init__(self, routes: Routes, timeout_s: float, clock: Clock, rng: random.Random) -> None:
        self.routes = routes
        self._timeout_s = timeout_s
        self._clock = clock
        self._rng = rng

    def attempts(self, timeout_s: float | None = None) -> Attempts:
        """The tries of one call, in the client's time where none is given. UnavailableError once closed."""
        within_s = self._timeout_s if timeout_s is None else timeout_s
        return Attempts(_WAITS, within_s, self._clock.monotonic, self._wait, self._rng.uniform)

    def _wait(self, seconds: float) -> None:
        self.routes.closed.wait(seconds)
        self.routes.check_open()

    def run(self, operation: Operation, ids: bytes, times: bytes) -> tuple[bytes, Rows]:
        """16 x N, 8 x N bytes -> outcome column, and the rows that were won in one shard and lost in another.
        UnavailableError and its kin, UsageError.
        """
        if not ids:
            return b"", np.empty(0, np.intp)
        attempts = self.attempts()
        configuration = self._configuration(attempts)
        through: list[Part] = []
        asked = split(whole(ids, times), configuration, operation.won is not None)
        orders: dict[int, list[str]] = {}  # of a shard's replicas, as they were when it was first asked
        for tries, left_s in enumerate(attempts):
            if operation.by_leader:
                targets = [self.routes.leader(part.shard) for part in asked]
            else:
                for part in asked:
                    orders.setdefault(part.shard, self.routes.nearest_first(part.shard))
                targets = [orders[part.shard][tries % len(orders[part.shard])] for part in asked]
            at_once = self._round(operation, asked, targets, try_timeout_s(self._timeout_s, left_s))
            if any(part.lost for part in asked):
                self.routes.ask_who(attempts.left_s)
            parts = [one for part in asked for one in sort_out(part, operation.misrouted, operation.won)]
            through += [part for part in parts if part.outcomes is not None]
            asked = [part for part in parts if part.outcomes is None]
            if any(part.misrouted for part in asked):
                asked, configuration, at_once = self._reroute(
                    operation, asked, configuration, attempts.left_s
                )
            if not asked:
                merged = merge_outcomes(through, len(ids) // ID_BYTES, operation.rising)
                return merged, lost_elsewhere(through, operation.won)
            in_turn = max(map(len, orders.values()), default=1)
            if at_once or not (operation.by_leader or (tries + 1) % in_turn == 0):
                attempts.next_at_once()
        raise final_error([*asked, *through], self._timeout_s, configuration.version)

    def _round(self, operation: Operation, parts: list[Part], targets: list[str], timeout_s: float) -> bool:
        """Send every part once; whether the next round may start without a wait."""
        at_once = True
        routes = self.routes
        answers = self._send(operation, parts, targets, timeout_s)
        for part, address, result in zip(parts, targets, answers, strict=True):
            if isinstance(result, grpc.RpcError):
                at_once &= self._note_failure(part, address, result, operation.by_leader)
                continue
            part.outcomes = result.outcomes
            routes.saw(result.version)
            if operation.by_leader:
                routes.answered(part.shard, address)
        return at_once

    def _send(
        self, operation: Operation, parts: list[Part], targets: list[str], timeout_s: float
    ) -> list[Any]:
        """One response or RpcError a part."""
        with self.routes.calling():
            methods = [getattr(self.routes.stub(address), operation.method) for address in targets]
            if len(parts) == 1:  # in the caller's own thread: gRPC's futures cost one more
                request = operation.request(parts[0])
                return [outcome_of(lambda: methods[0](request, timeout=timeout_s))]
            pending = [
                method.future(operation.request(part), timeout=timeout_s)
                for part, method in zip(parts, methods, strict=True)
            ]
            return [outcome_of(future.result) for future in pending]

    def _reroute(
        self, operation: Operation, parts: list[Part], configuration: Configuration, left_s: float
    ) -> tuple[list[Part], Configuration, bool]:
        """Split anew, by a newer configuration, what was misrouted; whether there was a newer one."""
        newest = self.routes.fetch(configuration.version, left_s) or configuration
        newer = newest.version > configuration.version
        routed, anew = [], False
        for part in parts:
            # One that waited for its answer while another part fetched was routed by the table before.
            if part.misrouted and (newer or part.route.known_us < newest.newest_us):
                anew = True
                routed += split(part, newest, operation.won is not None)
            else:
                routed.append(part)
        return routed, newest if newer else configuration, anew

    def ask_directory(self, method: str, request: Any, timeout_s: float | None = None) -> Any:
        """The answer of the directory's leader, as of `ask_leader`."""
        return self.ask_leader(DIRECTORY, method, request, timeout_s)

    def ask_leader(self, shard: int, method: str, request: Any, timeout_s: float | None = None) -> Any:
        """The answer of the leader of a shard, or of the directory. Tried again until the time is up.

        UsageError if it is refused: RefusedAfterUnknownError where an earlier try may have been done.
        """
        part = whole(shard=shard)
        within_s = self._timeout_s if timeout_s is None else timeout_s
        attempts = self.attempts(within_s)
        for left_s in attempts:
            address = self.routes.leader(shard)
            result = self.routes.ask(method, request, address, left_s)
            if not isinstance(result, grpc.RpcError):
                self.routes.answered(shard, address)
                return result
            try:
                self._look_on(part, address, result, attempts)
            except UsageError as error:
                if part.maybe_done:
                    raise RefusedAfterUnknownError(str(error)) from error
                raise
        raise final_error([part], within_s, 0)

    def ask_for_directory(self) -> pb.DirectoryResponse:
        """The answer of the nearest replica that knows a leader, or else of any. UnavailableError."""
        failures = []
        unled: pb.DirectoryResponse | None = None
        for address, answer in self.routes.directories(self._timeout_s):
            if isinstance(answer, grpc.RpcError):
                failures.append(f"{address}: {self._failure(answer, address)[1]}")
            elif answer.led:
                return answer
            else:
                unled = unled or answer
        if unled is None:
            raise UnavailableError(f"no registry replica answered ({'; '.join(failures)})")
        return unled

    def stream(
        self, method: str, request: Any, address: str | None, timeout_s: float, shard: int, led: bool
    ) -> Iterator[Any]:
        """The messages of one replica of the shard: the one named, or the nearest that answers at all, or,
        where none is named and it is to have `led`, the leader, which is looked for as long as any call may
        take. Once it has begun, nobody else is asked.

        UnavailableError if they are not all drawn within `timeout_s`.
        """
        deadline = self._clock.monotonic() + timeout_s
        by_leader = led and address is None
        part = whole(shard=shard)
        attempts = self.attempts(min(self._timeout_s, timeout_s) if by_leader else timeout_s)
        order = [address] if address is not None else self.routes.nearest_first(shard)
        for nth, left_s in enumerate(attempts):
            target = self.routes.leader(part.shard) if by_leader else order[nth]
            # One that hangs would hold up a long call to its end: it is asked for the directory before.
            error = (
                None if address else self.routes.ask("GetDirectory", pb.DirectoryRequest(), target, left_s)
            )
            if not isinstance(error, grpc.RpcError):
                error = yield from self._messages(
                    method, request, target, deadline, part.shard if by_leader else None
                )
                if error is None:
                    return
            if by_leader:
                self._look_on(part, target, error, attempts)
                continue
            self.routes.avoid(target)
            part.failures.append(f"{target}: {failure_of(error)}")
            if nth + 1 == len(order):
                break
            attempts.next_at_once()
        told = "; ".join(part.failures)
        if by_leader:
            raise UnavailableError(
                f"registry shard {shard}: no leader began {method} in time ({told}); retry"
            )
        raise UnavailableError(f"registry: {method} ended early ({told}); begin it again")

    def _messages(
        self, method: str, request: Any, address: str, deadline: float, led: int | None
    ) -> Generator[Any, None, grpc.RpcError | None]:
        """All messages; or the error before the first, in which case another may be asked. `led`: whose
        leader it is, if it answers at all.
        """
        begun = False
        try:
            with self.routes.calling():
                left_s = max(0.0, deadline - self._clock.monotonic())
                for message in getattr(self.routes.stub(address), method)(request, timeout=left_s):
                    if not begun and led is not None:
                        self.routes.answered(led, address)
                    begun = True
                    yield message
        except grpc.RpcError as error:
            if not begun:
                return error
            raise UnavailableError(
                f"registry: {method} ended early ({address}: {failure_of(error)}); begin it again"
            ) from error
        return None

    def _configuration(self, attempts: Attempts) -> Configuration:
        """What to route by: fetched where there is none, or a newer one."""
        known = self.routes.configuration
        if not self.routes.stale and known is not None:
            return known
        return self.newer_configuration(known.version if known else 0, attempts=attempts)

    def newer_configuration(
        self, version: int, always: bool = False, attempts: Attempts | None = None
    ) -> Configuration:
        """The newest that replicas know, where one newer than `version` is of interest; waited for while a
        registry that starts has none. UnavailableError.
        """
        failed: UnavailableError | None = None
        for left_s in attempts or self.attempts():
            try:
                newest = self.routes.fetch(version, left_s, always)
            except UnavailableError as error:
                newest, failed = None, error
            if newest is not None:
                return newest
        what = f"no sharding configuration of the registry within {self._timeout_s:g} s"
        if failed is None:
            raise NoQuorumError(f"{what}: its replicas are starting; retry")
        raise UnavailableError(f"{what}: {failed}; retry")

    def _look_on(self, part: Part, address: str, error: grpc.RpcError, attempts: Attempts) -> None:
        """After a try at a leader that failed: choose whom to ask next, and when."""
        if self._note_failure(part, address, error, by_leader=True):
            attempts.next_at_once()
        elif part.lost:
            self.routes.ask_who(attempts.left_s)

    def _note_failure(self, part: Part, address: str, error: grpc.RpcError, by_leader: bool) -> bool:
        """Remember it; whether to go on at once, to the leader named. UsageError as `_failure`."""
        failure, details, leader = self._failure(error, address)
        if by_leader:
            target = next_address(self.routes.hosts(part.shard), address, failure, leader)
            self.routes.replace_leader(part.shard, address, target)
        else:
            self.routes.avoid(address)
        return part.failed(failure, address, details, leader)

    def _failure(self, error: grpc.RpcError, address: str) -> tuple[Failure, str, str | None]:
        """(its kind, in words, the leader it names). UsageError where the caller is at fault."""
        code, details = error.code(), error.details() or ""
        if code in _CALLERS_FAULT:
            raise UsageError(f"registry replica {address}: {details}") from error
        failure = _NOTHING_DONE.get(code, Failure.UNKNOWN)
        leader = named_leader(details, LEADER_DETAILS, self.routes.addresses, address)
        what = "is not the leader" if failure is Failure.NOT_LEADER else failure_of(error)
        return failure, what, leader
