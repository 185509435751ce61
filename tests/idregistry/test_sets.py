"""Registry sets: a resharding spreads its shards over them, and each process has those of its set only."""

import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from idregistry.client import RegistryClient
from idregistry.rules.commands import (
    AddSet,
    Adopt,
    DirectoryCommand,
    DropSet,
    Found,
    Gone,
    Propose,
    Rejected,
    Replace,
    RetireSet,
    Row,
    Trim,
    encode,
)
from idregistry.rules.directory import DirectoryState, Proposal, View
from idregistry.rules.sharding import spread
from photon.core.columns import pack_times, split_ids
from photon.core.errors import UnavailableError
from photon.core.ids import Token
from photon.core.settings import MAIN_SET
from tests.idregistry.cluster import NODES, Cluster
from tests.idregistry.kit import FENCED, NOW_US, ROWS, directory, event_ids, row
from tests.idregistry.load import Load
from tests.waiting import wait_until

MakeCluster = Callable[..., Cluster]
SETS = st.sets(st.sampled_from([MAIN_SET, "b", "c", "d"]), min_size=1)
HOMES = st.dictionaries(st.integers(0, 20), st.sampled_from([MAIN_SET, "b", "c", "d", "gone"]))


@given(st.integers(1, 40), SETS, HOMES)
def test_shards_are_spread_evenly_over_the_sets_and_those_that_are_there_stay(
    shards: int, sets: set[str], homes: dict[int, str]
) -> None:
    found = spread(shards, sets, homes)
    assert len(found) == shards
    counts = Counter(found.values())
    assert counts.keys() <= sets
    assert max(counts.values()) - min(counts[name] for name in sets) <= 1
    assert all(found[shard] == homes[shard] for shard in found.keys() & homes.keys())
    new = sorted(found.keys() - homes.keys())
    assert new == [n for n in range(max(new, default=0) + 1) if n not in homes][: len(new)]
    assert spread(shards, sorted(sets, reverse=True), homes) == found


def test_with_one_set_shards_are_numbered_from_0() -> None:
    assert list(spread(6, [MAIN_SET], {0: MAIN_SET, 1: MAIN_SET})) == [0, 1, 2, 3, 4, 5]
    assert list(spread(3, [MAIN_SET], dict.fromkeys(range(6), MAIN_SET))) == [0, 1, 2]


def of_set(name: str, count: int = 3) -> tuple[Row, ...]:
    return tuple(Row(f"{name}{n}", "h", n + 1, f"{name}{n}:1", name) for n in range(count))


class Grown:
    """A registry of one set with two shards, to which others come."""

    def __init__(self) -> None:
        self.state = directory(Found(NOW_US, 2, ROWS, bytes(16)))

    @property
    def view(self) -> View:
        return self.state.view

    def put(self, command: DirectoryCommand) -> object:
        return self.state.apply(encode(command))

    def why(self, command: DirectoryCommand) -> str:
        answer = self.put(command)
        assert isinstance(answer, Rejected)
        return answer.why

    def intervals(self) -> list[tuple[int, ...]]:
        assert self.view.configuration is not None
        return [interval.shards for interval in self.view.configuration.intervals]

    def reshard(self, shards: int) -> tuple[int, ...]:
        configuration = self.view.configuration
        assert configuration is not None
        start_us = max(NOW_US, configuration.newest_us) + 10
        assert isinstance(self.put(Propose(NOW_US, shards, start_us, NOW_US)), Proposal)
        assert self.put(Adopt(NOW_US, configuration.version + 1)) is True
        return self.intervals()[-1]

    def forget(self) -> None:
        """All but the newest interval."""
        configuration = self.view.configuration
        assert configuration is not None
        assert self.put(Trim(NOW_US, configuration.version, configuration.newest_us)) is True


def test_a_resharding_brings_shards_to_a_new_set_and_takes_them_from_one_that_retires() -> None:
    grown = Grown()
    assert grown.put(AddSet(NOW_US, of_set("b"))) is True
    assert grown.put(AddSet(NOW_US, of_set("b"))) is True, "asked again"
    assert grown.intervals() == [(0, 1)], "nothing is moved"
    assert grown.reshard(4) == (0, 1, 2, 3)
    assert grown.view.homes == {0: MAIN_SET, 1: MAIN_SET, 2: "b", 3: "b"}
    assert grown.view.founders[3] == ("b0", "b1", "b2")
    assert grown.put(AddSet(NOW_US, of_set("c"))) is True
    assert grown.reshard(3) == (0, 2, 4)
    assert grown.view.homes[4] == "c"
    assert grown.put(RetireSet(NOW_US, "b")) is True
    assert grown.put(DropSet(NOW_US, "b")) is False, "it has shards"
    assert grown.reshard(4) == (0, 1, 4, 5)
    grown.forget()
    assert grown.view.homes == {0: MAIN_SET, 1: MAIN_SET, 4: "c", 5: "c"}
    assert grown.put(DropSet(NOW_US, "b")) is True
    assert not {"b0", "b1", "b2"} & grown.view.replicas.keys()
    assert "name" in grown.why(AddSet(NOW_US, of_set("b")))
    assert grown.put(AddSet(NOW_US, of_set("e"))) is True
    assert grown.reshard(3) == (0, 2, 4), "a number that was retired is another group"
    assert grown.view.group(2) != DirectoryState().view.group(2)
    copy = DirectoryState()
    copy.prepare(grown.state.freeze())()
    assert copy.view == grown.view


@pytest.mark.parametrize(
    ("rows", "why"),
    [
        ((), "an odd number"),
        (of_set("b", 2), "an odd number"),
        ((*of_set("b", 2), *of_set("c", 1)), "which name one set"),
        (of_set("b", 1) * 3, "each once"),
        ((Row("r0", "h", 1, "x:1", "b"),), "'r0' is or was"),
        ((Row("x", "h", 1, "x:1", MAIN_SET),), "there is a set 'main' already"),
        (of_set("b", 63), "all sets may have 64"),
    ],
)
def test_what_can_not_be_a_set_is_rejected(rows: tuple[Row, ...], why: str) -> None:
    assert why in Grown().why(AddSet(NOW_US, rows))


def test_the_set_of_the_directory_is_never_retired_nor_one_that_is_not_there() -> None:
    grown = Grown()
    assert "there are: none" in grown.why(RetireSet(NOW_US, MAIN_SET))
    grown.put(AddSet(NOW_US, of_set("b")))
    assert "there are: b" in grown.why(RetireSet(NOW_US, "x"))


def test_a_replica_is_replaced_within_its_set() -> None:
    grown = Grown()
    grown.put(AddSet(NOW_US, of_set("b")))
    for _ in range(2):
        assert grown.put(Replace(NOW_US, "b1", row("b9"))) is True
        assert (grown.view.staying("b"), grown.view.staying(MAIN_SET)) == (
            ("b0", "b2", "b9"),
            ("r0", "r1", "r2"),
        )
    assert grown.put(Gone(NOW_US, "b1")) is True
    assert grown.put(Replace(NOW_US, "b1", row("b9"))) is True, "asked again"
    assert grown.view.following == ("b0", "b2", "b9")


# --- real processes


def shards_by_set(client: RegistryClient) -> dict[str, set[int]]:
    answer = client.directory()
    found: dict[str, set[int]] = {replica.set: set() for replica in answer.replicas}
    for shard, home in zip(answer.shards, answer.homes, strict=True):
        found[home].add(shard)
    return found


def assert_held_once(cluster: Cluster, load: Load, where: dict[str, list[str]]) -> None:
    """What was acknowledged is in one shard, on each replica of the shard's set, and on no other process."""
    assert max(load.won.values()) == 1, "an id was won twice"
    client = cluster.client(20.0)
    for name, shards in shards_by_set(client).items():
        for node in where[name]:
            here = {shard["shard"] for shard in cluster.status(node)["shards"]}
            assert here == shards, f"{node} of {name}"
    for number in range(3):

        def held(number: int = number) -> Counter[bytes]:
            return Counter(
                key
                for name, shards in shards_by_set(client).items()
                for shard in shards
                for scanned in client.scan(shard, cluster.grpc[where[name][number]])
                for key in split_ids(scanned.ids)
            )

        wait_until(lambda: held() == Counter(load.won))


def grow(cluster: Cluster, admin: RegistryClient, name: str) -> list[str]:
    """Its replicas, once each knows the directory."""

    def knows(node: str) -> bool:
        with suppress(UnavailableError):
            return bool(cluster.status(node)["version"])
        return False

    nodes = cluster.add_set(name)
    admin.add_set(cluster.rows(*nodes))
    wait_until(lambda: all(map(knows, nodes)))
    return nodes


@pytest.mark.long
def test_commits_go_on_from_one_set_to_three_with_leaders_killed(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(shards=2, clock_skew_s=0.5)
    load = Load([cluster.client(5.0) for _ in range(4)])
    load.wait_for(20)
    admin = cluster.client(20.0)
    where = {MAIN_SET: list(NODES)} | {name: grow(cluster, admin, name) for name in ("b", "c")}
    resharded = admin.reshard(6)
    assert resharded.adopted, resharded.why
    assert {name: len(shards) for name, shards in shards_by_set(admin).items()} == {
        MAIN_SET: 2,
        "b": 2,
        "c": 2,
    }
    of_b = min(shards_by_set(admin)["b"])
    wait_until(lambda: time.time_ns() // 1000 > resharded.start_us)
    load.wait_for(20)
    for shard, nodes in ((0, NODES), (of_b, where["b"])):
        killed = cluster.leader(shard)
        assert killed in nodes
        cluster.kill(killed)
        load.wait_for(20)
        cluster.start(killed)
        load.wait_for(20)
    load.end()
    assert_held_once(cluster, load, where)
    now_us = time.time_ns() // 1000
    for incarnation in range(100, 105):  # once a fence is told, no shard of any set lets it win
        assert admin.fence(incarnation).fenced
        ids = event_ids(*range(incarnation * 1000, incarnation * 1000 + 60))
        token = Token("joiner:1", incarnation, 1).pack()
        assert admin.commit(ids, pack_times([now_us] * 60), token) == bytes([FENCED] * 60)
    held = [
        cluster.shard_status(nodes[0], s)["ids"]
        for n, nodes in where.items()
        for s in shards_by_set(admin)[n]
    ]
    assert min(held) > 0, "every shard had its share"


@pytest.mark.long
@pytest.mark.soak
def test_a_set_that_retires_is_gone_when_what_it_held_is_forgotten(make_cluster: MakeCluster) -> None:
    cluster = make_cluster(shards=1, clock_skew_s=0.5, retention_days=12 / 86_400)
    load = Load([cluster.client(5.0) for _ in range(2)], pause_s=0.02)
    admin = cluster.client(20.0)
    nodes = grow(cluster, admin, "b")
    for shards in (2, 1):
        resharded = admin.reshard(shards)
        assert resharded.adopted, resharded.why
        wait_until(lambda at=resharded.start_us: time.time_ns() // 1000 > at)  # type: ignore[misc]
        load.wait_for(20)
        admin.retire_set("b")
    wait_until(lambda: {replica.name for replica in admin.directory().replicas} == {*NODES}, 60.0)
    cluster.kill(*nodes)
    load.wait_for(20)
    load.end()
    assert max(load.won.values()) == 1
