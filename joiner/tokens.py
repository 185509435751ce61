"""Tokens: who asked the IdRegistry for an id, unique for ever (paper 3.3.2).

A token is 17 bytes and the address: version (1), incarnation (8), time us (8), little endian, then UTF-8.
An incarnation is one life of a joiner process, a random number. The registry compares tokens as plain bytes;
recovery reads in them which joiner won.
"""

import struct
import threading
from dataclasses import dataclass
from random import Random
from typing import Final

from photon.core.clock import Clock

_HEAD: Final = struct.Struct("<BQq")
_VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class Token:
    """Joiner's server address, incarnation of its process, and a time (us) unique in that incarnation."""

    address: str
    incarnation: int
    time_us: int

    def pack(self) -> bytes:
        return _HEAD.pack(_VERSION, self.incarnation, self.time_us) + self.address.encode()


def parse_token(packed: bytes) -> Token:
    """The reverse of `Token.pack`. ValueError for bytes that are no token of this version."""
    if len(packed) < _HEAD.size or packed[0] != _VERSION:
        raise ValueError(f"not a joiner's token of version {_VERSION}: {packed[:32]!r}")
    _, incarnation, time_us = _HEAD.unpack_from(packed)
    return Token(packed[_HEAD.size :].decode(), incarnation, time_us)


class TokenSource:
    """Gives out the tokens of one incarnation. For many threads at once."""

    def __init__(self, address: str, clock: Clock, rng: Random) -> None:
        """`rng` must not be seeded alike in two lives of a joiner: equal tokens would both win."""
        self.incarnation = rng.getrandbits(64)
        self._address = address
        self._clock = clock
        self._last_us = -(1 << 62)
        self._lock = threading.Lock()

    def next(self) -> bytes:
        """A packed token, later than all before it, whatever the clock does."""
        with self._lock:
            self._last_us = max(self._clock.now_us(), self._last_us + 1)
            return Token(self._address, self.incarnation, self._last_us).pack()
