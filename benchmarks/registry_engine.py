"""The replicated log alone under the registry's state: three processes, the leader proposes its own load.

No gRPC, no queue: what is left is Raft, its journal synced to disk, and the state machine.
"""

import json
import logging
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from benchmarks.registry_processes import BenchmarkError, Child, cpu_seconds
from idregistry.commands import Commit, Configure, encode
from idregistry.configuration import BEGINNING, Configuration, Interval
from idregistry.state import ShardState
from photon.app.ports import free_ports
from photon.app.supervisor import die_with_parent
from photon.core.columns import pack_times
from photon.core.fates import Committed
from photon.core.tokens import Token
from photon.raft.addresses import Endpoint
from photon.raft.host import RaftHost
from photon.raft.port import Applied, Outcome, ReplicatedLog

NODES = ("e0", "e1", "e2")
_READY_S = 30.0
_TIDY_EVERY_S = 0.05  # as idregistry.shard does under load
# A shard takes nothing before its first configuration: here all ids are its own.
_CONFIGURE = encode(Configure(0, Configuration(1, (Interval(BEGINNING, 1),))))


class Proposer:
    """Keeps so many commands of fresh ids in flight while a load is on. Raft thread, but for `begin`."""

    def __init__(self, state: ShardState) -> None:
        self.ready = False
        self._state = state
        self._tidy_at = 0.0
        self._load: dict[str, Any] | None = None
        self._latencies_ms: list[float] = []
        self._failed = 0
        self._asked = False
        self._made = 0
        self._finished = threading.Event()

    def run(self, load: dict[str, Any], wake: Callable[[], None]) -> dict[str, Any]:
        """Of one load; waits for its end."""
        self._latencies_ms, self._failed = [], 0
        self._finished.clear()
        self._load = load
        wake()
        self._finished.wait()
        return {"latencies_ms": self._latencies_ms, "failed": self._failed}

    def on_tick(self, log: ReplicatedLog) -> None:
        if time.monotonic() >= self._tidy_at:
            self._tidy_at = time.monotonic() + _TIDY_EVERY_S
            self._state.tidy()
        if not log.is_leader:
            return
        if not self._asked:
            self._asked = True
            log.propose(_CONFIGURE, self._configured)
        load = self._load
        if load is None:
            return
        if time.monotonic() >= load["end"]:
            if not log.in_flight:
                self._load = None
                self._finished.set()
            return
        while log.in_flight < load["in_flight"]:
            self._propose(log, load)

    def _configured(self, outcome: Outcome) -> None:
        self.ready = isinstance(outcome, Applied)
        self._asked = self.ready

    def _propose(self, log: ReplicatedLog, load: dict[str, Any]) -> None:
        count = load["ids"]
        began = time.monotonic()
        self._made += 1
        now_us = time.time_ns() // 1000
        token = Token("127.0.0.1:7000", 1, self._made).pack()
        command = Commit(now_us, [token], [count], os.urandom(16 * count), pack_times([now_us] * count))

        def done(outcome: Outcome) -> None:
            now = time.monotonic()
            if not isinstance(outcome, Applied) or outcome.result != bytes([Committed.WON]) * count:
                self._failed += 1
            elif load["begin"] <= now < load["end"]:
                self._latencies_ms.append((now - began) * 1e3)

        log.propose(encode(command), done)


def main() -> None:
    die_with_parent()
    logging.getLogger("photon.raft").setLevel(logging.ERROR)  # peers that have not started yet are no news
    argument = json.loads(sys.argv[1])
    node, ports = argument["node"], argument["ports"]
    state = ShardState(0)
    proposer = Proposer(state)
    host = RaftHost(
        Endpoint(node, ("127.0.0.1", ports[node]), b"benchmark"),
        {peer: ("127.0.0.1", port) for peer, port in ports.items() if peer != node},
        Path(argument["directory"]) / node,
        rng=random.Random(),
        on_fatal=_fail,
    )
    log = host.add_group(0, state, proposer.on_tick, list(ports))
    host.start()
    for line in sys.stdin:
        load = json.loads(line)
        print(
            json.dumps((proposer.ready and log.is_leader) if load is None else proposer.run(load, host.wake)),
            flush=True,
        )


def _fail(error: BaseException) -> None:
    print(f"{error!r}", file=sys.stderr, flush=True)
    os._exit(1)


class Engine:
    """The three processes. Starts when entered, its files deleted when left."""

    def __init__(self, directory: Path) -> None:
        self._parent = directory
        self._stack = ExitStack()
        self._children: list[Child] = []

    def __enter__(self) -> Self:
        self._parent.mkdir(parents=True, exist_ok=True)
        directory = self._stack.enter_context(
            tempfile.TemporaryDirectory(prefix="engine-", dir=self._parent, ignore_cleanup_errors=True)
        )
        ports = dict(zip(NODES, free_ports(len(NODES), random.Random()), strict=True))
        for node in NODES:
            argument = {"node": node, "ports": ports, "directory": directory}
            child = Child("benchmarks.registry_engine", argument)
            self._children.append(self._stack.enter_context(child))
        self._leader = self._wait_for_leader()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._stack.close()

    def measure(self, seconds: float, warm_s: float, ids: int, in_flight: int) -> dict[str, Any]:
        """`latencies_ms` of the commands that ended within the time, and `cores` of all three."""
        begin = time.monotonic() + warm_s
        self._leader.tell({"ids": ids, "in_flight": in_flight, "begin": begin, "end": begin + seconds})
        time.sleep(max(0.0, begin - time.monotonic()))
        pids = [child.pid for child in self._children]
        cpu = sum(cpu_seconds(pids))
        time.sleep(max(0.0, begin + seconds - time.monotonic()))
        cpu = sum(cpu_seconds(pids)) - cpu
        seen: dict[str, Any] = self._leader.hear()
        if seen["failed"]:
            raise BenchmarkError(f"{seen['failed']} commands failed: the leader changed under load")
        return {**seen, "cores": cpu / seconds}

    def _wait_for_leader(self) -> Child:
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline:
            for child in self._children:
                if child.ask(None):
                    return child
            time.sleep(0.05)
        raise BenchmarkError(f"the log has no leader within {_READY_S:g} s")


if __name__ == "__main__":
    main()
