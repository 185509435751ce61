"""A joiner that serves, in a process of its own: `serving_child ROOT NAME LISTEN LEASE_S`.

It gets no lease while ROOT/no-lease-NAME is there, and tells its address in ROOT/address-NAME.
"""

import signal
from pathlib import Path

from photon.core.errors import UnavailableError
from tests.fake_registry import FakeRegistry
from tests.joiner.fakes import make_server


def main(root: Path, name: str, listen: str, lease_s: float) -> None:
    registry = FakeRegistry()

    def before(call: str, _incarnation: int) -> None:
        if call == "lease" and (root / f"no-lease-{name}").exists():
            raise UnavailableError("registry: no quorum")

    registry.before = before
    server = make_server(root, registry, name=name, address=listen, lease_s=lease_s, requests_in_flight_max=8)
    server.start()
    new = root / f"new-{name}"
    new.write_text(server.listen)
    new.rename(root / f"address-{name}")
    signal.pause()
