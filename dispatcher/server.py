"""A dispatcher as a process: its parts wired together, and its status served."""

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from dispatcher.driver import Driver
from dispatcher.latency import EDGES_US
from dispatcher.ledger import Ledger
from dispatcher.ports import Joiner, Registry
from dispatcher.reader import BATCH_BYTES_MAX, LogReader
from dispatcher.retries import RetryQueue
from dispatcher.sender import Sender
from dispatcher.service import DispatcherService
from photon.core.clock import Clock
from photon.core.fates import Fate
from photon.core.formats import JsonLines
from photon.core.ids import IdPacker
from photon.core.logfiles import check_patterns
from photon.core.notices import Notices
from photon.core.settings import Settings
from photon.wire import dispatcher_pb2_grpc
from photon.wire.rpc import Server

_RPC_WORKERS: Final = 2


class DispatcherServer:
    """Reads the foreign logs that match `patterns` and sends their events to `joiner`.

    `directory` holds its state and is its own; `dead_letters` gets the events that end otherwise than joined
    or duplicate; `drain`: the logs will grow no more. Constructing opens the state: UsageError for a pattern
    that can never match, LockedError, CorruptStateError, DiskFullError.
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
        registry: Registry,
        joiner: Joiner,
        clock: Clock,
        rng: random.Random,
        drain: bool = False,
    ) -> None:
        check_patterns(patterns)
        own = settings.dispatcher
        self._identity = {"name": name, "datacenter": datacenter}
        self._drain = drain
        self._stopped = False
        self._notices = Notices("dispatcher")
        self._ledger = Ledger(directory, dead_letters, own.state_bytes_max)
        self._reader = LogReader(
            patterns,
            directory / "spool",
            JsonLines(settings.primary, settings.foreign, IdPacker(settings.ids.key.encode())),
            settings.logs,
            own.batch_events_max,
            clock,
            self._ledger.files(),
            drain,
            self._notices.tell,
        )

        def make_sender(wait: Callable[[float], bool]) -> Sender:
            looked_up = registry if own.lookup_before_send else None
            return Sender(looked_up, joiner, clock, rng, wait, self._notices.tell)

        self._driver = Driver(
            own,
            settings.logs.poll_interval_ms / 1000,
            self._ledger,
            self._reader,
            RetryQueue(self._ledger, own.retry_delay_ms_max * 1000, BATCH_BYTES_MAX),
            make_sender,
            clock,
            rng,
        )
        self._rpc = Server(listen, _RPC_WORKERS)
        self._rpc.add(
            dispatcher_pb2_grpc.add_DispatcherServicer_to_server,
            DispatcherService(self.status),
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
        self._driver.stop()
        self._rpc.stop()
        self._ledger.close()

    def status(self) -> dict[str, Any]:
        """Counts since the directory was made, and how it goes now. Plain values."""
        return {
            **self._identity,
            **_counted(self._ledger),
            "in_flight": self._driver.in_flight,
            "drained": self._drain and self._driver.idle,
            "notices": self._notices.lines(),
            "unended": self._reader.unended(),
            "unreadable": self._reader.unreadable(),
            "storage_error": self._driver.storage_error,
        }


def read_totals(directory: Path, dead_letters: Path, bytes_max: int) -> dict[str, Any]:
    """What a dispatcher that runs no more has counted, as in its status. LockedError if it still runs."""
    ledger = Ledger(directory, dead_letters, bytes_max)
    try:
        return _counted(ledger)
    finally:
        ledger.close()


def _counted(ledger: Ledger) -> dict[str, Any]:
    totals = ledger.totals
    fates = {fate.value: count for fate, count in totals.fates.items()}
    return {
        "foreign_events": totals.foreign_events,
        "fates": fates,
        "registered": totals.fates[Fate.JOINED] + totals.fates[Fate.DUPLICATE],
        "pending": totals.foreign_events - sum(fates.values()),
        "wasted_joins": totals.wasted_joins,
        "latency_us": {"edges": EDGES_US.tolist(), "counts": totals.latencies},
    }
