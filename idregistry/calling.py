"""A call of the client's, and what may come of it beside a response."""

import threading
from collections.abc import Callable
from typing import Any

import grpc

from photon.core.errors import UnavailableError


class ClosedMeanwhile:
    """Turns what gRPC raises for a channel that was closed into UnavailableError."""

    def __init__(self, closed: threading.Event) -> None:
        if closed.is_set():
            raise UnavailableError(
                "the registry client is closed; whether anything was registered is not known"
            )

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, ValueError | grpc.FutureCancelledError):
            raise UnavailableError(f"the registry client was closed during a call: {error}") from error


def outcome_of(call: Callable[[], Any]) -> Any:
    """Its response, or the RpcError it raised."""
    try:
        return call()
    except grpc.RpcError as error:
        return error
