"""What the executors do: lines to records, records through a computation (millwheel.engine.replay).

Rows go from task to task in blobs: `what` is an input of a computation, a sink, state, or what the driver is
to be told; `part` of the keys, `low` the oldest time in it.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import msgspec
import numpy as np
import pyarrow as pa

from millwheel.computation import BEFORE, NEVER
from millwheel.engine.lines import LineParser
from millwheel.engine.plan import Plan
from millwheel.engine.records import Part, Records
from millwheel.engine.replay import Replay, Spread
from millwheel.engine.stage import Stage
from millwheel.engine.wheel import for_readers
from millwheel.topology import DEAD_LETTERS, load_topology
from photon.core.settings import Logs
from photon.logs.files import Chunk
from spark.options import Span
from spark.reading.lines import Parse

ROW: Final = pa.schema(
    [("what", pa.string()), ("part", pa.int32()), ("low", pa.int64()), ("blob", pa.binary())]
)
TOLD: Final = "told"
STATE: Final = "state"
READING: Final = Logs(chunk_bytes=4 << 20, line_bytes_max=4 << 20)
_BATCH_BYTES: Final = 8 << 20
_STATE_ROWS: Final = 10_000
_json: Final = msgspec.json.encode
_pack: Final = msgspec.msgpack.Encoder().encode
unpack: Final = msgspec.msgpack.Decoder(Part).decode


@dataclass(frozen=True, slots=True)
class Work:
    """What every task has to know. `directory`: where the topology's modules are, and what its paths are
    relative to. `read`: of lines of the logs; `kept`: of what sinks get."""

    topology: str
    directory: str
    numbers: Mapping[str, int]
    parts: int
    goes_on: bool
    read: Span
    kept: Span

    def plan(self) -> Plan:
        return _plan(self.topology, self.directory, tuple(self.numbers.items()))


@cache
def _plan(topology: str, directory: str, numbers: tuple[tuple[str, int], ...]) -> Plan:
    if directory not in sys.path:
        sys.path.insert(0, directory)  # on a cluster the module was sent, or is installed
    return Plan(load_topology(topology), dict(numbers))


class Told(msgspec.Struct):
    """By a task: what it counted of an injector or a computation, the newest time in a log, how far that was
    read, and the oldest work that is left."""

    name: str
    counts: dict[str, int]
    log: str = ""
    newest: int = BEFORE
    end: int = 0
    oldest: int = NEVER


told: Final = msgspec.json.Decoder(Told).decode


def input_rows(number: int) -> str:
    return f"input-{number}"


def sink_rows(sink: str) -> str:
    return f"sink-{sink}"


def parsing(work: Work, injector: str, upto: int) -> Parse:
    """What parses chunks of an injector's logs to rows. `upto`: what is later says nothing of how far a log
    is."""
    plan = work.plan()
    inputs = {number: plan.inputs[number][1] for number in plan.readers[injector]}
    parser, rows = LineParser(plan.topology.injectors[injector], inputs), Rows(work)

    def parse(log: str, _path: str, chunk: Chunk) -> Iterator[Any]:
        count, parsed = 0, parser.parse_chunk(chunk)
        newest = int(parsed.times[parsed.times <= upto].max(initial=BEFORE))
        for number, records in parsed.records.items():
            found = _within(records, work.read)
            count = max(count, len(found))
            rows.records(number, found)
        letters = parsed.letters(injector, log)
        rows.letters(letters)
        counts = {"records": count, "dead_letters": len(letters)}
        rows.tell(Told(injector, counts, log, newest, chunk.end))
        yield from rows.batches(True)

    return parse


def compute(work: Work, name: str, low: int, batches: Iterable[Any]) -> Iterator[Any]:
    """Rows of a computation's inputs, all of a part together and by their oldest times, -> rows of what it
    produces. `low`: where its low watermark ends."""
    plan, rows = work.plan(), Rows(work)
    at, replay = -1, None
    for batch in batches:
        for part, blob in zip(batch.column("part").to_pylist(), batch.column("blob"), strict=True):
            if part != at:
                if replay is not None:
                    yield from rows.ended(replay)
                at, replay = part, Replay(plan, name, low)
            assert replay is not None
            piece = unpack(blob.as_buffer())
            replay.take(piece.input, piece.records)
            rows.produced(replay.stage)
            yield from rows.batches()
    if replay is not None:
        yield from rows.ended(replay)
    yield from rows.batches(True)


class Rows:
    """Gathers what a task makes."""

    def __init__(self, work: Work) -> None:
        self._work, self._plan = work, work.plan()
        self._spread = Spread(work.parts)
        self._lines: dict[str, tuple[int, list[bytes]]] = {}
        self._rows: list[tuple[str, int, int, bytes]] = []
        self._bytes = 0

    def records(self, number: int, records: Records) -> None:
        self._spread.add(number, records)

    def produced(self, stage: Stage) -> None:
        """What a stage has made since."""
        for stream, records, lines in stage.outputs:
            for number, found, letters in for_readers(self._plan, stream, records):
                self.records(number, found)
                if letters:
                    self.letters(letters)
                    self.tell(Told(self._plan.inputs[number][0], {"dead_letters": len(letters)}))
            if lines:
                self._sink(stream, records.times, lines)
        stage.outputs.clear()
        self.letters(stage.dead)
        stage.dead.clear()

    def letters(self, letters: Sequence[Mapping[str, Any]]) -> None:
        self._gather(DEAD_LETTERS, BEFORE, list(map(_json, letters)))

    def tell(self, one: Told) -> None:
        self._add(TOLD, 0, 0, _json(one))

    def ended(self, replay: Replay) -> Iterator[Any]:
        """A part has been taken whole."""
        replay.end()
        stage = replay.stage
        self.produced(stage)
        work = stage.oldest_work()
        self.tell(Told(stage.name, stage.counts, oldest=NEVER if work is None else work))
        left = list(replay.rows.items()) if self._work.goes_on else []
        for begin in range(0, len(left), _STATE_ROWS):
            self._add(STATE, 0, 0, _pack(dict(left[begin : begin + _STATE_ROWS])))
            yield from self.batches()

    def batches(self, end: bool = False) -> Iterator[Any]:
        """Record batches of ROW, once there is enough for one, or at the end."""
        if self._spread.full or end:
            for number, part, records in self._spread.take():
                low = int(records.times.min())
                self._add(input_rows(number), part, low, _pack(Part.of(number, records)))
        if self._bytes > _BATCH_BYTES or end:
            for sink, (low, lines) in self._lines.items():
                self._rows.append((sink_rows(sink), 0, low, b"\n".join(lines)))
            self._lines.clear()
            rows, self._rows, self._bytes = self._rows, [], 0
            if rows:
                yield pa.RecordBatch.from_arrays(
                    [
                        pa.array(column, field.type)
                        for column, field in zip(zip(*rows, strict=True), ROW, strict=True)
                    ],
                    schema=ROW,
                )

    def _sink(self, sink: str, times: Any, lines: Sequence[bytes]) -> None:
        kept = np.flatnonzero((times >= self._work.kept.start) & (times < self._work.kept.end))
        if len(kept):
            self._gather(sink, int(times[kept].min()), [lines[row] for row in kept.tolist()])

    def _gather(self, sink: str, low: int, lines: Sequence[bytes]) -> None:
        if lines:
            least, gathered = self._lines.get(sink, (low, []))
            gathered.extend(lines)
            self._lines[sink] = min(low, least), gathered
            self._bytes += sum(map(len, lines))

    def _add(self, what: str, part: int, low: int, blob: bytes) -> None:
        self._rows.append((what, part, low, blob))
        self._bytes += len(blob)


def _within(records: Records, span: Span) -> Records:
    inside = (records.times >= span.start) & (records.times < span.end)
    return records if inside.all() else records.rows(np.flatnonzero(inside)).named()
