"""Real registry servers under chaos: killed, stopped, cut off; what their clients saw, as a history."""

import contextlib
import random
import threading
import time
from itertools import permutations
from pathlib import Path

import psutil

from photon.core.columns import pack_times
from photon.core.errors import PhotonError
from photon.core.ids import Token
from tests.idregistry.cluster import NODES, Cluster
from tests.idregistry.kit import told
from tests.simulation.history import Act, Asked, Commit, Ended, History, Lookup, Told
from tests.simulation.proxy import Proxy
from tests.waiting import wait_until

_TRY_S = 1.5
_IDS = 400
NO_BOUNDARY = -(1 << 63)


class Servers(Cluster):
    """Three processes, behind a proxy that knows who dials."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, retention_days=0)
        self.proxy = Proxy(self.raft, self._who)
        self.dialed = self.proxy.ports

    def close(self) -> None:
        self.proxy.close()
        super().close()

    def _who(self, port: int) -> str | None:
        """Whose socket has this local port, by what the kernel says."""
        for node in self.running:
            with contextlib.suppress(psutil.Error):
                sockets = psutil.Process(self.process(node).pid).net_connections("tcp4")
                if any(one.laddr.port == port for one in sockets):
                    return str(node)
        return None


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
        self._servers.resume(*self._stopped)
        self._stopped.clear()
        for node in NODES:
            if node not in self._servers.running:
                self._servers.start(node)

    def _kill(self) -> None:
        running = self._servers.running
        if len(running) == len(NODES):
            node = self._rng.choice(running)
            self._stopped.discard(node)
            self.acts.append(f"kill {node}")
            self._servers.kill(node)

    def _stop(self) -> None:
        running = [node for node in self._servers.running if node not in self._stopped]
        if running:
            node = self._rng.choice(running)
            self.acts.append(f"stop {node}")
            self._servers.pause(node)
            self._stopped.add(node)

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
        self._client = servers.client(_TRY_S, self._rng.sample(NODES, len(NODES)))
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

    def _commit(self, ids: tuple[bytes, ...], times: tuple[int, ...]) -> None:
        self._tokens += 1
        token = Token(f"j{self._number}", self._number, self._tokens).pack()
        act = Commit(ids, times, token, self._number)
        op: int | None = None
        for _ in range(2 if self._rng.random() < 0.1 else 1):  # some ask again though they were told
            while True:
                op = self._recorder.asked(act, op)
                try:
                    outcomes = self._client.commit(b"".join(ids), pack_times(times), token)
                except PhotonError:
                    if self.gave_up.is_set():
                        return
                    continue
                self._recorder.told(op, outcomes)
                break

    def _look(self, act: Lookup) -> None:
        try:
            outcomes = self._client.lookup(b"".join(act.ids), pack_times(act.times))
        except PhotonError:
            return
        self._recorder.told(self._recorder.asked(act), outcomes)


def ended(servers: Servers, seconds: float) -> list[Ended]:
    """Each replica's ids and tokens, once all have applied the same."""

    def all_agree() -> bool:
        seen = [servers.shard_status(node) for node in NODES]
        return all(seen) and len({(one["applied_index"], one["leader"]) for one in seen}) == 1

    wait_until(all_agree, seconds)
    client = servers.client()
    return [Ended(node, told(client.scan(0, servers.grpc[node])), NO_BOUNDARY, b"") for node in NODES]
