"""The directory's part of the gRPC service: configuration, leases, fences, administration."""

import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from typing import Any, Final, NoReturn, Protocol

import grpc

from idregistry.coordinator import Ask, Coordinator, LeaseRuns, Look, Wanted
from idregistry.hosting import Hosted
from idregistry.rules.batching import Answer, Decided, NotLeader, OutcomeUnknown, Overloaded
from idregistry.rules.directory import DirectoryState, Proposal
from idregistry.rules.directory_commands import (
    Cancel,
    Fence,
    KeepAlive,
    Mismatched,
    Propose,
    Rejected,
    Replace,
    Row,
    name_mistake,
)
from idregistry.rules.packing import INCARNATIONS_MAX, LEADER_DETAILS
from idregistry.rules.sharding import HORIZON, SHARDS_MAX
from photon.core.addresses import mistake as address_mistake
from photon.core.clock import Clock
from photon.core.ids import TOKEN_BYTES_MAX
from photon.core.settings import IDENTITY_DIGEST_BYTES
from photon.raft.port import ReplicatedLog
from photon.rpc import idregistry_pb2 as pb

# --- How a gRPC handler waits for the raft thread, and what an answer is on the wire.

_MARGIN_S: Final = 0.05
"""A handler outwaits its deadline by so much, so that who answers in time is heard."""
_POLL_S: Final = 0.005


class Context(Protocol):
    """What is used of grpc.ServicerContext."""

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn: ...

    def time_remaining(self) -> float | None: ...

    def is_active(self) -> bool: ...


class Waiting:
    """How every handler waits for the raft thread, and what an answer is on the wire."""

    def __init__(self, addresses: Callable[[str], str], clock: Clock, timeout_s: float) -> None:
        """`addresses`: node id -> gRPC address, or empty."""
        self._addresses = addresses
        self._clock = clock
        self._timeout_s = timeout_s

    def wait(
        self, context: Context, offer: Callable[[float, Callable[[Answer], None]], Answer | None]
    ) -> Answer:
        """`offer` is given the deadline and whom to answer. Until the caller's deadline, or our own."""
        wait_s = self._wait_s(context)
        future: Future[Answer] = Future()
        refused = offer(self._clock.monotonic() + wait_s, future.set_result)
        if refused is not None:
            return refused
        try:
            return future.result(wait_s + _MARGIN_S)
        except NotInTime:
            return OutcomeUnknown()

    def deadline(self, context: Context) -> float:
        """Until when a handler may wait, in monotonic seconds: the caller's deadline, or our own."""
        return self._clock.monotonic() + self._wait_s(context)

    def until(self, context: Context, deadline: float, reached: Callable[[], bool]) -> bool:
        """Look every few ms whether it is `reached`; False if it is not by the deadline, or nobody waits."""
        while not reached():
            if self._clock.monotonic() >= deadline or not context.is_active():
                return False
            time.sleep(_POLL_S)
        return True

    def _wait_s(self, context: Context) -> float:
        remaining = context.time_remaining()
        return self._timeout_s if remaining is None else max(0.0, min(remaining, self._timeout_s))

    def abort(self, context: Context, answer: Answer) -> NoReturn:
        match answer:
            case NotLeader(leader):
                address = self._addresses(leader) if leader is not None else ""
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, LEADER_DETAILS + address)
            case Overloaded(why):
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
            case OutcomeUnknown():
                context.abort(
                    grpc.StatusCode.UNAVAILABLE,
                    "it is not known whether it was committed: retry with the same token",
                )
        raise AssertionError(answer)


ASKS_MAX: Final = 24
"""Calls that may wait for the directory, each in a thread of its own."""

FENCES_WAITING_MAX: Final = 8
"""Fence calls that may wait for the shards, each in a thread of its own."""

LEASE_S_MIN: Final = 0.1
LEASE_S_MAX: Final = 86_400.0


class DirectoryHandlers:
    """`rows`: name -> where each replica is; `shards`: what is hosted here."""

    def __init__(
        self,
        state: DirectoryState,
        log: ReplicatedLog,
        coordinator: Coordinator,
        rows: Callable[[], Mapping[str, Row]],
        shards: Callable[[], Mapping[int, Hosted]],
        waiting: Waiting,
    ) -> None:
        self._state = state
        self._log = log
        self._coordinator = coordinator
        self._rows = rows
        self._shards = shards
        self._waiting = waiting
        self._slots = threading.BoundedSemaphore(ASKS_MAX)
        self._fences = threading.BoundedSemaphore(FENCES_WAITING_MAX)

    @property
    def version(self) -> int:
        """Of the sharding configuration that this replica knows."""
        return self._state.view.version

    def get_directory(self) -> pb.DirectoryResponse:
        """What this replica knows: an older one is corrected by any newer."""
        view, rows = self._state.view, self._rows()
        hosted = self._shards()
        leaders = [hosted[n].log.leader if n in hosted else None for n in range(max(hosted, default=-1) + 1)]
        response = pb.DirectoryResponse(
            configuration=b"" if view.configuration is None else view.configuration.pack(),
            identity=view.identity,
            replicas=[
                pb.Replica(name=r.name, raft_host=r.raft_host, raft_port=r.raft_port, grpc=r.grpc)
                for r in rows.values()
            ],
            led=self._log.leader is not None,
            abandoned_version=view.abandoned[0],
            abandoned_why=view.abandoned[1],
            removed=view.removed,
            leaders=[
                rows[leader].grpc if leader is not None and leader in rows else "" for leader in leaders
            ],
        )
        if view.proposal is not None:
            response.proposal.CopyFrom(_proposal(view.proposal))
        return response

    def keep_alive(self, request: pb.KeepAliveRequest, context: Context) -> pb.KeepAliveResponse:
        """Take or renew a joiner's lease."""
        if not LEASE_S_MIN <= request.lease_s <= LEASE_S_MAX:
            _mistake(
                context, f"a lease of {request.lease_s} s; it runs from {LEASE_S_MIN} to {LEASE_S_MAX} s"
            )
        if len(request.address.encode()) > TOKEN_BYTES_MAX:
            _mistake(context, f"an address of {len(request.address)} characters")
        settings = request.settings
        if len(settings) not in (0, IDENTITY_DIGEST_BYTES):
            _mistake(
                context,
                f"a digest of settings of {len(settings)} bytes; it has {IDENTITY_DIGEST_BYTES} or none",
            )
        lease_us = round(request.lease_s * 1e6)
        result = self._ask(KeepAlive(0, request.incarnation, request.address, lease_us, settings), context)
        return pb.KeepAliveResponse(fenced=result is False, mismatched=isinstance(result, Mismatched))

    def fence(self, request: pb.FenceRequest, context: Context) -> pb.FenceResponse:
        """Fence an incarnation whose lease is over; "fenced" only once it can win nothing in any shard.

        UNAVAILABLE where a shard does not know of it in time: it is fenced, or will be; ask again.
        """
        if not self._fences.acquire(blocking=False):
            self._waiting.abort(context, Overloaded(f"{FENCES_WAITING_MAX} fences wait already; back off"))
        try:
            return self._fence(request.incarnation, context)
        finally:
            self._fences.release()

    def _fence(self, incarnation: int, context: Context) -> pb.FenceResponse:
        deadline = self._waiting.deadline(context)
        result = self._ask(Fence(0, incarnation, 0), context)
        if isinstance(result, LeaseRuns):
            return pb.FenceResponse(fenced=False, expires_in_s=result.for_s)
        if not result:  # it was renewed since the leader looked
            return pb.FenceResponse(fenced=False, expires_in_s=LEASE_S_MIN)
        place = self._state.fences.index(incarnation) + 1
        if not self._waiting.until(context, deadline, lambda: self._shards_know(place)):
            context.abort(
                grpc.StatusCode.UNAVAILABLE,
                "not every shard knows of the fence yet: has each a leader and a majority? Ask again",
            )
        return pb.FenceResponse(fenced=True)

    def _shards_know(self, fences: int) -> bool:
        """Whether so many of the directory's fences are committed in every shard there is.

        Wherever a shard is led: what our replica of it has applied stands in its log before every commit that
        is yet to come. One that is not open here yet, or in its new life, may be taking ids elsewhere.
        """
        view, shards = self._state.view, self._shards()
        return all(
            number in shards
            and shards[number].group == view.group(number)
            and shards[number].shard.state.fences >= fences
            for number in view.founders
        )

    def incarnations(self, request: pb.IncarnationsRequest, context: Context) -> pb.IncarnationsResponse:
        """How incarnations stand, by what the leader knows."""
        if len(request.incarnations) > INCARNATIONS_MAX:
            _mistake(
                context, f"{len(request.incarnations)} incarnations, at most {INCARNATIONS_MAX} are taken"
            )
        standings = self._ask(Look(tuple(request.incarnations)), context)
        return pb.IncarnationsResponse(
            fenced=[standing.fenced for standing in standings],
            expires_in_s=[standing.for_s for standing in standings],
        )

    def reshard(self, request: pb.ReshardRequest, context: Context) -> pb.ReshardResponse:
        """Propose another number of shards for events from a time on."""
        if not 1 <= request.shards <= SHARDS_MAX or not 0 <= request.at_us < HORIZON:
            _mistake(context, f"{request.shards} shards from {request.at_us} us: that can't be")
        result = self._ask(Propose(0, request.shards, request.at_us, 0), context)
        assert isinstance(result, Proposal), result
        return pb.ReshardResponse(version=result.version, start_us=result.start_us)

    def replace(self, request: pb.ReplaceRequest, context: Context) -> pb.ReplaceResponse:
        """Let a new replica take the place of an old one; or no more, where `cancel` names the new one."""
        # Names go into a command, which has a size that no name may burst: that would stop the replica.
        if request.cancel:
            if (mistake := name_mistake(request.cancel)) is not None:
                _mistake(context, mistake)
            self._ask(Cancel(0, request.cancel), context)
            return pb.ReplaceResponse()
        new = request.replica
        host = f"[{new.raft_host}]" if ":" in new.raft_host else new.raft_host
        mistake = (
            name_mistake(request.old)
            or name_mistake(new.name)
            or address_mistake(f"{host}:{new.raft_port}")
            or address_mistake(new.grpc)
        )
        if mistake is not None:
            _mistake(context, mistake)
        row = Row(new.name, new.raft_host, new.raft_port, new.grpc)
        self._ask(Replace(0, request.old, row), context)
        return pb.ReplaceResponse()

    def status(self) -> dict[str, object]:
        """The directory's part of the Status RPC."""
        view, log = self._state.view, self._log
        status, members = log.status(), log.members
        configuration = view.configuration
        intervals = [] if configuration is None else configuration.intervals
        return {
            "directory": {
                "leader": status.leader,
                "is_leader": status.is_leader,
                "term": status.term,
                "has_quorum": status.has_quorum,
                "voters": list(members.voters),
                "learners": list(members.learners),
                "resharding": None
                if view.proposal is None
                else [view.proposal.start_us, view.proposal.shards],
                "replacing": view.leaving,
                "leases": len(self._state.leases),
                "fences": len(self._state.fences),
            },
            "identity": view.identity.hex(),
            "version": view.version,
            "intervals": [[interval.start_us, interval.shards] for interval in intervals],
            "members": {name: row.grpc for name, row in self._rows().items()},
            "shards_expected": sorted(view.founders),
        }

    def _ask(self, what: Wanted, context: Context) -> Any:
        """What the directory's command was answered; aborts where it was not applied or was rejected."""
        if not self._log.is_leader:
            self._waiting.abort(context, NotLeader(self._log.leader))
        if not self._slots.acquire(blocking=False):
            self._waiting.abort(context, Overloaded(f"{ASKS_MAX} requests wait for the directory already"))

        def offer(deadline: float, answer: Callable[[Answer], None]) -> Answer | None:
            return self._coordinator.offer(Ask(what, deadline, answer))

        try:
            answer = self._waiting.wait(context, offer)
        finally:
            self._slots.release()
        if not isinstance(answer, Decided):
            self._waiting.abort(context, answer)
        if isinstance(answer.result, Rejected):
            if answer.result.busy:
                self._waiting.abort(context, Overloaded(answer.result.why))
            _mistake(context, answer.result.why)
        return answer.result


def _proposal(proposal: Proposal) -> pb.Proposal:
    return pb.Proposal(version=proposal.version, start_us=proposal.start_us, shards=proposal.shards)


def _mistake(context: Context, what: str) -> NoReturn:
    context.abort(grpc.StatusCode.INVALID_ARGUMENT, what)
