"""A joiner process: the worker behind gRPC. Columns in, outcomes out, errors as status codes."""

from typing import Final

import grpc
import msgspec

from joiner.rules import ForeignColumns
from joiner.worker import Worker
from photon.core.errors import OverloadedError, PhotonError, SettingsMismatchError, UsageError
from photon.core.settings import identity_digest
from photon.rpc import joiner_pb2, joiner_pb2_grpc
from photon.rpc.network import LOOPBACK, Network
from photon.rpc.servers import Server

SERVICE_NAME: Final = joiner_pb2.DESCRIPTOR.services_by_name["Joiner"].full_name
_SPARE_CALLS: Final = 8  # beyond the joins: status, health, and refusals


class JoinerServer(joiner_pb2_grpc.JoinerServicer):
    """Serves a worker, which it owns from now on, on the address of the worker's home (joiner.proto)."""

    def __init__(self, worker: Worker, network: Network = LOOPBACK) -> None:
        calls_max = worker.settings.joiner.requests_in_flight_max + _SPARE_CALLS
        self._worker = worker
        self._identity = identity_digest(worker.settings)
        self._server = Server(worker.home.address, calls_max, in_flight_max=calls_max, network=network)
        self._server.serve_while(worker.can_work)
        self._server.add(joiner_pb2_grpc.add_JoinerServicer_to_server, self, SERVICE_NAME)
        self.status = worker.status

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

    def Join(self, request: joiner_pb2.JoinRequest, context: grpc.ServicerContext) -> joiner_pb2.JoinResponse:
        columns = (request.ids, request.primary_ids, request.times, request.events, request.tries)
        batch = ForeignColumns(*columns, request.ages)
        try:
            if request.identity != self._identity:
                # Without a lease it is not known whose settings are the registry's: nobody is told to end.
                self._worker.leases.check(self._worker.leases.own)
                raise SettingsMismatchError(
                    "ids.key and all of [foreign] must be the same on all machines of a system, or every "
                    "event would be joined twice, and this joiner has others than its client: give the "
                    "client the joiner's photon.toml"
                )
            batch.check()
            if not batch.ids:  # an empty batch only asks whether a real one would be taken
                self._worker.leases.check(self._worker.leases.own)
                return joiner_pb2.JoinResponse()
            joined = self._worker.join(batch, context.time_remaining())
        except SettingsMismatchError as error:
            context.abort(grpc.StatusCode.FAILED_PRECONDITION, str(error))
        except OverloadedError as error:
            context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
        except UsageError as error:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
        except PhotonError as error:
            context.abort(grpc.StatusCode.UNAVAILABLE, str(error))
        return joiner_pb2.JoinResponse(
            outcomes=joined.outcomes,
            reason_rows=joined.reasons.keys(),
            reasons=joined.reasons.values(),
        )

    def Status(
        self, request: joiner_pb2.StatusRequest, context: grpc.ServicerContext
    ) -> joiner_pb2.StatusResponse:
        return joiner_pb2.StatusResponse(json=msgspec.json.encode(self._worker.status()))
