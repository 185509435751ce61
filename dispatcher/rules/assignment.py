"""Which worker reads which file (paper 3.2): a hash of its name, so each knows by itself. Pure."""

import functools
import hashlib
import re
from collections.abc import Callable
from typing import Final

SLOTS: Final = 64
"""A file has one of so many slots, a worker every so manieth of them."""

_ROTATED: Final = re.compile(
    r"""(?<=[^/])(?:
        \.(?:gz|zst)                                     # packed
      | \.\d{1,14}                                       # a.log.1, a.log.20260101
      | -\d{8,14}                                        # a.log-20260101, a.log-1767225600
      | [.-]\d{4}-\d\d-\d\d(?:[T_-]\d\d(?:[:-]?\d\d){0,2})?  # a.log.2026-01-01_12-30
    )\Z""",
    re.VERBOSE,
)


def unrotated(path: str) -> str:
    """The path without what rotation and compression append to it: `a.log.2.zst` -> `a.log`."""
    while (shorter := _ROTATED.sub("", path)) != path:
        path = shorter
    return path


@functools.lru_cache(1 << 16)
def slot_of(path: str) -> int:
    name = unrotated(path).encode("utf-8", "surrogateescape")
    return int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "big") % SLOTS


def worker_of(path: str, workers: int) -> int:
    """The worker, of so many, that reads the file."""
    return slot_of(path) % workers


def mine_of(worker: int, workers: int) -> Callable[[str], bool] | None:
    """By its path, whether a file is this worker's; None where all are."""
    return None if workers == 1 else lambda path: worker_of(path, workers) == worker
