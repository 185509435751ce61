import socket

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from photon.core.errors import AddressInUseError, UsageError
from photon.rpc.network import LOOPBACK
from photon.rpc.servers import Server


@pytest.mark.parametrize(
    "listen", ["0.0.0.0:1", "10.0.0.1:1", "[::]:1", "127.evil.example:1", "example.com:1"]
)
def test_nothing_listens_beyond_loopback_without_tls(listen):
    with pytest.raises(UsageError, match="insecure_beyond_loopback = true"):
        Server(listen, 1)


def test_a_port_that_is_taken_is_told_and_not_shared_in_silence():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(AddressInUseError, match=address):
            Server(address, 1).start()
    first = Server("127.0.0.1:0", 1)
    first.start()
    try:
        with pytest.raises(AddressInUseError):
            Server(first.listen, 1).start()
    finally:
        first.stop(0)


def test_every_server_answers_health_checks():
    server = Server("127.0.0.1:0", 2)
    server.start()
    with LOOPBACK.open(server.listen) as channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        answer = check(health_pb2.HealthCheckRequest(), timeout=10, wait_for_ready=True)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
        server.stop(0)
        with pytest.raises(grpc.RpcError):
            check(health_pb2.HealthCheckRequest(), timeout=1)
