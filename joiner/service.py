"""The gRPC face of the joiner: columns in, outcomes out, errors as status codes."""

from typing import Final

import grpc
import msgspec

from joiner.batch import ForeignColumns
from joiner.worker import Worker
from photon.core.errors import OverloadedError, PhotonError, UsageError
from photon.wire import joiner_pb2, joiner_pb2_grpc

SERVICE_NAME: Final = joiner_pb2.DESCRIPTOR.services_by_name["Joiner"].full_name


class JoinerService(joiner_pb2_grpc.JoinerServicer):
    """Join and Status (photon/wire/joiner.proto)."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

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
            batch.check()
            joined = self._worker.join(batch, context.time_remaining())
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
