"""Records in columns: how they move between stages, and to another worker.

A key has one of SLOTS slots by a hash; a slot of all computations is one key interval (paper 7.1: what is
assigned to a worker). Values travel as numbers, texts and None, as numpy columns, or encoded (`Ext`).
"""

import hashlib
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from millwheel.computation import Codes, Times, Values
from millwheel.engine.calls import FAULTS, ours, reason_of

SLOTS: Final = 1024
"""So many key intervals there are: as many workers at most, and what one of them has more to do than another
is evened out by steps of that size."""
Ext = msgspec.msgpack.Ext
MSGPACK: Final = 1
JSON: Final = 2
"""Codes of `Ext`: what its bytes are."""
_PLAIN: Final = frozenset({int, float, str, bool, type(None)})
_CACHED: Final = 1 << 20
FRAME_RECORDS: Final = 1_024
"""In a frame, about: who gets it takes it whole, however long its computation takes."""
_encode: Final = msgspec.msgpack.encode


@dataclass(eq=False, slots=True)
class Records:
    """N records of one stream for one consumer. `codes` (N,): rows of `names`, the distinct keys."""

    names: list[str]
    codes: Codes
    times: Times
    values: Values

    def __len__(self) -> int:
        return len(self.times)

    @property
    def keys(self) -> list[str]:
        return list(map(self.names.__getitem__, self.codes.tolist()))

    def rows(self, rows: npt.NDArray[np.intp]) -> "Records":
        """Some of them, in this order; the names stay."""
        return Records(self.names, self.codes[rows], self.times[rows], take(self.values, rows))

    def of_names(self, chosen: npt.NDArray[np.bool_]) -> "Records":
        """Those whose key is chosen; M names -> M flags."""
        if chosen.all():
            return self
        new = np.cumsum(chosen) - 1
        rows = np.flatnonzero(chosen[self.codes])
        names = [name for name, kept in zip(self.names, chosen.tolist(), strict=True) if kept]
        return Records(names, new[self.codes[rows]], self.times[rows], take(self.values, rows))

    def named(self) -> "Records":
        """With no names but those that occur."""
        used = np.zeros(len(self.names), np.bool_)
        used[self.codes] = True
        return self.of_names(used)

    def pieces(self) -> Iterator["Records"]:
        """Of FRAME_RECORDS at most."""
        if len(self) <= FRAME_RECORDS:
            yield self
            return
        for begin in range(0, len(self), FRAME_RECORDS):
            yield self.rows(np.arange(begin, min(begin + FRAME_RECORDS, len(self)))).named()


def take(values: Values, rows: npt.NDArray[np.intp]) -> Values:
    if values is None or isinstance(values, np.ndarray):
        return None if values is None else values[rows]
    return list(map(values.__getitem__, rows.tolist()))


def coded(keys: Sequence[str]) -> tuple[list[str], Codes]:
    """N keys -> the distinct ones by first occurrence, and the row of each (N,)."""
    index = {key: row for row, key in enumerate(dict.fromkeys(keys))}
    if len(index) == len(keys):
        return list(keys), np.arange(len(keys))
    return list(index), np.fromiter(map(index.__getitem__, keys), np.int64, len(keys))


def made_keys(
    key: Callable[[Any], Any], opened: Callable[[Any], Any], values: Sequence[Any]
) -> tuple[list[str], dict[int, str]]:
    """What a key function of the user's makes of N values: the keys, without the rows that have none; and by
    row why they have none."""
    try:
        found = [key(opened(value)) for value in values]
        if None not in found:
            keys = list(map(str, found))
            "".join(keys).encode()
            return keys, {}
    except FAULTS as error:  # which value it is, is found below
        if ours(error):
            raise
    keys, wrong = [], {}
    for row, value in enumerate(values):
        try:
            made = key(opened(value))
            if made is None:
                wrong[row] = "the key function returns None"
                continue
            text = str(made)
            text.encode()
            keys.append(text)
        except FAULTS as error:
            if ours(error):
                raise
            wrong[row] = f"the key function fails: {reason_of(error)}"
    return keys, wrong


def keyed(keys: Sequence[str], wrong: Container[int], times: Times, values: Values) -> Records:
    """Records of N values with what `made_keys` made of them."""
    if wrong:
        rows = np.array([row for row in range(len(times)) if row not in wrong], np.intp)
        times, values = times[rows], take(values, rows)
    return Records(*coded(keys), times, values)


def together(parts: Sequence[Records]) -> Records:
    """One after the other."""
    if len(parts) == 1:
        return parts[0]
    keys = [key for part in parts for key in part.keys]
    names, codes = coded(keys)
    times = np.concatenate([part.times for part in parts])
    columns = [part.values for part in parts]
    if all(column is None for column in columns):
        return Records(names, codes, times, None)
    arrays = [column for column in columns if isinstance(column, np.ndarray)]
    if len(arrays) == len(columns):
        return Records(names, codes, times, np.concatenate(arrays))
    values = [v for part in parts for v in values_of(part.values, len(part))]
    return Records(names, codes, times, values)


def values_of(values: Values, count: int) -> list[Any]:
    """A column as a list."""
    if values is None:
        return [None] * count
    return values.tolist() if isinstance(values, np.ndarray) else values


def wire(value: Any) -> Any:
    """A value as it travels: nobody who changes it later changes what was produced."""
    return value if type(value) in _PLAIN else Ext(MSGPACK, _encode(value))


def opener(decode: Callable[[bytes], Any], from_json: Callable[[bytes], Any]) -> Callable[[Any], Any]:
    """The reverse, for one type."""

    def opened(value: Any) -> Any:
        if type(value) is Ext:
            return (decode if value.code == MSGPACK else from_json)(bytes(value.data))
        return value

    return opened


def key_hash(key: str) -> int:
    """Of 64 bits; part of what is on disk, where a key has the slot that this says."""
    digest = hashlib.blake2b(key.encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return int.from_bytes(digest, "big")


def slot_of_key(key: str) -> int:
    return key_hash(key) % SLOTS


class Slots:
    """Slots of keys, or what else `of_key` gives each; those that come again are remembered."""

    def __init__(self, of_key: Callable[[str], int] = slot_of_key) -> None:
        self._of_key = of_key
        self._known: dict[str, int] = {}

    def of(self, names: Iterable[str]) -> npt.NDArray[np.int64]:
        """M names -> M slots."""
        names = list(names)
        found = list(map(self._known.get, names))
        if None in found:
            if len(self._known) > _CACHED:
                self._known.clear()
            for row, slot in enumerate(found):
                if slot is None:
                    found[row] = self._known[names[row]] = self._of_key(names[row])
        return np.array(found, np.int64)


class Part(msgspec.Struct, array_like=True):
    """What a frame has for one input of one computation."""

    input: int
    names: list[str]
    codes: bytes
    times: bytes
    dtype: str | None
    values: Any

    @classmethod
    def of(cls, number: int, records: Records) -> "Part":
        codes, times = records.codes.astype("<i8").tobytes(), records.times.astype("<i8").tobytes()
        values = records.values
        if isinstance(values, np.ndarray):
            return cls(number, records.names, codes, times, values.dtype.str, values.tobytes())
        return cls(number, records.names, codes, times, None, values)

    @property
    def records(self) -> Records:
        values = self.values if self.dtype is None else np.frombuffer(self.values, np.dtype(self.dtype))
        return Records(self.names, np.frombuffer(self.codes, "<i8"), np.frombuffer(self.times, "<i8"), values)

    def __len__(self) -> int:
        return len(self.times) // 8


class Frame(msgspec.Struct, array_like=True):
    """Records for one other worker. `number`: of its lane, rising. `lows`: a source's earliest time in it."""

    lane: int
    number: int
    lows: dict[str, int]
    parts: list[Part]


def by_frames(parts: Iterable[Part]) -> Iterator[list[Part]]:
    """As many together as a frame may have."""
    frame: list[Part] = []
    records = 0
    for part in parts:
        records += len(part)
        if frame and records > FRAME_RECORDS:
            yield frame
            frame, records = [], len(part)
        frame.append(part)
    if frame:
        yield frame


encode_frame: Final = msgspec.msgpack.Encoder().encode
decode_frame: Final = msgspec.msgpack.Decoder(Frame).decode


def split_frame(frame: Frame, slots: Slots, owner: npt.NDArray[np.int64]) -> dict[int, Frame]:
    """The frame by the workers that own its keys now."""
    split: dict[int, list[Part]] = {}
    for part in frame.parts:
        records = part.records
        owners = owner[slots.of(records.names)]
        for worker in np.unique(owners).tolist():
            mine = Part.of(part.input, records.of_names(owners == worker))
            split.setdefault(worker, []).append(mine)
    return {worker: Frame(frame.lane, frame.number, frame.lows, parts) for worker, parts in split.items()}
