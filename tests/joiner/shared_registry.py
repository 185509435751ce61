"""A registry in a file, for several processes: ids, leases and fences, as the real one promises them."""

import fcntl
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from photon.core.columns import split_ids
from photon.core.errors import FencedError
from photon.core.fates import Committed
from photon.core.ids import parse_token
from tests.joiner.fakes import packed_id

SKEW_S = 0.1


class SharedRegistry:
    def __init__(self, path: Path) -> None:
        self._path = path
        path.touch()

    def commit(self, ids: bytes, times: bytes, token: bytes) -> bytes:
        with self._state() as state:
            if parse_token(token).incarnation in state["fences"]:
                return bytes([Committed.FENCED]) * (len(times) // 8)
            held = [state["tokens"].setdefault(key.hex(), token.hex()) for key in split_ids(ids)]
            return bytes(Committed.WON if t == token.hex() else Committed.DUPLICATE for t in held)

    def keep_alive(self, token_address: str, incarnation: int, lease_s: float, settings: bytes = b"") -> None:
        with self._state() as state:
            if incarnation in state["fences"]:
                raise FencedError(f"incarnation {incarnation:016x} is fenced")
            state["leases"][str(incarnation)] = time.monotonic() + lease_s

    def fence(self, incarnation: int) -> bool:
        """Refused while its lease may run."""
        with self._state() as state:
            if time.monotonic() < state["leases"].get(str(incarnation), 0) + SKEW_S:
                return False
            state["fences"].append(incarnation)
            return True

    def release(self, name: str) -> bool:
        """Compare-and-delete, for fenced incarnations only."""
        with self._state() as state:
            token = state["tokens"].get(packed_id(name).hex())
            if not token or parse_token(bytes.fromhex(token)).incarnation not in state["fences"]:
                return False
            del state["tokens"][packed_id(name).hex()]
            return True

    def incarnations(self) -> list[int]:
        with self._state() as state:
            return [int(incarnation) for incarnation in state["leases"]]

    @contextmanager
    def _state(self) -> Iterator[Any]:
        with self._path.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            state = json.loads(file.read() or '{"tokens": {}, "leases": {}, "fences": []}')
            yield state
            file.seek(0)
            file.truncate()
            json.dump(state, file)
