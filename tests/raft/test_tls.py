"""Links inside TLS: the same promises, encrypted, and only among certificates of one CA."""

import socket
import ssl
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import pytest

from photon.core.tls import Tls
from photon.raft import links
from photon.raft.core import now
from photon.raft.transport import STRANGERS_MAX
from tests.certificates import Authority
from tests.raft.link_kit import Net


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


@pytest.fixture(scope="module")
def files(authority: Authority) -> list[Tls]:
    return [authority.issue("a"), authority.issue("b"), authority.issue("c")]


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return Authority(tmp_path_factory.mktemp("tls") / "theirs").issue("a")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def never_connects(net: Net) -> None:
    net.turn_for(0.4)
    assert not net.ears["a"].up and not net.ears["b"].up
    assert not net.ears["a"].seen and not net.ears["b"].seen


def test_three_nodes_connect_and_large_and_small_messages_arrive(stack: ExitStack, files: list[Tls]) -> None:
    net = Net("abc", tls=files).listen(stack).connect()
    sent = [(group, bytes([group]) * size) for group, size in ((1, 10), (2, 700_000), (1, 0), (3, 1 << 20))]
    for group, message in sent:
        net.nodes["a"].send("b", group, message)
        net.nodes["b"].send("a", group, message)
    net.turn_until(lambda: all(len(net.ears[node].frames) == len(sent) for node in "ab"))
    assert net.ears["b"].frames == [("a", group, message) for group, message in sent]
    assert net.ears["a"].frames == [("b", group, message) for group, message in sent]


@pytest.mark.parametrize("senders", ["ab", "a", "b"])
def test_messages_through_small_buffers_never_stall(
    senders: str, stack: ExitStack, files: list[Tls], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "SOCKET_BUFFER_BYTES", 1 << 14)
    net = Net(tls=files[:2]).listen(stack).connect()
    receivers = ["b" if sender == "a" else "a" for sender in senders]
    for number in range(3):
        for sender, receiver in zip(senders, receivers, strict=True):
            net.nodes[sender].send(receiver, number, bytes(1_000_000))
    for node in net.nodes.values():
        node.flush()
    for _ in range(5000):
        for node in net.nodes.values():
            node.poll(0.001)  # no flush: only the poller drives it
        if all(len(net.ears[receiver].frames) == 3 for receiver in receivers):
            break
    assert all(len(net.ears[receiver].frames) == 3 for receiver in receivers)


def test_what_is_encrypted_ahead_of_the_socket_is_bounded(
    stack: ExitStack, files: list[Tls], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(links, "SOCKET_BUFFER_BYTES", 1 << 14)
    net = Net(tls=files[:2]).listen(stack).connect()
    sender = net.nodes["a"]
    for _ in range(8):
        sender.send("b", 1, bytes(1 << 20))
    sender.flush()  # nobody reads
    (link,) = sender._links.values()
    assert link.queued_bytes > 1 << 20
    channel = link._channel
    assert len(channel._waiting) + channel._outgoing.pending < 1 << 20  # type: ignore[attr-defined]


def test_nothing_is_readable_on_the_way(stack: ExitStack, files: list[Tls]) -> None:
    net = Net(tls=files[:2]).listen(stack)
    relay = net.through_relay(stack)
    net.connect()
    net.nodes["a"].send("b", 1, b"a secret message")
    net.turn_until(lambda: net.ears["b"].frames)
    assert b"secret" not in relay.said and b"PHRAFT" not in relay.said


def test_a_byte_changed_on_the_way_ends_the_connection(
    stack: ExitStack, files: list[Tls], caplog: pytest.LogCaptureFixture
) -> None:
    """TLS finds it: the frames inside have no MAC of their own."""
    net = Net(tls=files[:2]).listen(stack)
    relay = net.through_relay(stack)
    net.connect()
    relay.change = lambda data: data[:-1] + bytes([data[-1] ^ 1])
    net.nodes["a"].send("b", 1, b"commit 1")
    net.turn_until(lambda: net.ears["b"].down)
    assert net.ears["b"].frames == []
    assert "TLS failed: decryption failed or bad record mac" in caplog.text
    relay.change = bytes
    net.turn_until(lambda: len(net.ears["b"].up) == 2)


def test_a_frame_repeated_on_the_way_ends_the_connection(stack: ExitStack, files: list[Tls]) -> None:
    """Frames inside TLS have no MAC: a record that comes twice breaks TLS itself."""
    net = Net(tls=files[:2]).listen(stack)
    relay = net.through_relay(stack)
    net.connect()
    relay.change = lambda data: data + data
    net.nodes["a"].send("b", 1, b"vote")
    net.turn_until(lambda: net.ears["b"].down)
    assert net.ears["b"].frames in ([], [("a", 1, b"vote")])


def test_a_connection_cut_within_the_tls_handshake_comes_back(stack: ExitStack, files: list[Tls]) -> None:
    net = Net(tls=files[:2]).listen(stack)
    relay = net.through_relay(stack)
    relay.change = lambda data: data[: len(data) // 2]
    net.turn_for(0.1)
    assert relay.left is not None
    relay.left.close()
    relay.left, relay.change = None, bytes
    net.connect()


def test_one_with_a_certificate_in_the_middle_of_two_sessions_is_found_out(
    stack: ExitStack, files: list[Tls], caplog: pytest.LogCaptureFixture
) -> None:
    """It has a certificate of the CA, and not the secret: it could decrypt all, if it were let through."""
    net = Net(tls=files[:2]).listen(stack)
    left, right = socket.create_server(("127.0.0.1", 0)), None
    stack.enter_context(left)
    net.nodes["a"].set_peers({"b": left.getsockname()[:2]})
    while not net.nodes["a"]._links:
        net.nodes["a"].tick(now())
    to_a = socket.socket(fileno=left.accept()[0].detach())
    right = socket.create_connection(net.addresses["b"])
    ends = [
        files[2].server_context().wrap_socket(to_a, server_side=True, do_handshake_on_connect=False),
        files[2].client_context().wrap_socket(right, do_handshake_on_connect=False),
    ]
    for end in ends:
        stack.enter_context(end)
        end.setblocking(False)
    passed = 0
    for _ in range(300):
        net.turn()
        for source, sink in (ends, ends[::-1]):
            with suppress(ssl.SSLWantReadError, OSError):
                source.do_handshake()
                passed += sink.send(source.recv(1 << 16))
        if "does not know the cluster's secret" in caplog.text:
            break
    assert passed > 100, "it has passed on the hello and the challenge"
    assert "b does not know the cluster's secret" in caplog.text
    assert not net.ears["a"].up and not net.ears["b"].up


# -- who is not let in ---------------------------------------------------


def test_a_certificate_of_another_ca_is_refused(
    stack: ExitStack, files: list[Tls], foreign: Tls, caplog: pytest.LogCaptureFixture
) -> None:
    never_connects(Net(tls=[foreign, files[1]]).listen(stack))
    assert "its certificate is not good" in caplog.text


def test_a_certificate_of_another_ca_is_refused_by_an_acceptor(
    stack: ExitStack, files: list[Tls], foreign: Tls, caplog: pytest.LogCaptureFixture
) -> None:
    """The dialer trusts our CA, so that it is the acceptor's to refuse."""
    stranger = Tls(foreign.cert, foreign.key, files[0].ca)
    never_connects(Net(tls=[stranger, files[1]]).listen(stack))
    assert "raft b: closed the connection of a stranger at 127.0.0.1: its certificate" in caplog.text


def test_a_certificate_that_has_expired_is_refused(
    stack: ExitStack, files: list[Tls], authority: Authority, caplog: pytest.LogCaptureFixture
) -> None:
    never_connects(Net(tls=[files[0], authority.issue("late", days=-1)]).listen(stack))
    assert "certificate has expired" in caplog.text


def test_no_certificate_at_all_is_refused(stack: ExitStack, files: list[Tls]) -> None:
    net = Net(tls=files[:2]).listen(stack)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(files[0].ca)
    context.check_hostname = False
    stranger = stack.enter_context(socket.create_connection(net.addresses["b"]))
    stranger.setblocking(False)
    end = stack.enter_context(context.wrap_socket(stranger, do_handshake_on_connect=False))
    told = ""
    for _ in range(100):
        net.nodes["b"].poll(0.01)
        net.nodes["b"].flush()
        try:
            end.do_handshake()
            end.recv(1)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            continue
        except ssl.SSLError as error:
            told = error.reason or ""
            break
    assert "ALERT_CERTIFICATE_REQUIRED" in told
    assert not net.nodes["b"]._links


def test_the_secret_is_asked_for_inside_tls_as_well(stack: ExitStack, files: list[Tls]) -> None:
    never_connects(Net(secrets=(b"s", b"t"), tls=files[:2]).listen(stack))


def test_an_old_tls_is_refused(stack: ExitStack, files: list[Tls]) -> None:
    assert files[0].server_context().minimum_version >= ssl.TLSVersion.TLSv1_2
    assert files[0].client_context().minimum_version >= ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize("plain", ["a", "b"])
def test_plain_and_tls_do_not_connect_and_say_why(
    plain: str, stack: ExitStack, files: list[Tls], caplog: pytest.LogCaptureFixture
) -> None:
    tls = [None, files[1]] if plain == "a" else [files[0], None]
    never_connects(Net(tls=tls).listen(stack))
    if plain == "a":
        assert (
            "raft b: closed the connection of a stranger at 127.0.0.1: it does not speak TLS" in caplog.text
        )
        assert "raft a: no connection to b: it closed the connection before" in caplog.text
    else:
        assert "raft b: closed the connection of a stranger at 127.0.0.1: it speaks TLS, which" in caplog.text
        assert "raft a: no connection to b: it closed the connection during the TLS handshake" in caplog.text


@pytest.mark.parametrize(
    "said", [b"GET / HTTP/1.0\r\n\r\n", b"\x16\x03\x01\xff\xff" + bytes(9000), bytes(5000)]
)
def test_a_strangers_bytes_cost_that_connection_only(said: bytes, stack: ExitStack, files: list[Tls]) -> None:
    net = Net(tls=files[:2]).listen(stack).connect()
    stranger = stack.enter_context(socket.create_connection(net.addresses["b"]))
    stranger.sendall(said)
    net.turn_for(0.05)
    stranger.close()
    net.turn_for(0.05)
    net.nodes["a"].send("b", 1, b"still here")
    net.turn_until(lambda: net.ears["b"].frames)
    assert net.ears["b"].down == []
    assert len(net.nodes["b"]._links) == 1


def test_slow_tls_handshakes_end_in_time_and_are_bounded(stack: ExitStack, files: list[Tls]) -> None:
    net = Net(tls=files[:2]).listen(stack).connect()
    for _ in range(STRANGERS_MAX + 10):
        stranger = stack.enter_context(socket.create_connection(net.addresses["b"]))
        stranger.sendall(b"\x16\x03\x01\x02\x00\x01")
        net.turn()
    assert len(net.nodes["b"]._links) <= STRANGERS_MAX + 1
    net.nodes["b"].tick(now() + 5.1)
    assert all(link.peer is not None for link in net.nodes["b"]._links.values())


@pytest.mark.parametrize("version", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
def test_both_versions_bind_the_proof_to_their_session(
    version: ssl.TLSVersion, stack: ExitStack, files: list[Tls]
) -> None:
    net = Net(tls=files[:2])
    contexts = net.nodes["a"]._contexts
    assert contexts is not None
    contexts[0].maximum_version = version
    net.listen(stack).connect()
    (one,), (other,) = (node._links.values() for node in net.nodes.values())
    assert one._channel.binding == other._channel.binding != b""
    net.nodes["a"].send("b", 1, b"message")
    net.turn_until(lambda: net.ears["b"].frames)
