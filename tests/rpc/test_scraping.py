"""Scrapes, and those who only look like one: few connections, each for a short while."""

import contextlib
import logging
import socket
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from photon.core.errors import StorageError, UsageError
from photon.rpc import metrics as scraping
from photon.rpc.metrics import CONNECTIONS_MAX, ScrapeServer, serve_metrics
from photon.rpc.network import Network, Tls, load_tls
from tests.certificates import Authority
from tests.waiting import wait_until

Start = Callable[..., ScrapeServer]


def answer(accept: str) -> tuple[str, bytes]:
    return "text/plain", b"photon_up 1\n"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scraping, "_LOOK_EVERY_S", 0.02)


@pytest.fixture
def start() -> Iterator[Start]:
    with contextlib.ExitStack() as stack:

        def serve(tls: Tls | None = None, gives: scraping.Answer = answer) -> ScrapeServer:
            server = ScrapeServer("127.0.0.1", 0, gives, tls)
            server.start()
            stack.callback(server.stop)
            return server

        yield serve


def connect(server: ScrapeServer) -> socket.socket:
    return socket.create_connection(server.server_address[:2], timeout=60)


def scrape(server: ScrapeServer, context: ssl.SSLContext | None = None) -> bytes:
    scheme = "http" if context is None else "https"
    url = f"{scheme}://127.0.0.1:{server.server_address[1]}/metrics"
    with urllib.request.urlopen(url, timeout=60, context=context) as response:
        body: bytes = response.read()
    return body


def serving() -> int:
    """Threads with a connection."""
    return sum("process_request_thread" in thread.name for thread in threading.enumerate())


def closed(stranger: socket.socket) -> bool:
    """Waits until the other end has closed, whatever it said before."""
    with contextlib.suppress(ConnectionError):
        while stranger.recv(1 << 16):
            pass
    return True


def test_one_who_asks_is_answered(start: Start) -> None:
    server = start()
    assert scrape(server) == b"photon_up 1\n"
    wait_until(lambda: not server._open)


def test_a_status_that_fails_is_a_status_code(start: Start) -> None:
    def fails(accept: str) -> tuple[str, bytes]:
        raise StorageError("the disk is gone")

    with pytest.raises(urllib.error.HTTPError, match="503"):
        scrape(start(gives=fails))


def test_silent_connections_are_few_and_those_who_ask_are_still_answered(start: Start) -> None:
    server = start()
    with contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(connect(server)) for _ in range(4 * CONNECTIONS_MAX)]
        assert scrape(server) == b"photon_up 1\n"
        assert len(server._open) <= CONNECTIONS_MAX
        assert closed(strangers[0])
        wait_until(lambda: serving() <= CONNECTIONS_MAX + 1)  # who was closed ends after its connection
    wait_until(lambda: not serving())


@pytest.mark.parametrize("secure", [False, True])
def test_one_who_says_little_at_a_time_is_closed_in_time(
    start: Start, secure: bool, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scraping, "CONNECTION_S_MAX", 0.5)
    server = start(authority.issue("node") if secure else None)
    stranger = connect(server)
    began = time.monotonic()
    with stranger, contextlib.suppress(OSError):
        for byte in (b"\x16\x03\x01\x02\x00" if secure else b"GET /") + bytes(5000):
            stranger.sendall(bytes([byte]))
            time.sleep(0.05)  # always before its socket's own timeout
            if not server._open:
                break
    assert not server._open
    assert time.monotonic() - began < 60
    wait_until(lambda: not serving())


@pytest.mark.parametrize(
    "said",
    [
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"\xff" * 200_000,
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST / HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"X: " + b"y" * 70_000 + b"\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 500,
    ],
)
def test_a_strangers_bytes_cost_that_connection_only(
    start: Start, said: bytes, capfd: pytest.CaptureFixture[str]
) -> None:
    server = start()
    with connect(server) as stranger, contextlib.suppress(OSError):
        stranger.sendall(said)
        stranger.shutdown(socket.SHUT_WR)
        closed(stranger)
    assert scrape(server) == b"photon_up 1\n"
    wait_until(lambda: not server._open)
    assert "Traceback" not in capfd.readouterr().err


# -- inside TLS ------------------------------------------------------------------------------------------


def test_with_tls_a_certificate_of_the_ca_is_asked_for(
    start: Start, authority: Authority, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    own = authority.issue("node")
    server = start(own)
    assert scrape(server, own.client_context()) == b"photon_up 1\n"
    with pytest.raises(OSError):
        scrape(server)
    without = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    without.check_hostname, without.verify_mode = False, ssl.CERT_NONE
    theirs = Authority(tmp_path / "theirs").issue("node").client_context()
    theirs.check_hostname, theirs.verify_mode = False, ssl.CERT_NONE
    for stranger in (without, theirs):
        with pytest.raises(OSError):
            scrape(server, stranger)
    wait_until(lambda: not server._open)
    assert scrape(server, own.client_context()) == b"photon_up 1\n"
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == 3
    assert all(line.startswith("closed the connection of 127.0.0.1: ") for line in said)
    assert "TLS, which [tls] asks for, failed: http request" in said[0]
    assert "did not return a certificate" in said[1]


def test_when_the_certificate_ends_is_a_metric(authority: Authority) -> None:
    issued = authority.issue("node", days=5)
    own = load_tls(issued.cert, issued.key, issued.ca)
    authority.issue("node", days=50)  # a newer one, which counts after a restart only
    server = serve_metrics("127.0.0.1:0", "registry", "r0", dict, Network(tls=own))
    try:
        text = scrape(server, own.client_context()).decode()
    finally:
        server.stop()
    (line,) = [x for x in text.splitlines() if x.startswith("photon_certificate_expires_seconds{")]
    assert abs(float(line.split()[-1]) - time.time() - 5 * 86_400) < 600


def test_beyond_loopback_metrics_are_served_with_tls_or_on_request_only() -> None:
    with pytest.raises(UsageError, match="insecure_beyond_loopback"):
        serve_metrics("0.0.0.0:0", "registry", "r0", dict)
    serve_metrics("0.0.0.0:0", "registry", "r0", dict, Network(insecure_beyond_loopback=True)).stop()
