"""The gRPC targets that reach all joiners of a list of addresses; gRPC spreads the calls of each. Pure."""

import ipaddress
import json
import re
from collections.abc import Sequence
from typing import Any, Final

from photon.core.addresses import parts

OPTIONS: Final[list[tuple[str, Any]]] = [
    (
        "grpc.service_config",
        json.dumps(
            {
                "loadBalancingConfig": [{"round_robin": {}}],
                # One that says NOT_SERVING (no lease, a disk that fails, draining) is sent nothing.
                "healthCheckConfig": {"serviceName": "photon.joiner.v1.Joiner"},
            }
        ),
    )
]
"""Of a channel to joiners."""


def targets(addresses: Sequence[str], together: bool) -> list[str]:
    """`host:port`s -> gRPC targets: one for all IPv4 literals, one for all IPv6 literals, one for each name.

    A name may stand for several joiners. `together` false: each literal has its own, too (TLS where host
    names are checked: gRPC looks for one name on all connections of a channel).
    """
    literals: dict[str, list[str]] = {"ipv4": [], "ipv6": []}
    found = []
    for address in dict.fromkeys(addresses):
        scheme = _scheme(parts(address)[0])
        if scheme == "dns":
            found.append(f"dns:///{address}")
        elif together:
            literals[scheme].append(address)
        else:
            found.append(f"{scheme}:{address}")
    return [f"{scheme}:{','.join(those)}" for scheme, those in literals.items() if those] + found


def addresses_of(target: str) -> list[str]:
    """The `host:port`s that one target of `targets` stands for."""
    return re.sub("^(dns:///|ipv[46]:)", "", target).split(",")


def _scheme(host: str) -> str:
    try:
        return f"ipv{ipaddress.ip_address(host).version}"
    except ValueError:
        return "dns"
