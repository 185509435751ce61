"""One process of a replica, run as its host runs it: what came, sync, tick, sync; then who waits is told."""

import heapq
import random
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from photon.core.errors import CorruptStateError, StorageError
from photon.raft.port import Change, Outcome, RaftLimits, RaftTiming, ReplicatedLog
from photon.raft.replica import NodeContext, Replica
from photon.raft.snapshot import StateMachineError
from tests.raft.kit import everybody_met
from tests.simulation.clients import Attempt
from tests.simulation.clock import Clock, NodeClock, random_clock
from tests.simulation.disks import Disks, SimulatedCrash
from tests.simulation.history import Bounded, History, Led, Moved, Seen
from tests.simulation.jobs import Jobs
from tests.simulation.machines import Watched, Workload, watched
from tests.simulation.network import DOWN, FRAME, UP, Arrival, Network

TIMING = RaftTiming(
    election_s_min=0.3, election_s_max=0.6, heartbeat_s=0.06, leader_fallback_s=1.0, proposal_s=3.0
)
_TURN_S_MAX = 0.004
_NEVER = float("inf")


class Ending(Protocol):
    """A process that a turn can end."""

    name: str

    def die(self, power: bool) -> None: ...
    def _stop(self, why: str) -> None: ...


def end(process: Ending, world: Any, error: BaseException) -> None:
    """What a turn that raised comes to: a crash, a stop that another start mends, or one for good."""
    if isinstance(error, SimulatedCrash):
        process.die(power=world.rng.random() < 0.5)
    elif isinstance(error, CorruptStateError):
        process._stop(str(error))
    elif isinstance(error, (StorageError, StateMachineError)):
        world.tell(process.name, f"stops: {error}")
        process.die(power=world.rng.random() < 0.3)
    else:
        process._stop("".join(traceback.format_exception(error, limit=-5)))


class World(Protocol):
    """What all nodes share, and what those who disturb them ask of it."""

    rng: random.Random
    clock: Clock
    disks: Disks
    network: Network
    workload: Workload
    limits: RaftLimits
    history: History
    drift: float
    names: list[str]
    nodes: "dict[str, Node]"
    down: dict[str, float]

    def living(self) -> "list[Node]": ...
    def join(self, name: str) -> "Node": ...
    def tell(self, node: str, what: str) -> None: ...
    def died(self, node: "Node", attempts: list[Attempt]) -> None: ...
    def answer(self, attempt: Attempt, outcome: Outcome) -> None: ...


class Node:
    """Lives, dies, and lives again on the same disk. It is the wire of its replica, too."""

    def __init__(self, name: str, world: World, founders: list[str] | None) -> None:
        """`founders` of the group; None for one that joins it."""
        self.name = name
        self.directory = world.disks.add(name) / "group-0000"
        self.replica: Replica | None = None
        self.machine: Any = None
        self.paused = False
        self.lost = False  # its disk is damaged: it must not come back
        self.wake_at = _NEVER
        self.life = 0
        self.installs = 0
        self._world = world
        self._founders = founders
        self._clock = NodeClock(0.0, 1.0)
        self._watched: Watched
        self._restored = 0
        self._inbox: list[Arrival] = []
        self._offered: deque[Attempt] = deque()
        self._at_its_next_turn: list[Callable[[ReplicatedLog], object]] = []
        self._open: set[Attempt] = set()
        self.jobs = Jobs(world.rng, world.clock)
        self._boundary_us: int | None = None

    # -- its life ---------------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        return self.replica is not None and self.replica.is_leader

    @property
    def digest(self) -> bytes:
        """Of all it has applied, however it came by it."""
        return self._watched.digest

    def start(self) -> None:
        """Open what is on the disk; it may fail, or die on the way."""
        world = self._world
        self.life += 1
        self._clock = random_clock(world.rng, world.drift)
        self._inbox.clear()
        self.jobs.running = None
        self._boundary_us = None
        self.machine = world.workload.machine()
        self._watched = watched(self.machine, self._applied)
        try:
            self.replica = self._open_replica()
        except CorruptStateError as error:
            self._stop(f"does not start: {error}")
            return
        except (SimulatedCrash, StorageError) as error:
            world.tell(self.name, f"does not start: {error!r}")
            self.die(power=world.rng.random() < 0.5)
            return
        self._restored = self._watched.restored
        world.network.join(self.name, self)
        world.tell(self.name, f"starts, log to {self.replica.store.journal.last_index}")
        self.wake_at = world.clock.at

    def _open_replica(self) -> Replica:
        self._enter()
        try:
            return self._made_replica()
        finally:
            self._leave()

    def _made_replica(self) -> Replica:
        world = self._world
        context = NodeContext(self.name, self.jobs, TIMING, world.limits, world.rng, everybody_met)
        return Replica(context, 0, self.directory, self._watched, self._on_tick, self, self._founders)

    def die(self, power: bool) -> None:
        """The process ends; with `power`, so does the machine's memory."""
        world = self._world
        assert world.disks.node is None
        world.tell(self.name, "loses power" if power else "is killed")
        if self.name in world.network.alive:
            world.network.leave(self.name, quietly=power)
        replica, self.replica = self.replica, None
        open_attempts = [*self._offered, *sorted(self._open, key=lambda attempt: attempt.wishes[0].op)]
        self._offered.clear()
        self._at_its_next_turn.clear()
        self._open.clear()
        self.paused = False
        self.wake_at = _NEVER
        world.died(self, open_attempts)
        if replica is not None:
            replica.abandon()
        if power:
            world.disks.lose_power(self.name)

    def _stop(self, why: str) -> None:
        world = self._world
        if not self.lost:
            world.history.append(Seen(world.clock.now, "stopped", f"{self.name}: {why}"))
        self.lost = True
        world.tell(self.name, why)
        world.disks.node = None
        self.die(power=False)

    # -- its turns --------------------------------------------------------------------------------------

    def arrive(self, arrival: Arrival) -> None:
        """Something will reach it."""
        heapq.heappush(self._inbox, arrival)
        if arrival.at < self.wake_at and not self.paused:
            self.wake_at = arrival.at

    def offer(self, attempt: Attempt) -> None:
        """A client asks it."""
        self._offered.append(attempt)
        if not self.paused:
            self.wake_at = self._world.clock.at

    def resume(self) -> None:
        self.paused = False
        self.wake_at = self._world.clock.at

    def hand_over(self) -> None:
        """Its operator wants another leader."""
        self._at_its_next_turn.append(lambda log: log.hand_over())
        self.wake_at = min(self.wake_at, self._world.clock.at)

    def change_members(self, change: Change) -> None:
        """Its operator wants other members; whether it was done is seen in them."""
        self._at_its_next_turn.append(lambda log: log.change_members(change, lambda outcome: None))
        self.wake_at = min(self.wake_at, self._world.clock.at)

    def turn(self) -> None:
        """What has come by now, then what is due."""
        world, replica = self._world, self.replica
        assert replica is not None
        led = replica.is_leader
        try:
            self._enter()
            self._turn(replica)
        except (SimulatedCrash, Exception) as error:
            self._leave()
            end(self, world, error)
            return
        busy_s = self._leave()
        if replica.is_leader and not led:
            world.history.append(Led(world.clock.at, self.name, replica.core.term))
            world.tell(self.name, f"leads term {replica.core.term}")
        self._plan(replica, busy_s)

    def _turn(self, replica: Replica) -> None:
        world = self._world
        now = world.clock.at
        came = bool(self._offered or self._at_its_next_turn)
        while self._inbox and self._inbox[0].at <= now:
            self._take(replica, heapq.heappop(self._inbox))
            came = True
        if came or self._job_is_done() or replica.deadline() <= world.clock():
            installs = replica.installs
            replica.sync()
            replica.tick()
            self.installs += replica.installs - installs
            replica.sync()
        self.installs += self._watched.restored - self._restored
        self._restored = self._watched.restored
        boundary_us = world.workload.boundary_us(self.machine)
        if boundary_us != self._boundary_us:
            self._boundary_us = boundary_us
            world.history.append(Bounded(now, self.name, self.life, boundary_us))

    def _job_is_done(self) -> bool:
        """The host is woken by it, once."""
        if self.jobs.running is None or self.jobs.busy():
            return False
        self.jobs.running = None
        return True

    def _take(self, replica: Replica, arrival: Arrival) -> None:
        network, peer = self._world.network, arrival.peer
        if arrival.kind == UP and network.has(self.name, peer):
            replica.peer_down(peer)  # the newer connection counts
        if not network.take(self.name, arrival):
            return
        if arrival.kind == FRAME:
            replica.receive(peer, arrival.data)
        elif arrival.kind == UP:
            replica.peer_up(peer)
        else:
            assert arrival.kind == DOWN
            replica.peer_down(peer)

    def _plan(self, replica: Replica, busy_s: float) -> None:
        """When it will look again: the host sleeps until something comes, or its deadline."""
        world = self._world
        at = self._clock.world(replica.deadline())
        if self._inbox:
            at = min(at, self._inbox[0].at)
        job = self.jobs.running
        if job is not None:
            at = min(at, job.ready_at)
        self.wake_at = max(at, world.clock.at) + busy_s + world.rng.random() * _TURN_S_MAX

    def _enter(self) -> None:
        self._world.clock.node = self._clock
        self._world.clock.lag = 0.0
        self._world.disks.node = self.name

    def _leave(self) -> float:
        """How long the turn took."""
        lag, self._world.clock.lag = self._world.clock.lag, 0.0
        self._world.disks.node = None
        return lag

    # -- what the replica asks --------------------------------------------------------------------------

    def _on_tick(self, log: ReplicatedLog) -> None:
        world = self._world
        asked, self._at_its_next_turn = self._at_its_next_turn, []
        for ask in asked:
            ask(log)
        while self._offered:
            attempt = self._offered.popleft()
            self._open.add(attempt)
            body = world.workload.encode([wish.act for wish in attempt.wishes], int(world.clock.at * 1e6))
            log.propose(body, partial(self._answer, attempt))
        if world.rng.random() < 0.1 and log.is_leader:
            command = world.workload.filing(self.machine, world.rng)
            if command is not None:
                log.propose(command, lambda _: None)

    def _answer(self, attempt: Attempt, outcome: Outcome) -> None:
        self._open.discard(attempt)
        self._world.answer(attempt, outcome)

    def _applied(self, count: int, digest: bytes) -> None:
        self._world.history.append(Moved(self._world.clock.at, self.name, count, digest))

    def send(self, peer: str, data: bytes) -> None:
        self._world.network.post(self.name, peer, data)

    def room(self, peer: str) -> int:
        network = self._world.network
        if not network.has(self.name, peer):
            return 0
        return self._world.limits.outgoing_bytes - network.queued(self.name, peer)
