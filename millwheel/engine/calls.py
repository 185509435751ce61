"""Which call of user code a worker is at, so that one in which it ends again and again is given up.

Code that ends its process (a segmentation fault, out of memory, `os._exit`), or holds the interpreter until
the run takes the worker for dead, raises nothing that could be undone. So the computation and the time of
each record and timer stand in a mark that outlives the process (photon.core.suspects): two numbers, all that
there is time for. What has computation and time of one at which a worker has ended is marked with a digest as
well; a call in which workers ended DEATHS_MAX times so marked is not made.
"""

import hashlib
import struct
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeVar

import msgspec

from millwheel.errors import ZombieError
from photon.core.errors import PhotonError, StorageError
from photon.core.suspects import DEATHS_MAX

_ID: Final = struct.Struct("=3q")
ID_BYTES: Final = _ID.size
"""Computation, time, and digest or 0."""
FAULTS: Final = BaseException
"""What a call fails by. Code that calls exit(), or leaks what asyncio cancels by, ends no worker: that would
start again and meet it again."""
_encode: Final = msgspec.msgpack.Encoder(enc_hook=repr).encode
_Item = TypeVar("_Item")


def reason_of(error: BaseException) -> str:
    try:
        reason = f"{type(error).__name__}: {error}"
    except Exception:  # a class of the user's that can't say what it is
        return type(error).__name__
    return reason.encode(errors="backslashreplace").decode()  # it may quote half a surrogate


def ours(error: BaseException, asks_outside: bool = False) -> bool:
    """Whether it is no fault of the user's code: it is of the worker or of its store, or of a computation
    that asks outside, and is to ask again."""
    kinds = PhotonError if asks_outside else StorageError | ZombieError
    return isinstance(error, kinds | KeyboardInterrupt)


class EndsWorkerError(Exception):
    """What is raised in place of a call in which workers ended."""


class Calls:
    """Of the stages of a worker, which make one at a time. `mark`, `deaths`: as of Suspects; `passed` gets
    the ids of those that went well."""

    def __init__(
        self,
        mark: Any = None,
        deaths: Mapping[bytes, int] | None = None,
        passed: Callable[[Iterable[bytes]], None] = lambda _: None,
    ) -> None:
        self._mark = memoryview(bytearray(ID_BYTES) if mark is None else mark).cast("q")
        self._deaths, self._passed = deaths or {}, passed
        self._times: dict[int, set[int]] = {}
        for computation, time, _ in map(_ID.unpack, self._deaths):
            self._times.setdefault(computation, set()).add(time)

    def begin(self, computation: int) -> memoryview:
        """Calls of this one follow, each of which sets [1] to its time."""
        self._mark[0] = computation + 1
        return self._mark

    def end(self) -> None:
        self._mark[0] = self._mark[1] = 0

    def careful(
        self, computation: int, call: Callable[[_Item], None], known: Callable[[_Item], tuple[int, Any]]
    ) -> Callable[[_Item], None]:
        """`call`, with a look at items that may be one in which a worker has ended. `known`: an item's time,
        and what tells it from others of that time."""
        times = self._times.get(computation + 1)
        if times is None:
            return call

        def carefully(item: _Item) -> None:
            time, what = known(item)
            if time not in times:
                call(item)
                return
            digest = int.from_bytes(hashlib.blake2b(_encode(what), digest_size=7).digest()) + 1
            id_ = _ID.pack(computation + 1, time, digest)
            if self._deaths.get(id_, 0) >= DEATHS_MAX:
                raise EndsWorkerError(
                    f"the worker ended {DEATHS_MAX} times in this call: it exited, was killed, ran out of "
                    "memory, or held the interpreter so long that it was taken for dead"
                )
            self._mark[2] = digest
            try:
                call(item)
            except FAULTS as error:
                if not isinstance(error, KeyboardInterrupt):
                    self._mark[2] = 0
                raise
            self._mark[2] = 0
            self._passed([id_])

        return carefully


def shown(found: bytes) -> tuple[int, int]:
    """The computation's number and the time (us) of an id."""
    computation, time, _ = _ID.unpack(found)
    return computation - 1, time
