"""Leases, fences, release and scan (paper 3.3.3) on real replica processes."""

import random
import threading
import time
from collections.abc import Callable

import pytest

from idregistry.rules.commands import Standing
from photon.core.columns import split_ids
from photon.core.errors import FencedError
from photon.core.fates import Registered, Released
from photon.core.ids import Token
from tests.idregistry.cluster import NODES, Cluster
from tests.idregistry.kit import FENCED, WON, event_ids, same_times
from tests.idregistry.load import Load, held
from tests.waiting import wait_until

pytestmark = pytest.mark.cluster

ABSENT, PRESENT, _, _ = bytes(Registered)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    """One for all: each test has ids and incarnations of its own."""
    made = Cluster(tmp_path_factory.mktemp("cluster"), shards=2, clock_skew_s=0.5)
    made.start()
    yield made
    made.close()


def test_what_a_dead_joiner_registered_is_released_once_it_is_fenced_and_not_before(cluster: Cluster) -> None:
    """3.3.3: "we delete the missing event from the IdRegistry, and re-inject the event"."""
    client = cluster.client()
    dead, alive = Token("joiner:1", 7, 1).pack(), Token("joiner:2", 8, 1).pack()
    ids, times = event_ids(*range(40)), same_times(40)
    client.keep_alive("joiner:1", 7, 1.0)
    asked = time.monotonic()
    assert client.commit(ids, times, dead) == bytes([WON] * 40)
    assert client.release(ids, times, [dead], [40]) == bytes([Released.NOT_FENCED] * 40)

    (seen,) = client.incarnations([7])
    answer = client.fence(7)
    assert not answer.fenced
    assert 0 < answer.expires_in_s <= seen.expires_in_s <= 1.1
    killed = cluster.leader(0)
    cluster.kill(killed)  # a new leader knows of the lease, and gives it its full time
    while not (answer := client.fence(7)).fenced:
        time.sleep(0.02)
    assert time.monotonic() - asked >= 1.0, "fenced while the joiner could believe in its lease"
    assert client.incarnations([8, 7]) == [Standing(False, 0.0), Standing(True, 0.0)]
    assert client.incarnations([]) == []
    with pytest.raises(FencedError):
        client.keep_alive("joiner:1", 7, 1.0)

    wait_until(lambda: client.release(ids[:16], times[:8], [dead], [1]) == bytes([Released.RELEASED]))
    wait_until(lambda: client.release(ids[:32], times[:16], [dead], [2])[1:] != bytes([Released.NOT_FENCED]))
    released = client.release(ids, times, [alive, dead], [10, 30])
    assert released[:10] == bytes([Released.NOT_FENCED] * 10), "the other joiner lives"
    assert set(released[10:]) <= {Released.RELEASED, Released.NOT_FENCED}
    wait_until(lambda: set(client.release(ids, times, [dead], [40])) == {Released.ABSENT})
    assert client.commit(ids, times, dead) == bytes([FENCED] * 40)
    assert client.commit(ids, times, alive) == bytes([WON] * 40)
    cluster.start(killed)


def test_a_scan_tells_ids_times_and_tokens_while_commits_go_on(cluster: Cluster) -> None:
    client = cluster.client()
    token = Token("joiner:1", 21, 1).pack()
    mine = event_ids(*range(10_000, 11_000))
    client.commit(mine, same_times(1000), token)
    load = Load([cluster.client() for _ in range(2)])
    load.wait_for(5)
    leader = cluster.leader(0)
    client = cluster.client()  # the first may have met it while it started, and leave it alone for now
    for fresh in (False, True, True):
        found = {}
        before = set(load.won)
        for scanned in client.scan(0, None if fresh else cluster.grpc[leader], fresh=fresh):
            assert len(scanned.times) == len(scanned.ids) // 2
            found |= dict(zip(split_ids(scanned.ids), scanned.tokens, strict=True))
        share = [key for key in split_ids(mine) if key in found]
        assert 300 < len(share) < 700, "about half of the ids are in one of two shards"
        assert {found[key] for key in share} == {token}
        if fresh:
            configuration = client.configuration()
            of_shard = [key for key in before if configuration.shard_of(key, same_times(1))[0] == 0]
            assert set(of_shard) <= found.keys(), "acknowledged before, and not in a fresh scan"
    load.end()
    assert load.batches > 5
    wait_until(lambda: held(client, leader, cluster, 2)[0] >= load.won.keys() | set(split_ids(mine)))


@pytest.mark.long
def test_nobody_is_fenced_who_may_believe_in_its_lease(cluster: Cluster) -> None:
    """A joiner reckons its lease from before it asked for it; it renews in time, or too late."""
    client = cluster.client()
    lease_s = 0.6
    rng = random.Random(1)
    stop = threading.Event()
    until_s: dict[int, float] = {}

    def renew(incarnation: int) -> None:
        while not stop.is_set():
            asked_s = time.monotonic()
            try:
                client.keep_alive("joiner:1", incarnation, lease_s)
            except FencedError:
                return
            until_s[incarnation] = asked_s + lease_s
            stop.wait(rng.uniform(0.0, 1.3 * lease_s))

    threads = [threading.Thread(target=renew, args=(incarnation,)) for incarnation in range(30, 36)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(until_s) == len(threads))
    fenced = set()
    end_s = time.monotonic() + 5.0
    while time.monotonic() < end_s and len(fenced) < len(threads):
        for incarnation in until_s.keys() - fenced:
            if client.fence(incarnation).fenced:
                assert time.monotonic() >= until_s[incarnation], "it may be writing"
                fenced.add(incarnation)
    stop.set()
    for thread in threads:
        thread.join()
    assert fenced, "those that came too late"


def test_every_replica_tells_of_a_joiner_that_is_gone_also_after_its_restart(
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = make_cluster(shards=2, forget_after_s=0.0)
    client = cluster.client()

    def gone() -> list[list[dict[str, object]]]:
        return [cluster.status(node)["gone_joiners"] for node in NODES]

    cluster.leader(0), cluster.leader(1)
    client.keep_alive("j:1", 7, 1.0)
    client.keep_alive("j:2", 8, 600.0)
    ids, times = event_ids(*range(40)), same_times(40)
    assert client.commit(ids[:480], times[:240], Token("j:1", 7, 1).pack()) == bytes([WON] * 30)
    assert client.commit(ids[480:], times[240:], Token("j:2", 8, 1).pack()) == bytes([WON] * 10)
    told = [{"address": "j:1", "events": 30}]
    wait_until(lambda: gone() == [told] * 3)
    killed = cluster.leader(0)
    cluster.kill(killed)
    cluster.start(killed)
    wait_until(lambda: cluster.shard_status(killed) != {})
    wait_until(lambda: gone() == [told] * 3)
    client.dismiss([7, 8])
    wait_until(lambda: gone() == [[]] * 3)
    assert client.incarnations([8])[0].expires_in_s > 0, "whose lease runs keeps it"
