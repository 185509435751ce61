"""Which gRPC targets reach all joiners, with and without certificates (joiner/client.py)."""

import json

import pytest

from joiner.client import OPTIONS, addresses_of, targets
from joiner.server import SERVICE_NAME
from photon.rpc.network import Network
from tests.certificates import Authority
from tests.joiner.fakes import batch_of


@pytest.mark.parametrize(
    ("addresses", "together", "wanted"),
    [
        (["127.0.0.1:1", "10.0.0.7:2"], True, ["ipv4:127.0.0.1:1,10.0.0.7:2"]),
        (["[::1]:1", "[fe80::2]:2"], True, ["ipv6:[::1]:1,[fe80::2]:2"]),
        (["127.0.0.1:1"], True, ["ipv4:127.0.0.1:1"]),
        # A name has a channel of its own, for it may stand for several joiners.
        (["joiner:1"], True, ["dns:///joiner:1"]),
        (["one:1", "two:1", "localhost:3"], True, ["dns:///one:1", "dns:///two:1", "dns:///localhost:3"]),
        (
            ["127.0.0.1:1", "joiner:1", "[::1]:1", "127.0.0.1:2"],
            True,
            ["ipv4:127.0.0.1:1,127.0.0.1:2", "ipv6:[::1]:1", "dns:///joiner:1"],
        ),
        # Where host names are checked no two share a channel.
        (["127.0.0.1:1", "127.0.0.1:2"], False, ["ipv4:127.0.0.1:1", "ipv4:127.0.0.1:2"]),
        # An address that is named twice gets no second share.
        (["127.0.0.1:1", "127.0.0.1:1", "j:1", "j:1"], True, ["ipv4:127.0.0.1:1", "dns:///j:1"]),
    ],
)
def test_literals_of_one_family_share_a_channel_and_each_name_has_its_own(addresses, together, wanted):
    found = targets(addresses, together)
    assert found == wanted
    assert sorted(a for target in found for a in addresses_of(target)) == sorted(set(addresses))


def test_health_is_asked_of_the_service_that_joiners_serve():
    config = json.loads(dict(OPTIONS)["grpc.service_config"])
    assert config["healthCheckConfig"]["serviceName"] == SERVICE_NAME


@pytest.mark.parametrize("tls_name", ["photon", ""])
def test_joiners_with_certificates_take_turns(serve, connect, tmp_path, tls_name):
    network = Network(Authority(tmp_path / "ca").issue("node", tls_name=tls_name))
    servers = [serve(name, network=network) for name in ("one", "two")]
    client = connect(*servers, network=network)
    number = 0
    while any(server.status()["joined"] < 3 for server in servers):
        number += 1
        client.join(batch_of([f"e{number}"]))
    assert sum(status["joined"] for status in client.statuses().values()) == number


def test_the_certificate_of_a_joiner_behind_a_proxy_carries_the_name_that_all_know_it_by(
    serve, connect, tmp_path
):
    tls = Authority(tmp_path / "ca").issue("node", carries="DNS:joiner.photon.test")
    server = serve(network=Network(tls))
    advertised = "joiner.photon.test:7420"
    network = Network(tls, {advertised: server.listen})
    client = connect(advertised, network=network)
    client.join(batch_of(["e"]))
    assert client.statuses()[advertised]["joined"] == 1
