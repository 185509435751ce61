"""The gRPC face of a registry replica (paper 2.1, Fig. 3). Handlers validate, queue and wait.

Status codes: INVALID_ARGUMENT (the caller's mistake), FAILED_PRECONDITION with details `leader=<address>`
(ask there; empty while nobody is known to lead), NOT_FOUND (no such shard here), RESOURCE_EXHAUSTED (nothing
was done), UNAVAILABLE (outcome unknown: retry with the same token).
"""

import contextlib
import json
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as NotInTime
from typing import Any, Final, NoReturn, Protocol

import grpc
import msgspec

from idregistry.coordinator import Beat, Coordinator, Hosting, Look, Report, Wanted
from idregistry.peers import to_wire
from idregistry.rules import commands
from idregistry.rules.directory import ROWS_BYTES_MAX, DirectoryState, Proposal, size_of
from idregistry.rules.names import name_mistake
from idregistry.rules.packing import (
    INCARNATIONS_MAX,
    LEADER_DETAILS,
    SCAN_S_MAX,
    TIME_BYTES,
    columns_mistake,
    segments_mistake,
    token_mistake,
)
from idregistry.rules.surveys import gone_joiners
from idregistry.shard import (
    Answer,
    Ask,
    Overloaded,
    Settled,
    Shard,
    barrier,
    group_status,
)
from idregistry.wire import mistake_of, parts_of, replicas_of, route_of, row_of, scanned_to_wire
from photon.core.addresses import mistake as address_mistake
from photon.core.clock import Clock
from photon.core.ids import ID_BYTES, TOKEN_BYTES_MAX
from photon.core.settings import IDENTITY_DIGEST_BYTES
from photon.raft.port import Refusal, Refused, ReplicatedLog, Unknown
from photon.raft.rules.members import MEMBERS_MAX
from photon.rpc import idregistry_pb2 as pb
from photon.rpc.idregistry_pb2_grpc import IdRegistryServicer

COMMITS_WAITING_MAX: Final = 128
"""Commit calls that may wait."""

COMMITS_SHARE: Final = 3
"""So many times the calls that may still come may wait for one shard: for a single one three quarters of all.
One that has lost its majority, of which all wait, leaves room for the others."""

ASKS_MAX: Final = 24
"""Calls that may wait for the directory."""

FENCES_WAITING_MAX: Final = 8
"""Fence calls that may wait for the shards."""

LOOKUPS_MAX: Final = max(2, (os.cpu_count() or 1) // 2)
"""Lookups at a time; the next wait: the raft thread must have its turns of the interpreter."""

SCANS_MAX: Final = 4
"""Scans at a time."""

ACCOUNTS_MAX: Final = 4
"""Accounts drawn up at a time."""

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

LEASE_S_MIN: Final = 0.1
LEASE_S_MAX: Final = 86_400.0

_MARGIN_S: Final = 0.05
"""A handler outwaits its deadline by so much, so that who answers in time is heard."""
_POLL_S: Final = 0.005

_IdsRequest = pb.CommitRequest | pb.LookupRequest | pb.ReleaseRequest
_Offer = Callable[[float, Callable[[Answer], None]], Answer | None]
"""Queues a request, given its deadline and whom to answer; its answer where it can't even wait."""


class Context(Protocol):
    """What is used of grpc.ServicerContext."""

    def abort(self, code: grpc.StatusCode, details: str) -> NoReturn: ...

    def time_remaining(self) -> float | None: ...

    def is_active(self) -> bool: ...


class Slots:
    """At most `most` calls at a time, each in a thread of its own, and for one shard fewer than `share` times
    what is left; `why` is told to the next.
    """

    def __init__(self, most: int, why: str, share: float = math.inf) -> None:
        self._why = f"{most} {why}"
        self._free = most
        self._share = share
        self._taken: Counter[int] = Counter()
        self._lock = threading.Lock()

    @contextlib.contextmanager
    def one(self, context: Context, shard: int = 0) -> Iterator[None]:
        """For the block; aborts where there is none."""
        with self._lock:
            if self._free <= 0 or self._taken[shard] >= self._share * self._free:
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, self._why)
            self._free -= 1
            self._taken[shard] += 1
        try:
            yield
        finally:
            with self._lock:
                self._free += 1
                self._taken[shard] -= 1


class IdRegistryService(IdRegistryServicer):
    """`state` and `log` are the directory's; `hosting` says what is here and who the others are."""

    def __init__(
        self,
        state: DirectoryState,
        log: ReplicatedLog,
        coordinator: Coordinator,
        hosting: Hosting,
        clock: Clock,
        timeout_s: float,
    ) -> None:
        self._state = state
        self._log = log
        self._coordinator = coordinator
        self._hosting = hosting
        self._clock = clock
        self._timeout_s = timeout_s
        self._commits = Slots(
            COMMITS_WAITING_MAX,
            "commits may wait, for one shard a part of them; back off and retry",
            COMMITS_SHARE,
        )
        self._asks = Slots(ASKS_MAX, "requests wait for the directory already")
        self._fences = Slots(FENCES_WAITING_MAX, "fences wait already; back off")
        self._lookups = threading.BoundedSemaphore(LOOKUPS_MAX)
        self._asked_accounts = Slots(ACCOUNTS_MAX, "accounts are asked for already; come back later")
        self._scans = Slots(SCANS_MAX, "scans run already; come back later")

    def Commit(self, request: pb.CommitRequest, context: Context) -> pb.OutcomesResponse:
        """Insert the absent ids; wait for the command they go into."""
        shard = self._asked(request, context, token_mistake(request.token))
        if request.registry not in (b"", self._state.view.identity):
            context.abort(
                grpc.StatusCode.UNAVAILABLE,
                "this is another registry, founded anew at the same addresses: nothing was registered in it",
            )
        count = len(request.ids) // ID_BYTES
        commit = commands.Commit(0, [request.token], [count], request.ids, request.times, [route_of(request)])
        return self._answered(shard, commit, context)

    def Release(self, request: pb.ReleaseRequest, context: Context) -> pb.OutcomesResponse:
        """Take out what a fenced incarnation's tokens hold, or what the holder itself gives back."""
        tokens, counts = list(request.tokens), list(request.counts)
        shard = self._asked(request, context, segments_mistake(request.ids, tokens, counts))
        routes = [route_of(request)] * len(tokens)
        release = commands.Release(0, tokens, counts, request.ids, request.times, routes, request.given_back)
        return self._answered(shard, release, context)

    def Lookup(self, request: pb.LookupRequest, context: Context) -> pb.OutcomesResponse:
        """What this replica knows now: "absent" may be stale, "present" is final.

        One that is far behind sends its clients elsewhere: each "absent" would cost a join in vain.
        """
        shard = self._asked(request, context)
        # What a leader has just proposed it does not lack.
        if (lag := shard.log.lag - shard.log.in_flight) > LOOKUP_LAG_MAX:
            context.abort(
                grpc.StatusCode.UNAVAILABLE, f"{lag} commands behind its leader; ask another replica"
            )
        timeout_s = context.time_remaining()
        if not self._lookups.acquire(timeout=self._timeout_s if timeout_s is None else timeout_s):
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many lookups; back off")
        try:
            # Before: what is applied shows.
            under_way = shard.log.unapplied() if request.tell_pending else []
            outcomes = b"".join(shard.state.lookup(*part) for part in parts_of(request))
            outcomes = shard.pending.mark(outcomes, request.ids, under_way)
        finally:
            self._lookups.release()
        return pb.OutcomesResponse(outcomes=outcomes, version=self._state.view.version)

    def Scan(self, request: pb.ScanRequest, context: Context) -> Iterator[pb.ScanResponse]:
        """All this replica holds of a shard, or of `ids`, in pieces, while commits go on. `fresh`: by the
        leader alone, and with all that was acknowledged before.

        Only with a deadline: by then, whatever the caller does, gRPC ends the call and so frees its slot.
        """
        remaining_s = context.time_remaining()
        if remaining_s is None or remaining_s > SCAN_S_MAX + _SCAN_MARGIN_S:
            context.abort(
                grpc.StatusCode.INVALID_ARGUMENT,
                f"a scan without a deadline, or with one too far off: give one of at most {SCAN_S_MAX:g} s",
            )
        _check(context, columns_mistake(request.ids, bytes(len(request.ids) // ID_BYTES * TIME_BYTES)))
        shard = self._shard(request.shard, context)
        with self._scans.one(context):
            if request.fresh:  # wait until all that was acknowledged before now is applied here
                self._check_leads(shard.log, context)
                self._settled(context, lambda *asked: shard.queue.offer(barrier(*asked)))
            pieces = iter([shard.state.find(request.ids)]) if request.ids else shard.state.scan()
            began = self._clock.monotonic()
            while context.is_active() and (piece := next(pieces, None)) is not None:
                message = scanned_to_wire(piece)
                drawn_s = self._clock.monotonic() - began
                yield message
                # Not more than half of a core's time: commits go first.
                time.sleep(min(drawn_s, _SCAN_PAUSE_S_MAX))
                began = self._clock.monotonic()

    def Account(self, request: pb.AccountRequest, context: Context) -> pb.AccountResponse:
        """What these incarnations hold, of all that was acknowledged before now."""
        shard = self._shard(request.shard, context)
        _check_count(request.incarnations, context)
        self._check_leads(shard.log, context)

        def offer(deadline: float, answer: Callable[[Answer], None]) -> Answer | None:
            def applied(outcome: Answer) -> None:  # in the raft thread: no command is half done
                done = isinstance(outcome, Settled)
                answer(Settled(shard.state.accounts()) if done else outcome)

            return shard.queue.offer(barrier(deadline, applied))

        with self._asked_accounts.one(context):
            account_of = self._settled(context, offer)
            account = account_of({*request.incarnations}, request.address, request.window)
        places = list(account.days)
        return pb.AccountResponse(
            incarnations=[incarnation for incarnation, _ in places],
            days=[day for _, day in places],
            events=[events for events, _ in account.days.values()],
            sums=[total for _, total in account.days.values()],
            first_day=account.first_day,
            since=account.since,
        )

    def _answered(
        self, shard: Shard, what: commands.Commit | commands.Release, context: Context
    ) -> pb.OutcomesResponse:
        self._check_leads(shard.log, context)
        outcomes = b""
        if what.ids:
            with self._commits.one(context, shard.number):
                outcomes = self._settled(context, lambda *asked: shard.queue.offer(Ask(what, *asked)))
        return pb.OutcomesResponse(outcomes=outcomes, version=self._state.view.version)

    def _asked(self, request: _IdsRequest, context: Context, mistake: str | None = None) -> Shard:
        """The shard that is asked for; aborts where the request is malformed or it is not here."""
        _check(context, columns_mistake(request.ids, request.times), mistake)
        return self._shard(request.shard, context)

    def _shard(self, number: int, context: Context) -> Shard:
        shard = self._hosting.shards.get(number)
        if shard is None:
            context.abort(
                grpc.StatusCode.NOT_FOUND,
                f"there is no shard {number} here by version {self._state.view.version} of the configuration",
            )
        return shard

    # --- the directory's

    def GetDirectory(self, request: pb.DirectoryRequest, context: Context) -> pb.DirectoryResponse:
        """What this replica knows: an older one is corrected by any newer."""
        view, hosted = self._state.view, self._hosting.shards
        leaders = [hosted[n].log.leader if n in hosted else None for n in range(max(hosted, default=-1) + 1)]
        return pb.DirectoryResponse(
            configuration=b"" if view.configuration is None else msgspec.msgpack.encode(view.configuration),
            identity=view.identity,
            replicas=replicas_of(self._hosting.rows.values()),
            shards=view.homes.keys(),
            homes=view.homes.values(),
            led=self._log.leader is not None,
            holders=self._coordinator.holders(),
            abandoned_why=view.abandoned[1],
            removed=view.removed,
            leaders=map(self._address, leaders),
        )

    def KeepAlive(self, request: pb.KeepAliveRequest, context: Context) -> pb.KeepAliveResponse:
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
        result = self._ask(
            commands.KeepAlive(0, request.incarnation, request.address, lease_us, settings), context
        )
        return pb.KeepAliveResponse(
            fenced=result is False,
            mismatched=isinstance(result, commands.Mismatched),
            registry=self._state.view.identity,
        )

    def Fence(self, request: pb.FenceRequest, context: Context) -> pb.FenceResponse:
        """Fence an incarnation whose lease is over; "fenced" only once it can win nothing in any shard.

        UNAVAILABLE where a shard does not know of it in time: it is fenced, or will be; ask again.
        """
        with self._fences.one(context):
            deadline = self._clock.monotonic() + self._wait_s(context)
            result = self._ask(commands.Fence(0, request.incarnation, 0), context)
            if isinstance(result, commands.Standing):
                return pb.FenceResponse(fenced=False, expires_in_s=result.expires_in_s)
            if not result:  # it was renewed since the leader looked
                return pb.FenceResponse(fenced=False, expires_in_s=LEASE_S_MIN)
            place = self._state.fences.index(request.incarnation) + 1
            while not self._shards_know(place):
                self._coordinator.hurry()
                if self._clock.monotonic() >= deadline or not context.is_active():
                    context.abort(
                        grpc.StatusCode.UNAVAILABLE,
                        "not every shard knows of the fence yet: has each a leader and a majority? Ask again",
                    )
                time.sleep(_POLL_S)
            return pb.FenceResponse(fenced=True)

    def _shards_know(self, fences: int) -> bool:
        """Whether so many of the directory's fences are committed in every shard there is.

        Wherever a shard is led: what our replica of it has applied stands in its log before every commit that
        is yet to come. One that is not open here yet, or in its new life, may be taking ids elsewhere.
        """
        facts = self._coordinator.of_all()
        return facts is not None and all(fact.fences >= fences for fact in facts.values())

    def Incarnations(self, request: pb.IncarnationsRequest, context: Context) -> pb.IncarnationsResponse:
        """How incarnations stand, by what the leader knows."""
        _check_count(request.incarnations, context)
        standings = self._ask(Look(tuple(request.incarnations)), context)
        return pb.IncarnationsResponse(
            fenced=[standing.fenced for standing in standings],
            expires_in_s=[standing.expires_in_s for standing in standings],
        )

    def Dismiss(self, request: pb.DismissRequest, context: Context) -> pb.DismissResponse:
        """Miss these incarnations no more once their leases have run out."""
        _check_count(request.incarnations, context)
        self._ask(commands.Dismiss(0, tuple(request.incarnations)), context)
        return pb.DismissResponse()

    def Hold(self, request: pb.HoldRequest, context: Context) -> pb.HoldResponse:
        """Let the boundary not pass a dispatcher's oldest event, or no longer."""
        _check(context, name_mistake(request.name))
        held = request.name in self._state.holds
        oldest_us = request.oldest_us if request.HasField("oldest_us") else None
        if request.release:
            self._ask(commands.Hold(0, request.name, None), context)
        else:
            self._ask(Report(request.name, oldest_us), context)
        return pb.HoldResponse(
            boundary_us=self._coordinator.boundary_us(),
            reached_us=self._coordinator.reached_us(),
            held=held,
        )

    def Reshard(self, request: pb.ReshardRequest, context: Context) -> pb.ReshardResponse:
        """Propose another number of shards for events from a time on."""
        result = self._ask(commands.Propose(0, request.shards, request.at_us, 0), context)
        assert isinstance(result, Proposal), result
        return pb.ReshardResponse(version=result.version, start_us=result.start_us)

    def Replace(self, request: pb.ReplaceRequest, context: Context) -> pb.ReplaceResponse:
        """Let a new replica take the place of an old one; or no more, where `cancel` names the new one."""
        # Names go into a command, which has a size that no name may burst: that would stop the replica.
        if request.cancel:
            _check(context, name_mistake(request.cancel))
            self._ask(commands.Cancel(0, request.cancel), context)
            return pb.ReplaceResponse()
        _check(context, name_mistake(request.old), mistake_of(request.replica))
        self._ask(commands.Replace(0, request.old, row_of(request.replica)), context)
        return pb.ReplaceResponse()

    def Set(self, request: pb.SetRequest, context: Context) -> pb.SetResponse:
        """Let a new set of replicas in, or give one up."""
        names = [request.retire] if request.retire else [row.set for row in request.add]
        _check(context, *map(name_mistake, names), *map(mistake_of, request.add))
        what: Wanted = commands.RetireSet(0, request.retire)
        if not request.retire:
            what = commands.AddSet(0, tuple(row_of(one) for one in request.add[: MEMBERS_MAX + 1]))
        self._ask(what, context)
        return pb.SetResponse()

    def Beat(self, request: pb.BeatRequest, context: Context) -> pb.GroupResponse:
        """A member of a group is there."""
        names = name_mistake(request.group), name_mistake(request.name)
        _check(context, *names, address_mistake(request.address))
        beat = Beat(request.group, request.name, request.life, request.address, request.shares)
        return pb.GroupResponse(group=msgspec.msgpack.encode(self._ask(beat, context)))

    def Drain(self, request: pb.DrainRequest, context: Context) -> pb.GroupResponse:
        """A member is to have no shares any more, or leaves."""
        _check(context, name_mistake(request.group), name_mistake(request.name))
        what: commands.Leave | commands.Drain = commands.Drain(0, request.group, request.name)
        if request.life:
            what = commands.Leave(0, request.group, request.name, request.life)
        return pb.GroupResponse(group=msgspec.msgpack.encode(self._ask(what, context)))

    def Write(self, request: pb.WriteRequest, context: Context) -> pb.WriteResponse:
        """The owner of a share writes what is to be kept of it."""
        if len(request.keys) != len(request.values):
            _mistake(context, f"{len(request.keys)} keys and {len(request.values)} values")
        _check(context, name_mistake(request.group))
        rows = dict(zip(request.keys, request.values, strict=True))
        if (size := size_of([*request.keys, *request.values, *request.removed])) > ROWS_BYTES_MAX:
            _mistake(context, f"{size} bytes of rows; a share has {ROWS_BYTES_MAX} at most")
        write = commands.Write(
            0, request.group, request.share, request.sequencer, rows, tuple(request.removed), request.release
        )
        done = self._ask(write, context)
        response = pb.WriteResponse(stands=done.stands, written=done.written)
        if request.read:
            response.keys.extend(done.rows.keys())
            response.values.extend(done.rows.values())
        return response

    def _ask(self, what: Wanted, context: Context) -> Any:
        """What the directory's command was answered; aborts where it was not applied or was rejected."""
        self._check_leads(self._log, context)
        with self._asks.one(context):
            result = self._settled(context, lambda *asked: self._coordinator.asks.offer(Ask(what, *asked)))
        if isinstance(result, commands.Rejected):
            if result.busy:
                self._abort(context, Overloaded(result.why))
            _mistake(context, result.why)
        return result

    # --- how a handler waits for the raft thread, and what an answer is on the wire

    def _check_leads(self, log: ReplicatedLog, context: Context) -> None:
        if not log.is_leader:
            self._abort(context, Refused(Refusal.NOT_LEADER, log.leader))

    def _settled(self, context: Context, offer: _Offer) -> Any:
        """What came of it by the caller's deadline, or our own; aborts where that is not known."""
        wait_s = self._wait_s(context)
        future: Future[Answer] = Future()
        answer = offer(self._clock.monotonic() + wait_s, future.set_result)
        if answer is None:
            try:
                answer = future.result(wait_s + _MARGIN_S)
            except NotInTime:
                answer = Unknown()
        if not isinstance(answer, Settled):
            self._abort(context, answer)
        return answer.result

    def _wait_s(self, context: Context) -> float:
        remaining = context.time_remaining()
        return self._timeout_s if remaining is None else max(0.0, min(remaining, self._timeout_s))

    def _abort(self, context: Context, answer: Overloaded | Refused | Unknown) -> NoReturn:
        match answer:
            case Overloaded(why):
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
            case Refused(Refusal.OVERLOADED):
                why = "the log has too many commands in flight; back off and retry"
                context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, why)
            case Refused(_, leader):
                context.abort(grpc.StatusCode.FAILED_PRECONDITION, LEADER_DETAILS + self._address(leader))
            case Unknown():
                context.abort(
                    grpc.StatusCode.UNAVAILABLE,
                    "it is not known whether it was committed: retry with the same token",
                )

    def _address(self, leader: str | None) -> str:
        """For clients; empty where nobody is known."""
        row = self._hosting.rows.get(leader or "")
        return "" if row is None else row.grpc

    # --- about this process

    def Now(self, request: pb.NowRequest, context: Context) -> pb.NowResponse:
        """This replica's clock, and what it knows of its shards."""
        return to_wire(self._clock.now_us(), self._hosting.shards.values())

    def Status(self, request: pb.StatusRequest, context: Context) -> pb.StatusResponse:
        """JSON: each shard as this replica sees it, and how many ids wait."""
        return pb.StatusResponse(json=json.dumps(self.status()).encode())

    def status(self) -> dict[str, object]:
        """As the Status RPC, as a dict."""
        view = self._state.view
        configuration = view.configuration
        intervals = [] if configuration is None else configuration.intervals
        hosted = self._hosting.shards.values()
        sets = sorted({row.set for row in view.replicas.values()})

        def shards_of(name: str) -> list[int]:
            return sorted(shard for shard, home in view.homes.items() if home == name)

        return {
            "shards": [one.status() for one in hosted],
            "queue": sum(one.queue.weight for one in hosted),
            "directory": {
                **group_status(self._log),
                "resharding": None
                if view.proposal is None
                else [view.proposal.start_us, len(view.proposal.homes)],
                "replacing": view.leaving,
                "leases": len(self._state.leases),
                "fences": len(self._state.fences),
                "holds": len(self._state.holds),
                "holding": self._coordinator.holding(),
            },
            "identity": view.identity.hex(),
            "version": view.version,
            "protocol": view.protocol,
            "intervals": [[interval.start_us, len(interval.shards)] for interval in intervals],
            "sets": {name: {"shards": shards_of(name), "retiring": name in view.retiring} for name in sets},
            "members": {name: row.grpc for name, row in self._hosting.rows.items()},
            "groups": {name: group.told() for name, group in self._state.groups.items()},
            "shards_expected": sorted(n for n in view.founders if view.hosts(self._log.status().node, n)),
            "gone_joiners": self._gone_joiners(),
        }

    def _gone_joiners(self) -> list[dict[str, object]]:
        """As this replica knows. Next to no work where none has vanished."""
        if not (vanished := dict(self._state.vanished)):
            return []
        held = Counter[int]()
        for shard in self._hosting.shards.values():
            held += shard.state.held_by(vanished.keys())
        leased = {lease.address for lease in dict(self._state.leases).values()}
        return gone_joiners(vanished, leased, held)


def _check_count(incarnations: Sequence[int], context: Context) -> None:
    if len(incarnations) > INCARNATIONS_MAX:
        _mistake(context, f"{len(incarnations)} incarnations, at most {INCARNATIONS_MAX} are taken")


def _check(context: Context, *mistakes: str | None) -> None:
    """Abort where there is a mistake, with the first."""
    mistake = next(filter(None, mistakes), None)
    if mistake is not None:
        _mistake(context, mistake)


def _mistake(context: Context, what: str) -> NoReturn:
    context.abort(grpc.StatusCode.INVALID_ARGUMENT, what)
