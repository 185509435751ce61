"""How an event that waits for its retry is written down. Pure.

Key: due us (8) | sequence (8), big endian, so that entries stand in the order they fall due.
Value: a fixed head, the file name, the line.
"""

import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from dispatcher.rules.events import Events
from photon.core.ids import ID_BYTES

KEY_BYTES: Final = 16

_KEY: Final = np.dtype([("due_us", ">u8"), ("sequence", ">u8")])
_HEAD: Final = np.dtype(
    [
        ("id", f"V{ID_BYTES}"),
        ("primary_id", f"V{ID_BYTES}"),
        ("time", "<i8"),
        ("first_seen", "<i8"),
        ("offset", "<i8"),
        ("tries", "<u4"),
        ("sends", "<u4"),
        ("name_bytes", "<u4"),
    ]
)
HEAD_BYTES: Final = _HEAD.itemsize


def pack_keys(due_us: npt.NDArray[np.int64], sequence: int) -> list[bytes]:
    """Keys of N entries; they take the numbers from `sequence` on."""
    keys = np.empty(len(due_us), _KEY)
    keys["due_us"] = np.maximum(due_us, 0)
    keys["sequence"] = np.arange(sequence, sequence + len(due_us), dtype=np.uint64)
    return _split(keys, KEY_BYTES)


def due_us_of(key: bytes) -> int:
    return int.from_bytes(key[:8], "big")


def due_us_column(keys: Sequence[bytes]) -> npt.NDArray[np.int64]:
    """due_us_of of N keys."""
    return np.frombuffer(b"".join(keys), _KEY)["due_us"].astype(np.int64)


def unpack_id(value: bytes) -> bytes:
    """The event's id alone."""
    return value[:ID_BYTES]


def pack_values(events: Events) -> list[bytes]:
    """Values of N entries."""
    count = len(events)
    names = [name.encode() for name in events.names]
    row_names = names * count if len(names) == 1 else [events.name(row).encode() for row in range(count)]
    head = np.empty(count, _HEAD)
    head["id"] = np.frombuffer(events.ids, f"V{ID_BYTES}")
    head["primary_id"] = np.frombuffer(events.primary_ids, f"V{ID_BYTES}")
    head["time"] = np.frombuffer(events.times, "<i8")
    head["first_seen"] = events.first_seen
    head["offset"] = events.offsets
    head["tries"] = events.tries
    head["sends"] = events.sends
    head["name_bytes"] = np.fromiter(map(len, row_names), np.uint32, count)
    return list(map(b"".join, zip(_split(head, HEAD_BYTES), row_names, events.lines, strict=True)))


def unpack_values(values: Sequence[bytes]) -> Events:
    """The reverse of pack_values. ValueError if one is too short to be an entry."""
    if min(map(len, values), default=HEAD_BYTES) < HEAD_BYTES:
        raise ValueError("a retry entry is cut short")
    head = np.frombuffer(b"".join([value[:HEAD_BYTES] for value in values]), _HEAD)
    ends = (HEAD_BYTES + head["name_bytes"].astype(np.int64)).tolist()
    return Events(
        ids=head["id"].tobytes(),
        primary_ids=head["primary_id"].tobytes(),
        times=head["time"].tobytes(),
        lines=[value[end:] for value, end in zip(values, ends, strict=True)],
        tries=head["tries"].copy(),
        sends=head["sends"].copy(),
        first_seen=head["first_seen"].copy(),
        offsets=head["offset"].copy(),
        names=[value[HEAD_BYTES:end].decode() for value, end in zip(values, ends, strict=True)],
        name_from=range(len(values)),
    )


def _split(rows: npt.NDArray[np.void], width: int) -> list[bytes]:
    return list(struct.unpack(f"{width}s" * len(rows), rows.tobytes()))
