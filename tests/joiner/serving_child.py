"""A joiner that serves, in a process of its own, and tells its address in ROOT/address-NAME."""

import signal
from pathlib import Path

from tests.fake_registry import FakeRegistry
from tests.joiner.fakes import make_server


def main(root: Path, name: str, listen: str) -> None:
    server = make_server(root, FakeRegistry(), name=name, address=listen, requests_in_flight_max=8)
    server.start()
    new = root / f"new-{name}"
    new.write_text(server.listen)
    new.rename(root / f"address-{name}")
    signal.pause()
