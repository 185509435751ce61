"""A channel to a host by name is opened anew where gRPC has given the name up (photon/wire/naming.py)."""

import time

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from photon.wire.naming import RENEW_S, NamedChannel, is_name
from photon.wire.rpc import Server

NOWHERE = "127.0.0.1:1"
CHECK = health_pb2.HealthCheckRequest()
SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize("target", ["r0:7400", "dns:///joiner:1", "a.b.example:80"])
def test_what_has_to_be_resolved_is_a_name(target):
    assert is_name(target)


@pytest.mark.parametrize(
    "target", ["127.0.0.1:1", "[::1]:1", "localhost:1", "ipv4:10.0.0.1:1,10.0.0.2:1", "ipv6:[::1]:1"]
)
def test_what_has_not_is_none(target):
    assert not is_name(target)


class Opened:
    """Channels to one address after the other; the last again and again. With a clock that stands still."""

    def __init__(self, *addresses):
        self.addresses = list(addresses)
        self.now_s = 100.0
        self.count = 0
        self.channel = NamedChannel(self._open, lambda: self.now_s)
        self.stub = health_pb2_grpc.HealthStub(self.channel)

    def _open(self):
        address = self.addresses[min(self.count, len(self.addresses) - 1)]
        self.count += 1
        return grpc.insecure_channel(address)

    def check(self):
        return self.stub.Check(CHECK, timeout=20).status

    def fail(self):
        with pytest.raises(grpc.RpcError) as failed:
            self.check()
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.fixture
def server():
    made = Server("127.0.0.1:0", 2)
    made.start()
    yield made
    made.stop(0)


@pytest.fixture
def opened(server):
    made = Opened(NOWHERE, server.listen)
    yield made
    made.channel.close()


def test_calls_that_find_no_connection_for_long_go_to_a_new_channel(opened):
    opened.fail()
    assert opened.count == 1
    opened.now_s += RENEW_S
    opened.fail()
    assert opened.count == 2
    assert opened.check() == SERVING


def test_a_call_that_was_asked_for_later_and_one_with_its_own_answer_do_so_too(opened):
    opened.now_s += RENEW_S
    assert opened.stub.Check.future(CHECK, timeout=20).exception() is not None
    deadline = time.monotonic() + 60
    while opened.count < 2:  # the future is told of before its callbacks have run
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert opened.stub.Check.future(CHECK, timeout=20).result().status == SERVING
    assert opened.stub.Check.with_call(CHECK, timeout=20)[0].status == SERVING


def test_a_call_that_the_server_refused_changes_nothing(server):
    opened = Opened(server.listen)
    opened.now_s += 10 * RENEW_S
    with pytest.raises(grpc.RpcError):
        opened.stub.Check(health_pb2.HealthCheckRequest(service="photon.nothing"), timeout=20)
    assert opened.check() == SERVING
    assert opened.count == 1
    opened.channel.close()


def test_channels_are_not_opened_more_often_than_that():
    opened = Opened(NOWHERE)
    for _ in range(20):
        opened.now_s += RENEW_S / 4
        opened.fail()
    assert 4 <= opened.count <= 6
    opened.channel.close()


def test_who_listens_to_the_channels_state_is_told_of_the_new_ones(opened):
    told = []
    opened.channel.subscribe(told.append)
    opened.now_s += RENEW_S
    opened.fail()
    opened.check()
    while grpc.ChannelConnectivity.READY not in told:
        opened.check()
    opened.channel.unsubscribe(told.append)


def test_a_closed_channel_is_not_opened_again(opened):
    opened.now_s += RENEW_S
    first = opened.channel.newest
    opened.channel.close()
    opened.channel.failed(first, Refused())
    assert opened.count == 1


class Refused:
    def code(self):
        return grpc.StatusCode.UNAVAILABLE

    def details(self):
        return "failed to connect to all addresses"
