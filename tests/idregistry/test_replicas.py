"""The registry as it runs: three processes, real logs on disk, SIGKILL (paper 2: fault-tolerance)."""

import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from idregistry.client import RegistryClient
from idregistry.rules.commands import Found, Row, encode
from idregistry.rules.directory import DirectoryState
from idregistry.rules.state import ShardState
from idregistry.shard import Answer, Request, Settled, Shard
from photon.core.clock import SystemClock
from photon.core.errors import NoQuorumError, UnavailableError
from photon.core.fates import Registered
from photon.core.settings import Registry
from photon.raft.addresses import Endpoint
from photon.raft.host import RaftHost
from photon.raft.port import RaftLimits
from tests.idregistry.cluster import NODES, Cluster
from tests.idregistry.kit import DUPLICATE, EXPIRED, NOW_US, WON, event_ids, same_times, token
from tests.waiting import wait_until

ABSENT, PRESENT, TOO_OLD, _ = bytes(Registered)

pytestmark = pytest.mark.cluster


@pytest.fixture
def make_cluster(tmp_path: Path) -> Iterator[Callable[..., Cluster]]:
    clusters: list[Cluster] = []

    def make(**settings: Any) -> Cluster:
        clusters.append(Cluster(tmp_path, **settings))
        clusters[-1].start()
        return clusters[-1]

    yield make
    for cluster in clusters:
        cluster.close()


class Joiners:
    """Threads that commit overlapping batches, each with tokens of its own, and note what they won.

    A call that ends with an unknown outcome is called again with its token, as a joiner does.
    """

    def __init__(self, clients: list[RegistryClient], universe: int) -> None:
        self.won: Counter[int] = Counter()
        self.batches = 0
        self._universe = universe
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=self._work, args=(n, client), daemon=True)
            for n, client in enumerate(clients)
        ]
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30.0)
            assert not thread.is_alive()

    def _work(self, worker: int, client: RegistryClient) -> None:
        rng = random.Random(worker)
        batch = 0
        while not self._stop.is_set():
            batch += 1
            numbers = rng.sample(range(self._universe), 200)
            packed = token(f"joiner {worker} batch {batch}")
            while True:
                try:
                    outcomes = client.commit(event_ids(*numbers), same_times(200), packed)
                    break
                except UnavailableError:
                    continue
            with self._lock:
                self.batches += 1
                self.won.update(n for n, outcome in zip(numbers, outcomes, strict=True) if outcome == WON)

    def wait_for(self, batches: int) -> None:
        until = self.batches + batches
        wait_until(lambda: self.batches >= until)


def assert_all_remember(cluster: Cluster, won: Counter[int], shards: int = 1) -> None:
    """Every replica, asked alone, knows exactly the ids that were won."""
    for node in NODES:
        wait_until(
            lambda node=node: (
                sum(cluster.shard_status(node, shard).get("ids", 0) for shard in range(shards)) == len(won)
            )
        )
        alone = cluster.client(nodes=[node])
        assert alone.lookup(event_ids(*won), same_times(len(won))) == bytes([PRESENT] * len(won))


def test_commits_go_on_after_the_leader_is_killed_and_no_id_is_won_twice(make_cluster) -> None:  # type: ignore[no-untyped-def]
    """2: "always available even when there is an outage ..."; 2.1: "automatically elects a new master"."""
    shards = 2
    cluster = make_cluster(shards=shards)
    joiners = Joiners([cluster.client(5.0) for _ in range(4)], universe=40_000)
    joiners.wait_for(30)
    for _ in range(2):
        leader = cluster.leader()
        cluster.kill(leader)
        joiners.wait_for(30)
        cluster.start(leader)
        joiners.wait_for(10)
    joiners.end()
    assert max(joiners.won.values()) == 1
    assert_all_remember(cluster, joiners.won, shards)


@pytest.mark.long
def test_a_leader_that_hangs_is_left_and_when_it_comes_back_it_grants_nothing(make_cluster) -> None:  # type: ignore[no-untyped-def]
    cluster = make_cluster()
    joiners = Joiners([cluster.client(4.0) for _ in range(3)], universe=20_000)
    joiners.wait_for(20)
    hung = cluster.leader()
    cluster.pause(hung)
    joiners.wait_for(20)
    cluster.resume(hung)
    joiners.wait_for(20)
    joiners.end()
    assert max(joiners.won.values()) == 1
    assert_all_remember(cluster, joiners.won)


@pytest.mark.long
def test_after_all_three_were_killed_everything_acknowledged_is_remembered(make_cluster) -> None:  # type: ignore[no-untyped-def]
    cluster = make_cluster()
    joiners = Joiners([cluster.client(5.0) for _ in range(3)], universe=30_000)
    joiners.wait_for(40)
    cluster.kill()
    cluster.start()
    joiners.wait_for(5)
    joiners.end()
    assert max(joiners.won.values()) == 1
    assert_all_remember(cluster, joiners.won)
    numbers = sorted(joiners.won)[:5000]
    again = cluster.client().commit(event_ids(*numbers), same_times(len(numbers)), token("somebody else"))
    assert again == bytes([DUPLICATE] * len(numbers))


@pytest.mark.long
def test_without_a_majority_nothing_is_acknowledged_and_lookups_go_on(make_cluster) -> None:  # type: ignore[no-untyped-def]
    cluster = make_cluster()
    client = cluster.client()
    client.commit(event_ids(1), same_times(1), token("a"))
    left = cluster.leader()
    cluster.kill(*(node for node in NODES if node != left))
    with pytest.raises(NoQuorumError):
        cluster.client(timeout_s=4.0).commit(event_ids(2), same_times(1), token("b"))
    assert client.lookup(event_ids(1, 3), same_times(2)) == bytes([PRESENT, ABSENT])
    cluster.start(*(node for node in NODES if node != left))
    assert client.commit(event_ids(2), same_times(1), token("b")) == bytes([WON])


def test_a_replica_starts_again_from_its_snapshot_and_the_log_behind_it(tmp_path: Path) -> None:
    restored: list[int] = []

    class Watched(ShardState):
        def restore(self, chunks: Iterable[bytes]) -> None:
            super().restore(chunks)
            restored.append(self.ids)

    def run(numbers: range) -> ShardState:
        settings, clock = Registry(), SystemClock()
        limits = RaftLimits(compact_entries=10, tail_entries=2)
        directory = DirectoryState()
        directory.apply(encode(Found(NOW_US, 1, (Row("r0", "127.0.0.1", 1, "127.0.0.1:2"),), bytes(16))))
        host = RaftHost(
            Endpoint("r0", ("127.0.0.1", 0), b""),
            {},
            tmp_path,
            rng=random.Random(1),
            on_fatal=fatal.append,
            limits=limits,
        )
        shard = Shard(0, settings, clock, host.wake, directory, lambda: None)
        shard.state = Watched(0)
        log = host.add_group(0, shard.state, shard.on_tick, ["r0"])
        host.start()
        wait_until(lambda: log.is_leader)
        for number in numbers:
            answers: list[Answer] = []
            shard.offer(
                Request(event_ids(number), same_times(1), token("a"), clock.monotonic() + 10, answers.append)
            )
            wait_until(lambda answers=answers: bool(answers))
            assert answers == [Settled(bytes([WON]))]
        wait_until(lambda: log.status().log_entries < 20)
        host.stop()
        return shard.state

    fatal: list[BaseException] = []
    first = run(range(45))
    second = run(range(40, 50))
    assert not fatal
    assert restored
    assert restored[0] >= 20
    assert (first.ids, second.ids) == (45, 50)


def test_a_terminated_replica_drains_and_exits_well(make_cluster) -> None:  # type: ignore[no-untyped-def]
    cluster = make_cluster()
    joiners = Joiners([cluster.client(5.0)], universe=10_000)
    joiners.wait_for(5)
    assert cluster.terminate(cluster.leader()) == [0]
    joiners.wait_for(5)
    joiners.end()
    assert max(joiners.won.values()) == 1


def test_old_ids_are_collected_on_all_replicas_and_their_events_expire(make_cluster) -> None:  # type: ignore[no-untyped-def]
    """2.3, with the year 2023 as long ago and a retention of a day."""
    cluster = make_cluster(retention_days=1.0)
    client = cluster.client()
    wait_until(lambda: all(cluster.shard_status(node).get("boundary_us") is not None for node in NODES))
    assert client.commit(event_ids(1), same_times(1, NOW_US), token("a")) == bytes([EXPIRED])
    assert client.lookup(event_ids(1), same_times(1, NOW_US)) == bytes([TOO_OLD])
    assert client.commit(event_ids(2), same_times(1, 4 * NOW_US), token("a")) == bytes([WON])
