"""A seeded simulation of one group: virtual time, a network that delays and cuts, crashes that tear writes.

The replicas are the production ones, on real files; only sockets, threads and time are played. A node is
crashed at any point that touches the disk, and loses what was not synced: from its end, torn at any byte, or
with holes.
"""

import os
import random
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path

from pysyncobj import syncobj

from photon.raft import disk
from photon.raft.port import Applied, Outcome, Refused, ReplicatedLog
from photon.raft.replica import Replica
from photon.raft.settings import RaftLimits, RaftTiming
from tests.raft.kit import SMALL, Register, command

TIMING = RaftTiming(
    election_s_min=0.3, election_s_max=0.6, heartbeat_s=0.06, leader_fallback_s=1.0, proposal_s=4.0
)


class SimulatedCrash(BaseException):
    """The power went out at a point that touches the disk."""


class Clock:
    """Virtual seconds; every look at it takes a little, as in life."""

    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        self.at += 1e-6
        return self.at


class Disks:
    """Stands before `photon.raft.disk`: knows what was synced, and crashes when it is told to."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.synced: dict[int, int] = {}  # bytes of each file that survive, by inode
        self.crash_chance = 0.0
        self._real = (disk.sync_data, disk.replace, disk.sync_directory)

    @contextmanager
    def installed(self) -> Iterator[None]:
        disk.sync_data, disk.replace, disk.sync_directory = (
            self._sync_data,
            self._replace,
            self._sync_directory,
        )
        try:
            yield
        finally:
            disk.sync_data, disk.replace, disk.sync_directory = self._real

    def _maybe_crash(self) -> None:
        if self.crash_chance and self._rng.random() < self.crash_chance:
            raise SimulatedCrash

    def _sync_data(self, fd: int) -> None:
        self._maybe_crash()
        stat = os.fstat(fd)
        self.synced[stat.st_ino] = stat.st_size
        self._maybe_crash()

    def _replace(self, temporary: Path, final: Path) -> None:
        self._maybe_crash()
        temporary.rename(final)
        self._maybe_crash()

    def _sync_directory(self, directory: Path) -> None:
        self._maybe_crash()

    def lose_unsynced(self, replica: Replica) -> None:
        """What a power loss leaves of the journal: all that was synced, and anything of the rest."""
        journal = replica.store.journal
        fd = journal._fd
        written = os.fstat(fd).st_size > journal._size  # the crash came between the write and the sync
        if journal._pending and not written and self._rng.random() < 0.7:
            batch = b"".join(journal._pending)
            os.write(fd, batch[: self._rng.randrange(len(batch) + 1)])
        stat = os.fstat(fd)
        safe = min(self.synced.get(stat.st_ino, stat.st_size), stat.st_size)
        if stat.st_size == safe:
            return
        kind = self._rng.random()
        if kind < 0.5:
            os.ftruncate(fd, self._rng.randint(safe, stat.st_size))
        elif kind < 0.8:
            hole = self._rng.randint(safe, stat.st_size - 1)
            length = self._rng.randint(1, stat.st_size - hole)
            path = journal._segments[-1].path
            with path.open("r+b") as file:
                file.seek(hole)
                file.write(bytes(length))


class Network:
    """One connection between each two nodes: in order on each, at any pace across them."""

    def __init__(self, rng: random.Random, clock: Clock, drop_chance: float) -> None:
        self._rng = rng
        self._clock = clock
        self._drop_chance = drop_chance
        self._queues: dict[tuple[str, str], deque[tuple[float, bytes]]] = defaultdict(deque)
        self._last: dict[tuple[str, str], float] = defaultdict(float)
        self.slow: dict[tuple[str, str], float] = defaultdict(float)
        self.cut: set[frozenset[str]] = set()
        self.nodes: dict[str, Replica] = {}

    def connected(self, one: str, other: str) -> bool:
        return one in self.nodes and other in self.nodes and frozenset((one, other)) not in self.cut

    def post(self, sender: str, receiver: str, data: bytes) -> None:
        if not self.connected(sender, receiver) or self._rng.random() < self._drop_chance:
            return
        link = sender, receiver
        at = self._clock.at + self._rng.random() * 0.03 + self.slow[link]
        self._last[link] = at = max(at, self._last[link])
        self._queues[link].append((at, data))

    def queued(self, sender: str, receiver: str) -> int:
        return sum(len(data) for _, data in self._queues[sender, receiver])

    def due(self, receiver: str) -> list[tuple[str, bytes]]:
        """What arrives at a node now; order across senders is any."""
        arrived = []
        senders = [sender for sender, to in self._queues if to == receiver]
        self._rng.shuffle(senders)
        for sender in senders:
            queue = self._queues[sender, receiver]
            while queue and queue[0][0] <= self._clock.at:
                arrived.append((sender, queue.popleft()[1]))
        return arrived

    def partition(self, one: str, other: str) -> None:
        pair = frozenset((one, other))
        was = self.connected(one, other)
        self.cut.add(pair)
        self._lose(one, other)
        if was:
            self.nodes[one].peer_down(other)
            self.nodes[other].peer_down(one)

    def heal(self, one: str, other: str) -> None:
        was = self.connected(one, other)
        self.cut.discard(frozenset((one, other)))
        if not was and self.connected(one, other):
            self.nodes[one].peer_up(other)
            self.nodes[other].peer_up(one)

    def join(self, node: str, replica: Replica) -> None:
        self.nodes[node] = replica
        for other in list(self.nodes):
            if other != node and self.connected(node, other):
                replica.peer_up(other)
                self.nodes[other].peer_up(node)

    def leave(self, node: str) -> None:
        for other in list(self.nodes):
            if other != node:
                self._lose(node, other)
                if self.connected(node, other):
                    self.nodes[other].peer_down(node)
        del self.nodes[node]

    def _lose(self, one: str, other: str) -> None:
        for link in ((one, other), (other, one)):
            self._queues[link].clear()
            self._last[link] = 0.0


class SimulatedWire:
    def __init__(self, network: Network, node: str, limits: RaftLimits) -> None:
        self._network = network
        self._node = node
        self._limits = limits

    def send(self, peer: str, data: bytes) -> None:
        self._network.post(self._node, peer, data)

    def room(self, peer: str) -> int:
        if not self._network.connected(self._node, peer):
            return 0
        return self._limits.outgoing_bytes - self._network.queued(self._node, peer)


class SimulatedJobs:
    """A job runs at the moment it is found done, some virtual time after its start."""

    def __init__(self, rng: random.Random, clock: Clock) -> None:
        self._rng = rng
        self._clock = clock
        self._ready_at = 0.0

    def busy(self) -> bool:
        return self._clock.at < self._ready_at

    def start(self, work: Callable[[], None]) -> "SimulatedJobs._Job":
        self._ready_at = self._clock.at + self._rng.random() * 0.5
        return self._Job(work, self._ready_at, self._clock)

    @dataclass
    class _Job:
        work: Callable[[], None]
        ready_at: float
        clock: Clock

        def done(self) -> bool:
            return self.clock.at >= self.ready_at

        def result(self) -> None:
            self.work()


@dataclass
class Findings:
    """What a run has shown. The lists must be empty."""

    two_winners: list[bytes] = field(default_factory=list)
    lost: list[bytes] = field(default_factory=list)
    wrong_losers: list[bytes] = field(default_factory=list)
    diverged: list[str] = field(default_factory=list)
    not_converged: list[str] = field(default_factory=list)
    unanswered: int = 0
    acknowledged: int = 0
    unknown: int = 0
    crashes: int = 0
    installs: int = 0
    elections: int = 0

    def broken(self) -> dict[str, object]:
        promises = ("two_winners", "lost", "wrong_losers", "diverged", "not_converged", "unanswered")
        return {name: getattr(self, name) for name in promises if getattr(self, name)}


class Simulation:
    """One seed. `run` plays faults for `seconds`, heals all, and checks what must hold."""

    def __init__(self, seed: int, directory: Path, nodes: str = "abc", limits: RaftLimits = SMALL) -> None:
        self.rng = random.Random(seed)
        self.clock = Clock()
        self.directory = directory
        self.names = list(nodes)
        self.limits = limits
        self.disks = Disks(self.rng)
        self.network = Network(self.rng, self.clock, drop_chance=self.rng.choice([0.0, 0.0, 0.02]))
        self.machines: dict[str, Register] = {}
        self.down: dict[str, float] = {}
        self.proposals: dict[str, deque[bytes]] = {name: deque() for name in nodes}
        self.open = 0
        self.granted: dict[bytes, set[int]] = defaultdict(set)
        self.refused: dict[bytes, set[int]] = defaultdict(set)
        self.history: dict[int, bytes] = {}
        self.findings = Findings()
        self._crash_chance = self.rng.choice([0.001, 0.005, 0.02])
        self._newest = 0
        self._token = 0
        self._retries: list[bytes] = []

    def run(self, seconds: float = 18.0, heal_seconds: float = 25.0) -> Findings:
        real = syncobj.monotonicTime
        syncobj.monotonicTime = self.clock
        try:
            with self.disks.installed():
                self._play(seconds, heal_seconds)
                self._check()
                for name in list(self.network.nodes):
                    self._crash(name)
        finally:
            syncobj.monotonicTime = real
        self.findings.unanswered = self.open
        return self.findings

    # -- time and faults --------------------------------------------------------------------------------

    def _play(self, seconds: float, heal_seconds: float) -> None:
        for name in self.names:
            self._start(name)
        end = self.clock.at + seconds
        while self.clock.at < end:
            self.clock.at += 0.006 + self.rng.random() * 0.012
            self._faults()
            self._client()
            self._turn_all()
        self._heal_all()
        end = self.clock.at + heal_seconds
        while self.clock.at < end and not self._settled():
            self.clock.at += 0.02
            self._turn_all()

    def _faults(self) -> None:
        rng, network = self.rng, self.network
        dice = rng.random()
        if dice < 0.008:
            network.partition(*rng.sample(self.names, 2))
        elif dice < 0.011:
            one, other = rng.sample(self.names, 2)
            network.partition(one, other)
            network.heal(one, other)
        elif dice < 0.015:
            alone = rng.choice(self.names)
            for other in self.names:
                if other != alone:
                    network.partition(alone, other)
        elif dice < 0.025 and network.cut:
            network.heal(*sorted(rng.choice(sorted(map(sorted, network.cut)))))
        elif dice < 0.029:
            for pair in list(network.cut):
                network.heal(*sorted(pair))
        elif dice < 0.034:
            one, other = rng.sample(self.names, 2)
            network.slow[one, other] = rng.choice([0.0, 0.0, 0.1, 0.5, 1.5])
        elif dice < 0.038 and len(network.nodes) > 1:
            self._crash(rng.choice(sorted(network.nodes)))
        self.disks.crash_chance = self._crash_chance if len(self.down) < len(self.names) - 1 else 0.0
        for name in [name for name, until in self.down.items() if until < self.clock.at]:
            del self.down[name]
            self._start(name)

    def _client(self) -> None:
        if self.rng.random() > 0.35 or not self.network.nodes:
            return
        if self._retries and self.rng.random() < 0.3:
            body = self._retries.pop()
        else:
            self._newest += self.rng.random() < 0.4
            self._token += 1
            key = b"id%06d" % max(0, self._newest - self.rng.randrange(10))
            body = command(key, self._token)
        leaders = [name for name, replica in self.network.nodes.items() if replica.is_leader]
        names = leaders if leaders and self.rng.random() < 0.8 else list(self.network.nodes)
        self.proposals[self.rng.choice(sorted(names))].append(body)

    def _turn_all(self) -> None:
        order = list(self.network.nodes)
        self.rng.shuffle(order)
        for name in order:
            try:
                self._turn(name)
            except SimulatedCrash:
                self._crash(name)

    def _turn(self, name: str) -> None:
        replica = self.network.nodes[name]
        was = replica.is_leader
        for sender, data in self.network.due(name):
            before = replica.store.snapshots.current
            replica.receive(sender, data)
            self.findings.installs += replica.store.snapshots.current != before
        if self.rng.random() < 0.85:
            replica.tick()
        self.findings.elections += replica.is_leader and not was
        replica.sync()

    def _heal_all(self) -> None:
        self.disks.crash_chance = 0.0
        self.network._drop_chance = 0.0
        self.network.slow.clear()
        for name in list(self.down):
            del self.down[name]
            self._start(name)
        for one, other in combinations(self.names, 2):
            self.network.heal(one, other)

    # -- nodes ------------------------------------------------------------------------------------------

    def _start(self, name: str) -> None:
        machine = Register()
        machine.on_apply = self._on_apply
        chance, self.disks.crash_chance = self.disks.crash_chance, 0.0
        replica = Replica(
            group=0,
            node=name,
            peers=[other for other in self.names if other != name],
            machine=machine,
            on_tick=lambda log: self._on_tick(name, log),
            directory=self.directory / name,
            wire=SimulatedWire(self.network, name, self.limits),
            jobs=SimulatedJobs(self.rng, self.clock),
            timing=TIMING,
            limits=self.limits,
            rng=self.rng,
        )
        self.disks.crash_chance = chance
        self.machines[name] = machine
        self.network.join(name, replica)

    def _crash(self, name: str) -> None:
        replica = self.network.nodes[name]
        self.disks.lose_unsynced(replica)
        self.network.leave(name)
        replica.abandon()
        self.down[name] = self.clock.at + self.rng.random() * 2
        self.findings.crashes += 1

    def _on_tick(self, name: str, log: ReplicatedLog) -> None:
        queue = self.proposals[name]
        while queue:
            body = queue.popleft()
            self.open += 1
            log.propose(body, lambda outcome, body=body: self._on_outcome(body, outcome))

    # -- what must hold ---------------------------------------------------------------------------------

    def _on_outcome(self, body: bytes, outcome: Outcome) -> None:
        self.open -= 1
        key, token = body[:-8], int.from_bytes(body[-8:], "little")
        if isinstance(outcome, Applied):
            self.findings.acknowledged += 1
            (self.granted if outcome.result else self.refused)[key].add(token)
        elif not isinstance(outcome, Refused):
            self.findings.unknown += 1
            self._retries.append(body)

    def _on_apply(self, count: int, digest: bytes) -> None:
        """Every replica applies the same commands in the same order, at every moment."""
        if self.history.setdefault(count, digest) != digest:
            self.findings.diverged.append(f"command {count}")

    def _settled(self) -> bool:
        replicas = list(self.network.nodes.values())
        applied = {replica.core.applied_index for replica in replicas}
        ends = {replica.store.journal.last_index for replica in replicas}
        leaders = {replica.leader for replica in replicas}
        return (
            self.open == 0
            and applied == ends
            and len(applied) == 1
            and len(leaders) == 1
            and None not in leaders
        )

    def _check(self) -> None:
        findings = self.findings
        if not self._settled():
            findings.not_converged += [str(replica.status()) for replica in self.network.nodes.values()]
        findings.two_winners += [key for key, tokens in self.granted.items() if len(tokens) > 1]
        for name, machine in self.machines.items():
            if self.machines[self.names[0]].tokens != machine.tokens:
                findings.diverged.append(name)
            findings.lost += [
                key for key, tokens in self.granted.items() if machine.tokens.get(key) not in tokens
            ]
            findings.wrong_losers += [
                key for key, lost in self.refused.items() if machine.tokens.get(key) in lost
            ]
