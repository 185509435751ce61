"""A TCP proxy between real processes which cuts one way, slows down, changes, and breaks connections."""

import socket
import struct
import threading
import time
from collections import defaultdict
from collections.abc import Callable

_POLL_S = 0.01
_CHUNK_BYTES = 1 << 16
_RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close with a reset


class Proxy:
    """One address for each node, at which the others reach it. What passes is told apart by who dialed.

    `who(port)`: the node that connects from this local port, or None where nobody knows.
    """

    def __init__(self, targets: dict[str, int], who: Callable[[int], str | None]) -> None:
        """`targets`: node -> the port it listens on, at 127.0.0.1."""
        self._targets = targets
        self._who = who
        self._lock = threading.Lock()
        self._open: list[tuple[str, str, socket.socket, socket.socket]] = []
        self._closed = False
        self.listens = False  # whether `said` keeps what passes
        self.cut: set[tuple[str, str]] = set()
        self.delay_s: dict[tuple[str, str], float] = {}
        self.change: dict[tuple[str, str], Callable[[bytes], bytes]] = {}
        self.said: defaultdict[tuple[str, str], bytes] = defaultdict(bytes)
        self.ports: dict[str, int] = {}
        self._listeners = []
        for node in targets:
            listener = socket.create_server(("127.0.0.1", 0))
            self.ports[node] = listener.getsockname()[1]
            self._listeners.append(listener)
            threading.Thread(target=self._accept, args=(node, listener), daemon=True).start()

    def heal(self) -> None:
        """Everything passes, at once, as it is."""
        self.cut.clear()
        self.delay_s.clear()
        self.change.clear()

    def reset(self, one: str, other: str) -> None:
        """Break the connections between two nodes."""
        with self._lock:
            broken = [entry for entry in self._open if {one, other} == set(entry[:2])]
        for entry in broken:
            self._close(entry)

    def close(self) -> None:
        self._closed = True
        for listener in self._listeners:
            listener.close()
        with self._lock:
            left = list(self._open)
        for entry in left:
            self._close(entry)

    def _accept(self, node: str, listener: socket.socket) -> None:
        while not self._closed:
            try:
                inner, (_, port) = listener.accept()
            except OSError:
                return
            threading.Thread(target=self._connect, args=(node, inner, port), daemon=True).start()

    def _connect(self, node: str, inner: socket.socket, port: int) -> None:
        dialer = self._who(port)
        try:
            if dialer is None:
                inner.close()
                return
            outer = socket.create_connection(("127.0.0.1", self._targets[node]), timeout=2.0)
        except OSError:
            inner.close()
            return
        outer.settimeout(None)
        for sock in (inner, outer):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        entry = dialer, node, inner, outer
        with self._lock:
            self._open.append(entry)
        for link, source, sink in (((dialer, node), inner, outer), ((node, dialer), outer, inner)):
            threading.Thread(target=self._pump, args=(entry, link, source, sink), daemon=True).start()

    def _pump(
        self,
        entry: tuple[str, str, socket.socket, socket.socket],
        link: tuple[str, str],
        source: socket.socket,
        sink: socket.socket,
    ) -> None:
        """What is cut is not read, and so not lost: as packets that are sent again and again."""
        try:
            while data := source.recv(_CHUNK_BYTES):
                time.sleep(self.delay_s.get(link, 0.0))
                while link in self.cut and not self._closed:
                    time.sleep(_POLL_S)
                if self.listens:
                    self.said[link] += data
                sink.sendall(self.change.get(link, bytes)(data))
        except OSError:
            pass
        self._close(entry)

    def _close(self, entry: tuple[str, str, socket.socket, socket.socket]) -> None:
        with self._lock:
            if entry in self._open:
                self._open.remove(entry)
        for sock in entry[2:]:
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
                sock.shutdown(socket.SHUT_RDWR)
            except OSError:
                pass
            sock.close()
