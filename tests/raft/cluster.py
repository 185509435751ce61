"""Hosts in this process, over real sockets and files, with a client that retries."""

import random
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TypeVar

from photon.raft.addresses import Endpoint
from photon.raft.host import RaftHost
from photon.raft.port import (
    Applied,
    Change,
    ChangeKind,
    Outcome,
    RaftLimits,
    RaftTiming,
    Refusal,
    ReplicatedLog,
    Unknown,
)
from tests.ports import free_ports
from tests.raft.kit import Register, command
from tests.waiting import wait_until

T = TypeVar("T")


class HostedNode:
    """One host with its groups; `waiting` is what its users want proposed."""

    def __init__(self, cluster: "Cluster", name: str) -> None:
        self.fatal: list[BaseException] = []
        self.machines = [Register() for _ in range(cluster.groups)]
        self.waiting: list[deque[tuple[bytes, Callable[[Outcome], None]]]] = [deque() for _ in self.machines]
        addresses = cluster.addresses
        self.calls: deque[Callable[[], None]] = deque()
        self.host = RaftHost(
            Endpoint(name, addresses[name], b"secret"),
            {other: address for other, address in addresses.items() if other != name},
            cluster.directory / name,
            cluster.timing,
            cluster.limits,
            rng=random.Random(),
            on_fatal=self.fatal.append,
        )
        self.logs: list[ReplicatedLog] = [
            self.host.add_group(group, machine, self._ticker(group), cluster.founders_for(name))
            for group, machine in enumerate(self.machines)
        ]

    def _ticker(self, group: int) -> Callable[[ReplicatedLog], None]:
        def on_tick(log: ReplicatedLog) -> None:
            while self.calls and group == 0:
                self.calls.popleft()()
            waiting = self.waiting[group]
            while waiting:
                log.propose(*waiting.popleft())

        return on_tick

    def add_group(self, group: int, founders: Sequence[str] | None) -> None:
        """In the raft thread; groups are numbered on."""
        self.machines.append(Register())
        self.waiting.append(deque())
        self.logs.append(self.host.add_group(group, self.machines[group], self._ticker(group), founders))

    def in_raft_thread(self, call: Callable[[], T]) -> T:
        """What it returns, or raises."""
        future: Future[T] = Future()

        def settle() -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        self.calls.append(settle)
        self.host.wake()
        return future.result(60.0)

    def change(self, kind: ChangeKind, node: str, group: int = 0) -> Outcome:
        """One attempt to change the members."""
        future: Future[Outcome] = Future()
        self.in_raft_thread(lambda: self.logs[group].change_members(Change(kind, node), future.set_result))
        return future.result(60.0)


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
        self.founders = list(names)
        self.nodes: dict[str, HostedNode] = {}

    def founders_for(self, name: str) -> list[str] | None:
        return self.founders if name in self.founders else None

    def add_address(self, name: str) -> None:
        """One more node; those that run are told."""
        self.addresses[name] = ("127.0.0.1", free_ports(1)[0])
        self.tell_peers()

    def tell_peers(self) -> None:
        for node in self.nodes.values():
            node.in_raft_thread(lambda node=node: node.host.set_peers(self.addresses))

    def change(self, kind: ChangeKind, node: str, group: int = 0) -> None:
        """Retry at whoever leads until it is done."""
        deadline = time.monotonic() + 60
        while True:
            outcome = self.nodes[self.wait_for_leader(group)].change(kind, node, group)
            if isinstance(outcome, Applied):
                return
            assert outcome == Unknown() or outcome.reason is not Refusal.UNFIT, outcome
            assert time.monotonic() < deadline, outcome
            time.sleep(0.02)

    def start(self, *names: str) -> None:
        for name in names or self.addresses:
            self.nodes[name] = HostedNode(self, name)
            self.nodes[name].host.start()

    def stop(self, *names: str) -> None:
        for name in names or list(self.nodes):
            self.nodes.pop(name).host.stop()

    def leader(self, group: int = 0) -> str | None:
        found = [
            (node.logs[group].status().term, name)
            for name, node in list(self.nodes.items())
            if node.logs[group].is_leader
        ]
        return max(found)[1] if found else None

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
        assert answered.wait(60), "a proposal was never answered"
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


MakeCluster = Callable[..., Cluster]
