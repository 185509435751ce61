"""gRPC inside TLS: who gets in, who does not, and what each is told."""

import pickle
import socket
import ssl
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from photon.core.errors import SettingsError, UnavailableError, UsageError
from photon.rpc import dispatcher_pb2 as pb
from photon.rpc import dispatcher_pb2_grpc
from photon.rpc.network import LOOPBACK, Network, Tls, failure_of, mend_of
from photon.rpc.servers import Server, StatusClient
from tests.certificates import Authority

NAME = "photon"
TIMEOUT_S = 30.0

Serve = Callable[[Network], Server]


@pytest.fixture(scope="module")
def tls(authority: Authority) -> Tls:
    return authority.issue("node", tls_name=NAME)


@pytest.fixture(scope="module")
def theirs(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    return Authority(tmp_path_factory.mktemp("tls") / "theirs").issue("node", tls_name=NAME)


def ask(server: Server, network: Network) -> dict[str, object]:
    return ask_at(server.listen, network)


def ask_at(address: str, network: Network) -> dict[str, object]:
    with closing(StatusClient("dispatcher", address, TIMEOUT_S, network)) as client:
        return client.status()


def refusal(server: Server, network: Network) -> str:
    """What the caller is told; the server goes on."""
    with pytest.raises(UnavailableError) as caught:
        ask(server, network)
    return str(caught.value)


def test_certificates_of_one_ca_that_carry_the_name_let_each_other_in(
    serve: Serve, tls: Tls, authority: Authority
) -> None:
    server = serve(Network(tls=tls))
    assert ask(server, Network(tls=tls)) == {"answers": True}
    assert ask(server, Network(tls=authority.issue("another", tls_name=NAME))) == {"answers": True}


@pytest.mark.parametrize("host", ["r0.photon.test", "10.1.2.3", "[fd00::2]"])
def test_what_is_dialed_in_its_place_changes_nothing_of_what_a_certificate_must_carry(
    serve: Serve, tls: Tls, authority: Authority, host: str
) -> None:
    carries = "DNS:r0.photon.test,IP:10.1.2.3,IP:fd00::2"
    server = serve(Network(tls=replace(authority.issue("r0", carries=carries), name="")))
    address, hosts = f"{host}:7400", replace(tls, name="")
    assert ask_at(address, Network(hosts, {address: server.listen})) == {"answers": True}
    other = "r1.photon.test:7400"
    with pytest.raises(UnavailableError, match="does not carry the name"):
        ask_at(other, Network(hosts, {other: server.listen}))


def test_without_a_name_the_host_is_looked_for(serve: Serve, tls: Tls, authority: Authority) -> None:
    hosts = replace(tls, name="")
    assert ask(serve(Network(tls=tls)), Network(tls=hosts)) == {"answers": True}
    elsewhere = authority.issue("elsewhere", carries="DNS:photon,DNS:elsewhere")
    assert "does not carry the name" in refusal(serve(Network(tls=elsewhere)), Network(tls=hosts))


@pytest.mark.parametrize(
    ("serves", "asks", "told"),
    [
        ("ours", "theirs", "the server's certificate is not of the CA that tls.ca names here"),
        # One that trusts our CA finds nothing wrong with the server: it is the server's to refuse.
        ("ours", "theirs, trusting", "refuse the certificate of this end (expired, or not of the CA that"),
        ("ours", "late", "refuse the certificate of this end (expired"),
        ("late", "ours", "the server's certificate has expired: sign a new one"),
        ("nameless", "ours", "does not carry the name that clients look for: sign one that carries tls.name"),
        ("ours", "", "it may want TLS (set [tls] at both ends or at none)"),
        ("", "ours", "does not speak TLS, which is set here: set [tls] at both ends"),
    ],
)
def test_who_does_not_fit_is_refused_and_told_why(
    serve: Serve, tls: Tls, theirs: Tls, authority: Authority, serves: str, asks: str, told: str
) -> None:
    ends = {
        "": LOOPBACK,
        "ours": Network(tls=tls),
        "theirs": Network(tls=theirs),
        "theirs, trusting": Network(tls=replace(theirs, ca=tls.ca)),
        "late": Network(tls=authority.issue("late", days=-1, tls_name=NAME)),
        "nameless": Network(tls=authority.issue("nameless", carries="DNS:other", tls_name="other")),
    }
    server = serve(ends[serves])
    assert told in refusal(server, ends[asks])
    if serves in ("", "ours"):
        assert ask(server, ends[serves]) == {"answers": True}


def test_no_certificate_is_refused(serve: Serve, tls: Tls) -> None:
    server = serve(Network(tls=tls))
    credentials = grpc.ssl_channel_credentials(tls.ca.read_bytes())
    options = [("grpc.ssl_target_name_override", NAME)]
    with grpc.secure_channel(server.listen, credentials, options=options) as channel:
        stub = dispatcher_pb2_grpc.DispatcherStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(grpc.RpcError) as caught:
            stub.Status(pb.StatusRequest(), timeout=TIMEOUT_S)
    assert "refuse the certificate of this end" in failure_of(caught.value)
    assert ask(server, Network(tls=tls)) == {"answers": True}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_an_old_tls_is_refused(serve: Serve, tls: Tls) -> None:
    server = serve(Network(tls=tls))
    context = tls.client_context()
    context.minimum_version = ssl.TLSVersion.MINIMUM_SUPPORTED
    context.maximum_version = ssl.TLSVersion.TLSv1_1
    context.set_ciphers("ALL:@SECLEVEL=0")
    host, _, port = server.listen.rpartition(":")
    with socket.create_connection((host, int(port))) as plain, pytest.raises((ssl.SSLError, OSError)):
        context.wrap_socket(plain)
    assert ask(server, Network(tls=tls)) == {"answers": True}


def test_what_has_nothing_to_do_with_tls_is_told_as_it_is() -> None:
    assert mend_of("failed to connect to all addresses; last error: Connection refused") is None
    assert mend_of("Socket closed") is None, "a call that was under way: the server has ended"
    assert mend_of("connections to all backends failing; last error: Socket closed") is not None


# -- what is listened on ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "listen",
    [
        *("0.0.0.0:0", "0.0.0.0:1", "10.0.0.1:1", "[::]:0", "[::]:1", "192.0.2.1:7400"),
        *("photon.example:7400", "127.evil.example:1"),
    ],
)
def test_beyond_loopback_nothing_is_listened_on_without_tls(listen: str) -> None:
    with pytest.raises(UsageError, match="insecure_beyond_loopback = true") as caught:
        Server(listen, 1)
    assert caught.value.exit_status == 2
    assert "\n" not in str(caught.value)


def test_bound_beyond_loopback_in_place_of_the_advertised_host_is_refused_as_well(tls: Tls) -> None:
    with pytest.raises(UsageError, match=r"refusing to listen on 0\.0\.0\.0:7400"):
        Network(bind="0.0.0.0").bound("127.0.0.1:7400")
    assert Network(tls=tls, bind="0.0.0.0").bound("127.0.0.1:7400") == "0.0.0.0:7400"
    for everywhere in ("::", "[::]"):
        assert Network(tls=tls, bind=everywhere).bound("node:7400") == "[::]:7400"


def test_beyond_loopback_it_listens_where_that_was_asked_for_in_so_many_words() -> None:
    Server("0.0.0.0:0", 1, network=Network(insecure_beyond_loopback=True)).stop(0)


def test_the_files_are_read_once_so_that_one_that_is_gone_later_does_no_harm(
    authority: Authority, tls: Tls, serve: Serve, tmp_path: Path
) -> None:
    own = authority.issue("moved", tls_name=NAME)
    network = Network(tls=own)
    for path in (own.cert, own.key):
        path.rename(tmp_path / path.name)
    try:
        assert ask(serve(network), network) == {"answers": True}
        with pytest.raises(SettingsError, match=f"{own.key.name}: cannot be read"):
            Network(tls=own)
    finally:
        for path in (own.cert, own.key):
            (tmp_path / path.name).rename(path)


def test_what_is_known_of_the_network_travels_without_the_key_and_reads_it_where_it_comes(
    tls: Tls, serve: Serve
) -> None:
    network = Network(tls, {"a:1": "b:2"}, "127.0.0.1")
    packed = pickle.dumps(network)
    assert tls.key.read_bytes() not in packed
    assert pickle.loads(packed) == network
    assert ask(serve(network), pickle.loads(packed)) == {"answers": True}
