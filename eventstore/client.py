"""The only door into this room for others."""

from typing import Any

import grpc

from photon.core.columns import split_lines
from photon.wire import eventstore_pb2, eventstore_pb2_grpc
from photon.wire.rpc import ask_status, open_channel, to_photon_error


class EventStoreClient:
    """Asks the event store of a datacenter (paper 3.4). For many threads at once."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self._address = address
        self._timeout_s = timeout_s
        self._channel = open_channel(address)
        self._stub = eventstore_pb2_grpc.EventStoreStub(self._channel)  # type: ignore[no-untyped-call]

    def lookup(self, ids: bytes) -> tuple[bytes, list[bytes]]:
        """16 x N bytes -> core.fates.Found column and N lines without newline, b"" where not found.

        UnavailableError, OverloadedError: ask again later.
        """
        request = eventstore_pb2.LookupRequest(ids=ids)
        try:
            response = self._stub.Lookup(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise to_photon_error(error, f"event store {self._address}") from error
        return response.outcomes, split_lines(response.events)

    def status(self) -> dict[str, Any]:
        """What the server says of itself. UnavailableError if it does not answer."""
        request = eventstore_pb2.StatusRequest()
        return ask_status(self._stub.Status, request, self._timeout_s, f"event store {self._address}")

    def close(self) -> None:
        self._channel.close()
