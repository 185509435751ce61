"""Tokens: who asked the IdRegistry for an id, unique for ever (paper 3.3.2). Pure.

A token is 17 bytes and the address: version (1), incarnation (8), time us (8), little endian, then UTF-8.
An incarnation is one life of a joiner process, a random number.
"""

import struct
from dataclasses import dataclass
from typing import Final

_HEAD: Final = struct.Struct("<BQq")
_VERSION: Final = 1
TOKEN_BYTES_MIN: Final = _HEAD.size
TOKEN_BYTES_MAX: Final = 1024


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
    if not TOKEN_BYTES_MIN <= len(packed) <= TOKEN_BYTES_MAX or packed[0] != _VERSION:
        raise ValueError(f"not a joiner's token of version {_VERSION}: {packed[:32]!r}")
    _, incarnation, time_us = _HEAD.unpack_from(packed)
    return Token(packed[_HEAD.size :].decode(), incarnation, time_us)
