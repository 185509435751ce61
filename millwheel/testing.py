"""Running a topology in a test: in memory, by a clock that the test moves; and against itself under faults.

    def test_visits():
        bench = Bench(TOPOLOGY)
        bench.send("clicks", {"user": "ann", "ts_us": 0})
        bench.watermark(3_600_000_000)
        assert bench.lines("visits") == [{"user": "ann", "pages": 1}]

`run` takes whole inputs. With `workers` and `seed` it plays several workers whose links stall, which are
killed or replaced at any step, and whose number changes; what reaches the sinks must be the same as without.
Under pytest an argument `millwheel_seed` is one seed after the other (millwheel.pytest_plugin). Low
watermarks know which lines are still to come, so none is late, except of injectors with a percentile: they
leave stragglers behind here too.
"""

import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, Final

import msgspec

from millwheel.computation import BEFORE, NEVER, Times
from millwheel.engine.lateness import Lateness, Stragglers
from millwheel.engine.lines import LineParser
from millwheel.engine.plan import Plan, numbered
from millwheel.engine.records import Frame, decode_frame, encode_frame
from millwheel.engine.shares import even, slots_of
from millwheel.engine.store import Changes, MemoryStore, keeper, lateness_row, position_row
from millwheel.engine.watermarks import Authority
from millwheel.engine.wheel import Early, Release, Wheel
from millwheel.engine.wheel import Lines as OfSink
from millwheel.errors import ZombieError
from millwheel.topology import DEAD_LETTERS, Topology

Lines = Mapping[str, Sequence[Any]]
"""By injector, what stands in its log: objects, or lines as bytes."""
_in_json: Final = msgspec.json.Encoder(order="deterministic").encode
_STEPS_MAX: Final = 1_000_000
_BATCH: Final = 7
"""Lines that are injected at a time, at most: small, so that much lies between two of them."""


def run(
    topology: Topology, lines: Lines, workers: int = 1, seed: int | None = None, kills: int = 10
) -> dict[str, list[Any]]:
    """Read all lines to their end; what every sink has then, and "dead-letters", in the order it was written.

    `seed`: faults and their moments are drawn from it; None has no faults. `kills`: of a worker; a quarter as
    often all stop, and others go on, one more at most.
    """
    world = World(topology, lines, workers, seed, kills)
    world.run()
    return world.sinks


def oracle(topology: Topology, lines: Lines) -> dict[str, list[Any]]:
    """One worker takes one line after the other by time, with a perfect low watermark: none is late."""
    bench = Bench(topology)
    ordered = sorted(
        (
            (bench.time_of(name, line, BEFORE), name, place, line)
            for name, all_ in lines.items()
            for place, line in enumerate(all_)
        ),
        key=lambda one: one[:3],
    )
    for time, name, _, line in ordered:
        bench.watermark(time)
        bench.send(name, line)
    bench.watermark(NEVER)
    return bench.sinks


def in_order(sinks: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Each sink's lines in an order of their own: to compare runs that wrote them in another."""
    return {name: sorted(lines, key=_in_json) for name, lines in sinks.items()}


class World:
    """Several workers, a store that survives them, links between them, an authority: all in memory, by dice.

    Each step one thing happens: a worker reads lines, takes a turn, makes a commit durable, lets out a part
    of it; a link hands on a message; a worker is taken for dead, and another starts in its place from the
    store. The former one is dead, or goes on as if it owned its key intervals (a zombie, paper 6.2). Now and
    then all stop, the authority too, and another number of workers goes on, each with any key intervals. A
    file of a log is read in order, and again from where the store says.
    """

    def __init__(
        self, topology: Topology, lines: Lines, workers: int = 2, seed: int | None = 0, kills: int = 10
    ) -> None:
        self.random = random.Random(seed)
        self.faults = seed is not None
        self.kills_left, self.stops_left = (kills, kills // 4) if self.faults else (0, 0)
        self.store = MemoryStore()
        self.sequencer = 0
        self.numbers: dict[str, int] = {}
        self.files = {
            name: {file: list(all_[file::workers]) for file in range(workers)} for name, all_ in lines.items()
        }
        self.sinks: dict[str, list[Any]] = {}
        self.written: set[tuple[int, int]] = set()
        self.steps = 0
        self.now = 0
        """The wall clock, which stands unless somebody moves it."""
        self.begin(topology, workers)

    def begin(self, topology: Topology, workers: int) -> None:
        """A run begins, or goes on with what is in the store."""
        self.numbers = numbered(topology, self.numbers)
        self.plan = Plan(topology, self.numbers)
        self.workers, self.owners = workers, list(even(workers))
        if self.steps:  # they may have moved meanwhile
            self.random.shuffle(self.owners)
        self.authority = Authority(self.plan.sources, workers)
        self.stragglers = Stragglers(topology.injectors)
        self.parsers = _parsers(self.plan)
        self.least = {
            (name, file): [
                *accumulate(
                    [min(self.time_of(name, line), NEVER - 1) for line in reversed(lines)], min, initial=NEVER
                )
            ][::-1]
            for name, files in self.files.items()
            for file, lines in files.items()
        }
        """Of the times of a file's lines, from each line on."""
        for name in self.plan.sinks:
            self.sinks.setdefault(name, [])
        self.zombies: list[_Worker] = []
        self.nodes: list[_Worker] = []
        for me in range(workers):
            self.nodes.append(_Worker(self, me))

    def run(self) -> None:
        """Until all low watermarks have ended and nothing is under way. AssertionError if that takes for
        ever.
        """
        while not self.over:
            self.steps += 1
            assert self.steps < _STEPS_MAX, f"not over after {self.steps} steps: {self.authority.marks}"
            self.step()

    @property
    def over(self) -> bool:
        return self.authority.ended and not any(worker.busy for worker in self.nodes)

    def step(self) -> None:
        if self.stops_left and self.random.random() < 0.002:
            self.stops_left -= 1
            self.begin(self.plan.topology, self.random.randint(1, self.workers + 1))
            return
        worker = self.random.choice(self.nodes)
        if self.kills_left and self.random.random() < 0.02:
            self.kills_left -= 1
            self.replace(worker, zombie=self.random.random() < 0.5)
        elif self.zombies and self.random.random() < 0.3:
            zombie = self.random.choice(self.zombies)
            try:
                self.random.choice(zombie.steps)()
            except ZombieError:
                self.zombies.remove(zombie)
        else:
            self.random.choice(worker.steps)()

    def replace(self, worker: "_Worker", zombie: bool = False) -> None:
        """By one that starts from the store."""
        if zombie:
            self.zombies.append(worker)
        self.nodes[worker.me] = worker.again()

    def time_of(self, injector: str, line: Any, none: int = NEVER) -> int:
        """A line's time; `none`: of one that is none."""
        times = self.parsers[injector].parse(_packed([line])).times
        return int(times[0]) if len(times) else none

    def write(self, lane: int, lines: Iterable[OfSink]) -> None:
        """To the sinks, which take a line of the store once (as files that are cut to what was noted)."""
        for of_sink in lines:
            if (lane, of_sink.number) not in self.written:
                self.written.add((lane, of_sink.number))
                self.sinks[of_sink.sink] += map(msgspec.json.decode, of_sink.lines.splitlines())


class Bench(World):
    """One worker in memory. Nothing moves but by `send`, `watermark` and `wait`."""

    def __init__(self, topology: Topology, now: int = 1_700_000_000_000_000) -> None:
        super().__init__(topology, {}, workers=1, seed=None)
        self.now = now
        (self._worker,) = self.nodes
        self._wheel, self._store = self._worker.wheel, self._worker.store

    def send(self, injector: str, *lines: Any) -> None:
        """Lines of its log, as objects or bytes."""
        parsed = self.parsers[injector].parse(_packed(lines))
        self._wheel.inject(injector, parsed.records, {}, parsed.letters(injector))
        self._worker.settle()

    def watermark(self, time: int, injector: str | None = None) -> None:
        """No line before this comes that is not late: of one injector, or of all."""
        for name in self.plan.injectors if injector is None else [injector]:
            self._wheel.bound(name, time)
        self._worker.settle()

    def wait(self, seconds: float) -> None:
        """The wall clock moves."""
        self.now += round(seconds * 1e6)
        self._worker.settle()

    def lines(self, sink: str) -> list[Any]:
        """What the sink got since last asked."""
        taken, self.sinks[sink] = self.sinks[sink], []
        return taken

    @property
    def dead_letters(self) -> list[Any]:
        return self.lines(DEAD_LETTERS)

    def low_watermark(self, name: str) -> int:
        """Of an injector's or a computation's stream (paper 4.5)."""
        return self.authority.marks[name]


class _Worker:
    def __init__(self, world: World, me: int) -> None:
        world.sequencer += 1
        self.world, self.me, self.sequencer = world, me, world.sequencer
        self.store = world.store.claim(slots_of(world.owners, me), self.sequencer)
        self.wheel = Wheel(world.plan, self.store, me, world.owners, self.sequencer)
        if world.faults and self.sequencer % 2:
            self.wheel.pace.share = 1e-9  # as little at a time as there is
        self.files = {
            name: [file for file in files if file % world.workers == me]
            for name, files in world.files.items()
            if name in world.plan.injectors
        }
        self.read = {
            (name, file): self._position(name, file) for name, all_ in self.files.items() for file in all_
        }
        self.late = {name: self._lateness(name) for name in world.stragglers.lateness_us}
        world.stragglers.report(me, {name: late.packed() for name, late in self.late.items()})
        self.newest = {
            (name, file): self._newest(name, file) for name, file in self.read if name in self.late
        }
        self.inflight: Changes | None = None
        self.durable = False
        self.early: list[OfSink] = []
        """Lines that left before their commit: of the next one, and of the one under way. A file loses those
        whose commit never was."""
        self.early_inflight: list[OfSink] = []
        self.leaving: list[Callable[[], object]] = []
        """Of the last commit, what has not left yet."""
        self.frames: list[tuple[int, bytes]] = []
        """On their way to this worker, with their sender."""
        self.acks: list[tuple[int, int, int]] = []
        self.reports: list[tuple[int, dict[str, int]]] = []
        self.told: list[dict[str, int]] = []
        world.authority.begins(me, self.sequencer)
        world.authority.restore(self.wheel.marks)
        self.wheel.told(dict(world.authority.marks))
        self._rewrite()
        self.steps = [
            self.inject,
            self.turn,
            self.begin,
            self.commit,
            self.let_out,
            self.take_frame,
            self.take_ack,
            self.hand_report,
            self.take_marks,
        ]
        for other in world.nodes:
            if other.me != me:
                self._connect(other)

    def again(self) -> "_Worker":
        """What is on links from or to this worker is gone; another one starts in its place."""
        for other in self.world.nodes:
            other.frames = [frame for frame in other.frames if frame[0] != self.me]
            other.acks = [ack for ack in other.acks if ack[0] != self.me]
        return _Worker(self.world, self.me)

    def _connect(self, other: "_Worker") -> None:
        """Each gets again what it did not acknowledge."""
        other.frames += [(self.me, encode_frame(frame)) for frame in self.wheel.frames_for(other.me)]
        self.frames += [(other.me, encode_frame(frame)) for frame in other.wheel.frames_for(self.me)]

    @property
    def busy(self) -> bool:
        return bool(self.inflight or self.frames or self.acks or self.wheel.due or self.wheel.unacked_bytes)

    def settle(self) -> None:
        """Do all that is to be done."""
        for _ in range(_STEPS_MAX):
            for step in (self.turn, self.begin, self.commit, self.let_out):
                step()
            while self.leaving:
                self.let_out()
            while self.frames:
                self.take_frame()
            self.hand_report()
            if not (self.told or self.wheel.due):
                return
            self.take_marks()
        raise AssertionError("timers that set timers do not come to an end")

    def inject(self) -> None:
        for name, files in self.files.items():
            if files:
                self._inject(name, self.world.random.choice(files))
        for name in self.world.plan.injectors:
            self.wheel.bound(
                name, min((self._bound(name, file) for file in self.files.get(name, ())), default=NEVER)
            )

    def _inject(self, name: str, file: int) -> None:
        at = self.read[name, file]
        lines = self.world.files[name][file][at : at + self.world.random.randint(1, _BATCH)]
        if not lines:
            return
        parsed = self.world.parsers[name].parse(_packed(lines))
        at += len(lines)
        changes: Changes = {self._position_row(name, file): at.to_bytes(8, "big")}
        if name in self.late:
            changes[self._lateness_row(name)] = self._count(name, file, parsed.times)
        self.wheel.inject(name, parsed.records, changes, parsed.letters(name))
        self.read[name, file] = at
        self.turn()

    def _bound(self, name: str, file: int) -> int:
        bound = self.world.least[name, file][self.read[name, file]]
        if name in self.late:
            bound = max(bound, self.newest[name, file] - self.world.stragglers.lateness_us[name])
        return bound

    def turn(self) -> None:
        self.wheel.turn(self.world.now)
        self.send_early()

    def send_early(self) -> None:
        early = self.wheel.early()
        self.send_frames(early)
        self.early += early.lines

    def begin(self) -> None:
        if self.inflight is None:
            self.inflight = self.wheel.begin_commit()
            self.send_early()
            self.early_inflight, self.early = self.early, []

    def commit(self) -> None:
        if self.inflight is not None and not self.durable:
            if self.inflight:  # without changes no store is asked
                self.store.commit(self.inflight)
            self.durable = True

    def let_out(self) -> None:
        """A part of it: a worker may die between any two."""
        if self.durable and not self.leaving:
            release = self.wheel.committed()
            self.leaving = [
                partial(self.send_frames, release),
                partial(self.send_acks, release),
                partial(self.world.write, self.me, [*self.early_inflight, *release.lines]),
                partial(self.reports.append, (self.sequencer, release.lows)),
            ]
        if self.leaving:
            self.leaving.pop(0)()
            if not self.leaving:
                self.inflight, self.durable = None, False

    def send_frames(self, left: Release | Early) -> None:
        for worker, frame in left.frames:
            self.world.nodes[worker].frames.append((self.me, encode_frame(frame)))

    def send_acks(self, release: Release) -> None:
        for lane, number in release.acks.items():
            self.world.nodes[keeper(lane, self.world.workers)].acks.append((self.me, lane, number))

    def take_frame(self) -> None:
        if self.frames:
            _, packed = self.frames.pop(0)
            frame: Frame = decode_frame(packed)
            self.wheel.receive(frame)
            if self.world.faults and self.world.random.random() < 0.1:
                self.wheel.receive(decode_frame(packed))  # it was sent again

    def take_ack(self) -> None:
        if self.acks:
            self.wheel.acked(*self.acks.pop(0))

    def hand_report(self) -> None:
        if self.reports:
            sequencer, lows = self.reports.pop(0)
            if self.world.authority.report(self.me, sequencer, lows):
                for worker in (*self.world.nodes, *self.world.zombies):
                    worker.told.append(dict(self.world.authority.marks))

    def take_marks(self) -> None:
        if self.told:
            self.wheel.told(self.told.pop(0))

    def _position_row(self, name: str, file: int) -> bytes:
        return position_row(self.world.plan.injectors[name], file)

    def _position(self, name: str, file: int) -> int:
        packed = self.store.read([self._position_row(name, file)])[0]
        return 0 if packed is None else int.from_bytes(packed, "big")

    def _lateness_row(self, name: str) -> bytes:
        return lateness_row(self.world.plan.injectors[name], self.me)

    def _lateness(self, name: str) -> Lateness:
        percentile = self.world.plan.topology.injectors[name].percentile
        assert percentile is not None
        return Lateness(percentile, self.store.read([self._lateness_row(name)])[0])

    def _newest(self, name: str, file: int) -> int:
        lines = self.world.files[name][file][: self.read[name, file]]
        return int(self.world.parsers[name].parse(_packed(lines)).times.max(initial=BEFORE))

    def _count(self, name: str, file: int, times: Times) -> bytes:
        newest = self.newest[name, file]
        self.late[name].saw(times, newest, NEVER)
        self.newest[name, file] = int(times.max(initial=newest))
        packed = self.late[name].packed()
        self.world.stragglers.report(self.me, {name: packed})
        return packed

    def _rewrite(self) -> None:
        """Lines that are in the store, and perhaps not in the files."""
        for name, number in self.world.plan.sinks.items():
            for lane in self.wheel.lanes:
                for of_lines, data in self.wheel.unwritten(number, lane):
                    self.world.write(lane, [OfSink(name, of_lines, data)])


def _parsers(plan: Plan) -> dict[str, LineParser]:
    return {
        name: LineParser(injector, {number: plan.inputs[number][1] for number in plan.readers[name]})
        for name, injector in plan.topology.injectors.items()
    }


def _packed(lines: Iterable[Any]) -> bytes:
    return b"".join(
        (line.rstrip(b"\n") if isinstance(line, bytes) else msgspec.json.encode(line)) + b"\n"
        for line in lines
    )
