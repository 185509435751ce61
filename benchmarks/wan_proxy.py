"""A long link on one machine: `python -m benchmarks.wan_proxy '{"delay_ms": 50, "ways": [[from, to], ...]}'`.

Every byte that comes in on port `from` of loopback goes out to port `to` `delay_ms` later, and so back. Only
time is added: no bandwidth limit, buffers without a bound, so that nothing else than the delay is measured.
Prints `true` when it listens.
"""

import json
import select
import socket
import sys
import time
from collections import deque
from typing import Final

from photon.app.supervisor import die_with_parent

_BUFFER_BYTES: Final = 8 << 20
_READ_BYTES: Final = 1 << 20
_IN: Final = select.EPOLLIN
_OUT: Final = select.EPOLLOUT


class _End:
    """One socket of a pair. `late` holds what is to be written to it, with the moment of each piece."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, _BUFFER_BYTES)
        self.sock = sock
        self.other: _End = self
        self.late: deque[tuple[float, memoryview]] = deque()
        self.closes_at: float | None = None
        self.reads = True
        self.blocked = False
        self.watched = _IN


class Proxy:
    def __init__(self, delay_s: float, ways: list[tuple[int, int]]) -> None:
        self._delay_s = delay_s
        self._epoll = select.epoll()
        self._ends: dict[int, _End] = {}
        self._listeners: dict[int, tuple[socket.socket, int]] = {}
        for port, target in ways:
            listener = socket.create_server(("127.0.0.1", port))
            listener.setblocking(False)
            self._listeners[listener.fileno()] = (listener, target)
            self._epoll.register(listener.fileno(), _IN)

    def run(self) -> None:
        while True:
            for fd, events in self._epoll.poll(self._wait_s()):
                if fd in self._listeners:
                    self._accept(*self._listeners[fd])
                    continue
                if fd in self._ends and events & ~_OUT:
                    self._read(self._ends[fd])
                if fd in self._ends and events & _OUT:
                    self._ends[fd].blocked = False
            now = time.monotonic()
            for end in list(self._ends.values()):
                if end.sock.fileno() in self._ends:
                    self._write(end, now)

    def _wait_s(self) -> float:
        moments = [end.late[0][0] for end in self._ends.values() if end.late and not end.blocked]
        moments += [
            end.closes_at for end in self._ends.values() if end.closes_at is not None and not end.late
        ]
        return max(0.0, min(moments) - time.monotonic()) if moments else 1.0

    def _accept(self, listener: socket.socket, target: int) -> None:
        near = listener.accept()[0]
        try:
            far = socket.create_connection(("127.0.0.1", target))
        except OSError:  # nobody there: the one who dials sees it at once
            near.close()
            return
        one, other = _End(near), _End(far)
        one.other, other.other = other, one
        for end in (one, other):
            self._ends[end.sock.fileno()] = end
            self._epoll.register(end.sock.fileno(), _IN)

    def _read(self, end: _End) -> None:
        try:
            data = end.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        due = time.monotonic() + self._delay_s
        if data:
            end.other.late.append((due, memoryview(data)))
        elif end.reads:
            end.reads = False
            end.other.closes_at = due
            self._watch(end)

    def _write(self, end: _End, now: float) -> None:
        try:
            while end.late and end.late[0][0] <= now and not end.blocked:
                due, data = end.late.popleft()
                sent = end.sock.send(data)
                if sent < len(data):
                    end.late.appendleft((due, data[sent:]))
        except BlockingIOError:
            end.late.appendleft((due, data))
            end.blocked = True
        except OSError:
            end.late.clear()
            end.closes_at = now
        self._watch(end)
        if end.closes_at is not None and end.closes_at <= now and not end.late:
            self._close(end)

    def _watch(self, end: _End) -> None:
        wanted = (_IN if end.reads else 0) | (_OUT if end.blocked else 0)
        if wanted != end.watched:
            end.watched = wanted
            self._epoll.modify(end.sock.fileno(), wanted)

    def _close(self, end: _End) -> None:
        for one in (end, end.other):
            if self._ends.pop(one.sock.fileno(), None) is not None:
                self._epoll.unregister(one.sock.fileno())
                one.sock.close()


def main() -> None:
    die_with_parent()
    argument = json.loads(sys.argv[1])
    proxy = Proxy(argument["delay_ms"] / 1000, [(start, to) for start, to in argument["ways"]])
    print("true", flush=True)
    proxy.run()


if __name__ == "__main__":
    main()
