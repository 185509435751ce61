"""A channel to a host by name is opened anew where gRPC has given the name up (photon/rpc/network.py)."""

import threading
from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from photon.rpc.network import RENEW_S, NamedChannel, is_name
from photon.rpc.servers import Server
from tests.idregistry.kit import RpcFailed
from tests.waiting import wait_until

NOWHERE = "127.0.0.1:1"
CHECK = health_pb2.HealthCheckRequest()
SERVING = health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    ("named", "targets"),
    [
        (True, ["r0:7400", "dns:///joiner:1", "a.b.example:80"]),
        (False, ["127.0.0.1:1", "[::1]:1", "localhost:1", "ipv4:10.0.0.1:1,10.0.0.2:1", "ipv6:[::1]:1"]),
    ],
)
def test_what_has_to_be_resolved_is_a_name(named, targets):
    assert {is_name(target) for target in targets} == {named}


class Opened:
    """Channels to one address after the other; the last again and again. With a clock that stands still."""

    def __init__(self, *addresses):
        self.addresses = list(addresses)
        self.now_s = 100.0
        self.count = 0
        self.inner = []
        self.channel = NamedChannel(self._open, lambda: self.now_s)
        self.stub = health_pb2_grpc.HealthStub(self.channel)

    def _open(self):
        address = self.addresses[min(self.count, len(self.addresses) - 1)]
        self.count += 1
        self.inner.append(grpc.insecure_channel(address))
        return self.inner[-1]

    def check(self):
        return self.stub.Check(CHECK, timeout=20).status

    def calls(self):
        """How many are under way."""
        used = self.channel.begin()
        self.channel.end(used)
        return used.calls

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


@pytest.mark.parametrize(
    "ask",
    [
        lambda stub: stub.Check(CHECK, timeout=20),
        lambda stub: stub.Check.with_call(CHECK, timeout=20)[0],
        lambda stub: stub.Check.future(CHECK, timeout=20).result(),
        lambda stub: next(stub.Watch(CHECK, timeout=20)),
    ],
    ids=["call", "with_call", "future", "stream"],
)
def test_calls_that_find_no_connection_for_long_go_to_a_new_channel(opened, ask):
    for count in (1, 2):
        with pytest.raises(grpc.RpcError) as failed:
            ask(opened.stub)
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        wait_until(
            lambda count=count: opened.count == count
        )  # a future is told of before its callbacks have run
        opened.now_s += RENEW_S
    assert ask(opened.stub).status == SERVING


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


def test_a_closed_channel_is_not_opened_again(opened):
    opened.now_s += RENEW_S
    used = opened.channel.begin()
    opened.channel.close()
    opened.channel.end(used, refused())
    assert opened.count == 1


def refused():
    return RpcFailed(grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses")


class Slow(health_pb2_grpc.HealthServicer):
    """Each call lasts until it is let go."""

    def __init__(self):
        self.begun, self.let_go = threading.Semaphore(0), threading.Event()

    def Check(self, request, context):
        self.begun.release()
        self.let_go.wait(60)
        return health_pb2.HealthCheckResponse(status=SERVING)

    def Watch(self, request, context):
        for _ in range(2):
            yield self.Check(request, context)


@pytest.fixture
def slow():
    """A plain server: its address and its servicer."""
    servicer = Slow()
    server = grpc.server(ThreadPoolExecutor(4))
    health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
    servicer.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    yield servicer
    servicer.let_go.set()
    server.stop(0).wait()


def test_many_futures_that_find_no_connection_all_end(opened):
    opened.now_s += RENEW_S
    futures = [opened.stub.Check.future(CHECK, timeout=20) for _ in range(8)]
    failures = []
    for future in futures:  # daemons: one that hangs fails this test and not the run
        threading.Thread(target=lambda f=future: failures.append(f.exception()), daemon=True).start()
    wait_until(lambda: len(failures) == len(futures))
    assert any(failure is not None for failure in failures)  # the later ones may find the new channel
    wait_until(lambda: opened.count == 2)
    assert opened.check() == SERVING


@pytest.mark.parametrize("kind", ["call", "future", "stream"])
def test_calls_under_way_outlive_a_renewal_and_their_channel_is_closed_after_them(slow, server, kind):
    opened = Opened(slow.address, server.listen)
    closed = threading.Event()
    first = opened.inner[0]
    close, first.close = first.close, lambda: (close(), closed.set())
    with ThreadPoolExecutor(1) as pool:
        if kind == "call":
            answer = pool.submit(opened.stub.Check, CHECK, timeout=60)
        elif kind == "future":
            answer = opened.stub.Check.future(CHECK, timeout=60)
        else:
            stream = opened.stub.Watch(CHECK, timeout=60)
            answer = pool.submit(lambda: list(stream)[-1])
        assert slow.begun.acquire(timeout=60)
        opened.now_s += RENEW_S
        used = opened.channel.begin()
        opened.channel.end(used, refused())
        assert opened.count == 2
        assert opened.check() == SERVING
        assert not closed.is_set()
        slow.let_go.set()
        assert answer.result(60).status == SERVING
    assert closed.wait(60)
    opened.channel.close()


def test_a_stream_that_nobody_holds_any_more_is_cancelled(slow):
    opened = Opened(slow.address)
    opened.stub.Watch(CHECK, timeout=600)
    wait_until(lambda: opened.calls() == 0)
    opened.channel.close()


def test_calls_of_many_threads_end_in_nothing_but_errors_of_grpc(server):
    """None meets a channel that another thread has closed."""
    opened = Opened(NOWHERE)
    wrong = []

    def call():
        for _ in range(50):
            opened.now_s += RENEW_S
            try:
                opened.check()
            except grpc.RpcError:
                continue
            except Exception as error:
                wrong.append(error)

    threads = [threading.Thread(target=call) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert opened.count > 4
    assert not wrong
    opened.channel.close()
