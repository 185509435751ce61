"""A dispatcher in a process of its own, to be killed.

`child ROOT REGISTRY JOINER SEED [drain] [worker=N workers=M]`
"""

import random
import sys
import time
from pathlib import Path

from dispatcher.server import DispatcherServer
from idregistry.client import RegistryClient
from joiner.client import JoinerClient
from photon.core.clock import SystemClock
from photon.rpc.servers import on_termination
from tests.dispatcher.fakes import fast_settings


def main(root: Path, registry: str, joiner: str, seed: int, drain: bool, worker: int, workers: int) -> None:
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
        RegistryClient([registry], 5.0, clock, rng),
        JoinerClient([joiner], 5.0),
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


if __name__ == "__main__":
    group = {name: int(n) for name, _, n in (arg.partition("=") for arg in sys.argv) if n}
    worker, workers = group.get("worker", 0), group.get("workers", 1)
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), "drain" in sys.argv, worker, workers)
