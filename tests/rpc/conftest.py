from collections.abc import Iterator

import grpc
import pytest

from photon.rpc import dispatcher_pb2 as pb
from photon.rpc.dispatcher_pb2_grpc import DispatcherServicer, add_DispatcherServicer_to_server
from photon.rpc.network import LOOPBACK, Network
from photon.rpc.servers import Server
from tests.certificates import Authority


@pytest.fixture(scope="session")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """The CA of the system."""
    return Authority(tmp_path_factory.mktemp("tls") / "ours")


class Answers(DispatcherServicer):
    def Status(self, request: pb.StatusRequest, context: grpc.ServicerContext) -> pb.StatusResponse:
        return pb.StatusResponse(json=b'{"answers": true}')


@pytest.fixture
def serve() -> Iterator[object]:
    """Starts servers that answer Status, and stops them."""
    servers = []

    def start(network: Network = LOOPBACK, workers: int = 2) -> Server:
        servers.append(Server("127.0.0.1:0", workers, network=network))
        servers[-1].add(add_DispatcherServicer_to_server, Answers(), "photon.dispatcher.v1.Dispatcher")
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.stop(0)
