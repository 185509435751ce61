"""Free loopback ports for processes that are started later."""

import random
import socket
from typing import Final

from photon.core.errors import UnavailableError

# Below the range the kernel gives to outgoing connections, so that none of those takes a port
# between the choice and the bind, nor while a process restarts on it.
_LOW: Final = 20_000
_HIGH: Final = 32_000
_TRIES: Final = 2_000


def free_ports(count: int, rng: random.Random) -> list[int]:
    """Distinct ports of 127.0.0.1 that nothing listens on now."""
    ports: set[int] = set()
    for _ in range(_TRIES):
        if len(ports) == count:
            break
        port = rng.randrange(_LOW, _HIGH)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            ports.add(port)
    if len(ports) < count:
        raise UnavailableError(f"no {count} free ports between {_LOW} and {_HIGH} on 127.0.0.1; free some")
    return sorted(ports)
