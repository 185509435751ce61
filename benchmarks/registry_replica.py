"""One registry replica as a process of a benchmark: `python -m benchmarks.registry_replica JSON`."""

import json
import os
import random
import signal
import sys
import threading
from pathlib import Path

from benchmarks.figures.fast_clock import FastClock
from idregistry.server import RegistryServer
from photon.app.supervisor import die_with_parent
from photon.core.clock import SystemClock
from photon.core.settings import parse_settings
from photon.wire.rpc import on_termination


def main() -> None:
    die_with_parent()
    replica = json.loads(sys.argv[1])
    node = replica["node"]
    stop = threading.Event()
    on_termination(stop.set)

    def fatal(error: BaseException) -> None:
        print(f"{node}: {error!r}", file=sys.stderr, flush=True)
        os.kill(os.getpid(), signal.SIGKILL)

    server = RegistryServer(
        parse_settings({"registry": replica["settings"]}).registry,
        node,
        replica["grpc"][node],
        ("127.0.0.1", replica["raft_listen"]),
        {name: ("127.0.0.1", port) for name, port in replica["raft_peers"].items()},
        replica["grpc"],
        Path(replica["directory"]),
        b"benchmark",
        FastClock(**replica["clock"]) if replica.get("clock") else SystemClock(),
        random.Random(),
        fatal,
        raft_dialed=("127.0.0.1", replica["raft_dialed"]),
    )
    server.start()
    stop.wait()
    server.stop()


if __name__ == "__main__":
    main()
