"""A small HTTP server for scrapes that no caller can make large: few connections, each for a short while.

The standard library's threading server starts a thread for each that connects, for as long as that one likes.
prometheus_client's own is that one; with TLS it shakes hands in the thread that accepts, so one silent
connection stops all scrapes (measured: the next one got no answer, docs/decisions/001-dependencies.md).
Here the oldest connection goes when one too many comes, and each has to be done within seconds.
"""

import contextlib
import logging
import socket
import socketserver
import ssl
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler
from typing import Any, Final

from photon.core.errors import AddressInUseError, PhotonError
from photon.core.tls import Tls
from photon.wire.rpc import Complaints

CONNECTIONS_MAX: Final = 8
CONNECTION_S_MAX: Final = 10.0
"""From accepting to the last byte of the answer."""
_LOOK_EVERY_S: Final = 0.5

Answer = Callable[[str], tuple[str, bytes]]
"""The request's Accept header -> content type and body of the answer. May raise PhotonError."""


class ScrapeServer(socketserver.TCPServer):
    """Answers GET with what `answer` gives. `start` serves until the process ends, or `stop`."""

    allow_reuse_address = True
    request_queue_size = 64

    def __init__(self, host: str, port: int, answer: Answer, tls: Tls | None = None) -> None:
        """AddressInUseError; SettingsError for TLS files that can't be used."""
        self.answer = answer
        self._context = None if tls is None else tls.server_context()
        self._complaints = Complaints(logging.getLogger("photon.metrics"))
        self._lock = threading.Lock()
        self._open: dict[socket.socket, float] = {}  # since when, the oldest first
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            super().__init__((host, port), _Scrape)
        except OSError as error:
            raise AddressInUseError(
                f"cannot serve metrics on {host}:{port}: the address is taken or not of this machine; "
                "choose another one"
            ) from error

    def start(self) -> None:
        threading.Thread(
            target=self.serve_forever, args=(_LOOK_EVERY_S,), name="metrics", daemon=True
        ).start()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()
        self._end(time.monotonic() + 2 * CONNECTION_S_MAX)

    @property
    def connections(self) -> int:
        return len(self._open)

    # -- what socketserver calls ------------------------------------------------------------------------

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            oldest = next(iter(self._open)) if len(self._open) >= CONNECTIONS_MAX else None
            if oldest is not None:
                self._forget(oldest)
            self._open[request] = time.monotonic()
        threading.Thread(
            target=self._serve, args=(request, client_address), name="scrape", daemon=True
        ).start()

    def service_actions(self) -> None:
        """Between connections and twice a second."""
        self._end(time.monotonic())

    def handle_error(self, request: Any, client_address: Any) -> None:
        """There was no thread for it."""
        with self._lock:
            self._open.pop(request, None)
        self._complain(str(client_address[0]), sys.exc_info()[1])

    # -- one connection, in its own thread --------------------------------------------------------------

    def _serve(self, request: socket.socket, client_address: tuple[Any, ...]) -> None:
        channel = request
        try:
            request.settimeout(CONNECTION_S_MAX)
            if self._context is not None:
                # Here, as a handshake takes as long as the caller likes; the plain one stays, to be shut.
                channel = self._context.wrap_socket(request.dup(), server_side=True)
            _Scrape(channel, client_address, self)
        except (OSError, ValueError) as error:
            self._complain(str(client_address[0]), error)
        finally:
            with self._lock:
                self._open.pop(request, None)
            for one in {channel, request}:
                one.close()

    def _end(self, now: float) -> None:
        """Shut those that take too long. Their threads see it, and end."""
        with self._lock:
            for request, since in list(self._open.items()):
                if now - since > CONNECTION_S_MAX:
                    self._forget(request)

    def _forget(self, request: socket.socket) -> None:
        self._open.pop(request, None)
        with contextlib.suppress(OSError):  # it has left
            request.shutdown(socket.SHUT_RDWR)

    def _complain(self, who: str, error: BaseException | None) -> None:
        self._complaints.tell(f"closed the connection of {who}: {_why(error)}")


class _Scrape(BaseHTTPRequestHandler):
    """One request, one answer, and the end."""

    server: ScrapeServer
    server_version, sys_version = "photon", ""

    def do_GET(self) -> None:
        try:
            kind, body = self.server.answer(self.headers.get("Accept", ""))
        except PhotonError as error:
            self.send_error(503, explain=str(error))
            return
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:
        """Scrapes are not news."""


def _why(error: BaseException | None) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not good: {error.verify_message}"
    if isinstance(error, ssl.SSLError):
        reason = (error.reason or str(error)).replace("_", " ").lower()
        return f"TLS, which [tls] asks for, failed: {reason}"
    return str(error) or type(error).__name__
