"""A joiner that serves, in a process of its own: `serving_child ROOT NAME LISTEN LEASE_S`.

It gets no lease while ROOT/no-lease-NAME is there, tells its address in ROOT/address-NAME, and drains at the
first SIGTERM.
"""

import random
import sys
import threading
from pathlib import Path

from joiner.server import JoinerServer
from photon.core.clock import SystemClock
from photon.core.errors import UnavailableError
from photon.rpc.servers import on_termination
from tests.joiner.fakes import FakeEventStore, FakeRegistry, settings


class Leases(FakeRegistry):
    def __init__(self, silent: Path) -> None:
        super().__init__()
        self._silent = silent

    def keep_alive(self, token_address: str, incarnation: int, lease_s: float, settings: bytes = b"") -> None:
        if self._silent.exists():
            raise UnavailableError("registry: no quorum")


def main(root: Path, name: str, listen: str, lease_s: float) -> None:
    told = threading.Event()
    on_termination(told.set)
    server = JoinerServer(
        settings(lease_s=lease_s, requests_in_flight_max=8),
        name=name,
        datacenter="east",
        listen=listen,
        directory=root / name,
        output_root=root / "out",
        registry=Leases(root / f"no-lease-{name}"),
        eventstore=FakeEventStore(),
        clock=SystemClock(),
        rng=random.Random(),
    )
    server.start()
    new = root / f"new-{name}"
    new.write_text(server.listen)
    new.rename(root / f"address-{name}")
    told.wait()
    sys.exit(0 if server.stop() else 1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], float(sys.argv[4]))
