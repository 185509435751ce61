"""The only door into this room for others."""

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from joiner.batch import ForeignColumns, JoinOutcomes
from joiner.spreading import Turns
from photon.core.errors import OverloadedError, UnavailableError, UsageError
from photon.wire import joiner_pb2, joiner_pb2_grpc
from photon.wire.network import LOOPBACK, Network
from photon.wire.rpc import ask_status, to_photon_error

__all__ = ["ForeignColumns", "JoinOutcomes", "JoinerClient"]


class JoinerClient:
    """Sends batches to joiners, which are all alike, in turn (paper 3.3.1); one that fails is left out for a
    growing while, while others answer. For many threads at once."""

    def __init__(
        self,
        addresses: Sequence[str],
        timeout_s: float,
        monotonic: Callable[[], float] = time.monotonic,
        network: Network = LOOPBACK,
    ) -> None:
        if not addresses:
            raise UsageError("no joiner's address was given; name one at least")
        self._timeout_s = timeout_s
        self._monotonic = monotonic
        self._channels = [network.open(address) for address in addresses]
        self._stubs = [
            (address, joiner_pb2_grpc.JoinerStub(channel))  # type: ignore[no-untyped-call]
            for address, channel in zip(addresses, self._channels, strict=True)
        ]
        self._turns = Turns(len(self._stubs))
        self._lock = threading.Lock()

    def join(self, batch: ForeignColumns, timeout_s: float | None = None) -> JoinOutcomes:
        """Each event's outcome. The joiner registers nothing after the timeout.

        OverloadedError: refused, nothing was done. UnavailableError: unknown; send again, to any joiner.
        """
        with self._lock:
            number = self._turns.next(self._monotonic())
        address, stub = self._stubs[number]
        request = joiner_pb2.JoinRequest(
            ids=batch.ids,
            primary_ids=batch.primary_ids,
            times=batch.times,
            events=batch.events,
            tries=batch.tries,
            first_seen=batch.first_seen,
        )
        try:
            response = stub.Join(request, timeout=self._timeout_s if timeout_s is None else timeout_s)
        except grpc.RpcError as error:
            failure = to_photon_error(error, f"joiner {address}")
            if error.code() is not grpc.StatusCode.INVALID_ARGUMENT:  # that is the batch's fault
                self._note(number, failure)
            raise failure from error
        self._note(number, None)
        reasons = dict(zip(response.reason_rows, response.reasons, strict=True))
        return JoinOutcomes(response.outcomes, reasons)

    def status(self) -> dict[str, Any]:
        """What the first joiner says of itself. UnavailableError if it does not answer."""
        return self._status_of(0)

    def statuses(self) -> dict[str, dict[str, Any] | UnavailableError]:
        """What each joiner says of itself, by address, or why it says nothing."""
        answers: dict[str, dict[str, Any] | UnavailableError] = {}
        for number, (address, _) in enumerate(self._stubs):
            try:
                answers[address] = self._status_of(number)
            except UnavailableError as error:
                answers[address] = error
        return answers

    def close(self) -> None:
        for channel in self._channels:
            channel.close()

    def _status_of(self, number: int) -> dict[str, Any]:
        address, stub = self._stubs[number]
        return ask_status(stub.Status, joiner_pb2.StatusRequest(), self._timeout_s, f"joiner {address}")

    def _note(self, number: int, failure: UnavailableError | None) -> None:
        with self._lock:
            if failure is None:
                self._turns.worked(number)
            elif isinstance(failure, OverloadedError):
                self._turns.refused(number, self._monotonic())
            else:
                self._turns.failed(number, self._monotonic())
