"""The proxy does to connections what the tests of real processes need of it."""

import socket
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.simulation.proxy import Proxy


@pytest.fixture
def echo() -> Iterator[int]:
    """A server that says everything back."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=_echo, args=(sock,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()


def _echo(sock: socket.socket) -> None:
    try:
        while data := sock.recv(100):
            sock.sendall(data)
    except OSError:
        pass


def test_a_cut_one_way_holds_back_what_is_said_until_it_is_healed(echo: int) -> None:
    proxy = Proxy({"server": echo}, lambda port: "client")
    with socket.create_connection(("127.0.0.1", proxy.ports["server"]), timeout=5.0) as sock:
        sock.sendall(b"one")
        assert sock.recv(100) == b"one"
        for link in (("client", "server"), ("server", "client")):
            proxy.cut.add(link)
            sock.sendall(b"two")
            sock.settimeout(0.1)
            with pytest.raises(TimeoutError):
                sock.recv(100)
            proxy.heal()
            sock.settimeout(5.0)
            assert sock.recv(100) == b"two"
    proxy.close()


def test_a_reset_breaks_the_connection_and_the_next_one_works(echo: int) -> None:
    proxy = Proxy({"server": echo}, lambda port: "client")
    with socket.create_connection(("127.0.0.1", proxy.ports["server"]), timeout=5.0) as sock:
        sock.sendall(b"one")
        assert sock.recv(100) == b"one"
        proxy.reset("server", "client")
        with suppress(ConnectionResetError):
            assert sock.recv(100) == b""
    with socket.create_connection(("127.0.0.1", proxy.ports["server"]), timeout=5.0) as sock:
        sock.sendall(b"two")
        assert sock.recv(100) == b"two"
    proxy.close()


def test_a_stranger_is_sent_away(echo: int) -> None:
    proxy = Proxy({"server": echo}, lambda port: None)
    with socket.create_connection(("127.0.0.1", proxy.ports["server"]), timeout=5.0) as sock:
        assert sock.recv(100) == b""
    proxy.close()
