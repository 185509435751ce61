"""An importer as a process: an import for each source of a datacenter, and its status served."""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import grpc
import msgspec

from photon.connect.importer import SIDES, Import, fields_of
from photon.core.disk import DirectoryLock
from photon.core.settings import Settings
from photon.core.status import Notices
from photon.rpc import importer_pb2, importer_pb2_grpc
from photon.rpc.network import LOOPBACK, Network
from photon.rpc.servers import Server

FIRST_S_MAX: Final = 30.0
"""Foreign sources wait so long for the primary ones to catch up."""
_RPC_WORKERS: Final = 2
_CALLS_MAX: Final = 64
_REQUEST_BYTES_MAX: Final = 1 << 20


class ImporterServer(importer_pb2_grpc.ImporterServicer):
    """`sources`: side (`primary`, `foreign`) -> the URIs that are copied into `directory`.

    UsageError for a source that can't be, LockedError, CorruptStateError, StorageError. `fail` is told, from
    any thread, of what no other try will mend.
    """

    def __init__(
        self,
        settings: Settings,
        name: str,
        datacenter: str,
        listen: str,
        directory: Path,
        sources: Mapping[str, Sequence[str]],
        drain: bool,
        fail: Callable[[BaseException], None],
        network: Network = LOOPBACK,
    ) -> None:
        self._identity = {"name": name, "datacenter": datacenter}
        self._notices = Notices("importer")
        self._lock = DirectoryLock(directory)
        self._imports: list[Import] = []
        self._started_s = float("inf")
        for side in SIDES:
            may_begin = self._have_primaries if side == "foreign" else lambda: True
            for text in sources.get(side, ()):
                given = directory, fields_of(settings, side), settings.imports
                told = self._notices.tell, fail, may_begin
                self._imports.append(Import(text, side, *given, drain, *told))
        self._rpc = Server(listen, _RPC_WORKERS, _CALLS_MAX, network, _REQUEST_BYTES_MAX)
        self._rpc.add(importer_pb2_grpc.add_ImporterServicer_to_server, self, "photon.importer.v1.Importer")

    def start(self) -> None:
        """AddressInUseError before anything is read."""
        self._rpc.start()
        self._rpc.set_serving(True)
        self._started_s = time.monotonic()
        for one in self._imports:
            one.start()

    def _have_primaries(self) -> bool:
        """What comes before its primary is looked up more than once: so in a backlog primaries come first."""
        primaries = [one for one in self._imports if one.side == "primary"]
        waited_s = time.monotonic() - self._started_s
        return waited_s > FIRST_S_MAX or all(one.caught_up for one in primaries)

    def stop(self) -> None:
        self._rpc.drain()
        stopping = [threading.Thread(target=one.stop) for one in self._imports]
        for thread in stopping:
            thread.start()
        for thread in stopping:
            thread.join()
        self._rpc.stop()
        self._lock.release()

    def status(self) -> dict[str, Any]:
        """`finished`: all that there was at the start is copied, and nothing later will be (drain)."""
        return {
            **self._identity,
            "finished": all(one.finished for one in self._imports),
            "sources": [one.status() for one in self._imports],
            "trouble": next((one.trouble for one in self._imports if one.trouble), None),
            "notices": self._notices.lines(),
        }

    def Status(
        self, request: importer_pb2.StatusRequest, context: grpc.ServicerContext
    ) -> importer_pb2.StatusResponse:
        del request, context
        return importer_pb2.StatusResponse(json=msgspec.json.encode(self.status()))
