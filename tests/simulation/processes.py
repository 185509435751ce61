"""Real registry servers under chaos: killed, stopped, cut off; what their clients saw, as a history."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from itertools import permutations
from pathlib import Path
from typing import Any

from idregistry.client import RegistryClient
from photon.core.clock import SystemClock
from photon.core.errors import PhotonError
from photon.core.ids import Token
from tests.ports import free_ports
from tests.simulation.history import Act, Asked, Commit, Ended, History, Lookup, Told
from tests.simulation.proxy import Proxy

ROOT = Path(__file__).parents[2]
NODES = ("a", "b", "c")
_SETTINGS = {"shards": 1, "retention_days": 0}
_TRY_S = 1.5
_IDS = 400
NO_BOUNDARY = -(1 << 63)


class Servers:
    """Three processes, behind a proxy that knows who dials."""

    def __init__(self, directory: Path) -> None:
        ports = free_ports(2 * len(NODES))
        self.grpc = {node: f"127.0.0.1:{port}" for node, port in zip(NODES, ports, strict=False)}
        self._raft = dict(zip(NODES, ports[len(NODES) :], strict=True))
        self._directory = directory
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.proxy = Proxy(self._raft, self._who)

    def start(self, node: str) -> None:
        given = {
            "node": node,
            "grpc": self.grpc,
            "raft_port": self._raft[node],
            "dialed": self.proxy.ports,
            "directory": str(self._directory / node),
            "settings": _SETTINGS,
        }
        command = [sys.executable, "-m", "tests.simulation.registry_process", json.dumps(given)]
        self.processes[node] = subprocess.Popen(command, cwd=ROOT)

    def kill(self, node: str) -> None:
        """SIGKILL, which ends a stopped one too."""
        process = self.processes.pop(node)
        process.kill()
        process.wait()

    def signal(self, node: str, number: int) -> None:
        self.processes[node].send_signal(number)

    def close(self) -> None:
        self.proxy.close()
        for node in list(self.processes):
            self.kill(node)

    def _who(self, port: int) -> str | None:
        """Whose socket has this local port, by what the kernel says."""
        wanted = f"0100007F:{port:04X}"
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        sockets = {f"socket:[{row[9]}]" for row in rows if row[1] == wanted}
        for node, process in list(self.processes.items()):
            if sockets & _links(Path(f"/proc/{process.pid}/fd")):
                return node
        return None


def _links(directory: Path) -> set[str]:
    found = set()
    try:
        for path in directory.iterdir():
            with contextlib.suppress(OSError):
                found.add(os.readlink(path))
    except OSError:
        pass  # the process has ended
    return found


class Chaos:
    """One fault after the other, then all is mended."""

    def __init__(self, servers: Servers, rng: random.Random) -> None:
        self._servers = servers
        self._rng = rng
        self._stopped: set[str] = set()
        self.acts: list[str] = []

    def run(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        acts = [self._kill, self._stop, self._cut, self._cut_one_way, self._reset, self._slow, self._mend]
        while time.monotonic() < end:
            self._rng.choice(acts)()
            time.sleep(self._rng.random() * 0.8)
        self.end()

    def end(self) -> None:
        """Everything is mended."""
        self._servers.proxy.heal()
        for node in list(self._stopped):
            self._go_on(node)
        for node in NODES:
            if node not in self._servers.processes:
                self._servers.start(node)

    def _kill(self) -> None:
        running = list(self._servers.processes)
        if len(running) == len(NODES):
            node = self._rng.choice(running)
            self._stopped.discard(node)
            self.acts.append(f"kill {node}")
            self._servers.kill(node)

    def _stop(self) -> None:
        running = [node for node in self._servers.processes if node not in self._stopped]
        if running:
            node = self._rng.choice(running)
            self.acts.append(f"stop {node}")
            self._servers.signal(node, signal.SIGSTOP)
            self._stopped.add(node)

    def _go_on(self, node: str) -> None:
        self._stopped.discard(node)
        if node in self._servers.processes:
            self._servers.signal(node, signal.SIGCONT)

    def _cut(self) -> None:
        alone = self._rng.choice(NODES)
        self.acts.append(f"cut {alone}")
        for other in NODES:
            if other != alone:
                self._servers.proxy.cut |= {(alone, other), (other, alone)}

    def _cut_one_way(self) -> None:
        link = self._rng.choice(list(permutations(NODES, 2)))
        self.acts.append(f"cut {link[0]}->{link[1]}")
        self._servers.proxy.cut.add(link)

    def _reset(self) -> None:
        one, other = self._rng.sample(NODES, 2)
        self._servers.proxy.reset(one, other)

    def _slow(self) -> None:
        link = self._rng.choice(list(permutations(NODES, 2)))
        self._servers.proxy.delay_s[link] = self._rng.choice((0.0, 0.02, 0.2))

    def _mend(self) -> None:
        self.end()


class Recorder:
    """The clients' side: what they asked and were told, in the order it happened."""

    def __init__(self) -> None:
        self.history: History = []
        self._lock = threading.Lock()
        self._ops = 0

    def asked(self, act: Act, op: int | None = None) -> int:
        with self._lock:
            if op is None:
                op = self._ops = self._ops + 1
            self.history.append(Asked(time.monotonic(), op, act))
            return op

    def told(self, op: int, outcomes: bytes) -> None:
        with self._lock:
            self.history.append(Told(time.monotonic(), op, tuple(outcomes)))


class ClientThread(threading.Thread):
    """Wants ids that others want too; asks until it is told, each time with the same token."""

    def __init__(self, number: int, servers: Servers, recorder: Recorder, over: threading.Event) -> None:
        super().__init__(name=f"client-{number}", daemon=True)
        self._number = number
        self._rng = random.Random(number)
        self._recorder = recorder
        self._over = over
        addresses = self._rng.sample(list(servers.grpc.values()), len(servers.grpc))
        self._client = RegistryClient(addresses, _TRY_S, SystemClock(), self._rng)
        self._tokens = 0
        self.gave_up = threading.Event()

    def run(self) -> None:
        newest = 0
        while not self._over.is_set() and newest < _IDS:
            newest += self._rng.random() < 0.5
            numbers = sorted({max(0, newest - self._rng.randrange(10)) for _ in range(4)})
            ids = tuple(b"id%014d" % number for number in numbers)
            times = tuple(1_760_000_000_000_000 + number for number in numbers)
            if self._rng.random() < 0.2:
                self._look(Lookup(ids, times))
            else:
                self._commit(ids, times)
            time.sleep(0.005)
        self._client.close()

    def _commit(self, ids: tuple[bytes, ...], times: tuple[int, ...]) -> None:
        self._tokens += 1
        token = Token(f"j{self._number}", self._number, self._tokens).pack()
        act = Commit(ids, times, token, self._number)
        op: int | None = None
        for _ in range(2 if self._rng.random() < 0.1 else 1):  # some ask again though they were told
            while True:
                op = self._recorder.asked(act, op)
                try:
                    outcomes = self._client.commit(b"".join(ids), _column(times), token)
                except PhotonError:
                    if self.gave_up.is_set():
                        return
                    continue
                self._recorder.told(op, outcomes)
                break

    def _look(self, act: Lookup) -> None:
        try:
            outcomes = self._client.lookup(b"".join(act.ids), _column(act.times))
        except PhotonError:
            return
        self._recorder.told(self._recorder.asked(act), outcomes)


def _column(times: tuple[int, ...]) -> bytes:
    return b"".join(time_us.to_bytes(8, "little", signed=True) for time_us in times)


def ended(servers: Servers, seconds: float) -> list[Ended]:
    """Each replica's ids and tokens, once all have applied the same."""
    deadline = time.monotonic() + seconds
    client = RegistryClient(list(servers.grpc.values()), 2.0, SystemClock(), random.Random(1))
    try:
        while True:
            applied = {_applied(client, address) for address in servers.grpc.values()}
            if len(applied) == 1 and None not in applied:
                break
            assert time.monotonic() < deadline, f"the replicas do not agree: {applied}"
            time.sleep(0.1)
        return [_end(client, node, address) for node, address in servers.grpc.items()]
    finally:
        client.close()


def _applied(client: RegistryClient, address: str) -> Any:
    try:
        (status,) = client.status(address)["shards"]
    except (PhotonError, ValueError):
        return None
    return status["applied_index"], status["leader"]


def _end(client: RegistryClient, node: str, address: str) -> Ended:
    held: dict[bytes, bytes] = {}
    for piece in client.scan(0, address):
        held.update((piece.ids[16 * at : 16 * at + 16], token) for at, token in enumerate(piece.tokens))
    return Ended(node, held, NO_BOUNDARY, b"")
