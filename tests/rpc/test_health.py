"""Health checks are told whether a server can do its work, and pings are taken for what they are."""

import socket
import threading
from contextlib import contextmanager
from types import SimpleNamespace

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from photon.core.errors import AddressInUseError
from photon.rpc import network
from photon.rpc import servers as rpc
from photon.rpc.joiner_pb2 import JoinRequest, JoinResponse
from photon.rpc.joiner_pb2_grpc import JoinerServicer, JoinerStub, add_JoinerServicer_to_server
from photon.rpc.network import LOOPBACK
from photon.rpc.servers import HEALTH_POLL_S, Server
from tests.health import NOT_SERVING, SERVING, await_health, health
from tests.waiting import wait_until

NAME = "photon.joiner.v1.Joiner"


class Held(JoinerServicer):
    """Answers when it is let go."""

    def __init__(self):
        self.begun, self.let_go = threading.Event(), threading.Event()

    def Join(self, request, context):
        self.begun.set()
        self.let_go.wait(60)
        return JoinResponse(outcomes=b"done")


@pytest.fixture
def held():
    return Held()


@pytest.fixture
def server(held):
    made = Server("127.0.0.1:0", 4)
    made.add(add_JoinerServicer_to_server, held, NAME)
    yield made
    held.let_go.set()
    made.stop(0)


@pytest.mark.parametrize("service", ["", NAME])
def test_a_server_says_at_once_and_again_and_again_whether_it_can_work(server, service):
    able = [False]
    server.serve_while(lambda: able[0])
    server.start()
    assert health(server.listen, service) == NOT_SERVING
    able[0] = True
    await_health(SERVING, server.listen, service)
    able[0] = False
    await_health(NOT_SERVING, server.listen, service)


@contextmanager
def watched(server, timeout=60):
    """A channel to it, and a watch that has heard that it serves."""
    with LOOPBACK.open(server.listen) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=timeout)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        yield channel, watch


def test_who_watches_is_told_within_half_a_second(server):
    able = [True]
    server.serve_while(lambda: able[0])
    server.start()
    assert HEALTH_POLL_S < 0.5
    with watched(server) as (_, watch):
        able[0] = False
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING


def test_a_server_whose_word_changes_while_watchers_come_and_go_never_stands_still(server):
    """With grpcio-health-checking alone it does, for good, within a second of this."""
    server.start()
    over = threading.Event()
    seen = [0] * 4

    def come_and_go(number):
        while not over.is_set():
            with LOOPBACK.open(server.listen) as channel:
                watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest(), timeout=60)
                next(watch)
                seen[number] += 1
                watch.cancel()

    threads = [
        threading.Thread(target=come_and_go, args=(number,), daemon=True) for number in range(len(seen))
    ]
    for thread in threads:
        thread.start()

    def many_have_come() -> bool:
        server.set_serving(False)
        server.set_serving(True)
        return min(seen) >= 100

    wait_until(many_have_come, what=lambda: f"it stands still after {seen} watches", pause=0.0)
    over.set()
    for thread in threads:
        thread.join(60)
    assert health(server.listen) == SERVING
    wait_until(
        lambda: not server._health._send_response_callbacks[""]
    )  # the library's: none is kept for ever


def test_a_server_that_cannot_tell_whether_it_can_work_says_no_and_why_and_is_asked_again(server, caplog):
    able = [lambda: True]
    server.serve_while(lambda: able[0]())
    server.start()
    able[0] = lambda: {}["missing"]
    await_health(NOT_SERVING, server.listen)
    able[0] = lambda: True
    await_health(SERVING, server.listen)
    assert "KeyError: 'missing'" in caplog.text


def test_a_service_that_is_not_there_has_no_health(server):
    server.start()
    assert health(server.listen, "photon.nothing") == "NOT_FOUND"


def test_a_draining_server_says_so_first_and_ends_what_is_under_way(server, held):
    server.start()
    with LOOPBACK.open(server.listen) as channel:
        called = JoinerStub(channel).Join.future(JoinRequest(), timeout=60)
        assert held.begun.wait(60)
        server.drain()
        assert health(server.listen, NAME) == NOT_SERVING
        server.set_serving(True)
        assert health(server.listen) == NOT_SERVING
        stopping = threading.Thread(target=server.stop, args=(30,))
        stopping.start()
        held.let_go.set()
        assert called.result().outcomes == b"done"
        stopping.join(60)
    assert health(server.listen) == "UNAVAILABLE"


@pytest.mark.long
def test_a_connection_that_is_silent_for_long_outlives_the_clients_pings(monkeypatch):
    """By default a server hangs up at the third (too_many_pings).

    Twice as fast as in earnest: gRPC pings no faster.
    """
    for owner, name in ((rpc, "_SERVER"), (network, "_CHANNEL")):
        quicker = [(key, value // 2 if key in INTERVALS else value) for key, value in getattr(owner, name)]
        monkeypatch.setattr(owner, name, quicker)
    server = Server("127.0.0.1:0", 4)
    server.start()
    with watched(server, 4) as (_, watch):
        with pytest.raises(grpc.RpcError) as ended:
            next(watch)
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    server.stop(0)


INTERVALS = ("grpc.keepalive_time_ms", "grpc.http2.min_ping_interval_without_data_ms")


def test_who_watches_has_a_moment_to_send_elsewhere_before_calls_are_refused(server, held, monkeypatch):
    answered, moments = threading.Event(), []
    moment = SimpleNamespace(sleep=lambda seconds: (moments.append(seconds), answered.wait(60)))
    server.start()
    held.let_go.set()
    with watched(server) as (channel, watch):
        monkeypatch.setattr(rpc, "time", moment)
        stopping = threading.Thread(target=server.stop, args=(30,))
        stopping.start()
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        called = JoinerStub(channel).Join(JoinRequest(), timeout=60)
        assert called.outcomes == b"done"
        answered.set()
        watch.cancel()
        stopping.join(60)
    assert moments == [rpc.DRAIN_S]


def test_who_leaves_on_the_word_was_watching_too(server, monkeypatch):
    moments = []
    server.start()
    with watched(server) as (_, watch):
        told = server.drain

        def told_and_left():
            told()
            watch.cancel()
            wait_until(lambda: not server._health.watchers)

        monkeypatch.setattr(server, "drain", told_and_left)
        monkeypatch.setattr(rpc, "time", SimpleNamespace(sleep=moments.append))
        server.stop(30)
    assert moments == [rpc.DRAIN_S]


def test_a_server_that_nobody_watches_any_more_ends_at_once(server):
    server.start()
    with watched(server) as (_, watch):
        assert server._health.watchers == 1
        watch.cancel()
    wait_until(lambda: not server._health.watchers)


def test_a_port_that_is_taken_is_told_and_not_shared_in_silence():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(AddressInUseError, match=address):
            Server(address, 1).start()
    first = Server("127.0.0.1:0", 1)
    first.start()
    try:
        with pytest.raises(AddressInUseError):
            Server(first.listen, 1).start()
    finally:
        first.stop(0)
