"""A dispatcher in a process of its own, to be killed; its registry and its joiner have one address."""

import random
import time
from pathlib import Path

from dispatcher.server import DispatcherServer
from idregistry.client import RegistryClient
from joiner.client import JoinerClient
from photon.core.clock import SystemClock
from photon.core.signals import on_termination
from tests.dispatcher.fakes import fast_settings


def main(root: Path, address: str, seed: int, drain: bool = False, worker: int = 0, workers: int = 1) -> None:
    clock, rng = SystemClock(), random.Random(seed)
    server = DispatcherServer(
        fast_settings(
            batch_events_max=40,
            batches_in_flight_max=3,
            request_timeout_s=5.0,
        ),
        f"d{seed}",
        "dc0",
        "127.0.0.1:0",
        root / "state",
        [str(root / "logs" / "*.jsonl")],
        root / "dead-letters",
        RegistryClient([address], 5.0, clock, rng),
        JoinerClient([address], 5.0),
        clock,
        rng,
        drain,
        worker=worker,
        workers=workers,
    )
    stopping = []
    on_termination(lambda: stopping.append(True))
    server.start()
    told = root / f"address-{seed}"
    told.with_suffix(".new").write_text(server.address)
    told.with_suffix(".new").rename(told)
    while not stopping and not server.wait(0) and not server.status()["drained"]:
        time.sleep(0.01)
    server.stop()
