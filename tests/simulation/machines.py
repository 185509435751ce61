"""The state machines under the log, and how a client's wish becomes a command of theirs and back."""

import hashlib
import random
import struct
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Protocol

from photon.core.fates import Committed
from photon.raft.port import FileId, Filing, RaftLimits, StateMachine
from tests.raft.kit import SMALL, Register, command
from tests.simulation.history import Act, Commit, Lookup

NO_BOUNDARY = -(1 << 63)
_HEAD = struct.Struct("<Q16s")


class Watched:
    """A state machine that sums up every command and its result, and tells of each."""

    def __init__(self, inner: StateMachine, on_apply: Callable[[int, bytes], None]) -> None:
        self.inner = inner
        self.count = 0
        self.digest = bytes(16)
        self.restored = 0
        self._on_apply = on_apply

    def apply(self, command: bytes) -> object:
        result = self.inner.apply(command)
        self.count += 1
        told = result if isinstance(result, bytes) else repr(result).encode()
        self.digest = hashlib.blake2b(self.digest + command + told, digest_size=16).digest()
        self._on_apply(self.count, self.digest)
        return result

    def freeze(self) -> Iterable[bytes]:
        return chain([_HEAD.pack(self.count, self.digest)], self.inner.freeze())

    def prepare(self, chunks: Iterable[bytes]) -> Callable[[], None]:
        drawn = iter(chunks)
        head = next(drawn)
        put_inner = self.inner.prepare(drawn)

        def put() -> None:
            self.restored += 1
            put_inner()
            self.count, self.digest = _HEAD.unpack(head)

        return put


class WatchedFiling(Watched):
    """One that keeps files, as a shard does."""

    def open_in(self, directory: Path) -> None:
        self._filing.open_in(directory)

    def work(self) -> Callable[[], None] | None:
        return self._filing.work()

    def pressure(self) -> float:
        return self._filing.pressure()

    def worked(self) -> None:
        self._filing.worked()

    def gave_up(self) -> None:
        self._filing.gave_up()

    def files(self) -> Sequence[FileId] | None:
        return self._filing.files()

    def verify(self, path: Path, file: FileId) -> bool:
        return self._filing.verify(path, file)

    @property
    def _filing(self) -> Filing:
        assert isinstance(self.inner, Filing)
        return self.inner


def watched(inner: StateMachine, on_apply: Callable[[int, bytes], None]) -> Watched:
    """As its machine is."""
    return (WatchedFiling if isinstance(inner, Filing) else Watched)(inner, on_apply)


class Workload(Protocol):
    """One kind of state machine. `kinds`: the acts it knows."""

    kinds: tuple[type, ...]
    ids_max: int
    limits: RaftLimits

    def time_us(self, number: int) -> int: ...
    def machine(self) -> Any: ...
    def key(self, number: int) -> bytes: ...
    def token(self, joiner: int, incarnation: int, number: int) -> bytes: ...
    def encode(self, acts: list[Act], time_us: int) -> bytes: ...
    def outcomes(self, acts: list[Act], result: object) -> list[tuple[int, ...]]: ...
    def lookup(self, machine: Any, act: Lookup) -> tuple[int, ...]: ...
    def held(self, machine: Any) -> dict[bytes, bytes]: ...
    def boundary_us(self, machine: Any) -> int: ...
    def filing(self, machine: Any, rng: random.Random) -> bytes | None: ...


class Registers:
    """The tiny register: one id and one number a command."""

    kinds: tuple[type, ...] = (Commit,)
    ids_max = 1
    limits = SMALL

    def time_us(self, number: int) -> int:
        return 0

    def machine(self) -> Register:
        return Register()

    def key(self, number: int) -> bytes:
        return b"id%06d" % number

    def token(self, joiner: int, incarnation: int, number: int) -> bytes:
        return struct.pack("<Q", number)

    def encode(self, acts: list[Act], time_us: int) -> bytes:
        (act,) = acts
        assert isinstance(act, Commit)
        return command(act.ids[0], int.from_bytes(act.token, "little"))

    def outcomes(self, acts: list[Act], result: object) -> list[tuple[int, ...]]:
        return [(int(Committed.WON if result else Committed.DUPLICATE),)]

    def lookup(self, machine: Register, act: Lookup) -> tuple[int, ...]:
        return tuple(int(key in machine.tokens) for key in act.ids)

    def held(self, machine: Register) -> dict[bytes, bytes]:
        return {key: struct.pack("<Q", token) for key, token in machine.tokens.items()}

    def boundary_us(self, machine: Register) -> int:
        return NO_BOUNDARY

    def filing(self, machine: Register, rng: random.Random) -> bytes | None:
        return None
