"""A registry whole: directory and shards on three hosts in one loop, sharded anew again and again, while
hosts die, are cut off and lose power together. Clients are production clients, each in a task of its own.
"""

import random
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from pysyncobj import syncobj

from idregistry.client import RegistryClient
from idregistry.rules.directory import DIRECTORY_GROUP
from idregistry.rules.packing import incarnation_of, pack_incarnation
from idregistry.rules.steward import DAY_US
from photon.core.columns import pack_times
from photon.core.errors import PhotonError, UsageError
from photon.core.ids import ID_BYTES, Token
from photon.core.settings import Registry
from photon.raft.port import RaftLimits
from tests.idregistry.kit import RpcFailed, opaque_id
from tests.in_memory import memory_directory
from tests.simulation.checkers import check
from tests.simulation.clock import Clock
from tests.simulation.disks import Disks
from tests.simulation.faults import Faults, Profile
from tests.simulation.history import (
    Asked,
    Commit,
    Ended,
    Fence,
    Founded,
    GiveBack,
    History,
    Led,
    Lookup,
    Raise,
    Release,
    Seen,
    Told,
)
from tests.simulation.hosts import BASE_US, NAMES, ROWS, HostNode, handlers_are_tasks
from tests.simulation.jobs import brief_rests
from tests.simulation.members import Members
from tests.simulation.network import Network
from tests.simulation.tasks import Tasks

_CLIENTS = 5
_DISPATCHERS = 2
_IDLER = 0  # the client that is seldom there: it goes by old tables
_RECENT = 12
_DELAY_S = 0.01
_LEASE_S = 0.6
_RETENTION_S = 2.5
SPREAD_S = 0.8
_AHEAD_CHANCE = 0.25  # of an event of a server whose clock is wrong: beyond where a new interval may begin
_AHEAD_US = 1_200_000, 1_500_000
_FOUNDING_S = 2.0
_SETTLE_PERIOD_S = 0.2
_SHARDS = (4, 2, 5, 1, 4, 3)
_LIMITS = RaftLimits(
    command_bytes_max=2000,
    batch_bytes=4000,
    outgoing_bytes=5000,
    compact_entries=40,
    tail_entries=3,
    segment_bytes=4000,
    snapshot_piece_bytes=700,
    in_flight_max=8,
    apply_turn_s=4e-6,  # a few commands: a log is read over many turns
)

USUAL = Profile(
    period_s=1.2,
    drift=0.02,
    cut=0.5,
    cut_one_way=0.5,
    isolate=0.5,
    split=0.3,
    heal=1.0,
    heal_all=3.0,
    pause=0.3,
    slow=0.5,
    blackout=0.2,
    crash_chance=0.0003,
    error_chance=0.0002,
    down_s=1.0,
    tail_entries=3,
    piece_bytes=700,
)
"""Much goes wrong, and between it there is time for a resharding."""


@dataclass(frozen=True, slots=True)
class Whole:
    """All that decides a run. `spread_s`: how far apart the times of one event's copies may be.

    `blackouts`: how often all power is lost just when a group has come. `put_back`: whether a host's disk is
    put back from a copy once. `leap_us`: by which all clocks, and some events, are ahead in its second half.
    `holds`: whether dispatchers hold the boundary; they come and go. `members`: of a group, between whom
    twice as many shares move.
    """

    seed: int
    spread_s: float = 0.0
    profile: Profile = USUAL
    blackouts: float = 0.4
    put_back: bool = False
    leap_us: int = 0
    holds: bool = False
    members: int = 0
    first_shards: int = 2
    seconds: float = 20.0
    heal_seconds: float = 40.0

    def command(self) -> str:
        """How to play it again, where the rest is as usual."""
        return f"python -m tests.simulation --whole --seed {self.seed} -v"


@dataclass
class WholeRun:
    """What came of it."""

    plan: Whole
    history: History
    broken: dict[str, list[str]]
    stats: dict[str, int] = field(default_factory=dict)


class _Context:
    """What the service asks of a call."""

    def __init__(self, clock: Clock, deadline: float) -> None:
        self._clock = clock
        self._deadline = deadline

    def abort(self, code: grpc.StatusCode, details: str) -> None:
        raise RpcFailed(code, details)

    def time_remaining(self) -> float:
        return self._deadline - self._clock.at

    def is_active(self) -> bool:
        return self._clock.at < self._deadline


class _Channel:
    """A client's way to one host, without gRPC. A request and its answer take a while, or never come."""

    def __init__(self, system: "System", address: str) -> None:
        self._system = system
        self._node = system.nodes[address.partition(":")[0]]

    def unary_unary(self, path: str, **_: Any) -> "_Method":
        return _Method(self, path.rpartition("/")[2])

    def unary_stream(self, path: str, **_: Any) -> None:
        return None

    def close(self) -> None: ...

    def call(self, method: str, request: Any, timeout: float) -> Any:
        system, node = self._system, self._node
        deadline = system.clock.at + timeout
        tasks, rng = system.tasks, system.rng
        if method == "Release" and request.given_back:
            system.work.given_back(request.ids, request.tokens[0])
        tasks.sleep(rng.random() * _DELAY_S)
        while node.paused or rng.random() < 0.01:
            tasks.sleep(0.1)
            if system.clock.at >= deadline:
                raise RpcFailed(grpc.StatusCode.DEADLINE_EXCEEDED, "no answer")
        life, service = node.life, node.service
        if service is None:
            raise RpcFailed(grpc.StatusCode.UNAVAILABLE, "nobody listens")
        try:
            answer = getattr(service, method)(request, _Context(system.clock, deadline))
        except RpcFailed as error:
            answer = error
        tasks.sleep(rng.random() * _DELAY_S)
        if node.life != life or system.clock.at > deadline or rng.random() < 0.02:
            answer = RpcFailed(grpc.StatusCode.UNAVAILABLE, "the connection is gone")
        if isinstance(answer, RpcFailed):
            if answer.code() == grpc.StatusCode.UNAVAILABLE:
                system.work.asked_in_vain()
            raise answer
        return answer


class _Method:
    def __init__(self, channel: _Channel, name: str) -> None:
        self._channel = channel
        self._name = name

    def __call__(self, request: Any, timeout: float) -> Any:
        return self._channel.call(self._name, request, timeout)

    def future(self, request: Any, timeout: float) -> Any:
        """Asked when its answer is."""
        return _Pending(lambda: self(request, timeout))


@dataclass(frozen=True, slots=True)
class _Pending:
    result: Callable[[], Any]


class _Closed:
    """threading.Event of a client that stays open: it only waits."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks

    def is_set(self) -> bool:
        return False

    def wait(self, seconds: float) -> None:
        self._tasks.sleep(seconds)


class _WorldTime:
    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def now_us(self) -> int:
        return BASE_US + round(self._clock.at * 1e6)

    def monotonic(self) -> float:
        return self._clock.at


class System:
    """The hosts' world, and the loop."""

    def __init__(self, plan: Whole, directory: Path, tell: Callable[[str], None] | None) -> None:
        self.plan = plan
        self.rng = random.Random(plan.seed)
        self.clock = Clock()
        self.history: History = []
        self.of_groups: dict[int, History] = {}
        self.spread_us = round(plan.spread_s * 1e6)
        self.settings = Registry(
            shards=plan.first_shards,
            retention_days=_RETENTION_S / 86_400,
            batch_ids_max=8,
            batches_in_flight_max=4,
            request_timeout_s=1.5,
            clock_skew_s=0.2,
        )
        self.limits = plan.profile.limits(_LIMITS)
        self.drift = plan.profile.drift
        self.disks = Disks(self.rng, self.clock, directory)
        self.network = Network(plan.seed, self.clock, False)
        self.tasks = Tasks(self.clock)
        self.names = list(NAMES)
        self.down: dict[str, float] = {}
        self.deaths = 0
        self._tell = tell
        self.nodes: dict[str, HostNode] = {}
        for name in self.names:
            self.nodes[name] = HostNode(name, self)
        self.faults = Faults(random.Random(plan.seed + 4), plan.profile, self, _FOUNDING_S)
        self._blackout_at = float("inf")
        self._dice = random.Random(plan.seed + 6)
        self._founded: set[int] = set()
        self._ops = 0
        self._boundary_us = -(1 << 63)
        self._first_boundary: tuple[float, int] | None = None
        self._wrong_from = self.clock.at + plan.seconds / 2
        self.over = False
        self.work = Work(self)
        self.members = Members(plan.seed, plan.members, self.clock, self.tasks, self.history)

    # -- the loop ---------------------------------------------------------------------------------------

    def run(self) -> None:
        for name in self.names:
            self.down[name] = self.clock.at
        self.work.begin()
        end = self.clock.at + self.plan.seconds
        if self.plan.put_back:
            self._put_back("a", "b", "c")
        self._until(end)
        self.over = self.members.over = True
        self.faults.end()
        self._blackout_at = float("inf")
        self.tell("-", "all is healed")
        end = self.clock.at + self.plan.heal_seconds
        while self.clock.at < end and not self.settled():
            self._until(self.clock.at + _SETTLE_PERIOD_S)
        self._end()

    def _until(self, end: float) -> None:
        clock, network, faults, tasks = self.clock, self.network, self.faults, self.tasks
        nodes = self.nodes.values()
        while True:
            node = min(nodes, key=lambda one: one.wake_at)
            due_at = min(tasks.due_at, network.due_at, faults.due_at, self._blackout_at)
            at = min(node.wake_at, due_at, end, *self.down.values())
            clock.at = max(clock.at, at)
            if at >= end:
                return
            if at == node.wake_at:
                node.turn()
            elif at == tasks.due_at:
                tasks.step()
            elif at == network.due_at:
                network.tick()
            elif at == faults.due_at:
                faults.step()
            elif at == self._blackout_at:
                self._black_out()
            else:
                for name in [name for name, down_at in self.down.items() if down_at <= clock.at]:
                    del self.down[name]
                    self.nodes[name].start()

    def _black_out(self) -> None:
        self._blackout_at = float("inf")
        self.tell("-", "the power fails")
        for node in self.living():
            node.die(power=True)
        for name in self.down:
            self.down[name] = self.clock.at + 0.1 + 0.1 * self._dice.random()

    def _put_back(self, leader: str, away: str, name: str) -> None:
        """A host's disk becomes what it was a life ago, and nobody is there who has all it forgot."""
        network, node = self.network, self.nodes[name]
        self._until(self.clock.at + 3.0)
        copy = self.disks.copy(name)
        node.die(power=False)
        self._until(self.clock.at + self.plan.profile.down_s + 1.0)  # the others meet its new life
        for other in (leader, name):
            network.cut_one_way(away, other)
            network.cut_one_way(other, away)
        self._until(self.clock.at + 3.0)
        if node.host is not None:
            node.die(power=False)
        self.disks.put_back(name, copy)
        node.lost = True  # it may stop
        self.tell(name, "has the disk that it had a while ago")
        if self.nodes[leader].host is not None:
            self.nodes[leader].die(power=False)
        self.down[leader] = self.clock.at + 4.0
        for other in (leader, name):
            network.heal(away, other)
            network.heal(other, away)

    # -- what the hosts ask -----------------------------------------------------------------------------

    def tell(self, node: str, what: str) -> None:
        if self._tell is not None:
            self._tell(f"{self.clock.now - 100:8.3f} {node} {what}")

    def died(self, node: HostNode) -> None:
        self.deaths += 1
        if not node.lost:
            self.down[node.name] = self.clock.at + self.faults.down_s()

    def followed(self, node: HostNode) -> None:
        """A directory has changed: what came with it?"""
        view = node.state.view
        groups = {view.group(shard) for shard in view.founders}
        new = groups - self._founded
        for group in sorted(new):
            self.history.append(Founded(self.clock.at, group, view.version))
        self._founded |= groups
        if new and not self.over and self._dice.random() < self.plan.blackouts:
            self._blackout_at = self.clock.at + 0.3 * self._dice.random()

    @property
    def wrong_us(self) -> int:
        """By which all clocks are ahead now."""
        return self.plan.leap_us if self.clock.at >= self._wrong_from else 0

    def raised(self, boundary_us: int) -> None:
        """A shard's boundary: nobody asks for it but the shard's leader."""
        if boundary_us > self._boundary_us:
            self._boundary_us = boundary_us
            at, first_us = self._first_boundary = self._first_boundary or (self.clock.at, boundary_us)
            in_s, by_us = self.clock.at - at, boundary_us - first_us
            if by_us > DAY_US + 2e6 * in_s:
                what = f"the boundary moved by {by_us / DAY_US:.1f} days in {in_s:.1f} s"
                self.history.append(Seen(self.clock.at, "leapt", what))
            for name, held_us in self.work.holds.items():
                if boundary_us > held_us:
                    what = f"{name} holds {held_us}, and the boundary is at {boundary_us}"
                    self.history.append(Seen(self.clock.at, "passed_a_hold", what))
            op = self.next_op()
            self.history.append(Asked(self.clock.at, op, Raise(boundary_us)))
            self.history.append(Told(self.clock.at, op, ()))

    def next_op(self) -> int:
        self._ops += 1
        return self._ops

    def living(self) -> list[HostNode]:
        return [node for node in self.nodes.values() if node.host is not None]

    # -- the end ----------------------------------------------------------------------------------------

    def settled(self) -> bool:
        """Whether all wishes are told, and all hosts hold the same."""
        living = self.living()
        if not self.tasks.done or self.down or not living:
            return False
        view = living[0].state.view
        groups = {DIRECTORY_GROUP, *(view.group(shard) for shard in view.founders)}
        if view.proposal is not None or any(node.groups != groups for node in living):
            return False
        for group in groups:
            replicas = [node.host.replicas[group] for node in living if node.host is not None]
            indices = {replica.core.applied_index for replica in replicas}
            indices |= {replica.store.journal.last_index for replica in replicas}
            if (
                len(indices) > 1
                or len({replica.leader for replica in replicas}) > 1
                or not replicas[0].leader
            ):
                return False
        return True

    def _end(self) -> None:
        self.members.end()
        if not self.settled():
            for node in self.living():
                assert node.host is not None
                told = {group: str(one.status()) for group, one in node.host.replicas.items()}
                left = "clients wait" if not self.tasks.done else ""
                self.history.append(Seen(self.clock.at, "unfinished", f"{node.name}: {left} {told}"))
            return
        for node in self.living():
            held = _held(node, self._is_expired, self.work.fenced)
            self.history.append(Ended(node.name, held, self._boundary_us, b""))
            for group, digest in node.digests().items():
                self.of_groups[group].append(Ended(node.name, {}, 0, digest))

    def _is_expired(self, key: bytes) -> bool:
        return self.work.times[key] + self.spread_us < self._boundary_us

    def close(self) -> None:
        self.tasks.close()
        for node in self.living():
            assert node.host is not None
            node.host.end()


def _held(node: HostNode, is_expired: Callable[[bytes], bool], fenced: set[bytes]) -> dict[bytes, bytes]:
    """Who holds each id that is not expired, in the shard that it belongs to. What a fenced life has left in
    one of several shards is of no account where another life holds the id: recovery would release it."""
    held: dict[bytes, bytes] = {}
    for shard in node.hosting.shards.values():
        for piece in shard.state.scan():
            keys = [piece.ids[at : at + ID_BYTES] for at in range(0, len(piece.ids), ID_BYTES)]
            for key, token, guarded in zip(keys, piece.tokens, piece.guarded.tolist(), strict=True):
                if guarded or is_expired(key):
                    continue
                other = held.setdefault(key, token)
                if incarnation_of(other) in fenced:
                    held[key] = token
                elif other != token and incarnation_of(token) not in fenced:
                    held[key] = b"two"
    return held


class Work:
    """The clients, who recovers, and who changes the number of shards."""

    def __init__(self, system: System) -> None:
        self._system = system
        self._tasks = system.tasks
        self._rng = random.Random(system.plan.seed + 3)
        self.times: dict[bytes, int] = {}
        """Of each event's first copy."""
        self._recent: deque[bytes] = deque(maxlen=_RECENT)
        self._lives = [100 + client for client in range(_CLIENTS)]
        self._over_lives: list[tuple[int, int]] = []  # (client, life) that recovery is to take care of
        self._commits: list[Commit] = []  # that were told
        self._tokens = 0
        self._asking: dict[object, Asked] = {}
        self.holds: dict[str, int] = {}
        """Dispatcher -> what it holds, at least."""
        self.fenced: set[bytes] = set()
        """Lives, as in tokens."""
        self.acknowledged = self.resharded = self.released = self.trimmed = self.held = 0

    def begin(self) -> None:
        for client in range(_CLIENTS):
            self._tasks.begin(lambda client=client: self._client(client))
        self._tasks.begin(self._recovery)
        self._tasks.begin(self._reshards)
        self._system.members.begin(self._registry)
        if self._system.plan.holds:
            for number in range(_DISPATCHERS):
                self._tasks.begin(lambda number=number: self._dispatcher(number))

    def _registry(self, number: int) -> RegistryClient:
        system = self._system
        addresses = [ROWS[name].grpc for name in NAMES]
        at = number % len(addresses)
        client = RegistryClient(
            addresses[at:] + addresses[:at],
            1.2,
            _WorldTime(system.clock),
            random.Random(system.plan.seed * 100 + number),
            _Ways(system),
        )
        client._routes.closed = _Closed(self._tasks)
        return client

    def asked_in_vain(self) -> None:
        """What the task that runs has asked for may have been done, and its client will ask again."""
        asking = self._asking.get(self._tasks.running)
        if asking is not None:
            self._system.history.append(replace(asking, at=self._system.clock.at))

    def given_back(self, ids: bytes, token: bytes) -> None:
        """A client asks for that of its own accord."""
        system, op = self._system, self._system.next_op()
        keys = tuple(ids[at : at + ID_BYTES] for at in range(0, len(ids), ID_BYTES))
        system.history.append(Asked(system.clock.at, op, GiveBack(keys, token)))
        system.history.append(Told(system.clock.at, op, ()))

    # -- joiners ----------------------------------------------------------------------------------------

    def _client(self, number: int) -> None:
        registry, rng = self._registry(number), self._rng
        while not self._system.over:
            self._tasks.sleep(rng.random() * (4.0 if number == _IDLER else 0.12))
            dice = rng.random()
            if dice < 0.15:
                keys, times = self._events(3)
                self._ask(
                    Lookup(keys, times), lambda: tuple(registry.lookup(b"".join(keys), pack_times(times)))
                )
            elif dice < 0.3:
                life = self._lives[number]
                with suppress(PhotonError):
                    registry.keep_alive(f"j{number}", life, _LEASE_S)
            else:
                self._commit(registry, number)

    def _commit(self, registry: RegistryClient, number: int) -> None:
        rng, life = self._rng, self._lives[number]
        if self._commits and rng.random() < 0.1:
            act = rng.choice(self._commits[-30:])  # a retry of what was told already
        else:
            self._tokens += 1
            keys, times = self._events(rng.randint(1, 4))
            act = Commit(keys, times, Token(f"j{number}", life, self._tokens).pack(), life)
        ids, times = b"".join(act.ids), pack_times(act.times)
        if self._ask(act, partial(registry.commit, ids, times, act.token)):
            self.acknowledged += 1
            self._commits.append(act)

    def _events(self, most: int) -> tuple[tuple[bytes, ...], tuple[int, ...]]:
        """Some that are fought for, or a new one: copies of one event may have other times."""
        rng, system = self._rng, self._system
        now_us = BASE_US + round(system.clock.at * 1e6)
        if not self._recent or rng.random() < 0.5:
            key = opaque_id(len(self.times))
            ahead = rng.random() < _AHEAD_CHANCE
            ahead_us = rng.randrange(*_AHEAD_US) + system.wrong_us if ahead else -rng.randrange(300_000)
            self.times[key] = now_us + ahead_us
            self._recent.append(key)
        keys = tuple(sorted({rng.choice(self._recent) for _ in range(most)}))
        times = tuple(self.times[key] + rng.randrange(system.spread_us + 1) for key in keys)
        return keys, times

    def _ask(self, act: Any, call: Callable[[], Iterable[int] | None]) -> bool:
        """Until it is told."""
        system, op = self._system, self._system.next_op()
        while True:
            asked = self._asking[self._tasks.running] = Asked(system.clock.at, op, act)
            system.history.append(asked)
            try:
                outcomes = call()
            except UsageError:
                raise  # the simulation's own mistake
            except PhotonError:
                outcomes = None
            if outcomes is not None:
                system.history.append(Told(system.clock.at, op, tuple(outcomes)))
                return True
            self._tasks.sleep(0.05 + self._rng.random() * 0.2)

    # -- recovery ---------------------------------------------------------------------------------------

    def _recovery(self) -> None:
        """A joiner begins a new life; the one before is fenced, and some of what it won is released."""
        registry, rng = self._registry(1), self._rng
        while not self._system.over:
            self._tasks.sleep(1.0 + rng.random() * 2)
            number = rng.randrange(_CLIENTS)
            life = self._lives[number]
            self._lives[number] += _CLIENTS
            self.fenced.add(pack_incarnation(life))
            self._ask(Fence((life,)), lambda: () if registry.fence(life).fenced else None)
            of_life = [act for act in self._commits[-20:] if act.incarnation == life]
            for act in rng.sample(of_life, min(2, len(of_life))):
                self._release(registry, act)
            if rng.random() < 0.3 and self._commits:
                self._release(registry, rng.choice(self._commits[-20:]))  # perhaps of one that lives

    def _release(self, registry: RegistryClient, act: Commit) -> None:
        ids, times = b"".join(act.ids), pack_times(act.times)
        self._ask(
            Release(act.ids, act.times, act.token),
            partial(registry.release, ids, times, [act.token], [len(act.ids)]),
        )
        self.released += 1

    # -- dispatchers ------------------------------------------------------------------------------------

    def _dispatcher(self, number: int) -> None:
        """It holds what it has not ended, is down for longer than ids are kept, and comes back."""
        system, name = self._system, f"d{number}"
        registry, rng = self._registry(number), random.Random(system.plan.seed * 10 + number)
        while not system.over:
            oldest_us = BASE_US + round(system.clock.at * 1e6)
            if name in self.holds:
                self.holds[name] = oldest_us  # it may be written down, whatever is told
            with suppress(PhotonError):
                registry.hold(name, oldest_us)
                self.holds[name] = oldest_us
                self.held += 1
            self._tasks.sleep(rng.random() * 2 * _RETENTION_S)
            if rng.random() < 0.2:
                self.holds.pop(name, None)
                with suppress(PhotonError):
                    registry.release_hold(name)

    # -- who changes the number of shards ---------------------------------------------------------------

    def _reshards(self) -> None:
        registry, rng, system = self._registry(2), self._rng, self._system
        self._tasks.sleep(1.0)
        for shards in _SHARDS:
            while not system.over:
                try:
                    self.resharded += registry.reshard(shards).adopted
                    break
                except UsageError:
                    break
                except PhotonError:
                    self._tasks.sleep(0.2)
            until = system.clock.at + (8.0 if rng.random() < 0.7 else 0.5)
            while not system.over and system.clock.at < until:
                self._tasks.sleep(0.3)
                with suppress(PhotonError):
                    if len(registry.configuration().intervals) == 1:
                        self.trimmed += 1
                        break


class _Ways:
    """photon.rpc.network.Network, as far as a client opens channels."""

    def __init__(self, system: System) -> None:
        self._system = system

    def open(self, address: str) -> _Channel:
        return _Channel(self._system, address)


def play(plan: Whole, tell: Callable[[str], None] | None = None) -> WholeRun:
    """Play a plan and judge it: the clients' history, and that of each group."""
    real = syncobj.monotonicTime
    with memory_directory() as directory:
        system = System(plan, directory, tell)
        syncobj.monotonicTime = system.clock
        try:
            with system.disks.installed(), handlers_are_tasks(system.tasks), brief_rests():
                try:
                    system.run()
                finally:
                    system.close()
        finally:
            syncobj.monotonicTime = real
    broken = check(system.history)
    for group, history in system.of_groups.items():
        for rule, findings in check(history).items():
            broken.setdefault(rule, []).extend(f"group {group}: {one}" for one in findings)
    work = system.work
    stats = {
        "deaths": system.deaths,
        "acknowledged": work.acknowledged,
        "resharded": work.resharded,
        "trimmed": work.trimmed,
        "released": work.released,
        "held": work.held,
        "moves": system.members.moves,
        "kept": system.members.writes,
        "groups": len(system._founded),
        "elections": sum(isinstance(event, Led) for of in system.of_groups.values() for event in of),
        "lost": sum(node.lost for node in system.nodes.values()),
        "virtual_ms": round((system.clock.at - 100) * 1000),
    }
    return WholeRun(plan, system.history, broken, stats)
