"""A cluster in one thread. `play(plan)` is a whole run: faults for a while, healing, and what is left."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from pysyncobj import syncobj

from photon.raft.port import Outcome
from tests.in_memory import memory_directory
from tests.simulation.checkers import check
from tests.simulation.clients import Attempt, Clients
from tests.simulation.clock import Clock
from tests.simulation.disks import Disks
from tests.simulation.faults import Faults, Profile, draw_profile
from tests.simulation.history import Ended, History, Lookup, Seen
from tests.simulation.jobs import brief_rests
from tests.simulation.machines import Registers, Workload
from tests.simulation.network import Network
from tests.simulation.node import Node
from tests.simulation.operator import Operator


def _registries() -> Workload:
    from tests.simulation.registry import Registries

    return Registries()


WORKLOADS: dict[str, Callable[[], Workload]] = {"register": Registers, "registry": _registries}
_SETTLE_PERIOD_S = 0.2
_CLIENT_PERIOD_S = 0.035


@dataclass(frozen=True, slots=True)
class Plan:
    """All that decides a run. `profile`: what goes wrong; drawn from the seed where it is None."""

    seed: int
    replicas: int = 3
    machine: str = "register"
    hostile: bool = False
    members: bool = False  # whether replicas are added, promoted, removed and replaced
    profile: Profile | None = None
    seconds: float = 16.0
    heal_seconds: float = 40.0

    def command(self) -> str:
        """How to play it again."""
        mood = " --hostile" * self.hostile + " --members" * self.members
        return (
            f"python -m tests.simulation --seed {self.seed} --replicas {self.replicas} "
            f"--machine {self.machine}{mood} -v"
        )


@dataclass
class Run:
    """What came of it. `broken` is empty, or the checkers have found something."""

    plan: Plan
    history: History
    broken: dict[str, list[str]]
    stats: dict[str, int] = field(default_factory=dict)


class Cluster:
    """The world the nodes share (`node.World`), and the loop."""

    def __init__(self, plan: Plan, directory: Path, tell: Callable[[str], None] | None) -> None:
        self.plan = plan
        self.rng = random.Random(plan.seed)
        self.clock = Clock()
        self.history: History = []
        self.workload = WORKLOADS[plan.machine]()
        profile = plan.profile or draw_profile(random.Random(plan.seed + 1))
        self.drift = profile.drift
        self.limits = profile.limits(self.workload.limits)
        self.disks = Disks(self.rng, self.clock, directory)
        self.network = Network(plan.seed, self.clock, plan.hostile)
        self.names = list("abcdefg"[: plan.replicas])
        self.nodes: dict[str, Node] = {}
        self.down: dict[str, float] = {}
        founders = list(self.names)
        for name in founders:
            self.nodes[name] = Node(name, self, founders)
        self.deaths = 0
        self._tell = tell
        self.clients = Clients(
            random.Random(plan.seed + 3), self.clock, self.workload, self.history, self._offer, self._look
        )
        self.faults = Faults(random.Random(plan.seed + 4), profile, self)
        self.operator = Operator(
            random.Random(plan.seed + 5), self, active=plan.members, shrinks=profile.rot == 0
        )

    # -- the loop ---------------------------------------------------------------------------------------

    def run(self) -> None:
        """Start all, let things go wrong, heal all, and wait until all agree."""
        for name in self.names:
            self.down[name] = self.clock.at
        self._until(self.clock.at + self.plan.seconds, self.clients.step, _CLIENT_PERIOD_S)
        self.faults.end()
        self.operator.end()
        self.tell("-", "all is healed")
        end = self.clock.at + self.plan.heal_seconds
        while self.clock.at < end and not self.settled():
            self._until(self.clock.at + _SETTLE_PERIOD_S, self.clients.settle, _SETTLE_PERIOD_S / 2)
        self._end()

    def _until(self, end: float, step: Callable[[], None], period_s: float) -> None:
        clock, network, faults, rng = self.clock, self.network, self.faults, self.clients.rng
        operator, nodes = self.operator, self.nodes.values()
        step_at = clock.at
        while True:
            node = min(nodes, key=_wakes)
            due_at = min(network.due_at, faults.due_at, operator.due_at)
            at = min(node.wake_at, step_at, due_at, *self.down.values(), end)
            clock.at = max(clock.at, at)
            if at >= end:
                return
            if at == node.wake_at:
                node.turn()
            elif at == step_at:
                step()
                step_at = clock.at + rng.random() * 2 * period_s
            elif at == network.due_at:
                network.tick()
            elif at == faults.due_at:
                faults.step()
            elif at == operator.due_at:
                operator.step()
            else:
                self._restart()

    def _restart(self) -> None:
        for name in [name for name, at in self.down.items() if at <= self.clock.at]:
            del self.down[name]
            self.nodes[name].start()

    def join(self, name: str) -> Node:
        """One more node, empty."""
        node = self.nodes[name] = Node(name, self, None)
        self.names.append(name)
        self.down[name] = self.clock.at + 0.1
        return node

    # -- what the nodes ask (node.World) ----------------------------------------------------------------

    def tell(self, node: str, what: str) -> None:
        if self._tell is not None:
            self._tell(f"{self.clock.now - 100:8.3f} {node} {what}")

    def died(self, node: Node, attempts: list[Attempt]) -> None:
        self.deaths += 1
        if not node.lost:
            self.down[node.name] = self.clock.at + self.faults.down_s()
        for attempt in attempts:
            self.clients.lost(attempt)

    def answer(self, attempt: Attempt, outcome: Outcome) -> None:
        self.clients.answer(attempt, outcome)

    # -- what the clients ask ---------------------------------------------------------------------------

    def living(self) -> list[Node]:
        return [node for node in self.nodes.values() if node.replica is not None]

    def _offer(self, attempt: Attempt) -> bool:
        living = self.living()
        leaders = [node for node in living if node.leads]
        if not living:
            return False
        rng = self.clients.rng
        chosen = rng.choice(leaders if leaders and rng.random() < 0.85 else living)
        chosen.offer(attempt)
        return True

    def _look(self, act: Lookup) -> tuple[int, ...] | None:
        living = [node for node in self.living() if not node.paused]
        if not living:
            return None
        return self.workload.lookup(self.clients.rng.choice(living).machine, act)

    # -- the end ----------------------------------------------------------------------------------------

    def settled(self) -> bool:
        """Whether all agree on a leader and have applied the same, and every wish is told."""
        replicas = [node.replica for node in self.members() if node.replica is not None]
        return bool(replicas) and (
            self.clients.done
            and not self.down
            and len({replica.core.applied_index for replica in replicas}) == 1
            and {replica.core.applied_index for replica in replicas}
            == {replica.store.journal.last_index for replica in replicas}
            and len({replica.leader for replica in replicas}) == 1
            and replicas[0].leader is not None
        )

    def members(self) -> list[Node]:
        """Who belongs to the group and lives, by the leader of the latest term."""
        leaders = [node.replica for node in self.living() if node.leads and node.replica is not None]
        if not leaders:
            return self.living()
        names = max(leaders, key=lambda replica: replica.core.term).members.all
        return [node for node in self.living() if node.name in names]

    def _end(self) -> None:
        if not self.settled():
            for node in self.members():
                assert node.replica is not None
                self.history.append(
                    Seen(self.clock.at, "unfinished", f"{node.name}: {node.replica.status()}")
                )
        for node in self.members():
            held, boundary_us = self.workload.held(node.machine), self.workload.boundary_us(node.machine)
            self.history.append(Ended(node.name, held, boundary_us, node.digest))

    def close(self) -> None:
        for node in self.living():
            assert node.replica is not None
            node.replica.abandon()


def _wakes(node: Node) -> float:
    return node.wake_at


def play(plan: Plan, tell: Callable[[str], None] | None = None) -> Run:
    """Play a plan and judge it."""
    real = syncobj.monotonicTime
    with memory_directory() as directory:
        cluster = Cluster(plan, directory, tell)
        syncobj.monotonicTime = cluster.clock
        try:
            with cluster.disks.installed(), brief_rests():
                try:
                    cluster.run()
                finally:
                    cluster.close()
        finally:
            syncobj.monotonicTime = real
    nodes = cluster.nodes.values()
    stats = {
        "deaths": cluster.deaths,
        "installs": sum(node.installs for node in nodes),
        "snapshots": sum(node.jobs.started for node in nodes),
        "elections": sum(1 for event in cluster.history if type(event).__name__ == "Led"),
        **cluster.clients.counts,
        "lost": sum(node.lost for node in nodes),
        "changes": cluster.operator.changes,
        "virtual_ms": int((cluster.clock.at - 100) * 1000),
    }
    return Run(plan, cluster.history, check(cluster.history), stats)
