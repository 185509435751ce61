"""Batches are spread over joiners with certificates, too, whether one name or host names are checked."""

import random

import pytest

from joiner.client import JoinerClient
from joiner.server import JoinerServer
from photon.core.clock import SystemClock
from photon.rpc.network import Network
from tests.certificates import Authority
from tests.joiner.fakes import IDENTITY, FakeEventStore, FakeRegistry, batch_of, settings


def joiner(root, name, network):
    return JoinerServer(
        settings(),
        name=name,
        datacenter="east",
        listen="127.0.0.1:0",
        directory=root / name,
        output_root=root / "out",
        registry=FakeRegistry(),
        eventstore=FakeEventStore(),
        clock=SystemClock(),
        rng=random.Random(),
        network=network,
    )


@pytest.mark.parametrize("tls_name", ["photon", ""])
def test_joiners_with_certificates_take_turns(tmp_path, tls_name):
    network = Network(Authority(tmp_path / "ca").issue("node", tls_name=tls_name))
    servers = [joiner(tmp_path, name, network) for name in ("one", "two")]
    for server in servers:
        server.start()
    client = JoinerClient([server.listen for server in servers], 30.0, network, identity=IDENTITY)
    try:
        number = 0
        while any(server.status()["joined"] < 3 for server in servers):
            number += 1
            client.join(batch_of([f"e{number}"]))
        assert sum(status["joined"] for status in client.statuses().values()) == number
    finally:
        client.close()
        for server in servers:
            server.stop(1)


def test_the_certificate_of_a_joiner_behind_a_proxy_carries_the_name_that_all_know_it_by(tmp_path):
    tls = Authority(tmp_path / "ca").issue("node", carries="DNS:joiner.photon.test")
    server = joiner(tmp_path, "one", Network(tls))
    server.start()
    advertised = "joiner.photon.test:7420"
    network = Network(tls, {advertised: server.listen})
    client = JoinerClient([advertised], 30.0, network, identity=IDENTITY)
    try:
        client.join(batch_of(["e"]))
        assert client.statuses()[advertised]["joined"] == 1
    finally:
        client.close()
        server.stop(1)
