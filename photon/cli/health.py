"""`photon health`: whether a process serves, by gRPC's health service; health checks of containers ask it.

Every ten seconds, in every pod: so it imports little (tests/cli/test_cli.py).
"""

from pathlib import Path
from typing import Final

import click
import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from photon.cli.options import config_option
from photon.core.addresses import split_address
from photon.core.errors import UnavailableError
from photon.core.settings import load_settings
from photon.rpc.network import Network, failure_of, network_of

TIMEOUT_S: Final = 5.0


@click.command("health")
@click.argument("address", envvar="PHOTON_ADDRESS")
@config_option("Settings (photon.toml) whose [tls] the process is asked with.")
@click.option("--timeout", type=float, default=TIMEOUT_S, show_default=True, help="Seconds to wait.")
def command(address: str, config: Path | None, timeout: float) -> None:
    """Ask the process at ADDRESS (host:port of its gRPC) whether it serves.

    Status 1 if it does not, or does not answer.
    """
    split_address(address, "ADDRESS")
    settings = load_settings(config)
    # Straight to the address: what stands between datacenters is not asked after here.
    answer = ask_health(network_of(settings, ""), address, timeout)
    click.echo(f"{address}: {answer}")
    raise SystemExit(0 if answer == "serving" else 1)


def ask_health(network: Network, address: str, timeout_s: float) -> str:
    """`serving`, or what it says instead. UnavailableError if it does not answer."""
    with network.open(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        try:
            answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=timeout_s)
        except grpc.RpcError as error:
            raise UnavailableError(f"{address}: {failure_of(error)}") from error
    status: str = health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)
    return status.lower().replace("_", " ")
