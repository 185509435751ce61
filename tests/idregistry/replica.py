"""One registry replica, for a process of its own. Ends with its parent."""

import logging
import os
import random
import signal
import sys
import threading
from pathlib import Path
from typing import Any

from idregistry import coordinator, shard
from idregistry.rules import table
from idregistry.rules.commands import Row
from idregistry.server import RegistryServer, Replica
from photon.core.clock import SystemClock
from photon.core.settings import parse_settings
from photon.core.signals import on_termination
from photon.rpc.network import LOOPBACK, Network, Tls


def main(replica: dict[str, Any]) -> None:
    node, grpc = replica["node"], replica["grpc"]
    logging.basicConfig(
        filename=replica["log"], level=logging.INFO, format="%(asctime)s %(name)s: %(message)s"
    )
    stop = threading.Event()
    on_termination(stop.set)

    def fatal(error: BaseException) -> None:
        print(f"{node}: {error!r}", file=sys.stderr, flush=True)
        logging.error("fatal", exc_info=error)
        os.kill(os.getpid(), signal.SIGKILL)

    if replica.get("forget_after_s") is not None:
        coordinator._FORGET_AFTER_S = replica["forget_after_s"]  # type: ignore[misc]
    if replica.get("seal_ids") is not None:
        table.SEAL_IDS = table.SEAL_IDS_MIN = replica["seal_ids"]
        shard._FILING_EVERY_S = 0.02  # type: ignore[misc]
    network = LOOPBACK
    if replica.get("tls"):
        *files, name = replica["tls"]
        network = Network(Tls(*map(Path, files), name))
    me = Replica(
        node,
        grpc[node],
        ("127.0.0.1", replica["raft"]),
        {
            name: Row(name, "127.0.0.1", port, grpc[name], replica["sets"].get(name, "main"))
            for name, port in replica["dialed"].items()
        },
        Path(replica["directory"]),
        b"test secret",
        joining=replica["joining"],
    )
    settings = parse_settings({"registry": replica["settings"]}).registry
    server = RegistryServer(me, settings, SystemClock(), random.Random(), fatal, network)
    server.start()
    parent = os.getppid()
    while not stop.wait(0.2) and os.getppid() == parent:
        pass
    server.stop()
