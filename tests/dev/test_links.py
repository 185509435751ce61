"""Links between datacenters: through them, cut, slow, mended."""

import contextlib
import dataclasses
import socket
import threading
import time

import pytest

from photon.cluster.topology import Replica, unplaced
from photon.core.errors import UsageError
from photon.core.settings import Settings
from photon.dev.links import Links
from tests.ports import free_ports


def echo(listener):
    def answer(connection):
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    with contextlib.suppress(OSError):
        while True:
            threading.Thread(target=answer, args=(listener.accept()[0],), daemon=True).start()


@pytest.fixture
def system(tmp_path):
    """A replica in each of three datacenters, and one that is anywhere; they send back what they get."""
    with contextlib.ExitStack() as held:
        replicas = []
        for name in ("east", "west", "central", ""):
            listener = held.enter_context(socket.create_server(("127.0.0.1", 0)))
            threading.Thread(target=echo, args=(listener,), daemon=True).start()
            address = f"127.0.0.1:{listener.getsockname()[1]}"
            replicas.append(
                Replica(name=name, datacenter=name, grpc=address, raft=address, directory=str(tmp_path))
            )
        topology = unplaced(Settings(), [], [], tmp_path, drain=False)
        yield dataclasses.replace(topology, replicas=replicas)


@pytest.fixture
def links(system):
    with Links(system, proxied=True) as made:
        yield made


@pytest.fixture
def dial(links):
    with contextlib.ExitStack() as held:

        def dialed(here, there):
            (advertised,) = (r.grpc for r in links.topology.replicas if r.name == there)
            host, _, port = links.topology.settings.via[here][advertised].partition(":")
            made = held.enter_context(socket.create_connection((host, int(port)), timeout=5))
            made.settimeout(5)
            return made

        yield dialed


def received(connection, length):
    found = b""
    while len(found) < length:
        part = connection.recv(1 << 16)
        assert part
        found += part
    return found


def is_silent(connection):
    connection.settimeout(0.3)
    try:
        return connection.recv(1) and False
    except TimeoutError:
        return True
    finally:
        connection.settimeout(5)


def test_each_two_datacenters_have_a_link_and_what_is_anywhere_has_none(links):
    names = [["central", "east"], ["central", "west"], ["east", "west"]]
    assert [one["between"] for one in links.told()] == names
    assert {here: len(dialed) for here, dialed in links.topology.settings.via.items()} == {
        "central": 2,
        "east": 2,
        "west": 2,
    }


def test_without_proxies_nothing_changes(system):
    with Links(system, proxied=False) as made:
        assert (made.topology, made.told()) == (system, [])
        with pytest.raises(UsageError, match="there are: none"):
            made.cut(["east", "west"])


def test_all_bytes_come_through_in_their_order_and_an_end_is_an_end(dial):
    connection = dial("east", "west")
    data = bytes(range(256)) * 40_000
    sending = threading.Thread(target=connection.sendall, args=(data,))
    sending.start()
    assert received(connection, len(data)) == data
    sending.join()
    connection.shutdown(socket.SHUT_WR)
    assert connection.recv(1) == b""


def test_a_link_to_a_process_that_is_down_ends_at_once(system):
    (down,) = free_ports(1)
    west = dataclasses.replace(system.replicas[1], grpc=f"127.0.0.1:{down}")
    there = dataclasses.replace(system, replicas=[system.replicas[0], west])
    with Links(there, proxied=True) as made:
        host, _, port = made.topology.settings.via["east"][west.grpc].partition(":")
        with socket.create_connection((host, int(port)), timeout=5) as connection:
            assert connection.recv(1) == b""


def test_a_cut_link_passes_nothing_either_way_and_loses_nothing(links, dial):
    known, back, other = dial("east", "west"), dial("west", "east"), dial("east", "central")
    for connection in (known, back):
        connection.sendall(b"before")
        assert received(connection, 6) == b"before"
    assert links.cut(["west", "east"]) == "the link between east and west is cut"
    late = dial("east", "west")
    for connection in (known, back, late):
        connection.sendall(b"kept")
        assert is_silent(connection)
    other.sendall(b"goes on")
    assert received(other, 7) == b"goes on"
    assert links.mend(["east", "west"]) == "the link between east and west is mended"
    for connection in (known, back, late):
        assert received(connection, 4) == b"kept"


def test_a_slow_link_delays_each_way_by_half_and_keeps_the_order_also_when_it_is_mended(links, dial):
    connection = dial("east", "west")
    links.delay(["east", "west"], 400)
    began = time.monotonic()
    connection.sendall(b"1")
    assert received(connection, 1) == b"1"
    assert time.monotonic() - began >= 0.4
    connection.sendall(b"2")
    links.mend(["east", "west"])
    connection.sendall(b"3")
    assert received(connection, 2) == b"23"


def test_what_is_no_link_or_no_delay_is_refused(links):
    with pytest.raises(UsageError, match="no link between east and mars; there are: central-east"):
        links.cut(["mars", "east"])
    for ms in (0, -5, 10_001, float("nan")):
        with pytest.raises(UsageError, match="slower by 1 to 10000 ms"):
            links.delay(["east", "west"], ms)
