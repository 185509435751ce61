"""Bytes of strangers on every port of every role cost a line in the log and that connection, nothing else."""

import os
import random
import socket
import ssl
import urllib.request

import grpc
import pytest

from photon.core.errors import UnavailableError
from photon.rpc.servers import CONNECTIONS_MAX
from tests.fuzz.site import ROLES, Site
from tests.fuzz.strangers import crowd, flood, half_a_call, hello, say, sayings
from tests.health import status_of
from tests.waiting import wait_until

SEED = int(os.environ.get("PHOTON_FUZZ_SEED", "1"))
EXAMPLES = int(os.environ.get("PHOTON_FUZZ_EXAMPLES", "20"))

pytestmark = pytest.mark.cluster


def test_a_replica_with_another_secret_or_of_another_release_is_told_of_in_the_log(plain: Site) -> None:
    """Again and again, as complaints are few."""

    def secret_told() -> bool:
        with socket.create_connection(("127.0.0.1", plain.ports["raft"]), timeout=60) as stranger:
            stranger.sendall(hello())
            assert stranger.recv(4096), "the hello was well formed: a challenge is the answer"
            stranger.sendall((40).to_bytes(2, "little") + bytes(40))
            assert stranger.recv(4096) == b""
        return "does not know the cluster's secret" in plain.said("registry")

    def release_told() -> bool:
        say(plain.ports["raft"], hello(version=0))
        return "it speaks versions 0 to 0 of the protocol" in plain.said("registry")

    wait_until(secret_told, what="the wrong secret")
    wait_until(release_told, what="the old release")


def test_every_port_survives_whatever_it_is_told(site: Site) -> None:
    before, facts = site.sizes(), site.facts()
    for port in site.ports.values():
        for said in sayings(random.Random(SEED)).values():
            say(port, said, 0.005)
    site.check_unharmed(before, facts)


def test_more_than_any_limit_is_not_kept(site: Site) -> None:
    before, facts = site.sizes(), site.facts()
    for name, port in site.ports.items():
        flood(port, 4 << 20)
        flood(port, 4 << 20, half_a_call("/photon.joiner.v1.Joiner/Join"))
        if name == "raft":
            assert flood(port, 64 << 20, hello()) < 64 << 20, "it listens to one without the secret for ever"
    site.check_unharmed(before, facts)


def test_many_connections_at_a_time_that_say_nothing_leave_nothing_behind(site: Site) -> None:
    before, facts = site.sizes(), site.facts()
    with crowd(list(site.ports.values()), 60):
        site.join_more()  # the links that are there go on
    site.check_unharmed(before)
    assert site.facts()["members"] == facts["members"]


@pytest.mark.parametrize("role", ROLES)
def test_bytes_that_are_no_message_are_answered_with_a_status_and_one_line(plain: Site, role: str) -> None:
    method = {
        "registry": "/photon.idregistry.v1.IdRegistry/Commit",
        "eventstore": "/photon.eventstore.v1.EventStore/Lookup",
        "joiner": "/photon.joiner.v1.Joiner/Join",
        "dispatcher": "/photon.dispatcher.v1.Dispatcher/Pending",
    }[role]
    before = plain.sizes()
    with grpc.insecure_channel(plain.address(role)) as channel:
        call = channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
        for said in (b"\xff\xff", b"\x0a\xff", os.urandom(5000)):
            with pytest.raises(grpc.RpcError) as caught:
                call(said, timeout=60)
            assert caught.value.code() in (grpc.StatusCode.INTERNAL, grpc.StatusCode.INVALID_ARGUMENT)
    assert f"{method}: 2 bytes that are no request" in plain.said(role)
    plain.check_unharmed(before)


# -- inside TLS ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
def test_inside_tls_each_role_serves_those_with_a_certificate_alone(secure: Site, role: str) -> None:
    assert secure.status(role)
    with pytest.raises(UnavailableError, match="want TLS"):
        status_of(role, secure.address(role))
    url = f"127.0.0.1:{secure.ports[f'{role} metrics']}/metrics"
    assert secure.tls is not None
    with urllib.request.urlopen(f"https://{url}", timeout=60, context=secure.tls.client_context()) as answer:
        assert b"photon_certificate_expires_seconds" in answer.read()
    without = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    without.check_hostname, without.verify_mode = False, ssl.CERT_NONE
    for stranger in (f"http://{url}", f"https://{url}"):
        with pytest.raises(OSError):
            urllib.request.urlopen(stranger, timeout=60, context=without)


# -- for as long as it is told to ------------------------------------------------------------------------


@pytest.mark.fuzz
@pytest.mark.timeout(3600)
def test_random_bytes_for_long(site: Site) -> None:
    before, facts = site.sizes(), site.facts()
    rng = random.Random(SEED)
    for _ in range(EXAMPLES):
        port = rng.choice(list(site.ports.values()))
        parts = rng.choices(list(sayings(rng).values()), k=rng.randrange(1, 4))
        said = bytearray(b"".join(parts))
        for _ in range(rng.randrange(10)):
            if said:
                said[rng.randrange(len(said))] = rng.randrange(256)
        say(port, bytes(said[: rng.randrange(len(said) + 1)]), rng.choice([0.0, 0.01, 0.1]))
    site.check_unharmed(before, facts)


@pytest.mark.fuzz
@pytest.mark.timeout(3600)
def test_thousands_of_connections(site: Site) -> None:
    before = site.sizes()
    for said in (b"", b"\x16", b"PRI * HTTP/2.0", hello(cut=5)):
        with crowd(list(site.ports.values()), 300, said):
            pass
    site.check_unharmed(before)


@pytest.mark.fuzz
@pytest.mark.timeout(600)
def test_half_calls_that_hold_all_threads_are_ended_in_time(plain: Site) -> None:
    before = plain.sizes()
    ports = [plain.ports[role] for role in ROLES]
    with crowd(ports, 60, half_a_call("/photon.joiner.v1.Joiner/Join")):
        plain.join_more()
    plain.check_unharmed(before)


@pytest.mark.fuzz
@pytest.mark.timeout(600)
def test_more_connections_than_a_server_takes_do_not_use_up_its_descriptors(plain: Site) -> None:
    before = plain.sizes()
    with crowd([plain.ports["joiner"]], CONNECTIONS_MAX + 200):
        assert plain.size("joiner").descriptors <= before["joiner"].descriptors + CONNECTIONS_MAX
        plain.join_more()  # once those without a word are gone
    plain.check_unharmed(before)
