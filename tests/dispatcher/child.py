"""A dispatcher in a process of its own, to be killed; its registry and its joiner have one address."""

import random
import time
from pathlib import Path

from dispatcher.server import DispatcherServer
from dispatcher.worker import Site
from idregistry.client import RegistryClient
from joiner.client import JoinerClient
from photon.core.clock import SteadyClock, SystemClock
from photon.core.signals import on_termination
from tests.dispatcher.fakes import fast_settings


def main(root: Path, address: str, seed: int, drain: bool = False, worker: int = 0, workers: int = 1) -> None:
    clock, rng = SystemClock(), random.Random(seed)
    site = Site(
        settings=fast_settings(
            batch_events_max=40,
            batches_in_flight_max=3,
            request_timeout_s=5.0,
        ),
        datacenter="dc0",
        directory=root / "state",
        number=worker,
        patterns=[str(root / "logs" / "*.jsonl")],
        dead_letters=root / "dead-letters",
        registry=RegistryClient([address], 5.0, clock, rng),
        joiner=JoinerClient([address], 5.0),
        clock=SteadyClock(clock),
        rng=rng,
        drain=drain,
    )
    server = DispatcherServer(site, f"d{seed}", "127.0.0.1:0", workers=workers)
    stopping = []
    on_termination(lambda: stopping.append(True))
    server.start()
    told = root / f"address-{seed}"
    told.with_suffix(".new").write_text(server.address)
    told.with_suffix(".new").rename(told)
    while not stopping and not server.wait(0) and not server.status()["drained"]:
        time.sleep(0.01)
    server.stop()
