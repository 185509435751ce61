"""A registry server in a process of its own: `python -m tests.simulation.registry_process '{...}'`."""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from idregistry.server import RegistryServer
from photon.core.clock import SystemClock
from photon.core.settings import parse_settings


def main() -> None:
    given = json.loads(sys.argv[1])
    node = given["node"]

    def fatal(error: BaseException) -> None:
        print(f"{node}: {error!r}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    dialed = {name: ("127.0.0.1", port) for name, port in given["dialed"].items()}
    server = RegistryServer(
        parse_settings({"registry": given["settings"]}).registry,
        node,
        given["grpc"][node],
        ("127.0.0.1", given["raft_port"]),
        {name: address for name, address in dialed.items() if name != node},
        given["grpc"],
        Path(given["directory"]),
        b"test secret",
        SystemClock(),
        random.Random(),
        fatal,
        raft_dialed=dialed[node],
    )
    server.start()
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
