"""Packed columns: the shape in which batches travel and are worked on (no Python statement per event).

Fields are read into columns by their paths: `id`, or `ctx.query.id` for a field of an object within the
event. Two dots stand for a dot in a name: `attributes.http..url` is the field `http.url` of `attributes`.
"""

import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from operator import attrgetter
from typing import Any, Final

import msgspec
import numpy as np
import numpy.typing as npt

from photon.core.errors import SettingsError
from photon.core.ids import ID_BYTES

_NEWLINE = np.uint8(10)
_MIX = np.uint64(0x9E3779B97F4A7C15)


# Few: a Struct holds 32 bytes an id, and sizes vary without end; building one again costs 0.02 us an id.
@lru_cache(maxsize=64)
def _ids_struct(count: int) -> struct.Struct:
    return struct.Struct(f"{ID_BYTES}s" * count)


def split_ids(ids: bytes) -> tuple[bytes, ...]:
    """16 x N bytes -> N keys of 16 bytes."""
    return _ids_struct(len(ids) // ID_BYTES).unpack(ids)


def pack_times(times_us: Sequence[int] | npt.NDArray[np.int64]) -> bytes:
    """N times -> 8 x N bytes, little endian signed. OverflowError if one does not fit."""
    return np.asarray(times_us, dtype="<i8").tobytes()


def unpack_times(times: bytes) -> npt.NDArray[np.int64]:
    """8 x N bytes -> N times (a read-only view)."""
    return np.frombuffer(times, "<i8")


def take_ids(ids: bytes, rows: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> bytes:
    """The chosen rows of a 16-byte column."""
    return np.frombuffer(ids, f"V{ID_BYTES}")[rows].tobytes()


def take_times(times: bytes, rows: npt.NDArray[np.intp] | npt.NDArray[np.bool_]) -> bytes:
    """The chosen rows of an 8-byte column."""
    return np.frombuffer(times, "<i8")[rows].tobytes()


def join_lines(lines: Sequence[bytes]) -> bytes:
    """N lines without newlines in them -> one newline after each; b"" for none."""
    return b"\n".join(lines) + b"\n" if lines else b""


def count_lines(column: bytes) -> int:
    """Newlines in it; five times as fast as `bytes.count`, which goes byte by byte."""
    return int(np.count_nonzero(np.frombuffer(column, np.uint8) == _NEWLINE))


def split_lines(column: bytes) -> list[bytes]:
    """The reverse of join_lines."""
    lines = column.split(b"\n")
    lines.pop()
    return lines


def hash_ids(ids: bytes) -> npt.NDArray[np.uint64]:
    """A deterministic 64-bit hash of each id. Part of the format: shards are computed from it for ever."""
    halves = np.frombuffer(ids, "<u8")
    mixed: npt.NDArray[np.uint64] = (halves[0::2] * _MIX) ^ halves[1::2]
    mixed ^= mixed >> np.uint64(32)
    mixed *= _MIX
    mixed ^= mixed >> np.uint64(29)
    return mixed


Column = Callable[[Sequence[Any]], list[Any]]
"""N events -> their N values of one field."""

# Half of what attrgetter takes, for what most logs have: fields of the event itself.
_OF_THE_EVENT: Final[tuple[Column, ...]] = (
    lambda events: [event.f0 for event in events],
    lambda events: [event.f1 for event in events],
    lambda events: [event.f2 for event in events],
)


@dataclass(frozen=True, slots=True)
class Field:
    """One field to be read. `optional`: it, or an object on the way to it, may be missing or null."""

    path: tuple[str, ...]
    type: Any
    optional: bool = False


def decoder_of(label: str, fields: Mapping[str, Field]) -> tuple[Any, dict[str, Column]]:
    """A decoder of events in which only these fields are looked at, and how to take each from the events.

    SettingsError if one field lies in another, which must then be an id and an object at a time.
    """
    tree: dict[str, Any] = {}
    for field in fields.values():
        _plant(tree, field)
    decoder = msgspec.json.Decoder(_struct(label, tree))
    return decoder, {name: _column(tree, field) for name, field in fields.items()}


def _plant(tree: dict[str, Any], field: Field) -> None:
    *way, last = field.path
    for name in way:
        tree = tree.setdefault(name, {})
        if isinstance(tree, Field):
            break
    if isinstance(tree, Field) or last in tree:
        raise SettingsError(
            f"field path '{'.'.join(field.path)}': one field can't lie within another, or be it"
        )
    tree[last] = field


def _struct(label: str, tree: Mapping[str, Any]) -> Any:
    """A struct that takes the tree's names and calls them f0, f1, ..., which are names in Python too."""
    fields: list[tuple[str, Any] | tuple[str, Any, Any]] = []
    for number, (name, child) in enumerate(tree.items()):
        inner = child.type if isinstance(child, Field) else _struct(f"{label}.{name}", child)
        if _optional(child):
            fields.append((f"f{number}", inner | None, None))
        else:
            fields.append((f"f{number}", inner))
    rename = {f"f{number}": name for number, name in enumerate(tree)}
    return msgspec.defstruct(label, fields, rename=rename, kw_only=True, gc=False)


def _optional(child: Any) -> bool:
    return child.optional if isinstance(child, Field) else all(map(_optional, child.values()))


def _column(tree: Mapping[str, Any], field: Field) -> Column:
    if len(field.path) == 1 and len(tree) <= len(_OF_THE_EVENT):
        return _OF_THE_EVENT[list(tree).index(field.path[0])]
    names = []
    for name in field.path:
        names.append(f"f{list(tree).index(name)}")
        tree = tree[name]
    get = attrgetter(".".join(names))
    if not field.optional or len(names) == 1:
        return lambda events: list(map(get, events))
    return lambda events: [_follow(event, names) for event in events]


def _follow(event: Any, names: Sequence[str]) -> Any:
    for name in names:
        if event is None:
            return None
        event = getattr(event, name)
    return event
