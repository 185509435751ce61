"""Who holds an id, in a number: the incarnations of joiners are few, ids and tokens many. Pure.

A token is its holder (incarnation and address) and a time. Numbers are given in the order of the log, alike
on all replicas, and never again to another. What is no joiner's token is a holder by itself, of time 0: it
compares as any other, but has no incarnation and so can't be fenced.
"""

import struct
from collections.abc import Iterable
from typing import Final

from photon.core.tokens import TOKEN_BYTES_MIN

NOBODY: Final = 0
"""The number of no holder."""

_TIME: Final = struct.Struct("<q")
_TIME_AT: Final = 9  # after version (1) and incarnation (8), see photon.core.tokens
_JOINER: Final = 1
_OTHER: Final = b"\0"


def incarnation_of(token: bytes) -> bytes | None:
    """The 8 bytes of the token's incarnation; None for what is no joiner's token."""
    if len(token) < TOKEN_BYTES_MIN or token[0] != _JOINER:
        return None
    return token[1:_TIME_AT]


def pack_incarnation(incarnation: int) -> bytes:
    """As it stands in a token."""
    return incarnation.to_bytes(8, "little")


class Holders:
    """Holder <-> number. `names` only grows: other threads may read what was there."""

    def __init__(self, names: Iterable[bytes] = ()) -> None:
        self.names: list[bytes] = [b"", *names]
        self._numbers = {name: number for number, name in enumerate(self.names) if number != NOBODY}

    def find(self, token: bytes) -> tuple[int | None, int]:
        """The holder's number, None if it never held anything, and the token's time."""
        name, time_us = _split(token)
        return self._numbers.get(name), time_us

    def intern(self, token: bytes) -> tuple[int, int]:
        """The holder's number, a new one if need be, and the token's time."""
        name, time_us = _split(token)
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self.names)
            self.names.append(name)
        return number, time_us

    def token(self, number: int, time_us: int) -> bytes:
        """The packed token. Any thread."""
        name = self.names[number]
        if name[:1] == _OTHER:
            return name[1:]
        return name[:_TIME_AT] + _TIME.pack(time_us) + name[_TIME_AT:]


def with_time(token: bytes, time_us: int) -> bytes:
    """A holder's token with another time; what is no joiner's token has none, and stays as it is."""
    if incarnation_of(token) is None:
        return token
    return token[:_TIME_AT] + _TIME.pack(time_us) + token[_TIME_AT + _TIME.size :]


def _split(token: bytes) -> tuple[bytes, int]:
    if incarnation_of(token) is None:
        return _OTHER + token, 0
    time_end = _TIME_AT + _TIME.size
    return token[:_TIME_AT] + token[time_end:], _TIME.unpack_from(token, _TIME_AT)[0]
