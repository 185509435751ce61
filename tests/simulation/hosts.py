"""One process of a registry, run whole but for sockets, threads and gRPC: host, home, directory, shards, and
the service. Several groups share its disk, its thread and its connections.
"""

import heapq
import random
import struct
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import msgspec

from idregistry import service as service_module
from idregistry import shard as shard_module
from idregistry.coordinator import Coordinator, Hosting
from idregistry.rules import table as table_module
from idregistry.rules.commands import IDENTITY_BYTES, Found, Row
from idregistry.rules.directory import DIRECTORY_GROUP, DirectoryState
from idregistry.rules.sharding import BEGINNING
from idregistry.rules.state import ShardState
from idregistry.rules.steward import reached_us
from idregistry.service import IdRegistryService
from idregistry.shard import Shard
from photon.core.errors import CorruptStateError, StorageError
from photon.core.settings import Registry
from photon.raft import host as host_module
from photon.raft.addresses import Address, Endpoint
from photon.raft.host import RaftHost
from photon.raft.port import RaftLimits, ReplicatedLog, StateMachine
from photon.raft.replica import Replica
from photon.raft.rules.codec import decode
from photon.raft.sender import SNAPSHOT_SHARE
from photon.raft.store import LIFE_BYTES
from tests.simulation.clock import Clock, NodeClock, random_clock
from tests.simulation.disks import Disks, SimulatedCrash
from tests.simulation.history import History, Led, Moved, Seen, Turned, Versioned
from tests.simulation.jobs import Job, Jobs
from tests.simulation.machines import Watched, watched
from tests.simulation.network import DOWN, FRAME, UP, Arrival, Network
from tests.simulation.node import TIMING, end
from tests.simulation.own_holes import patched
from tests.simulation.tasks import Tasks

NAMES = ("a", "b", "c")
ROWS = {name: Row(name, "127.0.0.1", 7000 + at, f"{name}:1") for at, name in enumerate(NAMES)}
BASE_US = 1_760_000_400_000_000 + 600_000_000  # ten minutes into a bucket
_TURN_S_MAX = 0.004
_NEVER = float("inf")
_HELLO, _WELCOME = 0xFFFFFFF0, 0xFFFFFFF1
_GROUP = struct.Struct("<I")


class World(Protocol):
    """What all hosts share."""

    rng: random.Random
    clock: Clock
    disks: Disks
    network: Network
    tasks: Tasks
    history: History
    of_groups: dict[int, History]
    settings: Registry
    limits: RaftLimits
    spread_us: int
    drift: float
    wrong_us: int
    nodes: "dict[str, HostNode]"

    def tell(self, node: str, what: str) -> None: ...
    def died(self, node: "HostNode") -> None: ...
    def followed(self, node: "HostNode") -> None: ...
    def raised(self, boundary_us: int) -> None: ...


class SimulatedTransport:
    """The network as `photon.raft.transport` shows it: handshakes are two messages, of which either may be
    late, or the last.
    """

    def __init__(
        self,
        node: "HostNode",
        endpoint: Endpoint,
        life: bytes,
        peers: Mapping[str, Address],
        receiver: RaftHost,
        timing: object,
        limits: RaftLimits,
        rng: object,
    ) -> None:
        self._node = node
        self._life = life
        self._receiver = receiver
        self._limits = limits
        self._admitted: set[str] = set()
        self._welcome: set[str] = set()
        self._up: set[str] = set()

    def watch(self, fd: int) -> None: ...

    def close(self) -> None:
        self._up.clear()

    def flush(self) -> None: ...

    def tick(self, at: float) -> None: ...

    def deadline(self) -> float:
        return _NEVER

    def set_peers(self, peers: Mapping[str, Address]) -> None: ...

    def poll(self, seconds: float) -> None:
        node = self._node
        network = node.world.network
        while node.inbox and node.inbox[0].at <= node.world.clock.at:
            arrival = heapq.heappop(node.inbox)
            peer = arrival.peer
            if arrival.kind == UP and network.has(node.name, peer):
                self._down(peer)  # the newer connection counts
            if not network.take(node.name, arrival):
                continue
            if arrival.kind == FRAME:
                self._frame(peer, arrival.data)
            elif arrival.kind == UP:
                self._say(peer, _HELLO, self._life + self._receiver.last_life(peer))
            else:
                assert arrival.kind == DOWN
                self._down(peer)

    def _frame(self, peer: str, data: bytes) -> None:
        (group,), message = _GROUP.unpack_from(data), data[_GROUP.size :]
        if group == _HELLO:
            why = self._receiver.life_seen(peer, message[:LIFE_BYTES], message[LIFE_BYTES:])
            if why is not None:
                self._node.world.tell(self._node.name, f"refuses {peer}: {why}")
                self._node.world.network.reset(self._node.name, peer)
                return
            self._admitted.add(peer)
            self._say(peer, _WELCOME, b"")
        elif group == _WELCOME:
            self._welcome.add(peer)
        elif peer in self._up:
            self._receiver.frame(peer, group, message)
        if peer in self._admitted & self._welcome and peer not in self._up:
            self._up.add(peer)
            self._receiver.peer_up(peer)

    def _down(self, peer: str) -> None:
        self._admitted.discard(peer)
        self._welcome.discard(peer)
        if peer in self._up:
            self._up.discard(peer)
            self._receiver.peer_down(peer)

    def _say(self, peer: str, group: int, message: bytes) -> None:
        self._node.world.network.post(self._node.name, peer, _GROUP.pack(group) + message)

    def send(self, peer: str, group: int, message: bytes) -> None:
        if peer not in self._up:
            return
        self._say(peer, group, message)
        piece = decode(message).get("serialized")
        if piece is not None and piece.data:
            left = self._limits.outgoing_bytes // SNAPSHOT_SHARE + len(message)
            queued = self._limits.outgoing_bytes - self.room(peer)
            if queued > left + _GROUP.size:
                world = self._node.world
                what = f"{self._node.name}: {queued} bytes of a snapshot and before it wait for {peer}"
                world.history.append(Seen(world.clock.at, "crowded", what))

    def room(self, peer: str) -> int:
        if peer not in self._up:
            return 0
        return self._limits.outgoing_bytes - self._node.world.network.queued(self._node.name, peer)


class _HostJobs(Jobs):
    """Their syncs keep no turn waiting, as they are another thread's."""

    def __init__(self, rng: random.Random, clock: Clock, disks: Disks) -> None:
        super().__init__(rng, clock)
        self._disks = disks

    def start(self, work: Callable[[], None]) -> Job:
        def beside() -> None:
            syncs = self._disks.syncs
            try:
                work()
            finally:
                self._disks.syncs = syncs

        return super().start(beside)

    def stop(self, seconds: float) -> None: ...


class _Host(RaftHost):
    """Its machines are watched, and its wake-ups are the loop's."""

    node: "HostNode"

    def add_group(
        self,
        group: int,
        machine: StateMachine,
        on_tick: Callable[[ReplicatedLog], None],
        founders: Sequence[str] | None,
    ) -> ReplicatedLog:
        seen = self.node.watch(group, machine)
        return super().add_group(group, seen, on_tick, founders)

    def wake(self) -> None:
        super().wake()
        self.node.wake()

    def begin(self) -> None:
        """In place of `start`: the loop's thread is the raft thread."""
        self._touched.update(self._replicas)
        self._thread = threading.current_thread()

    def turn(self) -> None:
        self._turn()

    def sleep_s(self) -> float:
        return self._sleep_s()

    def end(self) -> None:
        self._end(Replica.abandon)

    @property
    def replicas(self) -> dict[int, Any]:
        return self._replicas


class _NodeTime:
    """photon.core.clock.Clock of one node: its wall clock goes by its own rate, too."""

    def __init__(self, clock: Clock, skew_us: int) -> None:
        self._clock = clock
        self._skew_us = skew_us

    def now_us(self) -> int:
        return BASE_US + round(self._clock.at * 1e6) + self._skew_us

    def monotonic(self) -> float:
        return self._clock()


class HostNode:
    """Lives, dies, and lives again on the same disk."""

    def __init__(self, name: str, world: World) -> None:
        self.name = name
        self.world = world
        self.directory = world.disks.add(name) / "host"
        self.host: _Host | None = None
        self.service: IdRegistryService | None = None
        self.paused = False
        self.lost = False
        self.wake_at = _NEVER
        self.life = 0
        self.inbox: list[Arrival] = []
        self.installs = 0
        self.view_version = 0
        self.state = DirectoryState()
        self.hosting: Hosting
        self.jobs = Jobs(world.rng, world.clock)
        self._watched: dict[int, Watched] = {}
        self._led: set[int] = set()
        self._clock = NodeClock(0.0, 1.0)
        self._syncs = 0
        self._handing_over = False
        self._in_turn = False
        self._close_queues: Callable[[], object] = lambda: None

    # -- its life ---------------------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        return DIRECTORY_GROUP in self._led and self.host is not None

    def start(self) -> None:
        world = self.world
        self.life += 1
        self._clock = random_clock(world.rng, world.drift)
        self.inbox.clear()
        self._watched.clear()
        self._led.clear()
        self._syncs = 0
        try:
            self._enter()
            try:
                self._open()
            finally:
                self._leave()
        except CorruptStateError as error:
            self._stop(f"does not start: {error}")
            return
        except (SimulatedCrash, StorageError) as error:
            world.tell(self.name, f"does not start: {error!r}")
            self.die(power=world.rng.random() < 0.5)
            return
        world.network.join(self.name, self)
        world.tell(self.name, "starts")
        self.wake_at = world.clock.at

    def _open(self) -> None:
        world = self.world
        settings, time = world.settings, _NodeTime(world.clock, world.rng.randint(-50_000, 50_000))
        self._close_queues = lambda: None
        self.state = DirectoryState()
        self.jobs = jobs = _HostJobs(world.rng, world.clock, world.disks)
        others = {name: (row.raft_host, row.raft_port) for name, row in ROWS.items() if name != self.name}
        made: list[_Host] = []
        self.hosting = Hosting(
            self.name,
            ROWS,
            self.directory,
            lambda group: Shard(
                group,
                settings,
                time,
                made[0].wake,
                self.state,
                self._reached_us,
                self.hosting.furthest_us,
            ),
        )
        with (
            patched(host_module, "Transport", partial(SimulatedTransport, self)),
            patched(host_module, "BackgroundJobs", lambda finished: jobs),
            patched(host_module, "Home", partial(host_module.Home, random_bytes=world.rng.randbytes)),
        ):
            host = _Host(
                Endpoint(self.name, others["b" if self.name == "a" else "a"], b"secret"),
                others,
                self.directory,
                TIMING,
                world.limits,
                rng=world.rng,
                on_fatal=lambda error: None,
            )
        host.node = self
        made.append(host)
        self.host = host
        identity = world.rng.randbytes(IDENTITY_BYTES)
        founding = Found(0, settings.shards, tuple(ROWS.values()), identity, world.spread_us)
        coordinator = Coordinator(
            self.state, founding, settings, time, host.wake, self.hosting, self._reached_us
        )

        log = host.add_group(DIRECTORY_GROUP, self.state, coordinator.on_tick, NAMES)
        self.hosting.open_groups(host)
        self._close_queues = coordinator.close
        self.service = IdRegistryService(
            self.state, log, coordinator, self.hosting, time, settings.request_timeout_s
        )
        host.begin()

    def _reached_us(self) -> int | None:  # as server.RegistryServer
        newest = max((one.state.latest_us for one in self.hosting.shards.values()), default=BEGINNING)
        if self.host is None:
            return None  # it died while a handler waited: nobody hears that one's answer
        directory = self.host.replicas[DIRECTORY_GROUP]
        return reached_us(directory, BASE_US + round(self.world.clock.at * 1e6) + self.world.wrong_us, newest)

    def die(self, power: bool) -> None:
        world = self.world
        assert world.disks.node is None
        world.tell(self.name, "loses power" if power else "is killed")
        if self.name in world.network.alive:
            world.network.leave(self.name, quietly=power)
        host, self.host = self.host, None
        self.service = None
        self.paused = False
        self.life += 1
        self.wake_at = _NEVER
        if host is not None:
            host.end()
            self._close_queues()
        self.jobs.running = None
        self.wake_at = _NEVER
        world.died(self)
        if power:
            world.disks.lose_power(self.name)

    def _stop(self, why: str) -> None:
        world = self.world
        if not self.lost:
            world.history.append(Seen(world.clock.now, "stopped", f"{self.name}: {why}"))
        self.lost = True
        world.tell(self.name, why)
        self.die(power=False)

    # -- its turns --------------------------------------------------------------------------------------

    def arrive(self, arrival: Arrival) -> None:
        heapq.heappush(self.inbox, arrival)
        if arrival.at < self.wake_at and not self.paused:
            self.wake_at = arrival.at

    def wake(self) -> None:
        if not self.paused and not self._in_turn:
            self.wake_at = min(self.wake_at, self.world.clock.at)

    def resume(self) -> None:
        self.paused = False
        self.wake_at = self.world.clock.at

    def hand_over(self) -> None:
        self._handing_over = True
        self.wake()

    def turn(self) -> None:
        world, host = self.world, self.host
        assert host is not None
        job = self.jobs.running
        if job is not None and job.done():
            self.jobs.running = None
            host.wake()
        try:
            self._enter()
            if self._handing_over:
                self._handing_over = False
                for replica in list(host.replicas.values()):
                    replica.hand_over()
            host.turn()
        except (SimulatedCrash, Exception) as error:
            self._leave()
            end(self, world, error)
            return
        sleep_s = host.sleep_s()
        busy_s = self._leave()
        self._look(host)
        at = self._clock.world(self._clock.local(world.clock.at) + sleep_s)
        if self.inbox:
            at = min(at, self.inbox[0].at)
        job = self.jobs.running
        if job is not None:
            at = min(at, job.ready_at)
        self.wake_at = max(at, world.clock.at) + busy_s + world.rng.random() * _TURN_S_MAX

    def _look(self, host: _Host) -> None:
        """What the turn has changed."""
        world, now = self.world, self.world.clock.at
        syncs = world.disks.syncs
        if syncs > self._syncs:
            self._syncs = syncs
            world.history.append(Turned(now, self.name, syncs))
        for group, replica in host.replicas.items():
            if not replica.is_leader:
                self._led.discard(group)
            elif group not in self._led:
                self._led.add(group)
                world.of_groups.setdefault(group, []).append(Led(now, self.name, replica.core.term))
                world.tell(self.name, f"leads group {group}, term {replica.core.term}")
        if self.state.view.version != self.view_version:
            self.view_version = self.state.view.version
            world.followed(self)

    def _enter(self) -> None:
        self.world.clock.node = self._clock
        self.world.clock.lag = 0.0
        self.world.disks.node = self.name
        self.world.disks.syncs = 0
        self._in_turn = True

    def _leave(self) -> float:
        lag, self.world.clock.lag = self.world.clock.lag, 0.0
        self.world.disks.node = None
        self._in_turn = False
        return lag

    # -- what it holds ----------------------------------------------------------------------------------

    def watch(self, group: int, machine: StateMachine) -> Watched:
        """Every command of a group, and every configuration that comes with one."""
        world, life = self.world, self.life
        version = 0

        def applied(count: int, digest: bytes) -> None:
            nonlocal version
            world.of_groups.setdefault(group, []).append(Moved(world.clock.at, self.name, count, digest))
            known = machine.view if isinstance(machine, DirectoryState) else machine
            if known.version != version and known.configuration is not None:
                version = known.version
                told = msgspec.msgpack.encode(known.configuration)
                world.history.append(Versioned(world.clock.at, self.name, life, group, version, told))
                world.tell(self.name, f"group {group} has version {version}")
            if isinstance(machine, ShardState):
                world.raised(machine.boundary_us)

        seen = self._watched[group] = watched(machine, applied)
        return seen

    def digests(self) -> dict[int, bytes]:
        return {group: seen.digest for group, seen in self._watched.items() if group in self.groups}

    @property
    def groups(self) -> set[int]:
        return set() if self.host is None else set(self.host.replicas)


class _Future:
    """concurrent.futures.Future for a handler that is a task."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self._told: list[Any] = []
        self._wake: Callable[[], None] = lambda: None

    def set_result(self, result: Any) -> None:
        self._told.append(result)
        self._wake()

    def result(self, timeout: float) -> Any:
        if not self._told:
            self._wake = self._tasks.waking()
            self._tasks.wait(timeout)
        if not self._told:
            raise TimeoutError
        return self._told[0]


class _Time:
    def __init__(self, tasks: Tasks) -> None:
        self.sleep = tasks.sleep


@contextmanager
def handlers_are_tasks(tasks: Tasks) -> Iterator[None]:
    """The service waits by the world's clock."""
    with ExitStack() as stack:
        stack.enter_context(patched(service_module, "Future", lambda: _Future(tasks)))
        stack.enter_context(patched(service_module, "time", _Time(tasks)))
        # Ids are sealed soon, and segments merged.
        stack.enter_context(patched(table_module, "SEAL_IDS", 6))
        stack.enter_context(patched(table_module, "SEAL_IDS_MIN", 2))
        stack.enter_context(patched(shard_module, "_FILING_EVERY_S", 0.02))
        yield
