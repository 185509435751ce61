"""Free loopback ports for processes that are started later; others, where one is taken by then."""

import random
import socket
from collections.abc import Callable
from typing import Final, TypeVar

from photon.cluster.supervisor import PortTakenError
from photon.core.errors import UnavailableError

PORT_TRIES_MAX: Final = 5
_Started = TypeVar("_Started")

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


def on_free_ports(
    attempt: Callable[[], _Started], notice: Callable[[str], None], tries_max: int = PORT_TRIES_MAX
) -> _Started:
    """What `attempt` returns, which chooses ports; again, as long as another program is quicker.

    What was done is safe, as after any other end of a run. The last PortTakenError is raised.
    """
    for _ in range(tries_max - 1):
        try:
            return attempt()
        except PortTakenError as error:
            notice(f"{error}; starting again on other ports")
    return attempt()
