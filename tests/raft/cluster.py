"""Three hosts in this process, over real sockets and files, with a client that retries."""

import random
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path

from photon.raft.host import RaftHost
from photon.raft.port import Applied, Outcome, ReplicatedLog
from photon.raft.settings import RaftLimits, RaftTiming
from tests.raft.kit import Register, command, free_ports, wait_until


class HostedNode:
    """One host with its groups; `waiting` is what its users want proposed."""

    def __init__(self, cluster: "Cluster", name: str) -> None:
        self.fatal: list[BaseException] = []
        self.machines = [Register() for _ in range(cluster.groups)]
        self.waiting: list[deque[tuple[bytes, Callable[[Outcome], None]]]] = [deque() for _ in self.machines]
        addresses = cluster.addresses
        self.host = RaftHost(
            name,
            addresses[name],
            {other: address for other, address in addresses.items() if other != name},
            cluster.directory / name,
            b"secret",
            cluster.timing,
            rng=random.Random(),
            on_fatal=self.fatal.append,
            limits=cluster.limits,
        )
        self.logs: list[ReplicatedLog] = [
            self.host.add_group(group, machine, self._ticker(group))
            for group, machine in enumerate(self.machines)
        ]

    def _ticker(self, group: int) -> Callable[[ReplicatedLog], None]:
        def on_tick(log: ReplicatedLog) -> None:
            waiting = self.waiting[group]
            while waiting:
                log.propose(*waiting.popleft())

        return on_tick


class Cluster:
    def __init__(
        self,
        directory: Path,
        names: str = "abc",
        groups: int = 1,
        limits: RaftLimits | None = None,
        timing: RaftTiming | None = None,
    ) -> None:
        self.directory = directory
        self.groups = groups
        self.limits = limits or RaftLimits()
        self.timing = timing or RaftTiming()
        self.addresses = {
            name: ("127.0.0.1", port) for name, port in zip(names, free_ports(len(names)), strict=True)
        }
        self.nodes: dict[str, HostedNode] = {}

    def start(self, *names: str) -> None:
        for name in names or self.addresses:
            self.nodes[name] = HostedNode(self, name)
            self.nodes[name].host.start()

    def stop(self, *names: str) -> None:
        for name in names or list(self.nodes):
            self.nodes.pop(name).host.stop()

    def leader(self, group: int = 0) -> str | None:
        found = [name for name, node in list(self.nodes.items()) if node.logs[group].is_leader]
        return found[0] if found else None

    def wait_for_leader(self, group: int = 0) -> str:
        wait_until(lambda: self.leader(group) is not None)
        leader = self.leader(group)
        assert leader is not None
        return leader

    def propose(self, name: str, body: bytes, group: int = 0) -> Outcome:
        """One attempt at one node."""
        answered = threading.Event()
        outcomes: list[Outcome] = []

        def done(outcome: Outcome) -> None:
            outcomes.append(outcome)
            answered.set()

        node = self.nodes[name]
        node.waiting[group].append((body, done))
        node.host.wake()
        assert answered.wait(15.0), "a proposal was never answered"
        return outcomes[0]

    def register(self, key: bytes, token: int, group: int = 0) -> object:
        """Retry at whoever leads until it is applied; returns whether the token has won."""
        while True:
            outcome = self.propose(self.wait_for_leader(group), command(key, token), group)
            if isinstance(outcome, Applied):
                return outcome.result

    def wait_until_equal(self, group: int = 0) -> None:
        def equal() -> bool:
            machines = [node.machines[group] for node in self.nodes.values()]
            return len({(machine.count, machine.digest) for machine in machines}) == 1

        wait_until(equal)
