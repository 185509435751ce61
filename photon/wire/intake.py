"""What comes in before a handler sees it: connections without a word, bytes that are no message, streams that
nobody ends.

gRPC answers a message that can't be read itself, but writes a traceback for each; and a call keeps a thread
from its first byte on, for as long as the caller likes: half a message, or a stream of them (reflection).
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import grpc

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


class Intake(grpc.ServerInterceptor):  # type: ignore[misc]
    """Of one server; handlers are looked up once for each method."""

    def __init__(self) -> None:
        self._complaints = Complaints()
        self._streams = threading.BoundedSemaphore(STREAMS_MAX)
        self._handlers: dict[int, Any] = {}

    def intercept_service(self, continuation: Callable[[Any], Any], details: Any) -> Any:
        handler = continuation(details)
        if handler is None:
            return None
        # The generated code makes each handler once, and the server keeps them all.
        known = self._handlers.get(id(handler))
        if known is None:
            known = self._handlers[id(handler)] = self._guarded(handler, details.method)
        return known

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
