"""Who makes other ids of the same events than the joiner is refused, and nothing is done."""

import random

import grpc
import pytest

from joiner.client import JoinerClient
from joiner.server import JoinerServer
from photon.core.clock import SystemClock
from photon.core.errors import OverloadedError, SettingsMismatchError
from photon.core.fates import Joined
from photon.core.settings import identity_digest, parse_settings
from photon.rpc import joiner_pb2, joiner_pb2_grpc
from photon.rpc.network import LOOPBACK
from tests.joiner.fakes import IDENTITY, batch_of, lines_of, output_lines, settings

OTHERS = {
    "another key": identity_digest(parse_settings({"ids": {"key": "west"}})),
    "other fields": identity_digest(parse_settings({"foreign": {"id": "event"}})),
    "none": b"",
    "a part of it": IDENTITY[:-1],
}


@pytest.fixture
def server(tmp_path, registry, store):
    made = JoinerServer(
        settings(),
        "joiner",
        "east",
        "127.0.0.1:0",
        tmp_path / "state",
        tmp_path / "out",
        registry,
        store,
        SystemClock(),
        random.Random(),
    )
    yield made
    made.stop(1)


@pytest.fixture
def connect(server):
    clients = []

    def client_of(identity):
        clients.append(JoinerClient([server.listen], 20.0, identity=identity))
        return clients[-1]

    yield client_of
    for client in clients:
        client.close()


@pytest.mark.parametrize("theirs", OTHERS.values(), ids=OTHERS)
def test_who_makes_other_ids_is_told_so_and_nothing_is_done(
    server, connect, registry, store, tmp_path, theirs
):
    server.start()
    stranger = connect(theirs)
    for call in (stranger.agree, lambda: stranger.join(batch_of(["a", "b"]))):
        with pytest.raises(SettingsMismatchError, match=r"ids\.key and all of \[foreign\]") as told:
            call()
        assert server.listen in str(told.value) and "photon.toml" in str(told.value)
        assert "\n" not in str(told.value)
    assert registry.commits == 0 and not registry.tokens and not store.timeouts_s
    assert not output_lines(tmp_path)
    own = connect(IDENTITY)
    own.agree()
    assert own.join(batch_of(["a"])).outcomes == bytes([Joined.JOINED])
    assert output_lines(tmp_path) == lines_of("a")


def test_on_the_wire_it_is_a_status_of_its_own(server):
    server.start()
    with LOOPBACK.open(server.listen) as channel, pytest.raises(grpc.RpcError) as refused:
        joiner_pb2_grpc.JoinerStub(channel).Join(joiner_pb2.JoinRequest(), timeout=20)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def test_a_joiner_without_a_lease_tells_nobody_to_end_for_its_own_settings_may_be_the_wrong_ones(
    server, connect, registry
):
    registry.silent_to_leases = True
    server.start()
    batch = joiner_pb2.JoinRequest(identity=OTHERS["another key"])
    with LOOPBACK.open(server.listen) as channel:  # a JoinerClient would leave out one that is not healthy
        for request in (batch, joiner_pb2.JoinRequest(identity=IDENTITY)):
            with pytest.raises(grpc.RpcError) as refused:
                joiner_pb2_grpc.JoinerStub(channel).Join(request, timeout=20)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "no lease" in refused.value.details()
    with pytest.raises(OverloadedError):
        connect(OTHERS["another key"]).agree()


def test_agreeing_joins_nothing_and_asks_no_event_store(server, connect, store, registry):
    server.start()
    store.down = True
    connect(IDENTITY).agree()
    assert not store.timeouts_s and registry.commits == 0
    assert server.status()["joined"] == 0
