"""A computation as a step of a query that Spark keeps running: the stage of a worker, its state in Spark's.

A batch brings a part of the keys all of their records since the one before, and tells how far each producer
is. So it is what a turn is to a worker (millwheel.engine.wheel): records under the low watermark as it was,
then the low watermark moves, then timers are called. What other computations read passes through, for Spark
chains steps that keep state. A batch that is done again begins with the state of the one before.
"""

import os
from collections.abc import Iterator, Mapping
from typing import Any, Final

import msgspec
from pyspark.sql import DataFrame, Row
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.stateful_processor import StatefulProcessor
from pyspark.sql.streaming.stateful_processor_util import TransformWithStateInPandasUdfUtils
from pyspark.sql.udf import UserDefinedFunction
from pyspark.util import PythonEvalType

from millwheel.computation import BEFORE, NEVER
from millwheel.engine.plan import Plan
from millwheel.engine.records import Slots, together
from millwheel.engine.store import TIMERS, unpack_timers
from millwheel.engine.wheel import stage_of
from spark.history.tasks import ROW, Rows, Told, Work, input_rows, unpack

MARK: Final = "mark"
"""A row whose `low` is a Mark's low watermark."""
_ROW: Final = from_arrow_schema(ROW)
_Made = dict[str, Any]
KEPT_BYTES_MAX: Final = 256 << 20
"""As packed, in a process; what is dropped is read from Spark's state again."""
_FIRES_MAX: Final = 256
"""Times in a batch that timers are called: for one that sets itself again there is no end of it."""
LOG_BYTES = 4 << 20
"""Of a state's log on top of what is new in it, before it is written anew."""
_ROWS: Final = 10_000
_pack: Final = msgspec.msgpack.Encoder().encode


class Mark(msgspec.Struct, array_like=True):
    """Who says how far it is, of which of its parts, and what time it was."""

    name: str
    part: int
    now: int


_changes: Final = msgspec.msgpack.Decoder(dict[bytes, bytes | None]).decode
_mark: Final = msgspec.msgpack.Decoder(Mark).decode


def marks(parts: int, mark: Mark, low: int) -> Iterator[_Made]:
    """For each part of who reads it."""
    blob = _pack(mark)
    return ({"what": MARK, "part": part, "low": low, "blob": blob} for part in range(parts))


class _Kept:
    """What a process has of a part of a computation. `version`: of Spark's state, of which it is a copy."""

    def __init__(self, plan: Plan, name: str) -> None:
        self.version = b""
        self.rows: dict[bytes, bytes] = {}
        self.stage = stage_of(plan, name, Slots(), lambda names: list(map(self.rows.get, names)))
        self.log_bytes, self.whole_bytes = 0, 0
        """Of Spark's state, now and when it was last written anew."""

    def take(self, changes: Mapping[bytes, bytes | None]) -> None:
        for name, packed in changes.items():
            if packed is None:
                self.rows.pop(name, None)
            else:
                self.rows[name] = packed


_kept: dict[tuple[str, int], _Kept] = {}
"""By computation and part, those of Spark's last tasks in this process at the end."""


class Step(StatefulProcessor):  # type: ignore[misc, unused-ignore]
    """Of one computation, by parts of the keys."""

    def __init__(self, work: Work, name: str) -> None:
        self._work, self._name, self._log_bytes = work, name, LOG_BYTES

    def init(self, handle: Any) -> None:
        self._log = handle.getListState("log", "packed binary")
        self._past = handle.getValueState("past", "low long, version binary")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        plan, (part,) = self._work.plan(), key
        kept = self._as_of_before(plan, part)
        stage = kept.stage
        inputs = {input_rows(number): number for number in plan.inputs_of[self._name]}
        mine: list[tuple[int, int, bytes]] = []
        told: dict[tuple[str, int], int] = {}
        through: list[Row] = []
        following = plan.order[plan.order.index(self._name) + 1 :]
        later = {maker for name in following for maker in plan.makers[name]}
        for row in rows:
            if row.what in inputs:
                mine.append((inputs[row.what], row.low, bytes(row.blob)))
                continue
            if row.what == MARK:
                mark = _mark(bytes(row.blob))
                stage.now = max(stage.now, mark.now)
                told[mark.name, mark.part] = max(row.low, told.get((mark.name, mark.part), BEFORE))
                if mark.name not in later:
                    continue
            through.append(row)
        yield from through
        made = Rows(self._work)
        before = dict(stage.counts)
        mine.sort()  # the same in each attempt
        for number in sorted({of for of, _, _ in mine}):
            stage.process(number, together([unpack(blob).records for of, _, blob in mine if of == number]))
            made.produced(stage)
        stage.low_watermark = max(stage.low_watermark, self._low(plan, told))
        for _ in range(_FIRES_MAX):
            if not stage.fire():
                break
            made.produced(stage)
        work = stage.oldest_work()
        low = stage.low_watermark if work is None else min(stage.low_watermark, work)
        counts = {what: count - before[what] for what, count in stage.counts.items()}
        made.tell(Told(self._name, counts, oldest=NEVER if work is None else work))
        self._keep(part, kept)
        for batch in made.batches(True):
            yield from (Row(**one) for one in batch.to_pylist())
        if self._name in later:
            mine_is = Mark(self._name, part, stage.now)
            yield from (Row(**one) for one in marks(self._work.parts, mine_is, low))

    def close(self) -> None:
        pass

    def _as_of_before(self, plan: Plan, part: int) -> _Kept:
        """What the batch before left: as this process has it, if it is that, or from Spark's state. Not kept
        while this batch changes it."""
        past, kept = self._past.get(), _kept.pop((self._name, part), None)
        if past is None or kept is None or bytes(past[1]) != kept.version:
            kept = _Kept(plan, self._name)
            for (packed,) in self._log.get() if past is not None else ():
                kept.log_bytes += len(packed)
                kept.take(_changes(bytes(packed)))
            kept.whole_bytes = sum(len(name) + len(packed) for name, packed in kept.rows.items())
            for name, packed in kept.rows.items():
                if name.startswith(TIMERS):
                    kept.stage.due.restore(*unpack_timers(packed))
            kept.stage.low_watermark = BEFORE if past is None else past[0]
        return kept

    def _low(self, plan: Plan, told: Mapping[tuple[str, int], int]) -> int:
        """Of all parts of all that it reads from."""
        wanted = [
            (maker, part)
            for maker in plan.makers[self._name]
            for part in range(1 if maker in plan.injectors else self._work.parts)
        ]
        return min(told[one] for one in wanted)

    def _keep(self, part: int, kept: _Kept) -> None:
        """One blob of changes a batch; all of it anew where most of them are no more."""
        stage, kept.version = kept.stage, os.urandom(8)
        changes, stage.changes = stage.changes, {}
        kept.take(changes)
        stage.forget_cached({})
        if changes:
            packed = _pack(changes)
            kept.log_bytes += len(packed)
            if kept.log_bytes > 2 * kept.whole_bytes + self._log_bytes:
                rows = list(kept.rows.items())
                blobs = [_pack(dict(rows[at : at + _ROWS])) for at in range(0, len(rows), _ROWS)]
                kept.log_bytes = kept.whole_bytes = sum(map(len, blobs))
                self._log.clear()
                for blob in blobs:
                    self._log.appendValue((blob,))
            else:
                self._log.appendValue((packed,))
        self._past.update((stage.low_watermark, kept.version))
        _kept[self._name, part] = kept
        while len(_kept) > 1 and sum(one.log_bytes for one in _kept.values()) > KEPT_BYTES_MAX:
            del _kept[next(iter(_kept))]  # the one that came longest ago


def stepped(rows: DataFrame, work: Work, name: str) -> DataFrame:
    """Rows of ROW -> what the computation makes of them, and what it lets through.

    As GroupedData.transformWithState, which asks for pandas though it never uses it (PySpark 4.3).
    """
    made: Any = TransformWithStateInPandasUdfUtils(Step(work, name), "None").transformWithStateUDF
    kind = PythonEvalType.SQL_TRANSFORM_WITH_STATE_PYTHON_ROW_UDF
    column: Any = UserDefinedFunction(made, returnType=_ROW, evalType=kind)(
        *[rows[of] for of in rows.columns]
    )
    session: Any = rows.sparkSession
    schema = session._jsparkSession.parseDataType(_ROW.json())
    grouped: Any = rows.groupBy("part")
    found = grouped._jgd.transformWithStateInPySpark(column._jc, schema, "append", "None", None, "")
    return DataFrame(found, session)
