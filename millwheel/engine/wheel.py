"""A worker's rules: what it does in a turn, and what may leave it once a turn is durable.

    records come in -> stages, in the order of the graph -> one commit -> frames, acknowledgements, lines,
    report

Everything that a turn does to all stages of the worker is one commit: records consumed, state, timers,
positions of logs, records for other workers, lines for sinks. A record that goes from one stage to the next
within the worker is consumed in the commit that has it produced, so nothing of it is stored. One for another
worker is in the commit before it is sent (a strong production, paper 6.1.2), and is sent again until it is
acknowledged, which is after it is consumed durably over there. So is one for a computation of the same worker
that asks outside: done again, the turn could make another one of it. Frames of a lane are numbered; a slot
remembers the last number that it consumed of each lane, which is all that it takes to know a duplicate (paper
6.1.1).

Weak productions (paper 6.1.3) leave at the end of the turn: `early`. So does what an injector has for a
computation that does without exactly-once. After a crash the turn is done again and makes them anew, in other
frames: their reader takes both. When they are checkpointed, and their cause is acknowledged: `weak.py`.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from millwheel.computation import BEFORE, NEVER, Computation
from millwheel.engine.calls import Calls
from millwheel.engine.columnar import Columnar
from millwheel.engine.due import HOLD, WALL, WATERMARK
from millwheel.engine.keyed import Keyed
from millwheel.engine.plan import Plan
from millwheel.engine.records import (
    SLOTS,
    Frame,
    Part,
    Records,
    Slots,
    by_frames,
    decode_frame,
    encode_frame,
    keyed,
    made_keys,
    split_frame,
    together,
    values_of,
)
from millwheel.engine.shares import slots_of
from millwheel.engine.stage import Stage, buried, dead_letter, shown_value
from millwheel.engine.store import (
    HEARD,
    LANE,
    Changes,
    Lane,
    Store,
    frame_row,
    frame_rows,
    heard_row,
    keeper,
    lane_of_row,
    lane_row,
    lines_row,
    pack_floors,
    sink_row,
    unpack_floors,
    weak_lane,
)
from millwheel.engine.watermarks import of_inputs
from millwheel.engine.weak import UnderWay
from millwheel.topology import DEAD_LETTERS, Node

_lane: Final = msgspec.msgpack.Decoder(Lane).decode
_encode: Final = msgspec.msgpack.encode
_json: Final = msgspec.json.encode
_Floors = npt.NDArray[np.int64]
TURN_S: Final = 0.25
"""A turn that takes longer is followed by a smaller one: a worker that is to stop, or others that wait for
it, wait no longer than that, unless a single call takes longer."""
HEARD_MAX: Final = 1 << 16
"""Records of other workers in a whole turn, about."""


class Lines(NamedTuple):
    """For a sink: whole lines, and the number under which they stand in the store until the file has them."""

    sink: str
    number: int
    lines: bytes


class Release(NamedTuple):
    """What a commit lets out. `frames`: by worker; `acks`: by lane the last number that is consumed."""

    frames: list[tuple[int, Frame]]
    acks: dict[int, int]
    lines: list[Lines]
    lows: dict[str, int]


class Early(NamedTuple):
    """What leaves before a commit. `frames`: by worker."""

    frames: list[tuple[int, Frame]]
    lines: list[Lines]


class _Sent(NamedTuple):
    lows: dict[str, int]
    bytes: int


class Pace:
    """How much a turn takes on. `share`: of a whole one."""

    _LEAST = 1 / HEARD_MAX
    _STEP = 4.0
    _PATIENCE = 64

    def __init__(self) -> None:
        self.share = 1 / 64
        self._first: tuple[float, float] | None = None
        """Share and seconds of the first of turns that took long, or of the last that being small helped."""
        self._patience, self._lasting = 0, 0.0
        """Turns that may take long; how long the smallest one did."""

    def took(self, seconds: float, more: bool) -> None:
        """A turn of this share. `more`: it has left something."""
        if seconds <= TURN_S:
            self._first = None
            if more:
                self.share = min(self.share * min(2.0, TURN_S / max(seconds, 1e-9)), 1.0)
        elif self._patience:
            self._patience -= 1
            if more and seconds < 2 * self._lasting:
                self.share = min(2 * self.share, 1.0)
        elif self._first is not None and self.share > self._first[0] / self._STEP:
            self._less(seconds)
        elif self._first is not None and seconds > self._first[1] / 2:
            # It is not for what it takes on that a turn takes so long.
            self.share, self._first = self._first[0], None
            self._patience, self._lasting = self._PATIENCE, seconds
        else:
            self._first = self.share, seconds
            self._less(seconds)

    def _less(self, seconds: float) -> None:
        self.share = max(self.share * max(TURN_S / seconds, 1 / self._STEP), self._LEAST)


class Wheel:
    """For one thread. `owners`: the worker of each slot; the store has claimed those of `me`, under the
    sequencer."""

    def __init__(
        self,
        plan: Plan,
        store: Store,
        me: int,
        owners: Sequence[int],
        sequencer: int,
        calls: Calls | None = None,
    ) -> None:
        self.plan = plan
        self._store = store
        self.me, self.workers = me, max(owners) + 1
        self._owners = np.array(owners)
        self._mine = np.flatnonzero(self._owners == me)
        self._slots = Slots()
        lanes = {lane_of_row(row): _lane(packed) for row, packed in store.scan(LANE)}
        self._lane = lanes.get(me, Lane())
        self.lanes = [lane for lane in sorted({me, *lanes}) if lane % self.workers == me]
        """Its own, and those of workers that are no more."""
        self.marks: dict[str, int] = {}
        self._bounds = dict.fromkeys(plan.topology.injectors, BEFORE)
        self._promised: dict[str, int] = {}
        """What a source promised but for productions under way."""
        self._injected = {
            name: {"records": 0, "dead_letters": 0, **self._lane.counts.get(name, {})}
            for name in self._bounds
        }
        self._gone = {name: of for name, of in self._lane.counts.items() if name not in plan.sources}
        """Counts of what is no longer in the topology."""
        self.buried: set[str] = set()
        """Of those, who had records under way that are dead letters now."""
        self._counts_of_others = [lanes[lane].counts for lane in self.lanes if lane != me]
        self.stages = {name: stage_of(plan, name, self._slots, store.read) for name in plan.order}
        for name, stage in self.stages.items():
            stage.calls = calls or stage.calls
            stage.load_timers(store.scan, slots_of(owners, me))
            stage.counts.update(self._lane.counts.get(name, {}))
        self._heard: dict[int, _Floors] = defaultdict(lambda: np.zeros(SLOTS, np.int64))
        """By lane, what each slot has consumed of it."""
        for row, packed in store.scan(HEARD):
            floors = self._heard[lane_of_row(row)]
            np.maximum(floors, unpack_floors(packed), out=floors)
        self.pace = Pace()
        self._inbox: deque[Frame] = deque()
        self._unacked: dict[int, dict[tuple[int, int], _Sent]] = {to: {} for to in range(self.workers)}
        for lane in (*self.lanes, *map(weak_lane, self.lanes)):
            for _, packed in store.scan(frame_rows(lane)):
                for worker, frame in split_frame(decode_frame(packed), self._slots, self._owners).items():
                    self._unacked[worker][lane, frame.number] = _Sent(frame.lows, len(packed))
        self._weak = UnderWay(sequencer)
        self._inbox += self.frames_for(me)
        self._waiting: dict[tuple[int, bool], list[Records]] = {}
        """By input. True: after a crash they come again as they are, so what is made of them may leave."""
        self._outgoing: dict[bool, dict[int, tuple[list[Part], dict[str, int]]]] = {False: {}, True: {}}
        """True: weak."""
        self._lines: dict[bool, dict[str, list[bytes]]] = {False: {}, True: {}}
        self._acks: dict[int, int] = {}
        self._consumed: set[int] = set()
        """Lanes of which ids are to be kept."""
        self._early = Early([], [])
        self._changes: Changes = {}
        self._release: Release | None = None
        self._now = 0
        for known in lanes.values():
            self.told(known.marks)

    # What comes in

    def told(self, marks: dict[str, int]) -> None:
        """The authority's word."""
        for name, mark in marks.items():
            self.marks[name] = max(mark, self.marks.get(name, BEFORE))
        for name, stage in self.stages.items():
            low = max(of_inputs(self.plan.makers[name], self.marks), self.marks.get(name, BEFORE))
            stage.low_watermark = max(stage.low_watermark, low)

    def receive(self, frame: Frame) -> None:
        self._inbox.append(frame)

    def acked(self, worker: int, lane: int, number: int) -> None:
        """The other worker has consumed, durably, all that it was sent of the lane up to the number."""
        sent = self._unacked[worker]
        for key in [key for key in sent if key[0] == lane and key[1] <= number]:
            del sent[key]
            if not any(key in others for others in self._unacked.values()) and self._weak.acked(key):
                self._changes[frame_row(*key)] = None

    def inject(
        self,
        injector: str,
        records: dict[int, Records],
        positions: Changes,
        letters: Sequence[dict[str, Any]] = (),
    ) -> None:
        """Records of an injector by input, the rows that say that they are read, and its dead letters."""
        self._changes.update(positions)
        counts = self._injected[injector]
        counts["records"] += max(map(len, records.values()), default=0)
        counts["dead_letters"] += len(letters)
        for number, of_input in records.items():
            self._route(injector, number, of_input, True)
        if letters:
            self._lines[False].setdefault(DEAD_LETTERS, []).extend(map(_json, letters))

    def bound(self, injector: str, low: int) -> None:
        """All that this worker will still inject is at or after this time."""
        self._bounds[injector] = max(low, self._bounds[injector])

    def stored(self, sink: str, lane: int, numbers: Sequence[int], place: bytes) -> None:
        """The sink's files have these lines durably, and this is where they end."""
        number = self.plan.sinks[sink]
        for of_lines in numbers:
            self._changes[lines_row(number, lane, of_lines)] = None
        self._changes[sink_row(number, lane)] = place

    # What it does

    def turn(self, now: int) -> bool:
        """Take what was injected through the stages, and its share of what came in and is due. Whether more
        is due at once."""
        self._now = now
        heard = 0
        while self._inbox and heard < self.pace.share * HEARD_MAX:
            heard += self._hear(self._inbox.popleft())
        more = bool(self._inbox)
        for name, stage in self.stages.items():
            stage.now = now
            for weak in (True, False):
                for read in self.plan.inputs_of[name]:
                    parts = self._waiting.pop((read, weak), None)
                    if parts:
                        stage.process(read, together(parts))
                if weak:
                    self._drain(name, stage, weak)
            stage.fire(self.pace.share)
            self._drain(name, stage, False)
            more |= self._is_due(stage)
        return more

    def early(self) -> Early:
        """What leaves at once; to be asked for after each turn, and when a commit has begun."""
        self._take_early()
        early, self._early = self._early, Early([], [])
        return early

    def work(self) -> npt.NDArray[np.int64]:
        """Records and timers of each slot since last asked, of all stages."""
        work = np.zeros(SLOTS, np.int64)
        for stage in self.stages.values():
            work += stage.work
            stage.work[:] = 0
        return work

    @property
    def due(self) -> bool:
        """There is something to take a turn for."""
        return bool(self._inbox or self._waiting or any(map(self._is_due, self.stages.values())))

    @property
    def next_wall_timer(self) -> int | None:
        times = [stage.due.earliest(WALL) for stage in self.stages.values()]
        return min((time for time in times if time is not None), default=None)

    @property
    def unacked_bytes(self) -> int:
        return sum(sent.bytes for worker in self._unacked.values() for sent in worker.values())

    def frames_for(self, worker: int) -> Iterator[Frame]:
        """All that this worker was sent and has not acknowledged, by lane and number."""
        for lane, number in sorted(self._unacked[worker]):
            packed = self._weak.packed((lane, number)) or self._store.read([frame_row(lane, number)])[0]
            if packed is not None:
                split = split_frame(decode_frame(packed), self._slots, self._owners)
                if worker in split:
                    yield split[worker]

    def unwritten(self, sink: int, lane: int) -> Iterator[tuple[int, bytes]]:
        """Lines that were in the store at the start, by number: the sink's files may not have them."""
        prefix = lines_row(sink, lane, 0)[:-8]
        for row, data in self._store.scan(prefix):
            yield int.from_bytes(row[-8:], "big"), data

    # What it keeps and lets out

    def begin_commit(self) -> Changes | None:
        """The rows for one commit, {} if none need be; None if nothing is to be let out either. One at a
        time.
        """
        assert self._release is None
        if self._waiting:
            self.turn(self._now)  # what is noted as read has its effects in the same commit
        self._take_early()
        frames = self._take_frames(False)
        lines = self._take_lines(False)
        for stage in self.stages.values():
            if stage.changes:
                self._changes.update(stage.changes)
                stage.changes = {}
        for lane in self._consumed:
            self._changes[heard_row(lane, self.me)] = pack_floors(self._heard[lane])
        self._consumed.clear()
        changes, self._changes = self._changes, {}
        acks, self._acks = self._weak.begin_commit(changes, self._acks, self._now), {}
        if changes:
            self._lane.marks = self.marks
            self._lane.counts = self._counts()
            changes[lane_row(self.me)] = _encode(self._lane)
        self._release = Release(frames, acks, lines, self._lows())
        return changes

    def committed(self) -> Release:
        """The commit is durable."""
        assert self._release is not None
        release, self._release = self._release, None
        self._weak.committed()
        for stage in self.stages.values():
            stage.forget_cached(stage.changes)
        for lane, number in list(release.acks.items()):
            if keeper(lane, self.workers) == self.me:  # it came from a former worker, whose lane is ours now
                self.acked(self.me, lane, number)
                del release.acks[lane]
        return release

    def status(self) -> dict[str, Any]:
        return {
            "counts": summed([self._counts(), *self._counts_of_others]),
            "timers": {name: len(stage.due) for name, stage in self.stages.items()},
            "unacked_bytes": self.unacked_bytes,
            "hot": self._hot(),
        }

    def _hot(self) -> dict[str, Any] | None:
        """The key that stands out most, and where."""
        found = [(first, name) for name, stage in self.stages.items() if (first := stage.heavy.first())]
        if not found:
            return None
        (key, share), name = max(found, key=lambda one: one[0][1])
        return {"computation": name, "key": key, "share": round(share, 3)}

    def why(self, name: str) -> dict[str, Any]:
        """What is the oldest work of an injector or computation here."""
        low = self._low(name)
        for worker, sent in self._unacked.items():
            if any(frame.lows.get(name) == low for frame in sent.values()):
                return {"low": low, "held_by": "production", "for_worker": worker}
        if name in self._bounds:
            return {"low": low, "held_by": "injector"}
        for clock, what in ((WATERMARK, "timer"), (HOLD, "hold")):
            first = self.stages[name].due.which(clock)
            if first is not None and first[0] == low:
                return {"low": low, "held_by": what, "key": first[1], "tag": first[2]}
        makers = self.plan.makers[name]
        return {
            "low": low,
            "held_by": "input",
            "input": min(makers, key=lambda maker: self.marks.get(maker, BEFORE)),
        }

    # Within

    def _counts(self) -> dict[str, dict[str, int]]:
        return {**self._gone, **self._injected, **{name: stage.counts for name, stage in self.stages.items()}}

    def _is_due(self, stage: Stage) -> bool:
        timer, wall = stage.due.earliest(WATERMARK), stage.due.earliest(WALL)
        return (timer is not None and timer <= stage.low_watermark) or (
            wall is not None and wall <= self._now
        )

    def _hear(self, frame: Frame) -> int:
        """Take what is new of a frame, and all that is for who does without exactly-once; all of it is
        acknowledged, with the commit of this turn. How many records that are."""
        heard = 0
        floors, consumed = self._heard[frame.lane], False
        for part in frame.parts:
            records, gone = part.records, part.input in self.plan.gone
            if gone or self._consumer(part.input).exactly_once:
                slots = self._slots.of(records.names)
                fresh = floors[slots] < frame.number
                consumed |= len(records) > 0
                records = records.of_names(fresh)
            if len(records) and gone:
                self._bury(part.input, records)
            elif len(records):
                self._wait(part.input, records, True)
            heard += len(records)
        if consumed:
            # A lane's frames come in their order, so what came for any slot before is consumed.
            floors[self._mine] = np.maximum(floors[self._mine], frame.number)
            self._consumed.add(frame.lane)
        self._acks[frame.lane] = max(frame.number, self._acks.get(frame.lane, 0))
        return heard

    def _bury(self, number: int, records: Records) -> None:
        """What comes for an input that is no longer there."""
        name = self.plan.gone[number][0]
        self._lines[False].setdefault(DEAD_LETTERS, []).extend(map(_json, buried(self.plan, number, records)))
        stage = self.stages.get(name)
        counts = self._gone.setdefault(name, {}) if stage is None else stage.counts
        counts["dead_letters"] = counts.get("dead_letters", 0) + len(records)
        self.buried.add(name)

    def _consumer(self, number: int) -> Node:
        """Of an input."""
        return self.plan.topology.computations[self.plan.inputs[number][0]]

    def _wait(self, number: int, records: Records, again: bool) -> None:
        weak = again and self._consumer(number).productions == "weak"
        self._waiting.setdefault((number, weak), []).append(records)

    def _drain(self, name: str, stage: Stage, weak: bool) -> None:
        for stream, records, lines in stage.outputs:
            for number, found, letters in for_readers(self.plan, stream, records):
                consumer = self.stages[self.plan.inputs[number][0]]
                consumer.counts["dead_letters"] += len(letters)
                consumer.dead += letters
                self._route(name, number, found, weak)
            if lines:
                self._lines[weak].setdefault(stream, []).extend(lines)
        stage.outputs.clear()
        if stage.dead:
            self._lines[False].setdefault(DEAD_LETTERS, []).extend(map(_json, stage.dead))
            stage.dead.clear()

    def _route(self, source: str, number: int, records: Records, again: bool) -> None:
        """To the stage here, and to other workers. `again`: after a crash they are made again as they are."""
        if not len(records):
            return
        consumer = self._consumer(number)
        # What is asked outside is asked for good: not of what may come out otherwise after a crash.
        held = not again and consumer.computation.asks_outside
        if self.workers == 1 and not held:
            self._wait(number, records, again)
            return
        weak = again and not consumer.exactly_once
        owner = self._owners[self._slots.of(records.names)]
        for worker in np.unique(owner).tolist():
            theirs = records.of_names(owner == worker)
            if worker == self.me and not held:
                self._wait(number, theirs, again)
            else:
                parts, lows = self._outgoing[weak].setdefault(worker, ([], {}))
                parts += [Part.of(number, piece) for piece in theirs.pieces()]
                # What is behind its source's own promise is late whatever waits for it. Held back by it, a
                # low watermark would stand for as long as there is always some straggler under way.
                low = max(int(theirs.times.min()), self._promised.get(source, BEFORE))
                lows[source] = min(lows.get(source, NEVER), low)

    def _take_frames(self, weak: bool) -> list[tuple[int, Frame]]:
        frames = []
        wanted = [
            (worker, lows, of_frame)
            for worker, (parts, lows) in self._outgoing[weak].items()
            for of_frame in by_frames(parts)
        ]
        for worker, lows, of_frame in wanted:
            if weak:
                frame = Frame(weak_lane(self.me), self._weak.next_number(), lows, of_frame)
            else:
                frame = Frame(self.me, self._lane.frame, lows, of_frame)
                self._lane.frame += 1
            key, packed = (frame.lane, frame.number), encode_frame(frame)
            if weak:
                self._weak.sent(key, packed)
            else:
                self._changes[frame_row(*key)] = packed
            self._unacked[worker][key] = _Sent(lows, len(packed))
            frames.append((worker, frame))
        self._outgoing[weak] = {}
        return frames

    def _take_lines(self, weak: bool) -> list[Lines]:
        taken = []
        for sink, lines in self._lines[weak].items():
            data = b"\n".join(lines) + b"\n"
            number = self._lane.line
            self._lane.line += 1
            self._changes[lines_row(self.plan.sinks[sink], self.me, number)] = data
            taken.append(Lines(sink, number, data))
        self._lines[weak] = {}
        return taken

    def _take_early(self) -> None:
        self._early.frames.extend(self._take_frames(True))
        self._early.lines.extend(self._take_lines(True))

    def _low(self, name: str) -> int:
        """What is promised for an injector or a computation: nothing older comes of it from this worker."""
        low = self._own_low(name)
        for sent in self._unacked.values():
            for frame in sent.values():
                low = min(low, frame.lows.get(name, NEVER))
        return low

    def _own_low(self, name: str) -> int:
        """As _low, but for productions under way."""
        if name in self._bounds:
            return self._bounds[name]
        stage = self.stages[name]
        work = stage.oldest_work()
        return stage.low_watermark if work is None else min(stage.low_watermark, work)

    def _lows(self) -> dict[str, int]:
        for name in self.plan.sources:
            self._promised[name] = max(self._own_low(name), self._promised.get(name, BEFORE))
        return {name: self._low(name) for name in self.plan.sources}


def stage_of(
    plan: Plan, name: str, slots: Slots, read: Callable[[Sequence[bytes]], list[bytes | None]]
) -> Stage:
    """Of a computation. `read`: rows of its state."""
    kind = Keyed if isinstance(plan.topology.computations[name].computation, Computation) else Columnar
    return kind(plan, name, slots, read)


def for_readers(
    plan: Plan, stream: str, records: Records
) -> Iterator[tuple[int, Records, list[dict[str, Any]]]]:
    """By each input that reads the stream: the records, with the keys that it wants, and dead letters of its
    computation for those that have none."""
    for number in plan.readers[stream]:
        name, read, _ = plan.inputs[number]
        if not callable(read.key):
            yield number, records, []
            continue
        opened, values = plan.openers[stream], values_of(records.values, len(records))
        keys, wrong = made_keys(read.key, opened, values)
        letters = []
        for row, reason in wrong.items():
            key, value = records.names[records.codes[row]], shown_value(opened, values[row])
            at = int(records.times[row])
            letters.append(dead_letter(name, key, at, reason, stream=stream, value=value))
        yield number, keyed(keys, wrong, records.times, records.values), letters


def summed(counts: Sequence[dict[str, dict[str, int]]]) -> dict[str, dict[str, int]]:
    """Counts of several workers, by name."""
    total: dict[str, dict[str, int]] = {}
    for of_worker in counts:
        for name, of_name in of_worker.items():
            so_far = total.setdefault(name, {})
            for what, count in of_name.items():
                so_far[what] = so_far.get(what, 0) + count
    return total
