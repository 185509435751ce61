"""A joiner process: the worker behind gRPC."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, Final

from joiner.ports import Checkpoint, EventStore, Registry
from joiner.service import SERVICE_NAME, JoinerService
from joiner.worker import Worker
from photon.core.clock import Clock
from photon.core.settings import Settings
from photon.core.settings_identity import identity_digest
from photon.wire import joiner_pb2_grpc
from photon.wire.network import LOOPBACK, Network
from photon.wire.rpc import Server

_SPARE_CALLS: Final = 8  # beyond the joins: status, health, and refusals


class JoinerServer:
    """Serves Joiner on `listen`. The parameters are the Worker's."""

    def __init__(
        self,
        settings: Settings,
        name: str,
        datacenter: str,
        listen: str,
        directory: Path,
        output_root: Path,
        registry: Registry,
        eventstore: EventStore,
        clock: Clock,
        rng: Random,
        drain: bool = False,
        on_fatal: Callable[[BaseException], None] = lambda _: None,
        checkpoint: Checkpoint = lambda _: None,
        network: Network = LOOPBACK,
    ) -> None:
        """AdapterError, CorruptStateError, LockedError, StorageError, UsageError."""
        workers = settings.joiner.requests_in_flight_max + _SPARE_CALLS
        self._server = Server(listen, workers, in_flight_max=workers, network=network)
        self._worker = Worker(
            settings,
            name,
            datacenter,
            listen,
            directory,
            output_root,
            registry,
            eventstore,
            clock,
            rng,
            drain,
            on_fatal,
            checkpoint,
        )
        service = JoinerService(self._worker, identity_digest(settings))
        self._server.serve_while(self._worker.can_work)
        self._server.add(joiner_pb2_grpc.add_JoinerServicer_to_server, service, SERVICE_NAME)

    @property
    def listen(self) -> str:
        """The address it serves on; after `start` with the port that was chosen for `:0`."""
        return self._server.listen

    def start(self) -> None:
        """Serve. AddressInUseError if the port is taken."""
        try:
            self._server.start()
        except BaseException:
            self._worker.close()
            raise
        self._worker.start()
        self._server.set_serving(self._worker.can_work())  # at once, where the lease is there

    def stop(self, grace_s: float = 5.0) -> bool:
        """Let requests end, and unresolved batches, each within `grace_s`; whether all did."""
        self._server.stop(grace_s)
        return self._worker.stop(grace_s)

    def status(self) -> dict[str, Any]:
        """What the Status call says."""
        return self._worker.status()
