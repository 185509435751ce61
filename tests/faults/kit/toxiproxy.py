"""A real toxiproxy server in a process of its own, driven by toxiproxy-python.

What version 0.1.1 of that package leaves open against server 2.12 is closed here: the server that it talks to
is one for the whole process (so it is set anew before each call), requests go through the proxies that the
environment names, an answer of status 500 is taken for success (so each change is read back), and a request
has no end but the test's own.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final

import pytest
import requests
import toxiproxy  # type: ignore[import-untyped]
import toxiproxy.exceptions  # type: ignore[import-untyped]

from tests.ports import free_ports

START_S: Final = 30.0
STOP_S: Final = 10.0
_PLACE: Final = Path(__file__).parents[3] / ".toxiproxy" / "bin" / "server"
_RECEIVED: Final = re.compile(
    r'^toxiproxy_proxy_received_bytes_total\{.*proxy="([^"]+)".*\} ([0-9.e+]+)$', re.MULTILINE
)
_DIES_WITH_US: Final = """
import ctypes, os, signal, sys
ctypes.CDLL(None).prctl(1, signal.SIGKILL)
os.execv(sys.argv[1], sys.argv[1:])
"""
_package_lock: Final = threading.RLock()
"""The package keeps the server's address in a class."""


class ToxiproxyError(Exception):
    """There is no server, or it did not do what it was told."""


def toxiproxy_binary() -> Path | None:
    """Where the server's program is on this machine. ToxiproxyError: it is not where it is named."""
    named = os.environ.get("PHOTON_TOXIPROXY")
    if named and not Path(named).is_file():
        raise ToxiproxyError(f"PHOTON_TOXIPROXY names {named}, which is no file: build it, or unset that")
    found = named or shutil.which("toxiproxy-server") or (str(_PLACE) if _PLACE.exists() else None)
    return None if found is None else Path(found)


def need_toxiproxy() -> Path:
    """The program; without it the test is skipped, in CI it fails. ToxiproxyError: in no test."""
    binary = toxiproxy_binary()
    if binary is not None:
        return binary
    why = "no toxiproxy server: `make toxiproxy` builds it with Go, or PHOTON_TOXIPROXY names it"
    if "PYTEST_CURRENT_TEST" not in os.environ:
        raise ToxiproxyError(why)
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)


class ToxiproxyServer:
    """Started at once. `close` stops it, and with it all connections through it."""

    def __init__(self, binary: Path) -> None:
        (self.port,) = free_ports(1)
        self._client = toxiproxy.Toxiproxy()
        options = ("-host", "127.0.0.1", "-port", str(self.port), "-proxy-metrics")
        # Linux kills it when this process ends, however it does.
        self._process = subprocess.Popen(
            [sys.executable, "-S", "-c", _DIES_WITH_US, binary, *options],
            env={**os.environ, "LOG_LEVEL": "error"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + START_S
        while not self._runs():
            if self._process.poll() is not None or time.monotonic() > deadline:
                self.close()
                raise ToxiproxyError(f"{binary} does not answer on port {self.port}")
            time.sleep(0.02)

    def create(
        self, upstreams: Mapping[str, str], avoid: Collection[int] = (), listens: Sequence[str] = ()
    ) -> dict[str, str]:
        """Proxy's name -> upstream address; -> name -> the address it listens on, if not given in `listens`.

        Ports are below those that the kernel gives to outgoing connections: none of these takes the port of a
        proxy that is down. None is in `avoid`, where others will listen.
        """
        if not listens:
            free = [port for port in free_ports(len(upstreams) + len(avoid)) if port not in avoid]
            listens = [f"127.0.0.1:{port}" for port in free]
        with self._bound():
            for (name, upstream), listen in zip(upstreams.items(), listens, strict=False):
                try:
                    proxy = self._client.create(upstream, name, listen=listen, enabled=True)
                except KeyError as error:  # the answer is an error's, which the package takes for a proxy
                    raise ToxiproxyError(f"proxy {name} was not made, listening on {listen}") from error
                if proxy.listen != listen or not proxy.enabled:
                    raise ToxiproxyError(f"proxy {name} listens on {proxy.listen}, not on {listen}")
        return dict(zip(upstreams, listens, strict=False))

    def add(self, name: str, kind: str, stream: str, attributes: Mapping[str, int], toxicity: float) -> None:
        """A toxic on one stream of a proxy, in place of one of this kind that is there."""
        toxic = f"{kind}_{stream}"
        with self._bound():
            proxy = self._proxy(name)
            there = proxy.toxics()
            if toxic in there:
                proxy.destroy_toxic(toxic)
            proxy.add_toxic(
                type=kind, stream=stream, name=toxic, toxicity=toxicity, attributes=dict(attributes)
            )
            found = proxy.get_toxic(toxic)
            if found is None or any(found.attributes.get(key) != at for key, at in attributes.items()):
                raise ToxiproxyError(f"proxy {name} did not take {toxic} with {dict(attributes)}")

    def clear(self, name: str, kinds: tuple[str, ...] = ()) -> None:
        """Take toxics (of these kinds; none: all) off a proxy, and let it be up again."""
        with self._bound():
            proxy = self._proxy(name)
            for toxic in proxy.toxics().values():
                if not kinds or toxic.type in kinds:
                    with suppress(toxiproxy.exceptions.NotFound):
                        proxy.destroy_toxic(toxic.name)
        if not kinds or "down" in kinds:
            self.enable(name, True)

    def enable(self, name: str, enabled: bool) -> None:
        """One that is down has no connections, and refuses new ones."""
        with self._bound():
            proxy = self._proxy(name)
            if proxy.enabled == enabled:
                return
            if enabled:
                proxy.enable()
            else:
                proxy.disable()
            if self._proxy(name).enabled != enabled:
                raise ToxiproxyError(f"proxy {name} did not go {'up' if enabled else 'down'}")

    def reset(self) -> None:
        """All proxies up, without toxics."""
        with self._bound():
            if not self._client.reset():
                raise ToxiproxyError("the server did not reset its proxies")

    def freeze(self) -> None:
        """SIGSTOP: bytes wait in it, and in sockets. Nothing else may be asked of it until `thaw`."""
        self._process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self._process.send_signal(signal.SIGCONT)

    def received_bytes(self) -> Counter[str]:
        """By proxy, of both directions. A connection counts when it has ended."""
        counts: Counter[str] = Counter()
        with requests.Session() as session:
            session.trust_env = False
            text = session.get(f"http://127.0.0.1:{self.port}/metrics", timeout=START_S).text
        for name, value in _RECEIVED.findall(text):
            counts[name] += int(float(value))
        return counts

    def close(self) -> None:
        self.thaw()
        self._process.terminate()
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _runs(self) -> bool:
        with self._bound():
            return bool(self._client.running())

    def _proxy(self, name: str) -> Any:
        proxy = self._client.get_proxy(name)
        if proxy is None:
            raise ToxiproxyError(f"there is no proxy {name}")
        return proxy

    @contextmanager
    def _bound(self) -> Iterator[None]:
        """Let the package talk to this server, and straight."""
        with _package_lock, _no_proxy():
            self._client.update_api_consumer("127.0.0.1", self.port)
            yield


@contextmanager
def _no_proxy() -> Iterator[None]:
    before = os.environ.get("NO_PROXY")
    os.environ["NO_PROXY"] = "127.0.0.1"
    try:
        yield
    finally:
        if before is None:
            del os.environ["NO_PROXY"]
        else:
            os.environ["NO_PROXY"] = before
