"""What the two kinds of stages share: state of keys in a cache, timers, undo, dead letters, late records.

A stage is a computation in one worker, for all key intervals that the worker owns. Everything that a batch
does to it is undone whole if a call raises; what stands is in `changes`, rows for the worker's next commit.

What user code hands over is made to bytes while its call can still be undone (`_settle`, `_output`). What
can't be is a failure of that call alone, and not of the commit, which is everybody's.
"""

import contextlib
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np

from millwheel.computation import BEFORE, NEVER
from millwheel.engine.calls import Calls, ours
from millwheel.engine.due import HOLD, WALL, WATERMARK, Due, Firing, Pending
from millwheel.engine.plan import Plan, shown_type, state_type
from millwheel.engine.records import SLOTS, Ext, Records, Slots, opener, values_of
from millwheel.engine.shares import Heavy
from millwheel.engine.store import (
    STATE,
    TIMERS,
    Changes,
    key_row,
    node_rows,
    pack_timers,
    plain,
    rows_of_slots,
    unpack_timers,
)
from millwheel.topology import decoder_of

CACHED_KEYS: Final = 200_000
"""Of one stage; those of the current commit come on top."""
FIRED_MAX: Final = 8_192
"""Timers of a stage in a whole turn, about."""
_NOT_LOADED: Final = object()
_json: Final = msgspec.json.encode
_json_decode: Final = msgspec.json.decode
_encode: Final = msgspec.msgpack.Encoder().encode
_MAY_NOT_BE_FINITE: Final = re.compile(rb"\xcb[\x7f\xff][\xf0-\xff]", re.S).search
"""In msgpack: what all numbers that are not finite begin with, and some texts have in them."""


def _is_finite(value: Any) -> bool:
    """All numbers in it."""
    if isinstance(value, dict):
        return all(map(_is_finite, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


class Output(NamedTuple):
    """Records that a stage produced. `lines`: as the stream's sink has them, if it has one."""

    stream: str
    records: Records
    lines: list[bytes]


class Held:
    """State of one key. `packed`: as the last settled batch left it, None for none."""

    __slots__ = ("key", "packed", "row", "state", "touched")

    def __init__(self, key: str, row: bytes, packed: bytes | None) -> None:
        self.key, self.row, self.packed = key, row, packed
        self.state: Any = _NOT_LOADED
        self.touched = False


class Stage:
    """For one thread. `read`: rows from the store."""

    def __init__(
        self,
        plan: Plan,
        name: str,
        slots: Slots,
        read: Callable[[Sequence[bytes]], list[bytes | None]],
    ) -> None:
        self.number, self.name, self.node = plan.nodes[name], name, plan.topology.computations[name]
        self.due = Due()
        self.calls = Calls()
        """In a worker those of all its stages."""
        self.changes: Changes = {}
        self.outputs: list[Output] = []
        self.dead: list[dict[str, Any]] = []
        self.counts = dict.fromkeys(("records", "timers", "late", "dropped", "dead_letters", "produced"), 0)
        self.work = np.zeros(SLOTS, np.int64)
        """Records and timers of each slot that came since the worker last asked."""
        self.heavy = Heavy()
        self.low_watermark = BEFORE
        self.now = 0
        self.streams = {stream.name for stream in self.node.streams}
        self._slots = slots
        self._read = read
        self._cache: dict[str, Held] = {}
        self._touched: list[Held] = []
        self._timers_before: dict[str, Pending] = {}
        self._kind = state_type(self.node)
        self._decode = decoder_of(self._kind)
        self._openers = {
            number: (read.stream, _opener(kind))
            for number, (of, read, kind) in plan.inputs.items()
            if of == name
        }
        self._sinks = {
            stream.name: (_opener(stream.type), sink.with_time)
            for stream in self.node.streams
            if (sink := plan.sink(stream.name)) is not None
        }

    def load_timers(
        self, scan: Callable[[bytes, Sequence[bytes]], Iterable[tuple[bytes, bytes]]], slots: Iterable[int]
    ) -> None:
        """What was pending when the slots were claimed."""
        for _, packed in scan(node_rows(TIMERS, self.number), rows_of_slots(slots)):
            self.due.restore(*unpack_timers(packed))

    def process(self, number: int, records: Records) -> None:
        """Records for the input of this number."""
        self.counts["records"] += len(records)
        of_names = np.bincount(records.codes, minlength=len(records.names))
        self.work += np.bincount(self._slots.of(records.names), of_names, SLOTS).astype(np.int64)
        self.heavy.add(records.names, of_names)
        late = records.times < self.low_watermark
        if late.any():
            self.counts["late"] += int(late.sum())
            if self.node.late != "process":
                self._refuse(number, records.rows(np.flatnonzero(late)))
                records, late = records.rows(np.flatnonzero(~late)), late[~late]
        if len(records):
            self._call(number, records, late)

    def fire(self, share: float = 1.0) -> int:
        """Call the timers that are due; how many, up to about this share of FIRED_MAX of each clock."""
        fired = 0
        for clock, upto in ((WATERMARK, self.low_watermark), (WALL, self.now)):
            firing = self.due.take(clock, upto, max(1, int(share * FIRED_MAX)))
            if firing:
                fired += len(firing)
                self.counts["timers"] += len(firing)
                self.work += np.bincount(self._slots.of([one.key for one in firing]), minlength=SLOTS)
                self._fire(clock, firing)
        return fired

    def oldest_work(self) -> int | None:
        """The earliest pending timer or hold: below it this stage may still produce (paper 4.5)."""
        times = [t for t in (self.due.earliest(WATERMARK), self.due.earliest(HOLD)) if t is not None]
        return min(times, default=None)

    def forget_cached(self, kept: Changes) -> None:
        """Bound the cache: half is left, of the keys whose timers are next, for these are needed (paper 8.3).

        Rows whose change is in `kept` stay.
        """
        if len(self._cache) <= CACHED_KEYS:
            return
        farthest = sorted(self._cache, key=self.due.next_of, reverse=True)
        for key in farthest[: len(farthest) - CACHED_KEYS // 2]:
            if self._cache[key].row not in kept:
                del self._cache[key]

    def _call(self, number: int, records: Records, late: Any) -> None:
        raise NotImplementedError

    def _fire(self, clock: int, firing: list[Firing]) -> None:
        raise NotImplementedError

    def _hold(self, names: Sequence[str]) -> dict[str, Held]:
        """The cache, with these keys in it."""
        cache = self._cache
        missing = [name for name in names if name not in cache]
        if missing:
            slots = self._slots.of(missing).tolist()
            rows = [key_row(STATE, self.number, s, n) for s, n in zip(slots, missing, strict=True)]
            for name, row, packed in zip(missing, rows, self._read(rows), strict=True):
                cache[name] = Held(name, row, packed)
        return cache

    def _load(self, held: Held, new: Callable[[], Any]) -> Any:
        """Its state, to be changed."""
        if not held.touched:
            held.touched = True
            self._touched.append(held)
        if held.state is _NOT_LOADED:
            held.state = new() if held.packed is None else self._unpacked(held.packed)
        return held.state

    def _unpacked(self, packed: bytes) -> Any:
        try:
            return self._decode(packed)
        except msgspec.ValidationError as error:
            raise TypeError(f"state is no {shown_type(self._kind)}: {error}") from error

    def _timers_of(self, key: str) -> None:
        """Note the key's timers before they change."""
        if key not in self._timers_before:
            self._timers_before[key] = self.due.of(key)

    def _settle(self) -> None:
        """What was done stands. If that can't be made to bytes, it raises, and `_undo` undoes all of it."""
        states = self._packed_states()
        timers = self._packed_timers() if self._timers_before else {}
        changes = self.changes
        for held, packed in zip(self._touched, states, strict=True):
            held.touched = False
            if packed is None:
                held.state = _NOT_LOADED
            if packed != held.packed:
                held.packed = changes[held.row] = packed
        self._touched.clear()
        changes.update(timers)
        self._timers_before.clear()

    def _packed_states(self) -> list[bytes | None]:
        """Of the keys that were touched."""
        return [None if held.state is None else _encode(held.state) for held in self._touched]

    def _packed_timers(self) -> Changes:
        rows: Changes = {}
        keys = list(self._timers_before)
        for key, slot in zip(keys, self._slots.of(keys).tolist(), strict=True):
            timers = self.due.of(key)
            rows[key_row(TIMERS, self.number, slot, key)] = pack_timers(key, timers) if timers else None
        return rows

    def _output(self, stream: str, records: Records) -> Output:
        """As it is handed on. Raises if other workers, or the sink, could not have it."""
        "".join(records.names).encode()
        records.names = list(map(str.__str__, records.names))  # no numpy.str_, no enum: msgpack has texts
        packed = _encode(records.values) if isinstance(records.values, list) else b""
        lines: list[bytes] = []
        if stream in self._sinks:
            opened, with_time = self._sinks[stream]
            shown = [plain(opened(value)) for value in values_of(records.values, len(records))]
            if (not packed or _MAY_NOT_BE_FINITE(packed)) and not all(map(_is_finite, shown)):
                raise ValueError("nan and inf are no JSON, as a sink has it")
            if with_time:
                times = records.times.tolist()
                shown = [{"time": time, "value": value} for time, value in zip(times, shown, strict=True)]
            lines = list(map(_json, shown))
        return Output(stream, records, lines)

    def _stand(self, outputs: list[Output]) -> None:
        """`_settle`, and hand on what was produced."""
        self._settle()
        self.outputs += outputs
        self.counts["produced"] += sum(len(output.records) for output in outputs)

    def _failed(self, error: BaseException) -> None:
        """Of a call or several: nothing of them stands. Raises what is no fault of the user's code."""
        if ours(error, self.node.computation.asks_outside):
            if not isinstance(error, KeyboardInterrupt):  # which a worker ends by
                self.calls.end()
            raise error
        self._undo()

    def _undo(self) -> None:
        """Nothing of what was done since `_settle` stands."""
        for held in self._touched:
            held.touched, held.state = False, _NOT_LOADED
        self._touched.clear()
        for key, timers in self._timers_before.items():
            self.due.restore(key, timers)
        self._timers_before.clear()

    def _refuse(self, number: int, records: Records) -> None:
        """Late records that are not wanted."""
        if self.node.late == "drop":
            self.counts["dropped"] += len(records)
            return
        stream, opened = self._openers[number]
        values = values_of(records.values, len(records))
        for key, time, value in zip(records.keys, records.times.tolist(), values, strict=True):
            how = f"late by {(self.low_watermark - time) / 1e6:g} s"
            if self.low_watermark >= NEVER:
                how = "late: all logs had ended"
            self._bury(key, time, how, stream=stream, value=shown_value(opened, value))

    def _bury(self, key: str, time: int, reason: str, **what: Any) -> None:
        self.counts["dead_letters"] += 1
        self.dead.append(dead_letter(self.name, key, time, reason, **what))


def dead_letter(computation: str, key: str, time: int, reason: str, **what: Any) -> dict[str, Any]:
    return {"computation": computation, "key": key, "time": time, "reason": reason, **what}


def _opener(kind: Any) -> Callable[[Any], Any]:
    from_json = _json_decode if kind is Any else msgspec.json.Decoder(kind).decode
    return opener(decoder_of(kind), from_json)


_untyped: Final = _opener(Any)


def shown_value(opened: Callable[[Any], Any], value: Any) -> Any:
    """A value for a dead letter: if it is not of its type, as it came; if it can't be decoded, its text."""
    for decoded in (opened, _untyped):
        with contextlib.suppress(Exception):
            return plain(decoded(value))
    return bytes(value.data).decode("utf-8", "replace") if isinstance(value, Ext) else repr(value)


def buried(plan: Plan, number: int, records: Records) -> Iterator[dict[str, Any]]:
    """Dead letters of records for an input that is no longer there."""
    name, stream = plan.gone[number]
    opened = plan.openers.get(stream, _untyped)
    reason = f"it was under way when '{name}' no longer read '{stream}', or was no longer there"
    values = values_of(records.values, len(records))
    for key, at, value in zip(records.keys, records.times.tolist(), values, strict=True):
        yield dead_letter(name, key, at, reason, stream=stream, value=shown_value(opened, value))
