"""What goes over the wire: frames, the handshake, and what a stranger can do (nothing)."""

import os
import random
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon.core.errors import AddressInUseError, SettingsError, UsageError
from photon.raft import link as link_module
from photon.raft.codec import MessageError
from photon.raft.core import now
from photon.raft.frames import FrameError, FrameReader, pack_frame
from photon.raft.handshake import Handshake, HandshakeError
from photon.raft.settings import RaftLimits, RaftTiming
from photon.raft.transport import STRANGERS_MAX, Transport
from tests.raft.kit import free_ports

LIMITS = RaftLimits(command_bytes_max=1 << 20, batch_bytes=1 << 20, outgoing_bytes=4 << 20)
TIMING = RaftTiming(reconnect_s_min=0.01, reconnect_s_max=0.02)


# -- frames ------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.binary(max_size=50)), max_size=6), st.data())
def test_frames_survive_any_cut_of_the_stream(frames: list[tuple[int, bytes]], data: st.DataObject) -> None:
    stream = b"".join(pack_frame(group, message) + message for group, message in frames)
    reader = FrameReader(100)
    read = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        read += reader.feed(stream[:size])
        stream = stream[size:]
    assert read == frames


def test_a_damaged_frame_ends_the_stream() -> None:
    frame = pack_frame(7, b"message") + b"message"
    for at in range(4, len(frame)):
        damaged = bytearray(frame)
        damaged[at] ^= 1
        with pytest.raises(FrameError):
            FrameReader(100).feed(bytes(damaged))


def test_a_huge_length_is_refused_before_anything_is_kept() -> None:
    with pytest.raises(FrameError, match="where 100 is the most"):
        FrameReader(100).feed(b"\xff\xff\xff\x7f" + bytes(8))


# -- handshake ------------------------------------------------------------


def shake(dialer: Handshake, acceptor: Handshake) -> None:
    to_acceptor = dialer.begin()
    while to_acceptor:
        to_dialer = acceptor.feed(to_acceptor)
        to_acceptor = dialer.feed(to_dialer) if to_dialer else b""


def pair(
    dialer_secret: bytes = b"s",
    acceptor_secret: bytes = b"s",
    node: str = "a",
    target: str = "b",
    own: str = "b",
) -> tuple[Handshake, Handshake]:
    return (
        Handshake(node, ["b"], dialer_secret, os.urandom, target),
        Handshake(own, ["a"], acceptor_secret, os.urandom, None),
    )


def test_both_sides_prove_that_they_know_the_secret() -> None:
    dialer, acceptor = pair()
    shake(dialer, acceptor)
    assert (dialer.peer, acceptor.peer) == ("b", "a")


def test_another_secret_is_refused_by_whom_it_is_shown_to_first() -> None:
    dialer, acceptor = pair(dialer_secret=b"other")
    with pytest.raises(HandshakeError, match="does not know the cluster's secret"):
        shake(dialer, acceptor)
    assert acceptor.peer is None


def test_a_proof_without_the_secret_is_refused() -> None:
    dialer, acceptor = pair()
    challenge = acceptor.feed(dialer.begin())
    proof = bytearray(dialer.feed(challenge))
    proof[-1] ^= 1
    with pytest.raises(HandshakeError, match="does not know"):
        acceptor.feed(bytes(proof))
    assert acceptor.peer is None


def test_a_recorded_handshake_cannot_be_played_again() -> None:
    dialer, acceptor = pair()
    hello = dialer.begin()
    proof = dialer.feed(acceptor.feed(hello))
    _, again = pair()
    again.feed(hello)
    with pytest.raises(HandshakeError):
        again.feed(proof)


def test_an_acceptors_own_proof_cannot_be_reflected_to_it() -> None:
    dialer, acceptor = pair()
    challenge = acceptor.feed(dialer.begin())
    with pytest.raises(HandshakeError):
        acceptor.feed(challenge[-32:].join([b"\x20\x00", b""]))


@pytest.mark.parametrize(
    ("node", "target", "own", "message"),
    [("z", "b", "b", "z is not a peer of b"), ("a", "c", "b", "looks for c but has reached b")],
)
def test_the_wrong_node_is_told_what_is_wrong(node: str, target: str, own: str, message: str) -> None:
    dialer, acceptor = pair(node=node, target=target, own=own)
    with pytest.raises(HandshakeError, match=message):
        shake(dialer, acceptor)


@given(st.binary(max_size=200))
def test_garbage_in_a_handshake_is_refused_by_its_own_error_only(data: bytes) -> None:
    for side in pair():
        with suppress(HandshakeError):
            side.feed(data)
        assert side.peer is None


# -- sockets ------------------------------------------------------------


class Ear:
    """Receives what a transport tells."""

    def __init__(self) -> None:
        self.up: list[str] = []
        self.down: list[str] = []
        self.frames: list[tuple[str, int, bytes]] = []

    def peer_up(self, peer: str) -> None:
        self.up.append(peer)

    def peer_down(self, peer: str) -> None:
        self.down.append(peer)

    def frame(self, peer: str, group: int, message: bytes) -> None:
        if message == b"nonsense":
            raise MessageError("nonsense")
        self.frames.append((peer, group, message))


class Pair:
    """Two transports, a and b, turned by the test."""

    def __init__(self, secrets: tuple[bytes, bytes] = (b"s", b"s"), timing: RaftTiming = TIMING) -> None:
        ports = free_ports(2)
        addresses = dict(zip("ab", [("127.0.0.1", port) for port in ports], strict=True))
        self.addresses = addresses
        self.ears = {"a": Ear(), "b": Ear()}
        self.nodes = {
            node: Transport(
                node,
                addresses[node],
                {other: addresses[other]},
                secret,
                timing,
                LIMITS,
                random.Random(1),
                now,
                self.ears[node],
                MessageError,
            )
            for node, other, secret in (("a", "b", secrets[0]), ("b", "a", secrets[1]))
        }

    def turn(self) -> None:
        for node in self.nodes.values():
            node.tick(now())
            node.poll(0.002)
            node.flush()

    def turn_until(self, condition: object, turns: int = 2000) -> None:
        for _ in range(turns):
            if condition():  # type: ignore[operator]
                return
            self.turn()
        raise AssertionError("it did not happen in time")

    def connect(self) -> None:
        self.turn_until(lambda: self.ears["a"].up and self.ears["b"].up)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def running(stack: ExitStack, **settings: object) -> Pair:
    made = Pair(**settings)  # type: ignore[arg-type]
    for node in made.nodes.values():
        node.listen()
        stack.callback(node.close)
    return made


def test_messages_of_many_groups_arrive_whole_and_in_order(stack: ExitStack) -> None:
    both = running(stack)
    both.connect()
    sent = [(group, bytes([group]) * size) for group, size in ((1, 10), (2, 700_000), (1, 0), (3, 1 << 20))]
    for group, message in sent:
        both.nodes["a"].send("b", group, message)
    both.turn_until(lambda: len(both.ears["b"].frames) == len(sent))
    assert both.ears["b"].frames == [("a", group, message) for group, message in sent]


def test_a_large_message_leaves_without_any_further_send(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L3: what the socket did not take at once goes out when it is writable again."""
    monkeypatch.setattr(link_module, "SOCKET_BUFFER_BYTES", 1 << 16)
    both = running(stack)
    both.connect()
    both.nodes["a"].send("b", 1, bytes(1 << 20))
    both.nodes["a"].flush()
    for _ in range(2000):
        both.nodes["a"].poll(0.002)  # no flush: only the poller drives it
        both.nodes["b"].poll(0.002)
        if both.ears["b"].frames:
            break
    assert [len(message) for _, _, message in both.ears["b"].frames] == [1 << 20]


def test_another_secret_never_connects(stack: ExitStack) -> None:
    both = running(stack, secrets=(b"s", b"t"))
    for _ in range(60):
        both.turn()
    assert not both.ears["a"].up
    assert not both.ears["b"].up


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"GET / HTTP/1.0\r\n\r\n",
        b"\xff\xff\xff\xff" + bytes(100),
        b"\x40\x00PHRAFTH1",
        bytes(random.Random(5).randbytes(5000)),
        pack_frame(1, b"message") + b"message",
    ],
)
def test_a_strangers_bytes_cost_that_connection_only(stack: ExitStack, said: bytes) -> None:
    both = running(stack)
    both.connect()
    stranger = stack.enter_context(socket.create_connection(both.addresses["b"]))
    stranger.setblocking(False)
    stranger.sendall(said)
    for _ in range(5):
        both.turn()
    stranger.close()
    for _ in range(5):
        both.turn()
    both.nodes["a"].send("b", 1, b"still here")
    both.turn_until(lambda: both.ears["b"].frames)
    assert both.ears["b"].up == ["a"]
    assert both.ears["b"].down == []
    assert len(both.nodes["b"]._links) == 1


def test_strangers_cannot_use_up_the_descriptors(stack: ExitStack) -> None:
    both = running(stack)
    both.connect()
    for _ in range(STRANGERS_MAX + 20):
        stack.enter_context(socket.create_connection(both.addresses["b"]))
        both.turn()
    assert len(both.nodes["b"]._links) <= STRANGERS_MAX + 1
    assert both.ears["b"].down == []


def test_a_stranger_that_says_nothing_is_closed_in_time(stack: ExitStack) -> None:
    both = running(stack)
    both.connect()
    stack.enter_context(socket.create_connection(both.addresses["b"]))
    both.turn()
    both.turn()
    assert len(both.nodes["b"]._links) == 2
    both.nodes["b"].tick(now() + 5.1)
    assert all(link.peer is not None for link in both.nodes["b"]._links.values())


def test_a_peers_nonsense_closes_its_connection_which_then_comes_back(stack: ExitStack) -> None:
    both = running(stack)
    both.connect()
    both.nodes["a"].send("b", 1, b"nonsense")
    both.turn_until(lambda: len(both.ears["b"].up) == 2)
    assert both.ears["b"].down == ["a"]


def test_a_silent_peer_is_dropped_and_pings_keep_a_quiet_one(stack: ExitStack) -> None:
    timing = replace(TIMING, silence_s=0.4)
    both = running(stack, timing=timing)
    both.connect()
    deadline = now() + 1.0
    while now() < deadline:
        both.turn()
    assert both.ears["a"].down == []
    both.turn_until(lambda: both.ears["a"].down == [] and now() > deadline)
    stopped = both.nodes.pop("b")  # it is alive, but its thread is stuck
    both.turn_until(lambda: both.ears["a"].down == ["b"])
    stopped.close()


def test_more_than_may_wait_for_a_peer_drops_its_connection_not_the_memory(stack: ExitStack) -> None:
    both = running(stack)
    both.connect()
    sender = both.nodes["a"]
    assert sender.room("b") > LIMITS.batch_bytes
    for _ in range(20):
        sender.send("b", 1, bytes(1 << 20))
    assert both.ears["a"].down == ["b"]
    assert sender.room("b") == 0


def test_listening_outside_loopback_needs_a_secret() -> None:
    arguments = (TIMING, LIMITS, random.Random(1), now, Ear(), MessageError)
    with pytest.raises(SettingsError, match=r"will not listen on 0\.0\.0\.0 without a cluster secret"):
        Transport("a", ("0.0.0.0", 0), {}, b"", *arguments)
    Transport("a", ("127.0.0.1", 0), {}, b"", *arguments)
    Transport("a", ("0.0.0.0", 0), {}, b"secret", *arguments)
    with pytest.raises(SettingsError, match="among its own peers"):
        Transport("a", ("127.0.0.1", 0), {"a": ("127.0.0.1", 1)}, b"", *arguments)


def test_an_address_that_is_taken_is_named(stack: ExitStack) -> None:
    taken = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    port = taken.getsockname()[1]
    arguments = (TIMING, LIMITS, random.Random(1), now, Ear(), MessageError)
    with pytest.raises(AddressInUseError, match=f"127.0.0.1:{port}"):
        Transport("a", ("127.0.0.1", port), {}, b"", *arguments).listen()
    with pytest.raises(UsageError, match=r"192\.0\.2\.1:1"):
        Transport("a", ("192.0.2.1", 1), {}, b"s", *arguments).listen()
