"""The gRPC face of the joiner: columns in, outcomes out, errors as status codes."""

from typing import Final

import grpc
import msgspec

from joiner.batch import ForeignColumns
from joiner.worker import Worker
from photon.core.errors import OverloadedError, PhotonError, SettingsMismatchError, UsageError
from photon.wire import joiner_pb2, joiner_pb2_grpc

SERVICE_NAME: Final = joiner_pb2.DESCRIPTOR.services_by_name["Joiner"].full_name


class JoinerService(joiner_pb2_grpc.JoinerServicer):
    """Join and Status (photon/wire/joiner.proto)."""

    def __init__(self, worker: Worker, identity: bytes) -> None:
        """`identity`: core.settings_identity.identity_digest; requests of another one are refused."""
        self._worker = worker
        self._identity = identity

    def Join(self, request: joiner_pb2.JoinRequest, context: grpc.ServicerContext) -> joiner_pb2.JoinResponse:
        batch = ForeignColumns(
            request.ids,
            request.primary_ids,
            request.times,
            request.events,
            request.tries,
            request.first_seen,
        )
        try:
            self._check(request.identity)
            batch.check()
            if not batch.ids:
                self._check_lease()
                return joiner_pb2.JoinResponse()  # whether it would be taken was all that was asked
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

    def _check(self, identity: bytes) -> None:
        """OverloadedError, SettingsMismatchError.

        Without a lease it is not known whose settings are the registry's: then nobody is told to end.
        """
        if identity == self._identity:
            return
        self._check_lease()
        raise SettingsMismatchError(
            "ids.key and all of [foreign] must be the same on all machines of a system, or every event would "
            "be joined twice, and this joiner has others than its client: give the client the joiner's "
            "photon.toml"
        )

    def _check_lease(self) -> None:
        leases = self._worker.leases
        leases.check(leases.own)
