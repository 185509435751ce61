"""The only door into this room for others."""

import itertools
from collections.abc import Sequence
from typing import Any

import grpc

from joiner.batch import ForeignColumns, JoinOutcomes
from photon.core.errors import UsageError
from photon.wire import joiner_pb2, joiner_pb2_grpc
from photon.wire.rpc import ask_status, open_channel, to_photon_error

__all__ = ["ForeignColumns", "JoinOutcomes", "JoinerClient"]


class JoinerClient:
    """Sends batches to joiners, which are all alike, in turn (paper 3.3.1). For many threads at once."""

    def __init__(self, addresses: Sequence[str], timeout_s: float) -> None:
        if not addresses:
            raise UsageError("no joiner's address was given; name one at least")
        self._timeout_s = timeout_s
        self._channels = [open_channel(address) for address in addresses]
        self._stubs = [
            (address, joiner_pb2_grpc.JoinerStub(channel))  # type: ignore[no-untyped-call]
            for address, channel in zip(addresses, self._channels, strict=True)
        ]
        self._turns = itertools.cycle(self._stubs)

    def join(self, batch: ForeignColumns) -> JoinOutcomes:
        """Each event's outcome.

        OverloadedError: refused, nothing was done. UnavailableError: unknown; send again, to any joiner.
        """
        address, stub = next(self._turns)
        request = joiner_pb2.JoinRequest(
            ids=batch.ids,
            primary_ids=batch.primary_ids,
            times=batch.times,
            events=batch.events,
            tries=batch.tries,
            first_seen=batch.first_seen,
        )
        try:
            response = stub.Join(request, timeout=self._timeout_s)
        except grpc.RpcError as error:
            raise to_photon_error(error, f"joiner {address}") from error
        reasons = dict(zip(response.reason_rows, response.reasons, strict=True))
        return JoinOutcomes(response.outcomes, reasons)

    def status(self) -> dict[str, Any]:
        """What the first joiner says of itself. UnavailableError if it does not answer."""
        address, stub = self._stubs[0]
        return ask_status(stub.Status, joiner_pb2.StatusRequest(), self._timeout_s, f"joiner {address}")

    def close(self) -> None:
        for channel in self._channels:
            channel.close()
