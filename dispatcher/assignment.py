"""Which worker reads which file: rendezvous hashing over the live slots (paper 3.2). Pure.

Every worker comes to the same answer from the same slots, and a slot that comes or goes moves only the files
that it gets or had.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Source = tuple[int, int]
"""Device and inode of a log file as the user knows it."""

_U64 = npt.NDArray[np.uint64]
_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_MIX_1: Final = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2: Final = np.uint64(0x94D049BB133111EB)
_WORD: Final = (1 << 64) - 1


def owners(sources: Sequence[Source], slots: Collection[int]) -> list[int]:
    """The slot that each file belongs to.

    By the inode alone: a file stays with its worker when its device is mounted again under another number.
    """
    columns = np.array(sorted(slots), np.uint64)
    inodes = np.array([inode & _WORD for _, inode in sources], np.uint64)
    weights = _mixed(_mixed(inodes)[:, None] ^ _mixed(columns + np.uint64(1))[None, :])
    return columns[np.argmax(weights, axis=1)].tolist() if len(sources) else []


@dataclass(frozen=True, slots=True)
class Plan:
    """What a worker does about the files that there are.

    `claim`: nobody holds them and they are its own; `leave`: it holds them and they are another's.
    """

    claim: frozenset[Source]
    leave: frozenset[Source]


def plan(
    slot: int,
    live: Collection[int],
    claims: Mapping[Source, int],
    sources: Collection[Source],
    seen: Collection[Source],
) -> Plan:
    """`claims`: who holds what; `sources`: all files that are known; `seen`: those that a pattern matches.

    A file changes hands only when it is free: what a live worker holds is left to it until it lets go. One
    that no pattern matches any more stays with its holder, who knows where it went.
    """
    wanted = sorted(source for source in sources if claims.get(source, slot) == slot)
    claim, leave = set(), set()
    for source, owner in zip(wanted, owners(wanted, live), strict=True):
        if source not in claims:
            if owner == slot:
                claim.add(source)
        elif owner != slot and source in seen:
            leave.add(source)
    return Plan(frozenset(claim), frozenset(leave))


def _mixed(words: _U64) -> _U64:
    """The finisher of splitmix64: each bit of the word moves half the bits of the result."""
    words = words + _GOLDEN
    words = (words ^ (words >> np.uint64(30))) * _MIX_1
    words = (words ^ (words >> np.uint64(27))) * _MIX_2
    return words ^ (words >> np.uint64(31))
