"""The joiner with the real IdRegistry (three replicas), the real EventStore and real logs, all over gRPC."""

import contextlib
import json
import time
from collections import Counter

import numpy as np
import pytest

from eventstore.client import EventStoreClient
from eventstore.server import EventStoreServer
from joiner.client import ForeignColumns
from photon.core.clock import SystemClock
from photon.core.columns import join_lines, pack_times, split_lines
from photon.core.errors import OverloadedError
from photon.core.fates import Joined
from photon.core.ids import IdPacker
from photon.core.settings import Settings, parse_settings
from tests.idregistry.cluster import Cluster
from tests.waiting import wait_until

pytestmark = pytest.mark.cluster

QUERIES = 3_000


def query(number):
    return json.dumps({"id": f"query-{number}", "ts_us": number, "terms": "words"}).encode()


def click(number):
    return json.dumps({"id": f"click-{number}", "primary_id": f"query-{number}", "ts_us": number}).encode()


def clicks(numbers):
    packer = IdPacker()
    count = len(numbers)
    return ForeignColumns(
        packer.pack([f"click-{n}" for n in numbers]),
        packer.pack([f"query-{n}" for n in numbers]),
        pack_times(list(numbers)),
        join_lines([click(n) for n in numbers]),
        np.zeros(count, "<u4").tobytes(),
        pack_times([time.time_ns() // 1_000] * count),
    )


def joined_numbers(root):
    lines = [line for log in (root / "joined").rglob("*.jsonl") for line in split_lines(log.read_bytes())]
    for line in lines[:50]:
        number = json.loads(line)["ts_us"]
        assert line == click(number)[:-1] + b',"primary":' + query(number) + b"}"
    return Counter(json.loads(line)["ts_us"] for line in lines)


@pytest.fixture
def cluster(tmp_path):
    (tmp_path / "registry").mkdir()
    cluster = Cluster(tmp_path / "registry")
    cluster.start()
    yield cluster
    cluster.close()


@pytest.fixture
def store(tmp_path):
    (tmp_path / "queries").mkdir()
    (tmp_path / "queries" / "q.jsonl").write_bytes(join_lines([query(n) for n in range(QUERIES)]))
    server = EventStoreServer(
        Settings(), "127.0.0.1:0", tmp_path / "store", [str(tmp_path / "queries")], tmp_path / "letters",
        SystemClock(), drain=True,
    )  # fmt: skip
    server.start()
    client = EventStoreClient(server.listen, 10.0)
    wait_until(lambda: client.status()["caught_up"])
    yield client
    client.close()
    server.stop()


def sent(client, batch):
    """As a dispatcher sends it: again, where a joiner without a lease was not even sent it."""
    answers = []

    def is_answered():
        with contextlib.suppress(OverloadedError):
            answers.append(client.join(batch))
        return answers

    wait_until(is_answered)
    return answers[0]


def test_clicks_are_joined_once_though_the_registry_loses_its_leader_and_joiners_compete(
    cluster, serve, connect, tmp_path
):
    settings = parse_settings({"registry": {"request_timeout_s": 10.0}})
    servers = [
        serve(
            f"joiner-{name}",
            settings=settings,
            datacenter=name,
            output_root=tmp_path,
            registry=cluster.client(timeout_s=10.0),
            drain=True,
        )
        for name in ("east", "west")
    ]
    clients = [connect(server) for server in servers]
    cluster.leader()
    told = Counter()
    for first in range(0, QUERIES, 500):
        if first == 1_500:
            cluster.kill(cluster.leader())
        batch = clicks([*range(first, first + 500), QUERIES + first])
        for client in clients:
            told.update(sent(client, batch).outcomes)
    for server in servers:
        assert server.stop(20)
    assert joined_numbers(tmp_path) == Counter(range(QUERIES))
    assert told[Joined.JOINED] == told[Joined.DUPLICATE] == QUERIES
    assert told[Joined.UNJOINABLE] == 2 * QUERIES // 500
