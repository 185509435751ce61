"""A registry server in a process of its own: `python -m tests.simulation.registry_process '{...}'`."""

import json
import os
import random
import signal
import sys
import time
from pathlib import Path

from idregistry.rules.commands import Row
from idregistry.server import RegistryServer, Replica
from photon.core.clock import SystemClock
from photon.core.settings import parse_settings


def main() -> None:
    given = json.loads(sys.argv[1])
    node = given["node"]

    def fatal(error: BaseException) -> None:
        print(f"{node}: {error!r}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    me = Replica(
        node,
        given["grpc"][node],
        ("127.0.0.1", given["raft_port"]),
        {name: Row(name, "127.0.0.1", port, given["grpc"][name]) for name, port in given["dialed"].items()},
        Path(given["directory"]),
        b"test secret",
    )
    settings = parse_settings({"registry": given["settings"]}).registry
    server = RegistryServer(me, settings, SystemClock(), random.Random(), fatal)
    server.start()
    parent = os.getppid()
    while os.getppid() == parent:
        time.sleep(0.2)
    os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
