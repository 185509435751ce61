"""An event store of the test's own, events, and joiners put together from real parts."""

import contextlib
import errno
import json
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from joiner.rules import ForeignColumns, JoinOutcomes
from joiner.server import JoinerServer
from joiner.worker import Home, Worker
from photon.core import disk
from photon.core.clock import ManualClock, SystemClock
from photon.core.columns import join_lines, pack_times, split_ids, split_lines
from photon.core.errors import UnavailableError
from photon.core.fates import Found, Joined
from photon.core.settings import Settings, identity_digest, parse_settings
from photon.rpc.network import LOOPBACK, Network
from tests.waiting import wait_until

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
    age_us: int = 0,
    times_us: Sequence[int] | None = None,
) -> ForeignColumns:
    """Events of these names; each one's primary is `q-<name>` unless it is given."""
    count = len(names)
    primaries = primaries or [f"q-{name}" for name in names]
    events = events or [foreign_line(n, p) for n, p in zip(names, primaries, strict=True)]
    return ForeignColumns(
        ids=b"".join(map(packed_id, names)),
        primary_ids=b"".join(map(packed_id, primaries)),
        times=pack_times(times_us or [NOW_US] * count),
        events=join_lines(events),
        tries=np.full(count, tries, "<u4").tobytes(),
        ages=pack_times([age_us] * count),
    )


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
            assert self.hold.wait(60)
        if self.down:
            raise UnavailableError("event store: gone")
        names = [key.rstrip(b".").decode() for key in split_ids(ids)]
        found = bytes(self.lacks.get(name, Found.FOUND) for name in names)
        return found, [b"" if name in self.lacks else primary_line(name) for name in names]


def settings(adapter: str = "", lease_s: float = 10.0, **joiner: object) -> Settings:
    """`joiner` may go below the bounds that users have to keep."""
    made = parse_settings({"adapter": {"use": adapter}, "registry": {"lease_s": lease_s}})
    return replace(made, joiner=replace(made.joiner, **({"fsync": False} | joiner)))


def _new_worker(root: Path, registry, store: FakeEventStore | None, options: dict[str, Any]) -> Worker:
    """`options`: of Home and Worker; all others are settings of the joiner."""
    home = {"name": "joiner", "datacenter": "east", "address": "127.0.0.1:0", "output_root": root / "out"}
    home["directory"] = root / options.get("name", "joiner")
    home |= {field.name: options.pop(field.name) for field in fields(Home) if field.name in options}
    others = {"settings", "clock", "on_fatal", "checkpoint"}
    values = {"clock": SystemClock()} | {key: options.pop(key) for key in others & options.keys()}
    values.setdefault("settings", settings(**options))
    return Worker(home=Home(**home), registry=registry, eventstore=store or FakeEventStore(), **values)


def make_worker(root: Path, registry, store: FakeEventStore | None = None, **options) -> Worker:
    """A joiner on `root`, not yet started, but with a lease if the registry gives one."""
    worker = _new_worker(root, registry, store, options)
    worker.leases.renew_due()
    return worker


def make_server(
    root: Path, registry, store: FakeEventStore | None = None, network: Network = LOOPBACK, **options
) -> JoinerServer:
    """A joiner behind gRPC, not yet started."""
    return JoinerServer(_new_worker(root, registry, store, options), network)


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


def fates(answer: JoinOutcomes) -> list[str]:
    return [Joined(outcome).name for outcome in answer.outcomes]


def end_all(worker: Worker) -> None:
    """Start it, with a lease, and wait until the resolver has ended all."""
    worker.leases.renew_due()
    worker.start()
    wait_until(lambda: worker.status()["unresolved"] == 0)


class FailingWrites:
    """While `full`, writes fail to the files whose path holds a word: like a full disk, after some bytes."""

    def __init__(self, monkeypatch, word: str) -> None:
        self.full = True
        self.refused = 0
        self._word = word
        self._real = os.write
        monkeypatch.setattr(disk.os, "write", self._write)

    def _write(self, fd: int, data: bytes) -> int:
        if self.full and self._word in path_of(fd):
            if len(data) > 3:
                return self._real(fd, data[:3])
            self.refused += 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return self._real(fd, data)


def fail_one_sync(monkeypatch) -> None:
    """The next sync of joined lines can't begin."""
    real, failures = os.dup, [errno.EMFILE]

    def dup(fd: int) -> int:
        if "/joined/" in path_of(fd) and failures:
            raise OSError(failures.pop(), "too many open files")
        return real(fd)

    monkeypatch.setattr(os, "dup", dup)


class Crash(BaseException):
    """The end of a process, in a test that can't afford one."""


def crash_at(where: str) -> Callable[[str], None]:
    """A checkpoint that ends the life there."""

    def reached(step: str) -> None:
        if step == where:
            raise Crash

    return reached


def path_of(fd: int) -> str:
    return os.readlink(f"/proc/self/fd/{fd}")


def note_syncs(monkeypatch, name: str = "fdatasync") -> list[str]:
    """The names of the files that are synced from now on."""
    real, synced = getattr(os, name), []

    def sync(fd: int) -> None:
        real(fd)
        synced.append(os.path.basename(path_of(fd)))

    monkeypatch.setattr(os, name, sync)
    return synced


@contextlib.contextmanager
def running(*calls: Callable[[], object]) -> Iterator[None]:
    """Each in a thread of its own; the end of the block waits for them."""
    threads = [threading.Thread(target=call) for call in calls]
    for thread in threads:
        thread.start()
    yield
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
