"""Log files shared among readers: each file has a slot, by its path without what rotation appends to it."""

import functools
import hashlib
import re
from typing import Final

SLOTS: Final = 64
"""A file has one of so many slots; who reads files in shares has every so manieth of them."""

_ROTATED: Final = re.compile(
    r"""(?<=[^/])(?:
        \.(?:gz|zst)                                     # packed
      | \.\d{1,14}                                       # a.log.1, a.log.20260101
      | -\d{8,14}                                        # a.log-20260101, a.log-1767225600
      | [.-]\d{4}-\d\d-\d\d(?:[T_-]\d\d(?:[:-]?\d\d){0,2}Z?)?  # a.log.2026-01-01_12-30
      | [.-](?:19|20)\d\d[01]\d[0-3]\d[T_-]\d{4}(?:\d\d)?Z?  # a.log.20260101-101112
      | \.(?:old|bak|orig) | ~
    )\Z""",
    re.VERBOSE,
)


def unrotated(path: str) -> str:
    """The path without what rotation and compression append to it: `a.log.2.zst` -> `a.log`."""
    while (shorter := _ROTATED.sub("", path)) != path:
        path = shorter
    return path


@functools.lru_cache(1 << 16)
def slot_of(path: str, slots: int = SLOTS) -> int:
    """Of so many."""
    name = unrotated(path).encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") % slots
