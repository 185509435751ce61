"""Running a topology in a test: in memory, by a clock that the test moves; and against itself under faults.

    def test_visits():
        bench = Bench(TOPOLOGY)
        bench.send("clicks", {"user": "ann", "ts_us": 0})
        bench.watermark(3_600_000_000)
        assert bench.lines("visits") == [{"user": "ann", "pages": 1}]

`run` takes whole inputs. With `workers` and `seed` it plays several workers whose links stall and which are
killed at any step; what reaches the sinks must be the same as without. Under pytest an argument
`millwheel_seed` is one seed after the other (millwheel.pytest_plugin). Low watermarks know which lines are
still to come, so none is late, except of injectors with a percentile: they leave stragglers behind here too.
"""

import random
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any, Final

import msgspec

from millwheel.computation import BEFORE, NEVER, Times
from millwheel.engine.lateness import Lateness, Stragglers
from millwheel.engine.lines import LineParser
from millwheel.engine.plan import Plan, numbered
from millwheel.engine.records import Frame, decode_frame, encode_frame
from millwheel.engine.store import Changes, MemoryStore, lateness_row, owners, position_row
from millwheel.engine.watermarks import Authority
from millwheel.engine.wheel import Wheel
from millwheel.topology import DEAD_LETTERS, Topology
from photon.logs.formats import Malformed
from photon.logs.shares import SLOTS

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

    `seed`: faults and their moments are drawn from it, `kills` of a worker among them; None has no faults.
    """
    world = World(topology, lines, workers, seed, kills)
    world.run()
    return world.sinks


def oracle(topology: Topology, lines: Lines) -> dict[str, list[Any]]:
    """One worker takes one line after the other by time, with a perfect low watermark: none is late."""
    bench = Bench(topology)
    ordered = sorted(
        (
            (bench.time_of(name, line), name, place, line)
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


class Bench:
    """One worker in memory. Nothing moves but by `send`, `watermark` and `wait`."""

    def __init__(self, topology: Topology, now: int = 1_700_000_000_000_000) -> None:
        self.now = now
        self._plan = Plan(topology, numbered(topology, {}))
        self._parsers = _parsers(self._plan)
        store = MemoryStore()
        self._wheel = Wheel(self._plan, store.claim(range(SLOTS), 1), 0, 1)
        self._store = store
        self._authority = Authority(self._plan.sources, 1)
        self._authority.begins(0, 1)
        self.sinks: dict[str, list[Any]] = {name: [] for name in self._plan.sinks}

    def send(self, injector: str, *lines: Any) -> None:
        """Lines of its log, as objects or bytes."""
        parsed = self._parsers[injector].parse(_packed(lines))
        self._wheel.inject(injector, parsed.records, {}, _letters(injector, parsed.malformed))
        self._settle()

    def watermark(self, time: int, injector: str | None = None) -> None:
        """No line before this comes that is not late: of one injector, or of all."""
        for name in self._plan.injectors if injector is None else [injector]:
            self._wheel.bound(name, time)
        self._settle()

    def wait(self, seconds: float) -> None:
        """The wall clock moves."""
        self.now += round(seconds * 1e6)
        self._settle()

    def lines(self, sink: str) -> list[Any]:
        """What the sink got since last asked."""
        taken, self.sinks[sink] = self.sinks[sink], []
        return taken

    @property
    def dead_letters(self) -> list[Any]:
        return self.lines(DEAD_LETTERS)

    def low_watermark(self, name: str) -> int:
        """Of an injector's or a computation's stream (paper 4.5)."""
        return self._authority.marks[name]

    def time_of(self, injector: str, line: Any) -> int:
        """A line's time; of one that is none, before all others."""
        times = self._parsers[injector].parse(_packed([line])).times
        return int(times[0]) if len(times) else BEFORE

    def _settle(self) -> None:
        for _ in range(_STEPS_MAX):
            more = self._wheel.turn(self.now)
            changes = self._wheel.begin_commit()
            assert changes is not None
            self._wheel._store.commit(changes)
            release = self._wheel.committed()
            for of_sink in release.lines:
                self.sinks[of_sink.sink] += _objects(of_sink.lines)
            moved = self._authority.report(0, 1, release.lows)
            if moved:
                self._wheel.told(self._authority.marks)
            if not (more or moved or self._wheel.due):
                return
        raise AssertionError("timers that set timers do not come to an end")


class World:
    """Several workers, a store that survives them, links between them, an authority: all in memory, by dice.

    Each step one thing happens: a worker reads lines, takes a turn, makes a commit durable or lets it out; a
    link hands on a message; a worker is killed and starts again from the store. Lines of a worker's share of
    a log are read in order, and again from where the store says after a kill.
    """

    def __init__(
        self, topology: Topology, lines: Lines, workers: int = 2, seed: int | None = 0, kills: int = 10
    ) -> None:
        self.plan = Plan(topology, numbered(topology, {}))
        self.workers = workers
        self.random = random.Random(seed)
        self.faults = seed is not None
        self.kills_left = kills if self.faults else 0
        self.store = MemoryStore()
        self.authority = Authority(self.plan.sources, workers)
        self.stragglers = Stragglers(topology.injectors)
        self.sequencer = 0
        self.files = {name: [list(all_[w::workers]) for w in range(workers)] for name, all_ in lines.items()}
        self.parsers = _parsers(self.plan)
        self.least = {
            name: [_least([self.time_of(name, line) for line in file]) for file in files]
            for name, files in self.files.items()
        }
        """Of the times of a file's lines, from each line on."""
        self.sinks: dict[str, list[Any]] = {name: [] for name in self.plan.sinks}
        self.written: set[tuple[int, int]] = set()
        self.steps = 0
        self.nodes = [_Worker(self, me) for me in range(workers)]

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
        worker = self.random.choice(self.nodes)
        if self.kills_left and self.random.random() < 0.02:
            self.kills_left -= 1
            self.nodes[worker.me] = worker.again()
            return
        self.random.choice(worker.steps)()

    def time_of(self, injector: str, line: Any) -> int:
        """A line's time; of one that is none, after all others."""
        times = self.parsers[injector].parse(_packed([line])).times
        return int(times[0]) if len(times) else NEVER

    def write(self, me: int, lines: Iterable[Any]) -> None:
        """To the sinks, which take a line of the store once (as files that are cut to what was noted)."""
        for of_sink in lines:
            if (me, of_sink.number) not in self.written:
                self.written.add((me, of_sink.number))
                self.sinks[of_sink.sink] += _objects(of_sink.lines)


class _Worker:
    def __init__(self, world: World, me: int) -> None:
        world.sequencer += 1
        self.world, self.me, self.sequencer = world, me, world.sequencer
        slots = [slot for slot, owner in enumerate(owners(world.workers)) if owner == me]
        self.store = world.store.claim(slots, self.sequencer)
        self.wheel = Wheel(world.plan, self.store, me, world.workers)
        self.read = {name: self._position(name) for name in world.files}
        self.late = {name: self._lateness(name) for name in world.stragglers.lateness_us}
        self.newest = {name: self._newest(name) for name in self.late if name in world.files}
        self.inflight: Changes | None = None
        self.durable = False
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

    def again(self) -> "_Worker":
        """Killed: what was in memory and on links is gone; others connect to the new one and send again."""
        new = _Worker(self.world, self.me)
        for other in self.world.nodes:
            if other.me != self.me:
                other.frames = [frame for frame in other.frames if frame[0] != self.me]
                other.frames += [(self.me, encode_frame(frame)) for frame in new.wheel.frames_for(other.me)]
                other.acks = [ack for ack in other.acks if ack[0] != self.me]
                new.frames += [(other.me, encode_frame(frame)) for frame in other.wheel.frames_for(self.me)]
        return new

    @property
    def busy(self) -> bool:
        return bool(
            self.inflight is not None
            or self.frames
            or self.acks
            or self.wheel.due
            or self.wheel.unacked_bytes
        )

    def inject(self) -> None:
        for name, parser in self.world.parsers.items():
            mine = self.world.files[name][self.me] if name in self.world.files else []
            at = self.read.get(name, 0)
            count = self.world.random.randint(1, _BATCH)
            lines = mine[at : at + count]
            if lines:
                parsed = parser.parse(_packed(lines))
                at += len(lines)
                row = position_row(self.world.plan.injectors[name], self.me)
                letters = _letters(name, parsed.malformed)
                changes: Changes = {row: at.to_bytes(8, "big")}
                if name in self.late:
                    changes[self._lateness_row(name)] = self._count(name, parsed.times)
                self.wheel.inject(name, parsed.records, changes, letters)
                self.read[name] = at
                self.turn()
            bound = self.world.least[name][self.me][at] if mine else NEVER
            if name in self.newest:
                bound = max(bound, self.newest[name] - self.world.stragglers.lateness_us[name])
            self.wheel.bound(name, bound)

    def turn(self) -> None:
        self.wheel.turn(0)

    def begin(self) -> None:
        if self.inflight is None:
            self.inflight = self.wheel.begin_commit()

    def commit(self) -> None:
        if self.inflight is not None and not self.durable:
            self.store.commit(self.inflight)
            self.durable = True

    def let_out(self) -> None:
        if not self.durable:
            return
        self.inflight, self.durable = None, False
        release = self.wheel.committed()
        for worker, frame in release.frames:
            self.world.nodes[worker].frames.append((self.me, encode_frame(frame)))
        for lane, number in release.acks.items():
            self.world.nodes[lane].acks.append((self.me, lane, number))
        self.world.write(self.me, release.lines)
        self.reports.append((self.sequencer, release.lows))

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
                for worker in self.world.nodes:
                    worker.told.append(dict(self.world.authority.marks))

    def take_marks(self) -> None:
        if self.told:
            self.wheel.told(self.told.pop(0))

    def _position(self, name: str) -> int:
        packed = self.store.read([position_row(self.world.plan.injectors[name], self.me)])[0]
        return 0 if packed is None else int.from_bytes(packed, "big")

    def _lateness_row(self, name: str) -> bytes:
        return lateness_row(self.world.plan.injectors[name], self.me)

    def _lateness(self, name: str) -> Lateness:
        percentile = self.world.plan.topology.injectors[name].percentile
        assert percentile is not None
        return Lateness(percentile, self.store.read([self._lateness_row(name)])[0])

    def _newest(self, name: str) -> int:
        times = (
            self.world.parsers[name].parse(_packed(self.world.files[name][self.me][: self.read[name]])).times
        )
        return int(times.max(initial=BEFORE))

    def _count(self, name: str, times: Times) -> bytes:
        self.late[name].saw(times, self.newest[name], NEVER)
        self.newest[name] = int(times.max(initial=self.newest[name]))
        packed = self.late[name].packed()
        self.world.stragglers.report(self.me, {name: packed})
        return packed

    def _rewrite(self) -> None:
        """Lines that are in the store, and perhaps not in the files."""
        for name, number in self.world.plan.sinks.items():
            for of_lines, data in self.wheel.unwritten(number, self.me):
                self.world.write(self.me, [_Unwritten(name, of_lines, data)])


class _Unwritten(msgspec.Struct):
    sink: str
    number: int
    lines: bytes


def _parsers(plan: Plan) -> dict[str, LineParser]:
    return {
        name: LineParser(injector, {number: plan.inputs[number][1] for number in plan.readers[name]})
        for name, injector in plan.topology.injectors.items()
    }


def _letters(injector: str, malformed: Iterable[Malformed]) -> list[dict[str, Any]]:
    return [
        {"injector": injector, "reason": bad.reason, "line": bad.line.decode("utf-8", "replace")}
        for bad in malformed
    ]


def _packed(lines: Iterable[Any]) -> bytes:
    return b"".join(
        (line.rstrip(b"\n") if isinstance(line, bytes) else msgspec.json.encode(line)) + b"\n"
        for line in lines
    )


def _least(times: list[int]) -> list[int]:
    return list(accumulate(reversed(times), min, initial=NEVER))[::-1]


def _objects(lines: bytes) -> list[Any]:
    return [msgspec.json.decode(line) for line in lines.splitlines()]
