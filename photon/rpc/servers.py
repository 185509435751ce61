"""Servers with the options that measurement asked for (docs/decisions/004-grpc.md), and what they let in.

What comes in before a handler sees it is bounded: connections without a word, bytes that are no message,
streams that nobody ends. gRPC answers a message that can't be read itself, but writes a traceback for each;
and a call keeps a thread from its first byte on, for as long as the caller likes: half a message, or a stream
of them (reflection).
"""

import contextlib
import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from queue import Empty, SimpleQueue
from typing import Any, Final

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from photon.core.errors import AddressInUseError, OverloadedError, UnavailableError
from photon.rpc import importer_pb2
from photon.rpc.network import (
    KEEPALIVE_MS,
    LOOPBACK,
    MEANT_FOR,
    MESSAGE_BYTES_MAX,
    SIZES,
    Network,
    failure_of,
)

HEALTH_POLL_S: Final = 0.4
"""So often a server looks whether it can do its work."""
DRAIN_S: Final = 0.1
"""Between saying NOT_SERVING to those who watch and refusing calls: theirs are on their way for so long."""

CONNECTIONS_MAX: Final = 1024
"""Of a server. Each is a descriptor, which its journals and logs need as well."""
SILENT_S_MAX: Final = 10.0
"""One that has not shaken hands by then, or answered a ping of so long ago, is closed."""
_SILENT_MS_MAX: Final = int(SILENT_S_MAX * 1000)

LIMITS: Final = [
    ("grpc.max_allowed_incoming_connections", CONNECTIONS_MAX),
    ("grpc.server_handshake_timeout_ms", _SILENT_MS_MAX),
    ("grpc.http2.settings_timeout", _SILENT_MS_MAX),
    # Who only sends half a call and waits answers no pings.
    ("grpc.keepalive_time_ms", _SILENT_MS_MAX),
    ("grpc.keepalive_timeout_ms", _SILENT_MS_MAX),
    ("grpc.http2.ping_timeout_ms", _SILENT_MS_MAX),
    ("grpc.http2.max_pings_without_data", 0),
]
"""Options of every server."""

STREAMS_MAX: Final = 2
"""Calls whose requests are a stream, at a time."""
STREAM_S_MAX: Final = 10.0
"""How long each may take."""
_COMPLAINTS_MAX: Final = 10
_COMPLAINTS_PERIOD_S: Final = 60.0

_log: Final = logging.getLogger("photon.rpc")

_SERVER: Final = [
    *SIZES,
    *LIMITS,
    # Two servers must not share a port in silence.
    ("grpc.so_reuseport", 0),
    # Clients ping a server that is silent (photon.rpc.network): by default it would hang up on them.
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.keepalive_permit_without_calls", 1),
]
_SERVING: Final = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING: Final = health_pb2.HealthCheckResponse.NOT_SERVING


class Intake(grpc.ServerInterceptor):  # type: ignore[misc]
    """Of one server of this run; handlers are looked up once for each method."""

    def __init__(self, run: str = "") -> None:
        self._run = run
        self._complaints = Complaints()
        self._streams = threading.BoundedSemaphore(STREAMS_MAX)
        self._handlers: dict[int, Any] = {}

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        handler = continuation(details)
        if handler is None:
            return None
        if self._is_anothers(details.invocation_metadata):
            return _refusing(handler)
        # The generated code makes each handler once, and the server keeps them all.
        known = self._handlers.get(id(handler))
        if known is None:
            known = self._handlers[id(handler)] = self._guarded(handler, details.method)
        return known

    def _is_anothers(self, metadata: Sequence[tuple[str, str]]) -> bool:
        """Whether the call is meant for a server of another run."""
        for key, value in metadata:
            if key == "user-agent":
                return value.startswith(MEANT_FOR) and value.split(" ", 1)[0] != MEANT_FOR + self._run
        return False

    def _guarded(self, handler: Any, method: str) -> Any:
        guarded = handler._replace(request_deserializer=self._reading(handler.request_deserializer, method))
        if handler.request_streaming and handler.response_streaming:
            return guarded._replace(stream_stream=self._bounded(handler.stream_stream))
        return guarded

    def _reading(self, parse: Callable[[bytes], Any], method: str) -> Callable[[bytes], Any]:
        def read(data: bytes) -> Any:
            try:
                return parse(data)
            except Exception as error:
                self._complaints.tell(f"{method}: {len(data)} bytes that are no request: {error}")
                return None  # gRPC's own sign: the call ends with a status

        return read

    def _bounded(self, serve: Callable[[Any, Any], Iterator[Any]]) -> Callable[[Any, Any], Iterator[Any]]:
        def bounded(requests: Any, context: Any) -> Iterator[Any]:
            if not self._streams.acquire(blocking=False):
                context.abort(
                    grpc.StatusCode.RESOURCE_EXHAUSTED, f"{STREAMS_MAX} streams are open; come later"
                )
            limit = threading.Timer(STREAM_S_MAX, context.cancel)
            limit.daemon = True

            def end() -> None:
                limit.cancel()
                self._streams.release()

            if not context.add_callback(end):  # it has ended already
                end()
                return iter(())
            limit.start()
            return serve(requests, context)

        return bounded


def _refusing(handler: Any) -> Any:
    """It, for a call that another server was to get."""

    def refuse(_request: Any, context: grpc.ServicerContext) -> None:
        context.abort(grpc.StatusCode.UNAVAILABLE, "this address is another run's by now")

    kinds = ("unary_unary", "unary_stream", "stream_unary", "stream_stream")
    return handler._replace(**{kind: refuse for kind in kinds if getattr(handler, kind)})


class Complaints:
    """Few a minute: a stranger must not fill the log either."""

    def __init__(self, log: logging.Logger = _log, clock: Callable[[], float] = time.monotonic) -> None:
        self._log = log
        self._clock = clock
        self._lock = threading.Lock()
        self._told = 0
        self._since = clock()

    def tell(self, line: str) -> None:
        with self._lock:
            now = self._clock()
            if now - self._since > _COMPLAINTS_PERIOD_S:
                self._told, self._since = 0, now
            self._told += 1
            if self._told > _COMPLAINTS_MAX:
                return
        self._log.warning("%s", line)


class _Watching:
    """The context of a watch, whose end waits for `forget_ended`.

    The library would take a lock in gRPC's polling thread, and holds that lock while it waits for that thread
    to send a word to another watcher: the server would stand still for ever.
    """

    def __init__(self, context: grpc.ServicerContext, ended: "SimpleQueue[Callable[[], None]]") -> None:
        self._context = context
        self._ended = ended

    def add_callback(self, callback: Callable[[], None]) -> bool:
        if not self._context.add_callback(lambda: self._ended.put(callback)):
            self._ended.put(callback)  # it has ended already
        return True


class _Health(health.HealthServicer):  # type: ignore[misc]
    """Knows how many watch."""

    def __init__(self) -> None:
        super().__init__()
        self._count = threading.Lock()
        self._ended: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self.watchers = 0

    def forget_ended(self) -> None:
        """Let go of watches that are over. One thread, now and then."""
        with contextlib.suppress(Empty):
            while True:
                self._ended.get_nowait()()

    def Watch(self, request: Any, context: grpc.ServicerContext, send_response_callback: Any = None) -> Any:
        self._watched(1)
        if not context.add_callback(lambda: self._watched(-1)):
            self._watched(-1)  # it has ended already
        return super().Watch(request, _Watching(context, self._ended), send_response_callback)

    def _watched(self, by: int) -> None:
        with self._count:
            self.watchers += by


class Server:
    """A gRPC server with health and reflection. First SIGTERM drains, a second one forces."""

    def __init__(
        self,
        listen: str,
        workers: int,
        in_flight_max: int | None = None,
        network: Network = LOOPBACK,
        request_bytes_max: int = MESSAGE_BYTES_MAX,
    ) -> None:
        """`listen`: the advertised address; `network` says what is bound for it. UsageError.

        `in_flight_max` bounds running and queued calls together; more are refused RESOURCE_EXHAUSTED. So are
        larger requests than `request_bytes_max`, and `workers` of them are held at a time.
        """
        self.listen = listen
        self._bound = network.bound(listen)
        self._credentials = network.server_credentials
        self._pool = futures.ThreadPoolExecutor(workers, thread_name_prefix="rpc")
        self._server = grpc.server(
            self._pool,
            interceptors=[Intake(network.run)],
            options=[
                ("grpc.max_receive_message_length", request_bytes_max),
                *_SERVER,
            ],  # the first one counts
            maximum_concurrent_rpcs=in_flight_max,
        )
        self._health = _Health()
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        self._names: list[str] = [health.SERVICE_NAME, reflection.SERVICE_NAME]
        self._can_work: Callable[[], bool] = lambda: True
        self._serving: bool | None = None
        self._draining = threading.Event()
        self._watch = threading.Thread(target=self._look_again, name="health", daemon=True)

    def add(self, register: Callable[[Any, Any], None], servicer: object, service_name: str) -> None:
        """`register` is the generated add_XServicer_to_server."""
        register(servicer, self._server)
        self._names.append(service_name)

    def serve_while(self, can_work: Callable[[], bool]) -> None:
        """Health checks are told SERVING only while that is true; it is asked every HEALTH_POLL_S. Before
        `start`."""
        self._can_work = can_work

    def start(self) -> None:
        """Bind and serve. AddressInUseError if the port is taken."""
        reflection.enable_server_reflection(self._names, self._server)
        try:
            if self._credentials is None:
                bound = self._server.add_insecure_port(self._bound)
            else:
                bound = self._server.add_secure_port(self._bound, self._credentials)
        except RuntimeError as error:
            raise AddressInUseError(
                f"cannot listen on {self._bound}: the address is taken or not of this machine; "
                "choose another one in the settings"
            ) from error
        if self.listen.endswith(":0"):
            self.listen = f"{self.listen[:-2]}:{bound}"
        self.set_serving(self._can_work())
        self._server.start()
        self._watch.start()

    def set_serving(self, serving: bool) -> None:
        """What health checks are told, of the server ("") and of each of its services."""
        if serving is not self._serving:
            self._serving = serving
            for name in ("", *self._names):
                self._health.set(name, _SERVING if serving else _NOT_SERVING)

    def drain(self) -> None:
        """Health checks are told NOT_SERVING from now on; calls are taken until `stop`."""
        self._draining.set()
        self._health.enter_graceful_shutdown()

    def stop(self, grace: float = 5.0) -> None:
        """Refuse new calls, let those under way end within `grace` seconds."""
        watched = self._health.watchers  # before they are told: one that leaves on the word was watching
        self.drain()
        if watched:
            time.sleep(min(grace, DRAIN_S))
        self._server.stop(grace).wait(grace + 1.0)
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _look_again(self) -> None:
        complaints = Complaints()
        while not self._draining.wait(HEALTH_POLL_S):
            try:
                able = self._can_work()
            except Exception as error:  # it would end this thread, and its last word stay for ever
                complaints.tell(f"can't tell whether it can work: {type(error).__name__}: {error}")
                able = False
            self.set_serving(able)
            self._health.forget_ended()


def to_photon_error(error: grpc.RpcError, what: str) -> UnavailableError:
    """The house error for a failed call: overloaded (nothing was done) or unavailable (outcome unknown)."""
    if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return OverloadedError(f"{what}: {error.details()}")
    return UnavailableError(f"{what}: {failure_of(error)}")


_ROLES: Final = {
    "registry": ("photon.idregistry.v1.IdRegistry", "registry replica"),
    "importer": ("photon.importer.v1.Importer", "importer"),
    "eventstore": ("photon.eventstore.v1.EventStore", "event store"),
    "joiner": ("photon.joiner.v1.Joiner", "joiner"),
    "dispatcher": ("photon.dispatcher.v1.Dispatcher", "dispatcher"),
}
"""The service of each, and how it is told of. Their Status calls have messages of one shape."""


class StatusClient:
    """Asks one process what it says of itself. Thread-safe; connects when first asked."""

    def __init__(self, role: str, address: str, timeout_s: float = 5.0, network: Network = LOOPBACK) -> None:
        service, name = _ROLES[role]
        self._who, self._timeout_s = f"{name} {address}", timeout_s
        self._channel = network.open(address)
        read = importer_pb2.StatusResponse.FromString
        self._ask = self._channel.unary_unary(f"/{service}/Status", bytes, read)

    def status(self) -> dict[str, Any]:
        """The keys that its server documents. UnavailableError if it does not answer in JSON."""
        try:
            status: dict[str, Any] = json.loads(self._ask(b"", timeout=self._timeout_s).json)
        except grpc.RpcError as error:
            raise to_photon_error(error, self._who) from error
        except ValueError as error:
            raise UnavailableError(f"{self._who}: its status is no JSON: {error}") from error
        return status

    def close(self) -> None:
        self._channel.close()
