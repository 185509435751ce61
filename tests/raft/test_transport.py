"""Connections: who is up, who is not, and what a stranger or one in the middle can do (nothing)."""

import logging
import random
import resource
import socket
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest

from photon.core.errors import AddressInUseError, SettingsError, StorageError, UsageError
from photon.raft import links
from photon.raft.addresses import Address, Endpoint
from photon.raft.core import now
from photon.raft.links import FrameWriter
from photon.raft.transport import STRANGERS_MAX, LinkLog, Transport
from tests.ports import free_ports
from tests.raft.link_kit import LIMITS, TIMING, Ear, MakeNet, Net, life_of

# -- messages ------------------------------------------------------------


def test_messages_of_many_groups_arrive_whole_and_in_order(linked: MakeNet) -> None:
    net = linked("abc").connect()
    sent = [(group, bytes([group]) * size) for group, size in ((1, 10), (2, 700_000), (1, 0), (3, 1 << 20))]
    for group, message in sent:
        net.nodes["a"].send("b", group, message)
        net.nodes["b"].send("a", group, message)
    net.turn_until(lambda: all(len(net.ears[node].frames) == len(sent) for node in "ab"))
    assert net.ears["b"].frames == [("a", group, message) for group, message in sent]
    assert net.ears["a"].frames == [("b", group, message) for group, message in sent]


def test_a_large_message_leaves_without_any_further_send(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L3: what the socket did not take at once goes out when it is writable again."""
    monkeypatch.setattr(links, "SOCKET_BUFFER_BYTES", 1 << 16)
    net = Net().listen(stack).connect()
    net.nodes["a"].send("b", 1, bytes(1 << 20))
    net.nodes["a"].flush()
    for _ in range(2000):
        net.nodes["a"].poll(0.002)  # no flush: only the poller drives it
        net.nodes["b"].poll(0.002)
        if net.ears["b"].frames:
            break
    assert [len(message) for _, _, message in net.ears["b"].frames] == [1 << 20]


def test_what_was_sent_before_a_peer_left_is_delivered(linked: MakeNet) -> None:
    net = linked().connect()
    leaving = net.nodes.pop("a")
    for number in range(5):
        leaving.send("b", number, b"last words")
    leaving.flush()
    leaving.close()
    net.turn_until(lambda: net.ears["b"].down)
    assert len(net.ears["b"].frames) == 5


def test_a_peers_nonsense_closes_its_connection_which_then_comes_back(stack: ExitStack) -> None:
    net = Net().listen(stack).connect()
    net.nodes["a"].send("b", 1, b"nonsense")
    net.turn_until(lambda: len(net.ears["b"].up) == 2)
    assert net.ears["b"].down == ["a"]


def test_a_silent_peer_is_dropped_and_pings_keep_a_quiet_one(linked: MakeNet) -> None:
    net = linked(timing=replace(TIMING, silence_s=0.4)).connect()
    net.turn_for(1.0)
    assert net.ears["a"].down == []
    stopped = net.nodes.pop("b")  # it is alive, but its thread is stuck
    net.turn_until(lambda: net.ears["a"].down == ["b"])
    stopped.close()


def test_more_than_may_wait_for_a_peer_drops_its_connection_not_the_memory(linked: MakeNet) -> None:
    net = linked().connect()
    sender = net.nodes["a"]
    assert sender.room("b") > LIMITS.batch_bytes
    for _ in range(20):
        sender.send("b", 1, bytes(1 << 20))
    assert net.ears["a"].down == ["b"]
    assert sender.room("b") == 0


# -- who may come in -----------------------------------------------------


def test_another_secret_never_connects(linked: MakeNet) -> None:
    net = linked(secrets=(b"s", b"t"))
    net.turn_for(0.3)
    assert not net.ears["a"].up
    assert not net.ears["b"].up
    assert not net.ears["a"].seen and not net.ears["b"].seen


def test_each_peers_life_and_what_it_remembers_is_told_before_it_is_up(stack: ExitStack) -> None:
    net = Net("abc").listen(stack).connect()
    for node, ear in net.ears.items():
        remembered = ear.last_life(node)
        assert sorted(ear.seen) == [(other, life_of(other), remembered) for other in "abc" if other != node]


@pytest.mark.parametrize("refuser", ["a", "b"])
def test_a_refused_identity_is_never_up_and_told_once_on_both_sides(
    refuser: str, stack: ExitStack, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("photon.raft.transport.REFUSED_S", 0.0)
    refused = "b" if refuser == "a" else "a"
    net = Net().listen(stack)
    net.ears[refuser].refuses = f"{refused} has lost its disk: replace it"
    net.turn_until(lambda: len(net.ears[refuser].seen) > 5)
    assert not net.ears["a"].up and not net.ears["b"].up
    told = [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]
    assert sorted(told) == sorted(
        [
            f"raft {refuser}: no connection to {refused}: {refused} has lost its disk: replace it",
            f"raft {refused}: no connection to {refuser}: {refuser} refuses this node: "
            f"{refused} has lost its disk: replace it",
        ]
    )
    net.ears[refuser].refuses = None
    net.connect()


def test_a_refused_peer_is_not_dialed_again_at_once(stack: ExitStack) -> None:
    net = Net().listen(stack)
    net.ears["b"].refuses = "no"
    net.turn_for(0.5)
    assert len(net.ears["b"].seen) == 1


def test_a_failing_disk_beneath_the_identities_is_not_taken_for_a_bad_peer(stack: ExitStack) -> None:
    net = Net().listen(stack)

    def fail(peer: str, life: bytes, last_life: bytes) -> str | None:
        raise StorageError("the disk is full")

    net.ears["b"].life_seen = fail  # type: ignore[method-assign]
    with pytest.raises(StorageError):
        net.turn_for(2.0)


# -- peers that come and go ----------------------------------------------


def test_a_peer_that_is_added_while_the_host_runs_is_connected(stack: ExitStack) -> None:
    net = Net("abc").listen(stack)
    net.nodes["a"].set_peers({"b": net.addresses["b"]})
    net.nodes["c"].set_peers({"b": net.addresses["b"]})
    net.turn_until(lambda: len(net.ears["b"].up) == 2)
    assert net.ears["a"].up == ["b"]
    net.nodes["a"].set_peers(net.others("a"))
    net.nodes["c"].set_peers(net.others("c"))
    net.turn_until(lambda: net.ears["a"].up == ["b", "c"] and "a" in net.ears["c"].up)
    assert all(ear.down == [] for ear in net.ears.values())


@pytest.mark.parametrize("gone", ["a", "c"])
def test_a_peer_that_is_gone_is_disconnected_and_refused_from_then_on(
    gone: str, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    """a is one that dials b, c one that b dials."""
    net = Net("abc").listen(stack).connect()
    before = list(net.ears["b"].up)
    net.nodes["b"].set_peers({peer: at for peer, at in net.others("b").items() if peer != gone})
    assert net.ears["b"].down == [gone]
    net.turn_for(0.3)
    assert net.ears["b"].up == before
    assert net.ears[gone].up.count("b") == 1 and "b" in net.ears[gone].down
    net.nodes[gone].send("b", 1, b"still here")
    net.turn_for(0.05)
    assert net.ears["b"].frames == []
    if gone == "a":
        assert "b refuses this node: a is not a peer of b" in caplog.text
    net.nodes["b"].set_peers(net.others("b"))
    net.turn_until(lambda: net.ears["b"].up == [*before, gone])


def test_a_peer_that_is_removed_in_the_middle_of_its_handshake_does_not_come_in(stack: ExitStack) -> None:
    net = Net().listen(stack)
    acceptor, dialer = net.nodes["b"], net.nodes["a"]
    net.turn_until(lambda: any(link._handshake._claimed for link in acceptor._links.values()))
    acceptor.set_peers({})
    for _ in range(20):
        net.turn()
    assert net.ears["b"].up == [] and net.ears["b"].seen == []
    assert dialer._links == {} or not net.ears["a"].up


def test_a_peer_at_another_address_is_dialed_there(stack: ExitStack) -> None:
    net = Net().listen(stack).connect()
    (port,) = free_ports(1)
    endpoint = Endpoint("b", ("127.0.0.1", port), b"s")
    moved = Transport(
        endpoint, life_of("b"), net.others("b"), net.ears["b"], TIMING, LIMITS, random.Random(2)
    )
    moved.listen()
    stack.callback(moved.close)
    old, net.nodes["b"] = net.nodes["b"], moved  # the old one says nothing, and is not closed
    net.nodes["a"].set_peers({"b": ("127.0.0.1", port)})
    assert net.ears["a"].down == ["b"]
    net.turn_until(lambda: net.ears["a"].up == ["b", "b"])
    assert len(moved._up) == 1
    old.close()


def test_a_peer_that_comes_back_with_another_address_of_its_name_is_dialed_there(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Net().listen(stack)
    _, port = net.addresses["b"]
    named, resolve = {"b.example": "127.0.0.1"}, socket.getaddrinfo

    def getaddrinfo(host: str, *rest: Any, **options: Any) -> Any:
        if host in named and not options.get("flags", 0) & socket.AI_NUMERICHOST:
            host = named[host]
        return resolve(host, *rest, **options)

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    net.nodes["a"].set_peers({"b": ("b.example", port)})
    net.connect()
    net.nodes["b"].close()
    net.turn_until(lambda: net.ears["a"].down == ["b"])
    endpoint = Endpoint("b", ("127.0.0.2", port), b"s")
    moved = Transport(
        endpoint, life_of("b"), net.others("b"), net.ears["b"], TIMING, LIMITS, random.Random(2)
    )
    moved.listen()
    stack.callback(moved.close)
    net.nodes["b"], named["b.example"] = moved, "127.0.0.2"
    net.turn_until(lambda: net.ears["a"].up == ["b", "b"])


def test_the_same_peers_again_disturb_nobody(stack: ExitStack) -> None:
    net = Net("abc").listen(stack).connect()
    for node in net.nodes:
        net.nodes[node].set_peers(net.others(node))
    net.turn_for(0.1)
    assert all(ear.down == [] for ear in net.ears.values())


def test_peers_that_cannot_be_are_refused_and_change_nothing(stack: ExitStack) -> None:
    net = Net().listen(stack).connect()
    for peers in (
        {"b": ("127.0.0.1", 1)},
        {"": ("127.0.0.1", 1)},
        {"x\n": ("127.0.0.1", 1)},
        {"\udcff": ("127.0.0.1", 1)},
        {"a": ("127.0.0.1", 0)},
        {"a": ("127.0.0.1", 65536)},
        {"a": ("", 1)},
    ):
        with pytest.raises(SettingsError):
            net.nodes["b"].set_peers(peers)
    assert net.ears["b"].down == []


@pytest.mark.parametrize("host", ["x" * 70 + ".example", "no-such-host.invalid", "a b", "\udcff"])
def test_a_host_that_has_no_address_is_told_and_stops_nothing(
    host: str, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    net = Net().listen(stack)
    net.nodes["a"].set_peers({"b": (host, 1)})
    net.turn_until(lambda: "no connection to b" in caplog.text)
    net.nodes["a"].set_peers(net.others("a"))
    net.connect()


# -- strangers -----------------------------------------------------------


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.0\r\n\r\n",
        b"\x16\x03\x01\xff\xff" + bytes(9000),
        b"\xff\xff\xff\xff" + bytes(100),
        b"\x40\x00PHRAFTH1",
        bytes(random.Random(5).randbytes(5000)),
        FrameWriter(b"s").header(1, b"message") + b"message",
    ],
)
def test_a_strangers_bytes_cost_that_connection_only(linked: MakeNet, stack: ExitStack, said: bytes) -> None:
    net = linked().connect()
    stranger = stack.enter_context(socket.create_connection(net.addresses["b"]))
    stranger.setblocking(False)
    stranger.sendall(said)
    for _ in range(5):
        net.turn()
    stranger.close()
    for _ in range(5):
        net.turn()
    net.nodes["a"].send("b", 1, b"still here")
    net.turn_until(lambda: net.ears["b"].frames)
    assert net.ears["b"].up == ["a"]
    assert net.ears["b"].down == []
    assert len(net.nodes["b"]._links) == 1


def test_strangers_cannot_use_up_the_descriptors(linked: MakeNet, stack: ExitStack) -> None:
    net = linked().connect()
    for _ in range(STRANGERS_MAX + 20):
        stranger = stack.enter_context(socket.create_connection(net.addresses["b"]))
        stranger.sendall(b"\x16\x03\x01\x02\x00\x01" if net.tls else b"")
        net.turn()
    assert len(net.nodes["b"]._links) <= STRANGERS_MAX + 1
    assert net.ears["b"].down == []
    net.nodes["b"].tick(now() + 5.1)
    assert all(link.peer is not None for link in net.nodes["b"]._links.values())


def test_a_turn_hears_one_stranger_and_all_peers(linked: MakeNet, stack: ExitStack) -> None:
    """A handshake costs a signature: 20 at once would hold the peers' heartbeats up."""
    net = linked().connect()
    node = net.nodes["b"]
    flood = [stack.enter_context(socket.create_connection(net.addresses["b"])) for _ in range(20)]
    for _ in flood:
        node.poll(0.1)
    for stranger in flood:
        stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
    for _ in flood:
        net.nodes["a"].send("b", 1, b"heartbeat")
        net.nodes["a"].flush()
        heard = len(net.ears["b"].frames)
        while len(net.ears["b"].frames) == heard:
            before = len(node._links)
            node.poll(0.1)
            assert len(node._links) >= before - 1
    for _ in range(40):
        node.poll(0.01)
    assert all(link.peer is not None for link in node._links.values()), "all are heard in the end"


def test_a_flood_from_one_address_does_not_drive_out_another(stack: ExitStack) -> None:
    net = Net().listen(stack)
    other = stack.enter_context(socket.create_connection(net.addresses["b"], source_address=("127.0.0.2", 0)))
    net.nodes["b"].poll(0.1)
    for _ in range(STRANGERS_MAX + 20):
        stack.enter_context(socket.create_connection(net.addresses["b"]))
        net.nodes["b"].poll(0.1)
    links = net.nodes["b"]._links.values()
    assert len(links) == STRANGERS_MAX
    assert [link.source for link in links].count(other.getsockname()[0]) == 1


@pytest.mark.parametrize("drip", [False, True])
def test_a_stranger_that_says_nothing_or_little_is_closed_in_time(stack: ExitStack, drip: bool) -> None:
    net = Net().listen(stack).connect()
    stranger = stack.enter_context(socket.create_connection(net.addresses["b"]))
    for byte in b"\x80\x00PHR":
        if drip:
            stranger.sendall(bytes([byte]))
        net.turn()
    assert len(net.nodes["b"]._links) == 2
    net.nodes["b"].tick(now() + 5.1)
    assert all(link.peer is not None for link in net.nodes["b"]._links.values())


def test_a_stranger_makes_nothing_be_kept(stack: ExitStack) -> None:
    """The largest message that is believed of it is waited for; all past it ends the connection."""
    net = Net().listen(stack)
    stranger = stack.enter_context(socket.create_connection(net.addresses["b"]))
    stranger.setblocking(False)
    stranger.sendall(b"\xff\x00" + bytes(200))
    net.nodes["b"].poll(0.1)
    net.nodes["b"].poll(0.1)
    (link,) = net.nodes["b"]._links.values()
    assert len(link._handshake.rest) == 202
    stranger.sendall(bytes(1 << 20))
    net.nodes["b"].poll(0.1)
    assert not net.nodes["b"]._links


def test_running_out_of_descriptors_neither_stops_nor_spins_the_thread(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = Net().listen(stack)
    acceptor = net.nodes["b"]
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    net.nodes["a"].tick(now())  # it has its socket, and connects
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
        acceptor.poll(0.5)
        began = now()
        acceptor.poll(0.05)
        assert now() - began >= 0.04, "the one that waits wakes it again and again"
        assert acceptor.deadline() <= now() + 0.1
        net.nodes["a"]._next_dial["b"] = 0.0
        net.nodes["a"]._dialing.clear()
        net.nodes["a"].tick(now())  # can't even make a socket
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    net.connect()


def test_complaints_about_strangers_are_few(caplog: pytest.LogCaptureFixture) -> None:
    at = [0.0]
    log = LinkLog("a", lambda: at[0])
    for _ in range(1000):
        log.stranger("the same")
        at[0] += 0.25
    assert len(caplog.records) == 1
    caplog.clear()
    for number in range(1200):
        log.stranger(f"another {number}")
        at[0] += 0.25
    assert len(caplog.records) == 300
    assert len(log._complaints) <= 256


# -- one in the middle ---------------------------------------------------


def test_one_in_the_middle_who_changes_a_byte_of_a_frame_ends_the_connection(
    linked: MakeNet, stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    net = linked()
    proxy = net.through_proxy(stack)
    net.connect()
    proxy.change["a", "b"] = lambda data: data[:-1] + bytes([data[-1] ^ 1])
    net.nodes["a"].send("b", 1, b"commit 1")
    net.turn_until(lambda: net.ears["b"].down)
    assert net.ears["b"].frames == []
    found = "decryption failed or bad record mac" if net.tls else "a frame that does not verify"
    assert found in caplog.text
    proxy.heal()
    net.turn_until(lambda: len(net.ears["b"].up) == 2)


def test_a_recorded_connection_cannot_be_played_again(linked: MakeNet, stack: ExitStack) -> None:
    net = linked()
    proxy = net.through_proxy(stack)
    proxy.listens = True
    net.connect()
    net.nodes["a"].send("b", 1, b"vote")
    net.turn_until(lambda: net.ears["b"].frames)
    again = stack.enter_context(socket.create_connection(net.addresses["b"]))
    again.sendall(proxy.said["a", "b"])
    net.turn_for(0.1)
    assert net.ears["b"].frames == [("a", 1, b"vote")]
    assert net.ears["b"].up == ["a"] and net.ears["b"].down == []


# -- addresses -----------------------------------------------------------


def test_listening_outside_loopback_needs_a_secret() -> None:
    with pytest.raises(SettingsError, match=r"will not listen on 0\.0\.0\.0 without a cluster secret"):
        Endpoint("a", ("0.0.0.0", 0), b"")
    lone(Endpoint("a", ("127.0.0.1", 0), b""))
    lone(Endpoint("a", ("0.0.0.0", 0), b"secret"))
    with pytest.raises(SettingsError, match="among its own peers"):
        lone(Endpoint("a", ("127.0.0.1", 0), b""), {"a": ("127.0.0.1", 1)})


def lone(endpoint: Endpoint, peers: Mapping[str, Address] | None = None) -> Transport:
    return Transport(endpoint, bytes(16), peers or {}, Ear(), TIMING, LIMITS, random.Random(1))


def test_without_a_secret_loopback_works_as_well(stack: ExitStack) -> None:
    net = Net(secrets=(b"", b"")).listen(stack).connect()
    net.nodes["a"].send("b", 1, b"message")
    net.turn_until(lambda: net.ears["b"].frames)


def test_an_address_that_is_taken_is_named(stack: ExitStack) -> None:
    taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    port = taken.getsockname()[1]
    with pytest.raises(AddressInUseError, match=f"127.0.0.1:{port}"):
        lone(Endpoint("a", ("127.0.0.1", port), b"")).listen()
    with pytest.raises(UsageError, match=r"192\.0\.2\.1:1"):
        lone(Endpoint("a", ("192.0.2.1", 1), b"s")).listen()
