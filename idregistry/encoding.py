"""An id as the state keeps it: its hash first, so that ids in order are ids spread evenly. Pure.

    id (16) = a (8) | b (8)      <->      h (8, big endian) | b (8)      h = columns.hash_ids(id)

Given b, the hash can be turned back, so nothing is lost. The first byte of h says in which of 256 sub-dicts
an id is, the other 15 bytes are its key there: a bytes object of 15 takes 48 bytes of memory, one of 16 takes
64.
"""

import struct
from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

from photon.core.columns import hash_ids
from photon.core.ids import ID_BYTES

SUBS: Final = 256
KEY_BYTES: Final = ID_BYTES - 1

FEW: Final = 12
"""Up to so many ids plain Python is faster than numpy's overhead for each call."""

Hashes = npt.NDArray[np.uint64]

_MIX: Final = 0x9E3779B97F4A7C15
_UNMIX: Final = pow(_MIX, -1, 1 << 64)
_MASK: Final = (1 << 64) - 1
_HALVES: Final = struct.Struct("<QQ")


# Few: a Struct holds 32 bytes an id, and sizes vary without end; building one again costs 0.02 us an id.
@lru_cache(maxsize=64)
def _keys_struct(count: int) -> struct.Struct:
    return struct.Struct(f"x{KEY_BYTES}s" * count)


class Encoded:
    """A batch of ids: `subs` (1 x N bytes, the number of each one's sub-dict) and `keys` (N of 15 bytes)."""

    __slots__ = ("_hashes", "_ids", "count", "keys", "subs")

    def __init__(self, ids: bytes) -> None:
        self._ids = ids
        self._hashes: Hashes | None = None
        self.count = len(ids) // ID_BYTES
        raw = self._encode_few() if self.count <= FEW else self._encode()
        self.subs = raw[::ID_BYTES]
        self.keys: tuple[bytes, ...] = _keys_struct(self.count).unpack(raw)

    @property
    def hashes(self) -> Hashes:
        """N hashes."""
        if self._hashes is None:
            self._hashes = hash_ids(self._ids)
        return self._hashes

    @property
    def tails(self) -> Hashes:
        """N second halves: what tells ids of one hash apart."""
        return np.frombuffer(self._ids, "<u8")[1::2]

    def _encode(self) -> bytes:
        column = np.empty((self.count, 2), np.uint64)
        column[:, 0] = self.hashes.byteswap()
        column[:, 1] = self.tails
        return column.tobytes()

    def _encode_few(self) -> bytes:
        rows = []
        for first, second in _HALVES.iter_unpack(self._ids):
            mixed = (first * _MIX & _MASK) ^ second
            mixed = (mixed ^ mixed >> 32) * _MIX & _MASK
            rows.append((mixed ^ mixed >> 29).to_bytes(8, "big") + second.to_bytes(8, "little"))
        return b"".join(rows)


def split_keys(sub: int, keys: list[bytes]) -> tuple[Hashes, Hashes]:
    """Keys of one sub-dict -> their hashes and second halves."""
    rows = np.empty((len(keys), ID_BYTES), np.uint8)
    rows[:, 0] = sub
    rows[:, 1:] = np.frombuffer(b"".join(keys), np.uint8).reshape(-1, KEY_BYTES)
    halves = rows.view("<u8")
    return halves[:, 0].byteswap(), halves[:, 1].copy()


def decode(hashes: Hashes, tails: Hashes) -> bytes:
    """Hashes and second halves -> 16 x N bytes of ids: hash_ids turned back."""
    unmix = np.uint64(_UNMIX)
    mixed = hashes ^ (hashes >> np.uint64(29)) ^ (hashes >> np.uint64(58))
    mixed *= unmix
    mixed ^= mixed >> np.uint64(32)
    mixed ^= tails
    mixed *= unmix
    halves = np.empty((len(hashes), 2), "<u8")
    halves[:, 0] = mixed
    halves[:, 1] = tails
    return halves.tobytes()
