"""Servers with the options that measurement asked for (docs/decisions/004-grpc.md)."""

import json
import signal
import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from photon.core.errors import AddressInUseError, OverloadedError, UnavailableError
from photon.wire.network import LOOPBACK, SIZES, Network

# Two servers must not share a port in silence.
_SERVER: Final = [*SIZES, ("grpc.so_reuseport", 0)]


class Server:
    """A gRPC server with health and reflection. First SIGTERM drains, a second one forces."""

    def __init__(
        self, listen: str, workers: int, in_flight_max: int | None = None, network: Network = LOOPBACK
    ) -> None:
        """`listen`: the advertised address; `network` says what is bound for it. UsageError.

        `in_flight_max` bounds running and queued calls together; more are refused RESOURCE_EXHAUSTED.
        """
        self.listen = listen
        self._bound = network.bound(listen)
        self._tls = network.tls
        self._pool = futures.ThreadPoolExecutor(workers, thread_name_prefix="rpc")
        self._server = grpc.server(self._pool, options=_SERVER, maximum_concurrent_rpcs=in_flight_max)
        self._health = health.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._names: list[str] = [health.SERVICE_NAME, reflection.SERVICE_NAME]
        self._stopping = threading.Event()

    def add(self, register: Callable[[Any, Any], None], servicer: object, service_name: str) -> None:
        """`register` is the generated add_XServicer_to_server."""
        register(servicer, self._server)
        self._names.append(service_name)

    def start(self) -> None:
        """Bind and serve. AddressInUseError if the port is taken."""
        reflection.enable_server_reflection(self._names, self._server)
        try:
            bound = self._add_port()
        except RuntimeError as error:
            raise AddressInUseError(
                f"cannot listen on {self._bound}: the address is taken or not of this machine; "
                "choose another one in the settings"
            ) from error
        if self.listen.endswith(":0"):
            self.listen = f"{self.listen[:-2]}:{bound}"
        self._server.start()
        for name in self._names:
            self._health.set(name, health_pb2.HealthCheckResponse.SERVING)
        self._health.set("", health_pb2.HealthCheckResponse.SERVING)

    def _add_port(self) -> int:
        if self._tls is None:
            return int(self._server.add_insecure_port(self._bound))
        pair = self._tls.key.read_bytes(), self._tls.cert.read_bytes()
        credentials = grpc.ssl_server_credentials([pair], self._tls.ca.read_bytes(), require_client_auth=True)
        return int(self._server.add_secure_port(self._bound, credentials))

    def stop(self, grace: float = 5.0) -> None:
        """Refuse new calls, let those under way end within `grace` seconds."""
        self._health.enter_graceful_shutdown()
        self._server.stop(grace).wait(grace + 1.0)
        self._pool.shutdown(wait=False, cancel_futures=True)


def on_termination(stop: Callable[[], None]) -> None:
    """First SIGTERM or SIGINT calls `stop`; a second one ends the process at once (main thread only)."""

    def first(_signum: int, _frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        stop()

    signal.signal(signal.SIGTERM, first)
    signal.signal(signal.SIGINT, first)


def to_photon_error(error: grpc.RpcError, what: str) -> UnavailableError:
    """The house error for a failed call: overloaded (nothing was done) or unavailable (outcome unknown)."""
    code, details = error.code(), error.details()
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return OverloadedError(f"{what}: {details}")
    return UnavailableError(f"{what}: {code.name.lower()}: {details}")


def ask_status(call: Any, request: Any, timeout_s: float, who: str) -> dict[str, Any]:
    """What a server says of itself, by its Status call. UnavailableError if it does not answer in JSON."""
    try:
        status: dict[str, Any] = json.loads(call(request, timeout=timeout_s).json)
    except grpc.RpcError as error:
        raise to_photon_error(error, who) from error
    except ValueError as error:
        raise UnavailableError(f"{who}: its status is no JSON: {error}") from error
    return status
