"""What a toxic does to the bytes of a link: the real server, and the Python package.

Links that break, are reset, or are down are in test_links, where a whole system feels them."""

import contextlib
import random
import socket
import threading
import time

import pytest

from photon.core.settings import Settings
from photon.dev.plan import plan_dev
from tests.faults.kit.toxics import Proxies, links_between
from tests.waiting import wait_until

pytestmark = pytest.mark.links

WAIT_S = 30.0
LINK = "grpc:west>r0"


class Echo:
    """Sends back what it gets; `got` is all of it."""

    def __init__(self, address):
        host, _, port = address.rpartition(":")
        self.got = bytearray()
        self._listener = socket.create_server((host, int(port)))
        self._connections = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self._connections.append(connection)
                threading.Thread(target=self._serve, args=[connection], daemon=True).start()

    def _serve(self, connection):
        with contextlib.suppress(OSError):
            while data := connection.recv(65_536):
                self.got += data
                connection.sendall(data)
        connection.close()

    def close(self):
        self._listener.shutdown(socket.SHUT_RDWR)  # else it listens on, while its thread waits
        self._listener.close()
        for connection in self._connections:
            connection.close()


@pytest.fixture(scope="module")
def proxied(tmp_path_factory):
    """A topology of three datacenters without processes, and proxies in all its links."""
    rng = random.Random()
    plan = plan_dev(
        Settings(), tmp_path_factory.mktemp("work"), tmp_path_factory.mktemp("out"), (), (), 2, rng, 3
    )
    proxies = Proxies(rng)
    yield proxies, proxies.between(plan), plan
    proxies.close()


@pytest.fixture
def link(proxied):
    """The proxies, the link, an echo server behind it, and a dialer."""
    proxies, topology, _ = proxied
    (found,) = [link for link in proxies.links() if link.name == LINK]
    echo = Echo(found.upstream)
    opened = []

    def dial():
        host, port = topology.network("west").dialed(*split(found.advertised))
        opened.append(socket.create_connection((host, port), WAIT_S))
        return opened[-1]

    yield proxies, found, echo, dial
    for connection in opened:
        connection.close()
    echo.close()
    proxies.heal()


def refuses(topology, datacenter, replica):
    """Whether the proxy that is dialed in a datacenter for a replica is down."""
    with socket.socket() as probe:
        return probe.connect_ex(topology.network(datacenter).dialed(*split(replica.grpc))) != 0


def split(address):
    host, _, port = address.rpartition(":")
    return host, int(port)


def ask(connection, data=b"hello"):
    """The answer's bytes, and the seconds it took."""
    began = time.monotonic()
    connection.sendall(data)
    got = b""
    while len(got) < len(data) and (more := connection.recv(65_536)):
        got += more
    return got, time.monotonic() - began


def silent(connection, seconds=0.5):
    connection.settimeout(seconds)
    try:
        return connection.recv(1) is None
    except TimeoutError:
        return True
    finally:
        connection.settimeout(WAIT_S)


def ended(connection):
    """Closed or reset by the other side."""
    with contextlib.suppress(ConnectionError):
        while connection.recv(65_536):
            pass
    return True


def test_each_link_that_crosses_datacenters_has_a_proxy_of_its_own(proxied):
    proxies, topology, plan = proxied
    names = {link.name for link in links_between(plan)}
    assert names == {
        "raft:east>r1", "raft:east>r2", "raft:west>r2",
        "grpc:east>r1", "grpc:east>r2", "grpc:west>r0", "grpc:west>r2", "grpc:central>r0", "grpc:central>r1",
    }  # fmt: skip
    assert {link.name for link in proxies.links()} == names
    dialed = [there for via in topology.settings.via.values() for there in via.values()]
    assert len(set(dialed)) == len(names)
    assert not set(dialed) & {replica.grpc for replica in plan.replicas}
    assert topology.network("").via == {}
    for replica in plan.replicas:
        assert replica.grpc not in topology.network(replica.datacenter).via


def test_bytes_pass_and_are_counted(link):
    proxies, found, _, dial = link
    before = proxies.traffic()[found.name]
    connection = dial()
    assert ask(connection, b"x" * 1_000)[0] == b"x" * 1_000
    connection.close()
    wait_until(lambda: proxies.traffic()[found.name] - before == 2_000)


def test_what_is_cut_is_lost_in_silence_until_it_heals(link):
    proxies, _, echo, dial = link
    old = dial()
    ask(old)
    proxies.cut("east", "west")
    new = dial()
    for connection in (old, new):
        connection.sendall(b"lost")
        assert silent(connection)
    assert echo.got == b"hello"
    proxies.heal("west", "east")
    assert ended(old) and ended(new)
    assert ask(dial())[0] == b"hello"


@pytest.mark.parametrize(
    ("cut", "arrives"),
    [
        (("west", "east", "to"), False),
        (("east", "west", "from"), False),
        (("west", "east", "from"), True),
        (("east", "west", "to"), True),
    ],
)
def test_one_direction_alone_is_cut(link, cut, arrives):
    proxies, _, echo, dial = link
    connection = dial()
    ask(connection)
    proxies.cut(*cut)
    connection.sendall(b"more")
    if arrives:
        wait_until(lambda: echo.got == b"hellomore")
    assert silent(connection)
    assert echo.got == (b"hellomore" if arrives else b"hello")


def test_an_isolated_datacenter_is_cut_from_all_others_and_they_are_not(link):
    proxies, _, _, dial = link
    proxies.isolate("central")
    assert ask(dial())[0] == b"hello"
    proxies.isolate_region({"east": "us", "west": "us", "central": "eu"}, "us")
    assert ask(dial())[0] == b"hello"
    proxies.isolate("west", kind="raft")
    assert ask(dial())[0] == b"hello"
    proxies.isolate("west")
    connection = dial()
    connection.sendall(b"lost")
    assert silent(connection)


def test_latency_is_between_regions_alone_and_stays_when_a_cut_is_mended(link):
    proxies, _, _, dial = link

    def quickest():
        return min(ask(dial())[1] for _ in range(3))

    proxies.latency({"east": "us", "west": "us", "central": "eu"}, 400)
    assert quickest() < 0.3
    proxies.latency({"east": "us-east", "west": "us-west", "central": "eu"}, 400, jitter_ms=20)
    proxies.cut("east", "west")
    proxies.mend_cuts()
    assert quickest() > 0.3
    proxies.heal()
    assert quickest() < 0.3


def test_bandwidth_slows_down_and_a_slicer_changes_no_byte(link):
    proxies, found, _, dial = link
    proxies.bandwidth([found], 50)
    assert ask(dial(), b"x" * 20_000)[1] > 0.3
    proxies.heal()
    proxies.slicer([found], 16)
    data = random.Random(2).randbytes(5_000)
    assert ask(dial(), data)[0] == data


def test_a_fault_of_no_link_is_refused(proxied):
    proxies, _, _ = proxied
    with pytest.raises(AssertionError, match="no such link"):
        proxies.cut("east", "east-2")


def test_two_servers_are_told_apart(proxied):
    """toxiproxy-python keeps the server's address in a class."""
    proxies, topology, plan = proxied
    other = Proxies(random.Random())
    try:
        again = other.between(plan)
        proxies.heal()
        assert again.settings.via != topology.settings.via
        other.down(other.links("west"))
        proxies.down(proxies.links("central"))
        assert refuses(again, "west", plan.replicas[0])
        assert not refuses(again, "east", plan.replicas[2])
        assert refuses(topology, "central", plan.replicas[0])
        assert not refuses(topology, "west", plan.replicas[0])
    finally:
        other.close()
        proxies.heal()
