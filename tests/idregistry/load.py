"""Joiners that commit all the while, and the account of what they were told."""

import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Sequence

from idregistry.client import RegistryClient
from photon.core.columns import pack_times, split_ids
from photon.core.errors import UnavailableError
from photon.core.fates import Committed, Registered
from photon.core.ids import Token
from photon.core.settings import BATCH_IDS_MAX
from tests.idregistry.cluster import Cluster
from tests.idregistry.kit import event_id
from tests.waiting import wait_until

BATCH = 200


class Load:
    """Threads that commit events of the present, each id by two of them, with tokens of their own.

    A call that ends with an unknown outcome is called again with its token, as a joiner does.
    """

    def __init__(self, clients: Sequence[RegistryClient], pause_s: float = 0.0) -> None:
        self.won: Counter[bytes] = Counter()
        self.told: dict[bytes, set[Committed]] = defaultdict(set)
        self.times: dict[bytes, int] = {}
        self.batches = 0
        self.slowest_s = 0.0
        """The longest that one batch took, with all its retries."""
        self._pause_s = pause_s
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._failed: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._work, args=(n, client), daemon=True)
            for n, client in enumerate(clients)
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(60.0)
            assert not thread.is_alive(), "a joiner hangs"
        assert not self._failed, self._failed

    def wait_for(self, batches: int, timeout_s: float = 30.0) -> None:
        until = self.batches + batches
        wait_until(lambda: self.batches >= until or bool(self._failed), timeout_s)
        assert not self._failed, self._failed

    def _work(self, worker: int, client: RegistryClient) -> None:
        try:
            batch = 0
            while not self._stop.wait(self._pause_s):
                batch += 1
                self._commit(worker, batch, client)
        except BaseException as error:
            self._failed.append(error)
            raise

    def _commit(self, worker: int, batch: int, client: RegistryClient) -> None:
        # Workers 2n and 2n + 1 want the same ids, each with the time at which it saw the event.
        rng = random.Random(worker // 2 * 1_000_003 + batch)
        keys = [event_id(rng.getrandbits(48)) for _ in range(BATCH)]
        with self._lock:
            now_us = time.time_ns() // 1000
            times = [self.times.setdefault(key, now_us) for key in keys]
        token = Token("127.0.0.1:1", worker, batch).pack()
        began = time.monotonic()
        while True:
            try:
                outcomes = client.commit(b"".join(keys), pack_times(times), token)
                break
            except UnavailableError:
                if self._stop.is_set() and time.monotonic() - began > 45.0:
                    raise
        with self._lock:
            self.batches += 1
            self.slowest_s = max(self.slowest_s, time.monotonic() - began)
            for key, outcome in zip(keys, outcomes, strict=True):
                self.told[key].add(Committed(outcome))
                if outcome == Committed.WON:
                    self.won[key] += 1


def assert_sound(cluster: Cluster, load: Load, shards: int) -> None:
    """What was acknowledged is there, on every replica, in one shard, and nothing was won twice."""
    assert max(load.won.values()) == 1, "an id was won twice"
    assert set(load.told) == set(load.won), "an id has no winner though all were answered"
    for node in cluster.running:
        client = cluster.client(nodes=[node])
        wait_until(lambda node=node: held(client, node, cluster, shards)[0] == set(load.won))  # type: ignore[misc]
        found, total = held(client, node, cluster, shards)
        assert len(found) == total, "an id is in two shards"
        some = list(load.won)[:BATCH_IDS_MAX]
        times = pack_times([load.times[key] for key in some])
        assert set(client.lookup(b"".join(some), times)) == {Registered.PRESENT}


def held(client: RegistryClient, node: str, cluster: Cluster, shards: int) -> tuple[set[bytes], int]:
    """(ids, their number with repetitions) of all shards of one replica."""
    found: set[bytes] = set()
    total = 0
    for shard in range(shards):
        try:
            for scanned in client.scan(shard, cluster.grpc[node]):
                keys = split_ids(scanned.ids)
                found.update(keys)
                total += len(keys)
        except UnavailableError:
            return set(), -1
    return found, total
