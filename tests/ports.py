"""Free loopback ports, for servers that a test starts a moment later."""

import os
import random
import socket
from itertools import count

# Below the kernel's range for outgoing connections and the one that a run chooses from (photon.app.ports), so
# that a server that was killed finds its port free. Workers of pytest-xdist have a share each: none chooses a
# port that the other one's server is about to bind.
_LOW, _SHARE, _SHARES = 10_000, 2_500, 4

_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
_numbers = count(random.randrange(_SHARE))


def free_ports(wanted: int) -> list[int]:
    """Distinct ports of 127.0.0.1 that nothing listens on now; the same ones again only after all others."""
    first = _LOW + _worker % _SHARES * _SHARE
    ports: list[int] = []
    for _ in range(_SHARE):
        port = first + next(_numbers) % _SHARE
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        ports.append(port)
        if len(ports) == wanted:
            return ports
    raise AssertionError(f"no {wanted} free ports from {first} on")
