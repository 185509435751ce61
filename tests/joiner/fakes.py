"""A registry and an event store of the test's own, events, and joiners put together from real parts."""

import json
import os
import random
import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from joiner.rules.batch import ForeignColumns
from joiner.worker import Worker
from photon.core.clock import ManualClock, SystemClock
from photon.core.columns import join_lines, pack_times, split_ids, split_lines
from photon.core.errors import FencedError, SettingsMismatchError, UnavailableError
from photon.core.fates import Committed, Found
from photon.core.ids import parse_token
from photon.core.settings import Settings, identity_digest, parse_settings

NOW_US = ManualClock().now_us()
IDENTITY = identity_digest(Settings())


def packed_id(name: str) -> bytes:
    return name.encode().ljust(16, b".")[:16]


def primary_line(name: str) -> bytes:
    return json.dumps({"id": name, "text": f"query {name}"}).encode()


def foreign_line(name: str, primary: str) -> bytes:
    return json.dumps({"id": name, "primary_id": primary}).encode()


def joined_line(name: str, primary: str) -> bytes:
    return foreign_line(name, primary)[:-1] + b',"primary":' + primary_line(primary) + b"}"


def batch_of(
    names: Sequence[str],
    primaries: Sequence[str] | None = None,
    events: Sequence[bytes] | None = None,
    tries: int = 0,
    first_seen_us: int = NOW_US,
) -> ForeignColumns:
    """Events of these names; each one's primary is `q-<name>` unless it is given."""
    count = len(names)
    primaries = primaries or [f"q-{name}" for name in names]
    events = events or [foreign_line(n, p) for n, p in zip(names, primaries, strict=True)]
    return ForeignColumns(
        ids=b"".join(map(packed_id, names)),
        primary_ids=b"".join(map(packed_id, primaries)),
        times=pack_times([NOW_US] * count),
        events=join_lines(events),
        tries=np.full(count, tries, "<u4").tobytes(),
        first_seen=pack_times([first_seen_us] * count),
    )


class FakeRegistry:
    """Keeps its promises, in memory or (for processes that are killed) in a file."""

    def __init__(self, path: Path | None = None) -> None:
        self.tokens: dict[bytes, bytes] = {}
        self.expired: set[bytes] = set()
        self.commits = 0
        self.failures: list[str] = []
        """What befalls the next commits: "before" it is done or "after", or "" for nothing."""
        self.down = False
        self.silent_to_leases = False
        self.asked_leases: list[tuple[str, int, float]] = []
        self.fences: set[int] = set()
        self.settings = b""
        """Digest of those that it was founded with, by the first that tells one."""
        self._lock = threading.Lock()
        self._file = None
        if path is not None:
            self._file = path.open("ab", buffering=0)
            for line in path.read_bytes().splitlines():
                key, token = map(bytes.fromhex, line.decode().split())
                self.tokens[key] = token

    def commit(self, ids: bytes, times: bytes, token: bytes) -> bytes:
        with self._lock:
            self.commits += 1
            failure = self.failures.pop(0) if self.failures else ""
            if self.down or failure == "before":
                raise UnavailableError("registry: no quorum")
            keys = split_ids(ids)
            if parse_token(token).incarnation in self.fences:
                return bytes([Committed.FENCED]) * len(keys)
            new = [key for key in keys if key not in self.tokens and key not in self.expired]
            self.tokens.update(dict.fromkeys(new, token))
            if self._file is not None:
                self._file.write(b"".join(f"{k.hex()} {token.hex()}\n".encode() for k in new))
            if failure == "after":
                raise UnavailableError("registry: the answer was lost")
            return bytes(self._outcome(key, token) for key in keys)

    def keep_alive(self, token_address: str, incarnation: int, lease_s: float, settings: bytes = b"") -> None:
        self.asked_leases.append((token_address, incarnation, lease_s))
        if self.down or self.silent_to_leases:
            raise UnavailableError("registry: no quorum")
        if incarnation in self.fences:
            raise FencedError(f"incarnation {incarnation:016x} is fenced")
        if settings and self.settings not in (b"", settings):
            raise SettingsMismatchError("the registry was founded with other settings")
        self.settings = self.settings or settings

    def release(self, name: str, incarnation: int) -> bool:
        """Recovery's: forget the id if it is of that incarnation, which must be fenced."""
        assert incarnation in self.fences
        token = self.tokens.get(packed_id(name))
        if token is None or parse_token(token).incarnation != incarnation:
            return False
        del self.tokens[packed_id(name)]
        return True

    def _outcome(self, key: bytes, token: bytes) -> Committed:
        if key in self.expired:
            return Committed.EXPIRED
        return Committed.WON if self.tokens[key] == token else Committed.DUPLICATE


class FakeEventStore:
    """Has every primary event of the form `q-...` but those it is told to lack."""

    def __init__(self) -> None:
        self.lacks: dict[str, Found] = {}
        self.down = False
        self.hold: threading.Event | None = None
        """While set and not yet happened, lookups wait for it."""
        self.timeouts_s: list[float | None] = []

    def lookup(self, ids: bytes, timeout_s: float | None = None) -> tuple[bytes, list[bytes]]:
        self.timeouts_s.append(timeout_s)
        if self.hold is not None:
            assert self.hold.wait(20)
        if self.down:
            raise UnavailableError("event store: gone")
        names = [key.rstrip(b".").decode() for key in split_ids(ids)]
        found = bytes(self.lacks.get(name, Found.FOUND) for name in names)
        return found, [b"" if name in self.lacks else primary_line(name) for name in names]


def settings(adapter: str = "", lease_s: float = 10.0, **joiner: object) -> Settings:
    """`joiner` may go below the bounds that users have to keep."""
    made = parse_settings({"adapter": {"use": adapter}, "registry": {"lease_s": lease_s}})
    return replace(made, joiner=replace(made.joiner, **({"fsync": False} | joiner)))


def make_worker(root: Path, registry, store: FakeEventStore | None = None, **options) -> Worker:
    """A joiner on `root`, not yet started, but with a lease if the registry gives one."""
    values = {
        "settings": settings(),
        "name": "joiner",
        "datacenter": "east",
        "address": "127.0.0.1:1",
        "directory": root / "state",
        "output_root": root / "out",
        "registry": registry,
        "eventstore": store or FakeEventStore(),
        "clock": SystemClock(),
        "rng": random.Random(),
    }
    worker = Worker(**(values | options))
    worker.leases.renew_due()
    return worker


def output_files(root: Path, out: str = "out", kind: str = "jsonl") -> list[Path]:
    return sorted((root / out / "joined" / "east").glob(f"*.{kind}"))


def output_bytes(root: Path, out: str = "out") -> bytes:
    return b"".join(path.read_bytes() for path in output_files(root, out))


def output_lines(root: Path, out: str = "out") -> Counter[bytes]:
    """Of the files that are lines."""
    data = output_bytes(root, out)
    assert not data or data.endswith(b"\n")
    return Counter(split_lines(data))


def lines_of(names: Iterable[str]) -> Counter[bytes]:
    return Counter(joined_line(name, f"q-{name}") for name in names)


def cut_file(path: Path, size: int) -> None:
    os.truncate(path, size)
