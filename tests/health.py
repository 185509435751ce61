"""What a server says of its health, and of itself."""

from contextlib import closing

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from photon.rpc.network import LOOPBACK
from photon.rpc.servers import StatusClient
from tests.waiting import wait_until

SERVING = "SERVING"
NOT_SERVING = "NOT_SERVING"


def health(address, service="", network=LOOPBACK):
    """SERVING, NOT_SERVING, or the name of the status with which the call failed."""
    with network.open(address) as channel:
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=10)
        except grpc.RpcError as error:
            return error.code().name
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)


def status_of(role, address, network=LOOPBACK):
    """UnavailableError."""
    with closing(StatusClient(role, address, 20.0, network)) as client:
        return client.status()


def await_health(wanted, address, service="", seconds=60):
    """Wait until it says so."""

    def found():
        return health(address, service)

    wait_until(lambda: found() == wanted, seconds, lambda: f"{address} {service}: {found()}, not {wanted}")
