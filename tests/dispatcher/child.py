"""A dispatcher in a process of its own, to be killed.

`child ROOT REGISTRY JOINER SEED [drain] [workers=N]`
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

LEASE_S = 1.0


def main(root: Path, registry: str, joiner: str, seed: int, drain: bool, workers: int) -> None:
    clock, rng = SystemClock(), random.Random(seed)
    server = DispatcherServer(
        fast_settings(
            batch_events_max=40,
            batches_in_flight_max=3,
            request_timeout_s=5.0,
            workers=workers,
            lease_s=LEASE_S,
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
    group = [int(arg.removeprefix("workers=")) for arg in sys.argv if arg.startswith("workers=")]
    main(Path(sys.argv[1]), sys.argv[2], sys.argv[3], int(sys.argv[4]), "drain" in sys.argv, *(group or [1]))
