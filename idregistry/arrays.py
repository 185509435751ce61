"""Large arrays by themselves: their memory is taken page by page as they are filled, and goes back to the
system the moment they are let go, where the allocator would keep it. Pure.
"""

import mmap
from typing import Any, Final

import numpy as np
import numpy.typing as npt

_LARGE_BYTES: Final = 1 << 20


def array_of(rows: int, kind: type[np.generic]) -> npt.NDArray[Any]:
    """`rows` rows of no particular values. MemoryError."""
    size = rows * np.dtype(kind).itemsize
    if size < _LARGE_BYTES:
        return np.empty(rows, kind)
    try:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"no memory for {size} bytes: {error}") from error
    return np.frombuffer(memory, kind)
