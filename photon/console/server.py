"""Serves the console from a thread of a process that has other things to do, or as one of its own."""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import uvicorn

from photon.cluster.dead_letters import FATES, REPLAYED, Filter, count_letters, replay_in
from photon.cluster.statuses import StatusReader
from photon.cluster.topology import Topology
from photon.console.app import Audit, make_app
from photon.console.index import JoinedIndex
from photon.console.pages import Act, Beside, Pages
from photon.core.addresses import split_address
from photon.core.clock import SystemClock
from photon.core.errors import AddressInUseError, PhotonError, UsageError
from photon.core.fates import Fate

_CONNECTIONS_MAX: Final = 256
_IDLE_S: Final = 10
_LOOPBACK: Final = ("127.0.0.1", "localhost", "[::1]")


class Console:
    """From `start` to `stop`. `pages.add` is to be told of samples, or `ask` is true and it asks itself."""

    def __init__(
        self,
        topology: Topology,
        work: Path,
        listen: str,
        or_any: bool = False,
        ask: bool = True,
        beside: Beside | None = None,
        notice: Callable[[str], None] = lambda _: None,
    ) -> None:
        """`work`: where its index and its audit log are; `or_any`: another port will do, if that is taken.
        AddressInUseError, SettingsError, UsageError."""
        host, port = split_address(listen, "--listen")
        tls = topology.settings.tls
        if host not in ("127.0.0.1", "localhost", "::1") and not tls.ca:
            raise UsageError(
                f"--listen {listen}: without [tls] a console serves this machine only; give "
                f"127.0.0.1:{port}, and reach it by ssh -L"
            )
        self._notice = notice
        self._index = _index_of(topology, work, notice)
        self._closing = threading.Event()
        beside = beside or Beside()
        self.pages = Pages(topology, self._index, beside)
        app = make_app(self.pages, [*_LOOPBACK, host], beside.acts, Audit(work / "console.jsonl"))
        config = uvicorn.Config(
            app,
            log_level="critical",
            access_log=False,
            lifespan="off",
            server_header=False,
            limit_concurrency=_CONNECTIONS_MAX,
            timeout_keep_alive=_IDLE_S,
            timeout_graceful_shutdown=1,
            ssl_certfile=tls.cert or None,
            ssl_keyfile=tls.key or None,
            ssl_ca_certs=tls.ca or None,
            ssl_cert_reqs=ssl.CERT_REQUIRED if tls.ca else ssl.CERT_NONE,
        )
        self._server = uvicorn.Server(config)
        self._socket = _bound(host, port, listen, or_any)
        port = self._socket.getsockname()[1]
        self.url = f"{'https' if tls.ca else 'http'}://{host}:{port}/"
        self._threads = [threading.Thread(target=self._serve, name="console", daemon=True)]
        if ask:
            self._threads.append(threading.Thread(target=self._ask, name="console-ask", daemon=True))
        self._topology = topology

    def start(self) -> None:
        if self._index is not None:
            self._index.start()
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Let `wait` return. Any thread."""
        self._closing.set()

    def stop(self) -> None:
        self._closing.set()
        self._server.should_exit = True
        for thread in self._threads:
            thread.join()
        self._socket.close()
        if self._index is not None:
            self._index.stop()

    def wait(self) -> None:
        """Until it is told to stop."""
        self._closing.wait()

    def _serve(self) -> None:
        try:
            self._server.run(sockets=[self._socket])
        except Exception as error:  # the run goes on without it
            self._notice(f"the console has ended: {error!r}")

    def _ask(self) -> None:
        with contextlib.closing(StatusReader(self._topology)) as reader:
            while not self._closing.is_set():
                began = time.monotonic()
                self.pages.add(reader.read(), reader.why_silent)
                self._closing.wait(max(0.0, 1.0 - (time.monotonic() - began)))


def _bound(host: str, port: int, listen: str, or_any: bool) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        try:
            bound.bind((host, port))
        except OSError:
            if not or_any:
                raise
            bound.bind((host, 0))
        bound.listen()  # from now on nobody else gets the port
    except OSError as error:
        bound.close()
        raise AddressInUseError(f"--listen {listen}: {error.strerror}; name another one") from error
    return bound


def _index_of(topology: Topology, work: Path, notice: Callable[[str], None]) -> JoinedIndex | None:
    """None where the output is not here, or another console has the index."""
    joined = Path(topology.output) / "joined"
    if not joined.is_dir():
        return None
    try:
        return JoinedIndex(topology.settings, joined, work / "console", SystemClock())
    except PhotonError as error:
        notice(f"the console looks through the joined logs, for it has no index of them: {error}")
        return None


def replaying(topology: Topology, notice: Callable[[str], None]) -> Act:
    """{datacenter, fate, reason, dry_run, rate} -> {replayed}, as `photon dead-letters replay` does; with a
    `rate` of events a second it goes on behind the answer."""

    def act(asked: Mapping[str, Any]) -> Mapping[str, Any]:
        datacenter, fate, reason = (asked.get(key, "") for key in ("datacenter", "fate", "reason"))
        names = [pipeline.datacenter for pipeline in topology.pipelines]
        if datacenter not in names or not isinstance(reason, str) or (fate and fate not in FATES):
            raise UsageError(f"name a datacenter ({', '.join(names)}), and a fate ({', '.join(FATES)})")
        rate = asked.get("rate")
        if rate is not None and (not isinstance(rate, int) or rate < 1):
            raise UsageError("a rate is a whole number of events a second, 1 or more")
        chosen = Filter([Fate(fate)] if fate else REPLAYED, reason)
        directory = topology.dead_letters_directory(datacenter)
        rows = [row for row in count_letters(directory, chosen) if row["log"] == "foreign"]
        would = sum(row["count"] - row["replayed"] for row in rows)
        if asked.get("dry_run"):
            return {"would_replay": would}
        parts = replay_in(topology, directory, chosen, rate=rate)
        if rate is None or would <= rate:
            return {"replayed": sum(parts)}
        next(parts)  # who can't replay says so

        def go_on() -> None:
            try:
                notice(f"dead letters of {datacenter}: {rate + sum(parts):,} were replayed")
            except PhotonError as error:
                notice(f"dead letters of {datacenter}: a replay has stopped: {error}")

        threading.Thread(target=go_on, name="replay", daemon=True).start()
        return {"replayed": would, "rate": rate}

    return act
