"""Links inside TLS: the same promises, encrypted, and only among certificates of one CA."""

import socket
import ssl
from contextlib import ExitStack, suppress

import pytest

from photon.raft import links
from photon.raft.core import now
from photon.rpc.network import Tls
from tests.certificates import Authority
from tests.raft.link_kit import Net


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return Authority(tmp_path_factory.mktemp("tls") / "theirs").issue("a")


def never_connects(net: Net) -> None:
    net.turn_for(0.4)
    assert not net.ears["a"].up and not net.ears["b"].up
    assert not net.ears["a"].seen and not net.ears["b"].seen


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
    proxy = net.through_proxy(stack)
    proxy.listens = True
    net.connect()
    net.nodes["a"].send("b", 1, b"a secret message")
    net.turn_until(lambda: net.ears["b"].frames)
    said = proxy.said["a", "b"]
    assert said and b"secret" not in said and b"PHRAFT" not in said


def test_a_connection_cut_within_the_tls_handshake_comes_back(stack: ExitStack, files: list[Tls]) -> None:
    net = Net(tls=files[:2]).listen(stack)
    proxy = net.through_proxy(stack)
    proxy.change["a", "b"] = lambda data: data[: len(data) // 2]
    net.turn_for(0.1)
    proxy.heal()
    proxy.reset("a", "b")
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


@pytest.mark.parametrize("which", ["another CA's", "another CA's, of one that trusts ours", "expired"])
def test_a_certificate_that_is_not_good_is_refused(
    which: str,
    stack: ExitStack,
    files: list[Tls],
    foreign: Tls,
    authority: Authority,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Where the dialer trusts our CA, it is the acceptor's to refuse."""
    acceptors = "raft b: closed the connection of a stranger at 127.0.0.1: its certificate"
    tls, said = {
        "another CA's": ([foreign, files[1]], "its certificate is not good"),
        "another CA's, of one that trusts ours": (
            [Tls(foreign.cert, foreign.key, files[0].ca), files[1]],
            acceptors,
        ),
        "expired": ([files[0], authority.issue("late", days=-1)], "certificate has expired"),
    }[which]
    never_connects(Net(tls=tls).listen(stack))
    assert said in caplog.text


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
