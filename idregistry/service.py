"""The gRPC face of a registry replica (paper 2.1, Fig. 3). Handlers validate, queue and wait.

Status codes: INVALID_ARGUMENT (the caller's mistake), FAILED_PRECONDITION with details `leader=<address>`
(ask there; empty while nobody is known to lead), NOT_FOUND (no such shard here), RESOURCE_EXHAUSTED (nothing
was done), UNAVAILABLE (outcome unknown: retry with the same token).
"""

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final, NoReturn

import grpc

from idregistry.directory_service import Context, DirectoryHandlers, Waiting
from idregistry.hosting import Hosted
from idregistry.rules.batching import Answer, Errand, NotLeader, Overloaded, Request, Settled, barrier
from idregistry.rules.packing import SCAN_S_MAX, columns_mistake, segments_mistake, token_mistake
from idregistry.rules.state import Scanned
from photon.core.clock import Clock
from photon.rpc import idregistry_pb2 as pb
from photon.rpc.idregistry_pb2_grpc import IdRegistryServicer

COMMITS_WAITING_MAX: Final = 96
"""Commit calls that may wait, each in a thread of its own."""

SCANS_MAX: Final = 4
"""Scans at a time, each in a thread of its own."""

_SCAN_PAUSE_S_MAX: Final = 0.1
_SCAN_MARGIN_S: Final = 60.0
"""gRPC rounds long timeouts up."""

WORKERS: Final = COMMITS_WAITING_MAX + 48
"""Handler threads: some are always left for lookups and status, however long the commits wait."""

IN_FLIGHT_MAX: Final = WORKERS + 256
"""Calls under way and waiting for a thread; beyond it they are refused at once."""

LOOKUP_LAG_MAX: Final = 64
"""Commands that a replica which answers lookups may lack: what is under way at busy times is less."""

REQUEST_BYTES_MAX: Final = 4 << 20
"""Of a request: twice what the largest that is taken has."""

_IdsRequest = pb.CommitRequest | pb.LookupRequest | pb.ReleaseRequest


class IdRegistryService(IdRegistryServicer):
    """`shards`: what is hosted here now. The directory's calls go to `directory`."""

    def __init__(
        self,
        shards: Callable[[], Mapping[int, Hosted]],
        directory: DirectoryHandlers,
        waiting: Waiting,
        clock: Clock,
    ) -> None:
        self._shards = shards
        self._directory = directory
        self._waiting = waiting
        self._clock = clock
        self._slots = threading.BoundedSemaphore(COMMITS_WAITING_MAX)
        self._scans = threading.BoundedSemaphore(SCANS_MAX)

    def Commit(self, request: pb.CommitRequest, context: Context) -> pb.OutcomesResponse:
        """Insert the absent ids; wait for the command they go into."""
        hosted = self._hosted(request, context, token_mistake(request.token))

        def offer(deadline: float, answer: Callable[[Answer], None]) -> Answer | None:
            return hosted.shard.offer(Request(request.ids, request.times, request.token, deadline, answer))

        return self._answered(hosted, request, context, offer)

    def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.OutcomesResponse:
        """Take out what a fenced incarnation's tokens hold."""
        tokens, counts = list(request.tokens), list(request.counts)
        hosted = self._hosted(request, context, segments_mistake(request.ids, tokens, counts))

        def offer(deadline: float, answer: Callable[[Answer], None]) -> Answer | None:
            return hosted.shard.offer(Errand(request.ids, request.times, tokens, counts, deadline, answer))

        return self._answered(hosted, request, context, offer)

    def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.LookupResponse:
        """What this replica knows now: "absent" may be stale, "present" is final.

        One that is far behind sends its clients elsewhere: each "absent" would cost a join in vain.
        """
        hosted = self._hosted(request, context, None)
        # What a leader has just proposed it does not lack.
        if (lag := hosted.log.lag - hosted.log.in_flight) > LOOKUP_LAG_MAX:
            context.abort(
                grpc.StatusCode.UNAVAILABLE, f"{lag} commands behind its leader; ask another replica"
            )
        under_way = hosted.log.unapplied() if request.tell_pending else []  # before: what is applied shows
        outcomes = hosted.shard.state.lookup(request.ids, request.times)
        outcomes = hosted.pending.mark(outcomes, request.ids, under_way)
        return pb.LookupResponse(outcomes=outcomes, version=self._directory.version)

    def Scan(self, request: pb.ScanRequest, context: Context) -> Iterator[pb.ScanResponse]:
        """All this replica holds of a shard, in pieces, while commits go on. `fresh`: by the leader alone,
        and with all that was acknowledged before.

        Only with a deadline: by then, whatever the caller does, gRPC ends the call and so frees its slot.
        """
        remaining_s = context.time_remaining()
        if remaining_s is None or remaining_s > SCAN_S_MAX + _SCAN_MARGIN_S:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"a scan without a deadline, or with one too far off: give one of at most {SCAN_S_MAX:g} s",
            )
        hosted = self._shards().get(request.shard)
        if hosted is None:
            self._not_here(request.shard, context)
        if not self._scans.acquire(blocking=False):
            self._waiting.abort(context, Overloaded(f"{SCANS_MAX} scans run already; come back later"))
        try:
            if request.fresh:
                self._pass_barrier(hosted, context)
            pieces = hosted.shard.state.scan()
            began = self._clock.monotonic()
            while context.is_active() and (piece := next(pieces, None)) is not None:
                message = _to_wire(piece)
                drawn_s = self._clock.monotonic() - began
                yield message
                # Not more than half of a core's time: commits go first.
                time.sleep(min(drawn_s, _SCAN_PAUSE_S_MAX))
                began = self._clock.monotonic()
        finally:
            self._scans.release()

    def _pass_barrier(self, hosted: Hosted, context: Context) -> None:
        """Wait until all that was acknowledged before now is applied here; aborts where it can't be."""
        if not hosted.log.is_leader:
            self._waiting.abort(context, NotLeader(hosted.log.leader))
        answer = self._waiting.wait(context, lambda *asked: hosted.shard.offer(barrier(*asked)))
        if not isinstance(answer, Settled):
            self._waiting.abort(context, answer)

    # --- the directory's: see DirectoryHandlers

    def GetDirectory(self, request: pb.DirectoryRequest, context: Context) -> pb.DirectoryResponse:
        return self._directory.get_directory()

    def KeepAlive(self, request: pb.KeepAliveRequest, context: Context) -> pb.KeepAliveResponse:
        return self._directory.keep_alive(request, context)

    def Fence(self, request: pb.FenceRequest, context: Context) -> pb.FenceResponse:
        return self._directory.fence(request, context)

    def Incarnations(self, request: pb.IncarnationsRequest, context: Context) -> pb.IncarnationsResponse:
        return self._directory.incarnations(request, context)

    def Reshard(self, request: pb.ReshardRequest, context: Context) -> pb.ReshardResponse:
        return self._directory.reshard(request, context)

    def Replace(self, request: pb.ReplaceRequest, context: Context) -> pb.ReplaceResponse:
        return self._directory.replace(request, context)

    # --- about this process

    def Now(self, request: pb.NowRequest, context: Context) -> pb.NowResponse:
        """This replica's clock."""
        return pb.NowResponse(now_us=self._clock.now_us())

    def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        """JSON: each shard as this replica sees it, and how many ids wait."""
        return pb.StatusResponse(json=json.dumps(self.status()).encode())

    def status(self) -> dict[str, object]:
        """The same as a dict."""
        hosted = self._shards().values()
        return {
            "shards": [one.shard.status(one.log) for one in hosted],
            "queue": sum(one.shard.waiting_ids for one in hosted),
            **self._directory.status(),
        }

    def _answered(
        self,
        hosted: Hosted,
        request: pb.CommitRequest | pb.ReleaseRequest,
        context: Context,
        offer: Callable[[float, Callable[[Answer], None]], Answer | None],
    ) -> pb.OutcomesResponse:
        log = hosted.log
        if not log.is_leader:
            self._waiting.abort(context, NotLeader(log.leader))
        if not request.ids:
            return pb.OutcomesResponse(version=self._directory.version)
        if not self._slots.acquire(blocking=False):
            why = f"{COMMITS_WAITING_MAX} commits wait already; back off and retry"
            self._waiting.abort(context, Overloaded(why))
        try:
            answer = self._waiting.wait(context, offer)
        finally:
            self._slots.release()
        if not isinstance(answer, Settled):
            self._waiting.abort(context, answer)
        return pb.OutcomesResponse(outcomes=answer.outcomes, version=self._directory.version)

    def _hosted(self, request: _IdsRequest, context: Context, mistake: str | None) -> Hosted:
        """The shard that is asked for; aborts where the request is malformed or it is not here."""
        mistake = columns_mistake(request.ids, request.times) or mistake
        if mistake is not None:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, mistake)
        hosted = self._shards().get(request.shard)
        if hosted is None:
            self._not_here(request.shard, context)
        return hosted

    def _not_here(self, shard: int, context: Context) -> NoReturn:
        context.abort(
            grpc.StatusCode.NOT_FOUND,
            f"there is no shard {shard} here, by version {self._directory.version} of the configuration",
        )


def _to_wire(scanned: Scanned) -> pb.ScanResponse:
    return pb.ScanResponse(
        ids=scanned.ids,
        times=scanned.times,
        holders=scanned.holders,
        holder_of=scanned.holder_of.tobytes(),
        token_times=scanned.token_times.tobytes(),
        boundary_us=scanned.boundary_us,
    )
