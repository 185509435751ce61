"""A dispatcher as a process: its parts wired together, and its status served."""

import contextlib
import os
import random
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import msgspec

from dispatcher.arrivals import Listener
from dispatcher.driver import Driver
from dispatcher.hold import Holder
from dispatcher.ledger import Ledger
from dispatcher.reader import LogReader
from dispatcher.rules.homes import Homes
from dispatcher.rules.pacing import Pacing
from dispatcher.sender import Gate, Sender
from dispatcher.workers import Inbox, counted, fix_workers, mine_of, worker_directory
from eventstore.client import EventStoreClient
from idregistry.client import RegistryClient, check_registry
from joiner.client import JoinerClient
from photon.core.clock import Clock, SteadyClock
from photon.core.errors import StorageError
from photon.core.ids import ID_BYTES
from photon.core.settings import Settings
from photon.core.status import Notices
from photon.logs.files import check_patterns
from photon.logs.formats import json_lines
from photon.rpc import dispatcher_pb2, dispatcher_pb2_grpc
from photon.rpc.network import LOOPBACK, Network
from photon.rpc.servers import Server


class DispatcherService(dispatcher_pb2_grpc.DispatcherServicer):
    """`status` gives the answer as a dict of plain values, `waiting` one for each of 16 x N ids."""

    def __init__(
        self, status: Callable[[], dict[str, Any]], waiting: Callable[[bytes], list[dict[str, Any] | None]]
    ) -> None:
        self._status = status
        self._waiting = waiting

    def Status(
        self, request: dispatcher_pb2.StatusRequest, context: grpc.ServicerContext
    ) -> dispatcher_pb2.StatusResponse:
        del request, context
        return dispatcher_pb2.StatusResponse(json=msgspec.json.encode(self._status()))

    def Pending(
        self, request: dispatcher_pb2.PendingRequest, context: grpc.ServicerContext
    ) -> dispatcher_pb2.PendingResponse:
        if len(request.ids) % ID_BYTES:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"'ids' is {ID_BYTES} bytes an id")
        try:
            waiting = self._waiting(request.ids)
        except StorageError as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        return dispatcher_pb2.PendingResponse(json=msgspec.json.encode(waiting))


_RPC_WORKERS: Final = 2
_CALLS_MAX: Final = 64
_REQUEST_BYTES_MAX: Final = 1 << 20


class DispatcherServer:
    """Reads the foreign logs that match `patterns` and sends their events to `joiner`.

    `directory` is of the datacenter's `workers` dispatchers, each of which reads the files whose names say
    so (paper 3.2); the state of this one, the `worker`th, is within. `eventstore`, which it closes, tells of
    arrivals; without it waiting events have their backoff alone. `joiners`: address -> datacenter of all that
    read the same events (rules/homes); None: this one alone. `dead_letters` gets the events that end
    otherwise than joined or duplicate; `drain`: the logs will grow no more. Constructing opens the state:
    UsageError for a pattern that can never match, SettingsError for another number of workers, LockedError,
    CorruptStateError, DiskFullError.
    """

    def __init__(
        self,
        settings: Settings,
        name: str,
        datacenter: str,
        listen: str,
        directory: Path,
        patterns: Sequence[str],
        dead_letters: Path,
        registry: RegistryClient,
        joiner: JoinerClient,
        clock: Clock,
        rng: random.Random,
        drain: bool = False,
        network: Network = LOOPBACK,
        worker: int = 0,
        workers: int = 1,
        eventstore: EventStoreClient | None = None,
        joiners: Mapping[str, str] | None = None,
    ) -> None:
        check_patterns(patterns)
        steady = SteadyClock(clock)
        own = settings.dispatcher
        self._identity = {"name": name, "datacenter": datacenter}
        self._worker = {"slot": worker, "name": name, "process": os.getpid()}
        self._drain = drain
        self._stopped = False
        self._notices = Notices("dispatcher")
        fix_workers(directory, workers)
        place = worker_directory(directory, worker)
        self._ledger = Ledger(place, dead_letters, own.state_bytes_max, worker)
        stopping, wake = threading.Event(), threading.Event()
        with contextlib.ExitStack() as undo:
            undo.callback(self._ledger.close)
            inbox = Inbox(directory, self._ledger.file.sync)
            states = self._ledger.files()
            inbox.sweep(states)
            self._reader = LogReader(
                [*patterns, inbox.pattern],
                place / "spool",
                json_lines(settings),
                settings.logs,
                own.batch_events_max,
                steady,
                states,
                drain,
                self._notices.tell,
                mine_of(worker, workers),
                wake.set,
                inbox.holds,
            )
            pacing = Pacing(
                own.batches_in_flight_max,
                own.batch_events_max,
                settings.logs.chunk_bytes,
            )
            self._gate = Gate(pacing, steady, rng, stopping, self._notices.tell)
            looked_up = registry if own.lookup_before_send else None

            def recognise() -> None:
                check_registry(place, registry.identity())

            homes = Homes(datacenter, joiners or {}, own.home_hedge_ms / 1000)
            self._sender = Sender(looked_up, joiner, self._gate, inbox.is_recovered, recognise, homes)
            self._driver = Driver(
                settings, self._ledger, self._reader, self._sender, self._gate, wake, inbox.sweep
            )
            undo.pop_all()
        told = self._driver.arrive, self._driver.read_to
        self._listener = Listener(eventstore, self._gate, *told) if eventstore else None
        days, follower = settings.registry.retention_days, self._reader.follower
        self._holder = Holder(name, registry, self._ledger, follower, self._gate, days) if days > 0 else None
        self._rpc = Server(listen, _RPC_WORKERS, _CALLS_MAX, network, _REQUEST_BYTES_MAX)
        self._rpc.serve_while(lambda: self._driver.storage_error is None)
        self._rpc.add(
            dispatcher_pb2_grpc.add_DispatcherServicer_to_server,
            DispatcherService(self.status, self._ledger.find_waiting),
            "photon.dispatcher.v1.Dispatcher",
        )

    @property
    def address(self) -> str:
        """Where it listens, the chosen port in it once it is started."""
        return self._rpc.listen

    def start(self) -> None:
        """Serve and work. AddressInUseError before anything is read."""
        self._rpc.start()
        self._driver.start()
        for beside in (self._listener, self._holder):
            if beside:
                beside.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """True once it was stopped; False after the timeout. Raises what ended it before, if anything did."""
        ended = self._driver.ended.wait(timeout_s)
        if self._driver.failure is not None:
            raise self._driver.failure
        return ended

    def stop(self) -> None:
        """Read no more, record what is under way, close. What no joiner answers is sent at the next start."""
        if self._stopped:
            return
        self._stopped = True
        self._rpc.drain()
        self._driver.stop()
        if self._listener:
            self._listener.stop()
        if self._holder:
            self._holder.stop(self._drain and self._driver.idle)
        self._reader.follower.close()
        self._rpc.stop()
        self._ledger.close()

    def status(self) -> dict[str, Any]:
        """Counts since the ledger was made, and how it goes now. Plain values."""
        return {
            **self._identity,
            **counted(self._ledger.totals),
            "backlog": self._reader.backlog(),
            "waiting_bytes": self._ledger.waiting_bytes,
            "in_flight": self._driver.in_flight,
            "woken": self._driver.woken,
            "requests_max": self._gate.size,
            "homes": self._sender.homes(),
            "drained": self._drain and self._driver.idle,
            "paused": self._driver.paused,
            "notices": self._notices.lines(),
            "unended": self._reader.follower.unended(),
            "unreadable": self._reader.follower.unreadable,
            "storage_error": self._driver.storage_error,
            "worker": {**self._worker, "files": self._reader.follower.files},
        }
