"""Batches are spread over joiners with certificates, too, whether one name or host names are checked."""

import random

import pytest

from joiner.client import JoinerClient
from joiner.server import JoinerServer
from photon.core.clock import SystemClock
from photon.wire.network import Network
from tests.certificates import Authority
from tests.joiner.fakes import IDENTITY, FakeEventStore, FakeRegistry, batch_of, settings


@pytest.mark.parametrize("tls_name", ["photon", ""])
def test_joiners_with_certificates_take_turns(tmp_path, tls_name):
    network = Network(Authority(tmp_path / "ca").issue("node", tls_name=tls_name))
    servers = [
        JoinerServer(
            settings(),
            name=name,
            datacenter="east",
            listen="127.0.0.1:0",
            directory=tmp_path / name,
            output_root=tmp_path / "out",
            registry=FakeRegistry(),
            eventstore=FakeEventStore(),
            clock=SystemClock(),
            rng=random.Random(),
            network=network,
        )
        for name in ("one", "two")
    ]
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
