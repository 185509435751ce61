"""A dispatcher as a process: its parts wired together, and its status served."""

import os
import threading
from collections.abc import Sequence
from typing import Any, Final

import grpc
import msgspec

from dispatcher.rules.verdicts import NOTHING
from dispatcher.shares import Place, Shares
from dispatcher.worker import Site, Worker
from dispatcher.workers import counted, fix_workers
from photon.core.disk import DirectoryLock
from photon.core.errors import StorageError
from photon.core.ids import ID_BYTES
from photon.logs.files import check_patterns
from photon.rpc import dispatcher_pb2, dispatcher_pb2_grpc
from photon.rpc.network import LOOPBACK, Network
from photon.rpc.servers import Server

_RPC_WORKERS: Final = 2
SOONEST_MAX: Final = 1000
_CALLS_MAX: Final = 64
_REQUEST_BYTES_MAX: Final = 1 << 20


class DispatcherServer(dispatcher_pb2_grpc.DispatcherServicer):
    """Reads the foreign logs and sends their events to a joiner, as the `site` says.

    With a `place` it has those shares of the logs that the registry's directory gives it, wherever it runs
    (dispatcher/shares.py). Without one it is one of `workers` on one machine, by the site's number, each of
    which reads the files whose names say so (paper 3.2). Constructing opens the state: UsageError for a
    pattern that can never match, SettingsError for another number of workers, LockedError,
    CorruptStateError, DiskFullError.
    """

    def __init__(
        self,
        site: Site,
        name: str,
        listen: str,
        network: Network = LOOPBACK,
        workers: int = 1,
        place: Place | None = None,
    ) -> None:
        check_patterns(site.patterns)
        self._site = site
        self._name = name
        self._stopped = False
        self._ended = threading.Event()
        self._failure: BaseException | None = None
        self._shares: Shares | None = None
        self._worker: Worker | None = None
        self._lock: DirectoryLock | None = None
        if place is not None:
            # Started twice, the second would take the shares from the first, which would end.
            self._lock = DirectoryLock(site.directory)
            self._shares = Shares(site, place, self._fail)
        else:
            fix_workers(site.directory, workers)
            self._worker = Worker(site, site.number, workers, name)
        self._rpc = Server(listen, _RPC_WORKERS, _CALLS_MAX, network, _REQUEST_BYTES_MAX)
        self._rpc.serve_while(lambda: not any(one.driver.storage_error for one in self._workers))
        self._rpc.add(
            dispatcher_pb2_grpc.add_DispatcherServicer_to_server,
            self,
            "photon.dispatcher.v1.Dispatcher",
        )

    @property
    def address(self) -> str:
        """Where it listens, the chosen port in it once it is started."""
        return self._rpc.listen

    def start(self) -> None:
        """Serve and work. AddressInUseError before anything is read."""
        self._rpc.start()
        if self._shares is not None:
            self._shares.start()  # which starts its workers, as it gets shares
        elif self._worker is not None:
            self._worker.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """True once it was stopped; False after the timeout. Raises what ended it before, if anything did."""
        ended = self._worker.driver.ended if self._worker is not None else self._ended
        done = ended.wait(timeout_s)
        failure = self._failure if self._worker is None else self._worker.driver.failure
        if failure is not None:
            raise failure
        return done

    def stop(self) -> None:
        """Read no more, record what is under way, close. What no joiner answers is sent at the next start."""
        if self._stopped:
            return
        self._stopped = True
        self._rpc.drain()
        if self._shares is not None:
            self._shares.stop()
        elif self._worker is not None:
            self._worker.rest()
        self._rpc.stop()
        if self._worker is not None:
            self._worker.close()
        if self._lock is not None:
            self._lock.release()
        self._ended.set()

    def status(self) -> dict[str, Any]:
        """Counts since the ledgers were made, and how it goes now. Plain values."""
        workers = self._workers
        totals = NOTHING
        for worker in workers:
            totals = totals.plus(worker.ledger.totals)
        told = together([worker.status() for worker in workers])
        files = told.pop("files")
        placed = (
            {} if self._shares is None else {"shares": self._shares.status(), "trouble": self._shares.trouble}
        )
        return {
            "name": self._name,
            "datacenter": self._site.datacenter,
            **counted(totals),
            **told,
            **placed,
            "notices": self._site.notices.lines(),
            "worker": {
                "slot": self._site.number,
                "name": self._name,
                "process": os.getpid(),
                "files": files,
            },
        }

    def Status(
        self, request: dispatcher_pb2.StatusRequest, context: grpc.ServicerContext
    ) -> dispatcher_pb2.StatusResponse:
        return dispatcher_pb2.StatusResponse(json=msgspec.json.encode(self.status()))

    def Pending(
        self, request: dispatcher_pb2.PendingRequest, context: grpc.ServicerContext
    ) -> dispatcher_pb2.PendingResponse:
        if len(request.ids) % ID_BYTES:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"'ids' is {ID_BYTES} bytes an id")
        if request.soonest > SOONEST_MAX:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"'soonest' is at most {SOONEST_MAX}")
        waiting: Sequence[dict[str, Any] | None]
        try:
            waiting = self._soonest(request.soonest) if request.soonest else self._find_waiting(request.ids)
        except StorageError as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        return dispatcher_pb2.PendingResponse(json=msgspec.json.encode(waiting))

    @property
    def _workers(self) -> list[Worker]:
        if self._shares is not None:
            return self._shares.workers
        return [] if self._worker is None else [self._worker]

    def _soonest(self, count: int) -> list[dict[str, Any]]:
        found = [one for worker in self._workers for one in worker.ledger.soonest(count)]
        return sorted(found, key=lambda one: int(one["due_us"]))[:count]

    def _find_waiting(self, ids: bytes) -> list[dict[str, Any] | None]:
        found: list[dict[str, Any] | None] = [None] * (len(ids) // ID_BYTES)
        for worker in self._workers:
            found = [one or other for one, other in zip(found, worker.ledger.find_waiting(ids), strict=True)]
        return found

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._ended.set()


def together(statuses: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Of several workers of a process: sums, or what is so of any, or of all."""
    if len(statuses) == 1:
        return dict(statuses[0])
    backlogs = [one["backlog"] for one in statuses]
    return {
        "backlog": {
            "bytes": sum(one["bytes"] for one in backlogs),
            "events": sum(one["events"] for one in backlogs),
            "seconds": max((one["seconds"] for one in backlogs), default=0.0),
        },
        **{
            key: sum(one[key] for one in statuses)
            for key in ("waiting_bytes", "in_flight", "woken", "requests_max", "files")
        },
        "homes": statuses[0]["homes"] if statuses else {},
        "drained": bool(statuses) and all(one["drained"] for one in statuses),
        "paused": next((one["paused"] for one in statuses if one["paused"]), None),
        "unended": {name: size for one in statuses for name, size in one["unended"].items()},
        "unreadable": {name: why for one in statuses for name, why in one["unreadable"].items()},
        "storage_error": next((one["storage_error"] for one in statuses if one["storage_error"]), None),
    }
