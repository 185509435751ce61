"""The gRPC face of a registry replica (paper 2.1, Fig. 3). Handlers validate, queue and wait.

Status codes: INVALID_ARGUMENT (the caller's mistake), FAILED_PRECONDITION with details `leader=<address>`
(ask there; empty while nobody is known to lead), RESOURCE_EXHAUSTED (nothing was done), UNAVAILABLE (outcome
unknown: retry with the same token).
"""

import json
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from typing import Final, NoReturn, Protocol

import grpc

from idregistry.answers import Answer, NotLeader, OutcomeUnknown, Overloaded, Settled
from idregistry.batching import Request
from idregistry.messages import LEADER_DETAILS, columns_mistake, token_mistake
from idregistry.shard import Shard
from photon.core.clock import Clock
from photon.raft.port import ReplicatedLog
from photon.wire import idregistry_pb2 as pb
from photon.wire.idregistry_pb2_grpc import IdRegistryServicer

COMMITS_WAITING_MAX: Final = 96
"""Commit calls that may wait, each in a thread of its own."""

WORKERS: Final = COMMITS_WAITING_MAX + 32
"""Handler threads: some are always left for lookups and status, however long the commits wait."""

_MARGIN_S: Final = 0.05
"""A handler outwaits its deadline by so much, so that who answers in time is heard."""


class _Context(Protocol):
    """What is used of grpc.ServicerContext."""

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn: ...

    def time_remaining(self) -> float | None: ...


class IdRegistryService(IdRegistryServicer):
    """`shards[i]` with its log `logs[i]`; `addresses`: node id -> gRPC address, told to who is wrong here."""

    def __init__(
        self,
        shards: Sequence[Shard],
        logs: Sequence[ReplicatedLog],
        addresses: Mapping[str, str],
        clock: Clock,
        timeout_s: float,
    ) -> None:
        self._shards = shards
        self._logs = logs
        self._addresses = addresses
        self._clock = clock
        self._timeout_s = timeout_s
        self._slots = threading.BoundedSemaphore(COMMITS_WAITING_MAX)

    def Commit(self, request: pb.CommitRequest, context: _Context) -> pb.CommitResponse:
        """Insert the absent ids; wait for the command they go into."""
        mistake = self._mistake(request) or token_mistake(request.token)
        if mistake is not None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, mistake)
        log = self._logs[request.shard]
        if not log.is_leader:
            self._abort(context, NotLeader(log.leader))
        if not request.ids:
            return pb.CommitResponse()
        if not self._slots.acquire(blocking=False):
            self._abort(
                context, Overloaded(f"{COMMITS_WAITING_MAX} commits wait already; back off and retry")
            )
        try:
            answer = self._wait(request, context)
        finally:
            self._slots.release()
        if not isinstance(answer, Settled):
            self._abort(context, answer)
        return pb.CommitResponse(outcomes=answer.outcomes)

    def Lookup(self, request: pb.LookupRequest, context: _Context) -> pb.LookupResponse:
        """What this replica knows now: "absent" may be stale, "present" is final."""
        mistake = self._mistake(request)
        if mistake is not None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, mistake)
        return pb.LookupResponse(
            outcomes=self._shards[request.shard].state.lookup(request.ids, request.times)
        )

    def Status(self, request: pb.StatusRequest, context: _Context) -> pb.StatusResponse:
        """JSON: each shard as this replica sees it, and how many ids wait."""
        return pb.StatusResponse(json=json.dumps(self.status()).encode())

    def status(self) -> dict[str, object]:
        """The same as a dict."""
        shards = [shard.status(log) for shard, log in zip(self._shards, self._logs, strict=True)]
        return {"shards": shards, "queue": sum(shard.waiting_ids for shard in self._shards)}

    def _wait(self, request: pb.CommitRequest, context: _Context) -> Answer:
        """Queue the request and wait for its answer until the caller's deadline, or our own."""
        remaining = context.time_remaining()
        wait_s = self._timeout_s if remaining is None else max(0.0, min(remaining, self._timeout_s))
        future: Future[Answer] = Future()
        refused = self._shards[request.shard].offer(
            Request(
                request.ids,
                request.times,
                request.token,
                self._clock.monotonic() + wait_s,
                future.set_result,
            )
        )
        if refused is not None:
            return refused
        try:
            return future.result(wait_s + _MARGIN_S)
        except NotInTime:
            return OutcomeUnknown()

    def _mistake(self, request: pb.CommitRequest | pb.LookupRequest) -> str | None:
        """What is wrong with the request, or None."""
        if request.shard >= len(self._shards):
            return (
                f"shard {request.shard} does not exist, there are {len(self._shards)}; give the client "
                "the same registry.shards as the servers"
            )
        return columns_mistake(request.ids, request.times)

    def _abort(self, context: _Context, answer: NotLeader | Overloaded | OutcomeUnknown) -> NoReturn:
        match answer:
            case NotLeader(leader):
                address = self._addresses.get(leader, "") if leader is not None else ""
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, LEADER_DETAILS + address)
            case Overloaded(why):
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
            case OutcomeUnknown():
                context.abort(
                    grpc.StatusCode.UNAVAILABLE,
                    "it is not known whether it was committed: retry with the same token",
                )
