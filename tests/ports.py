"""Free loopback ports, for servers that a test starts a moment later."""

import os
import random
import socket
from itertools import count

# Below the kernel's range for outgoing connections and the one that a run chooses from
# (photon.cluster.local_cluster), so that a server that was killed finds its port free. Workers of
# pytest-xdist have a share each: none chooses a port that the other one's server is about to bind.
_LOW, _SHARE, _SHARES = 10_000, 2_500, 4

_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_numbers = count(random.randrange(_SHARE))


def free_ports(wanted: int) -> list[int]:
    """Distinct ports of 127.0.0.1 that nothing listens on now; the same ones again only after all others."""
    return _runs(wanted, 1)


def paired_ports(wanted: int) -> list[int]:
    """As free_ports, and the port above each is free as well and never chosen: for metrics beside gRPC."""
    return _runs(wanted, 2)


def port_before(free: int) -> int:
    """A free port, with as many free ones behind it."""
    return _runs(1, 1 + free)[0]


def _runs(wanted: int, length: int) -> list[int]:
    """Starts of `wanted` runs of neighbouring ports that are all free."""
    first = _LOW + _worker % _SHARES * _SHARE
    starts: list[int] = []
    run: list[int] = []
    for _ in range(_SHARE):
        port = first + next(_numbers) % _SHARE
        run = [*run, port] if run and port == run[-1] + 1 else [port]
        if not _free(port):
            run = []
        elif len(run) == length:
            starts.append(run[0])
            run = []
        if len(starts) == wanted:
            return starts
    raise AssertionError(f"no {wanted} free ports from {first} on")


def _free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
