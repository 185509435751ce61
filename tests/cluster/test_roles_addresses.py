"""What a process binds where that is not what it is known by, and in what order."""

import socket
import urllib.error
import urllib.request

import pytest

from photon.cluster import roles
from photon.cluster.topology import Pipeline, Replica, Topology
from photon.core.errors import AddressInUseError
from photon.core.settings import Settings
from photon.rpc.network import LOOPBACK, Network
from tests.ports import free_ports


class Role:
    """Notes whether its metrics are bound when it starts."""

    def __init__(self, metrics):
        self.metrics = metrics
        self.answer_at_start = None

    def start(self):
        self.answer_at_start = scraped(self.metrics)

    def status(self):
        return {"queue": 7}


def scraped(address):
    try:
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=20) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code


@pytest.fixture
def address():
    (port,) = free_ports(1)
    return f"127.0.0.1:{port}"


def topology(metrics, role="registry", **replica):
    found = Replica(
        "", "r0.photon.test:7400", "r0.photon.test:7401", name="r0", directory="/nowhere", **replica
    )
    east = Pipeline(datacenter="east", joiners=("127.0.0.1:7420",), directory="/nowhere")
    process = "registry-r0" if role == "registry" else "joiner-east"
    return Topology(Settings(), [], [], "/nowhere", "", False, [found], [east], {process: metrics})


def start(server, system, role, name):
    roles._start(system, system.process(role, name), server, LOOPBACK)


def test_metrics_of_a_replica_are_bound_where_its_grpc_is(address):
    advertised = f"192.0.2.1:{address.rpartition(':')[2]}"
    role = Role(address)
    start(role, topology(advertised, listen_grpc="127.0.0.1:7400"), "registry", "r0")
    assert "photon_registry_queue_ids" in scraped(address)


def test_metrics_are_bound_before_anybody_is_served_and_say_that_it_is_starting(address):
    role = Role(address)
    start(role, topology(address, "joiner"), "joiner", "east")
    assert role.answer_at_start == 503


def test_a_process_whose_metrics_have_no_port_serves_nobody(address):
    role = Role(address)
    host, _, port = address.rpartition(":")
    with socket.create_server((host, int(port))), pytest.raises(AddressInUseError):
        start(role, topology(address, "joiner"), "joiner", "east")
    assert role.answer_at_start is None


@pytest.mark.parametrize(("bind", "host"), [("[::]", "::"), ("::", "::"), ("0.0.0.0", "0.0.0.0"), ("", "r0")])
def test_raft_listens_where_grpc_does(bind, host):
    replica = Replica("", "r0:7400", "r0:7401", name="r0", directory="/nowhere")
    assert roles._raft_listen(replica, Network(bind=bind)) == (host, 7401)
