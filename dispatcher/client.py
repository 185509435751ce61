"""The only door to a dispatcher from another room."""

from typing import Any

import grpc
import msgspec

from photon.core.errors import UnavailableError
from photon.rpc import dispatcher_pb2, dispatcher_pb2_grpc
from photon.rpc.network import LOOPBACK, Network
from photon.rpc.servers import to_photon_error


class DispatcherClient:
    """Thread-safe; connects when first asked."""

    def __init__(self, address: str, timeout_s: float = 5.0, network: Network = LOOPBACK) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._channel = network.open(address)
        self._stub = dispatcher_pb2_grpc.DispatcherStub(self._channel)  # type: ignore[no-untyped-call]

    def pending(self, ids: bytes) -> list[dict[str, Any] | None]:
        """16 x N ids of foreign events -> what is known of each that waits for its retry, None of the others.

        Keys: waiting_since_us, tries (its primary was not there), sends, due_us, file, offset, worker. Each
        worker answers for what it has read. UnavailableError.
        """
        return self._waiting(dispatcher_pb2.PendingRequest(ids=ids))

    def soonest(self, count: int) -> list[dict[str, Any]]:
        """Of at most `count` events that wait (1 to 1,000), those that are tried next; keys as of `pending`.
        UnavailableError."""
        return [one for one in self._waiting(dispatcher_pb2.PendingRequest(soonest=count)) if one is not None]

    def _waiting(self, request: dispatcher_pb2.PendingRequest) -> list[dict[str, Any] | None]:
        who = f"dispatcher {self._address}"
        try:
            answer = self._stub.Pending(request, timeout=self._timeout_s)
            found: list[dict[str, Any] | None] = msgspec.json.decode(answer.json)
        except grpc.RpcError as error:
            raise to_photon_error(error, who) from error
        except msgspec.DecodeError as error:
            raise UnavailableError(f"{who}: its answer is no JSON: {error}") from error
        return found

    def close(self) -> None:
        self._channel.close()
