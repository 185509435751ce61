"""One process of a running system that ends itself, or stands still, at a marked point between two IO steps.

    python -m tests.faults.kit.crashing --at "intent synced" --pass 2 --reached FILE -- joiner serve ...

is `photon joiner serve ...`, which passes that point twice and is killed (or, with --signal STOP,
stopped) at the third pass, by its own hand, with nothing between the point and the signal. It says so in the
file before. The joiner has a port for that (joiner.output.Checkpoint); in the other roles the production
methods are wrapped here.
"""

import argparse
import functools
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from photon.cli import main as cli

_photon: Final = cli.main

JOINER: Final = (
    "looked up",
    "intent half written",
    "intent appended",
    "intent synced",
    "registered",
    "output half written",
    "lines written",
    "one root appended",
    "output appended",
    "output synced",
    "done",
    "one root rotated",
    "listed",
)
DISPATCHER: Final = (
    "ids looked up",
    "answered",
    "letters half written",
    "letters appended",
    "letters synced",
    "offset put",
    "retry dropped",
    "retries put",
    "committed",
    "recorded",
)
EVENTSTORE: Final = (
    "group read",
    "letters half written",
    "letters appended",
    "letters synced",
    "map written",
    "cache filled",
    "segment written",
    "segment listed",
    "segments merged",
)
REGISTRY: Final = (
    "vote stored",
    "entries half written",
    "entries written",
    "entries synced",
    "snapshot written",
    "snapshot adopted",
    "entries dropped",
)
POINTS: Final[Mapping[str, tuple[str, ...]]] = {
    "joiner": JOINER,
    "dispatcher": DISPATCHER,
    "eventstore": EVENTSTORE,
    "registry": REGISTRY,
}
"""Of each role: what it has just done."""
SELDOM: Final = (
    "listed",
    "letters synced",
    "segment written",
    "segment listed",
    "segments merged",
    "snapshot written",
    "vote stored",
)
"""What takes seconds to come."""

_SEGMENT_ENTRIES: Final = 64
"""Of the log file map, and entries between snapshots: few, so that these steps come within seconds."""
_COMPACT_ENTRIES: Final = 60


@dataclass(frozen=True, slots=True)
class Crash:
    """`passes`: how often the point is passed before."""

    point: str
    passes: int = 0
    stop: bool = False
    """Stand still (SIGSTOP), rather than end."""

    def arguments(self, reached: Path) -> list[str]:
        """What goes before those of the photon command."""
        how = ["--signal", "STOP"] if self.stop else []
        return ["--at", self.point, "--pass", str(self.passes), *how, "--reached", str(reached), "--"]


class Armed:
    """Called at each point of the process, from any thread."""

    def __init__(self, crash: Crash, reached: Path, process: str) -> None:
        self._crash = crash
        self._left = crash.passes
        self._lock = threading.Lock()
        self._process = process
        self._told = os.open(reached, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def __call__(self, point: str) -> None:
        if self.is_due(point):
            self.strike()

    def is_due(self, point: str) -> bool:
        """Whether this pass is the one; then `strike` must follow."""
        if point != self._crash.point:
            return False
        with self._lock:
            self._left -= 1
            return self._left == -1

    def strike(self) -> None:
        os.write(self._told, f"{self._process}: {self._crash.point}\n".encode())
        if self._crash.stop:
            # To the thread itself: one sent to the process may stop it only after this thread went on a bit.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        else:
            os.kill(os.getpid(), signal.SIGKILL)


def main(arguments: Sequence[str] | None = None) -> None:
    """As `photon`, with or without a point in front."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if "--at" in arguments[:1]:
        end = arguments.index("--")
        asked, arguments = _parse(arguments[:end]), arguments[end + 1 :]
        crash = Crash(asked.at, asked.passes, asked.signal == "STOP")
        role, name = arguments[0], arguments[arguments.index("--name") + 1]
        assert crash.point in POINTS[role], f"{role} has no point {crash.point!r}"
        _MARKERS[role](Armed(crash, asked.reached, f"{role}-{name.replace('/', '-')}"))
    _photon(list(arguments))


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--at", required=True)
    parser.add_argument("--pass", dest="passes", type=int, default=0)
    parser.add_argument("--signal", choices=("KILL", "STOP"), default="KILL")
    parser.add_argument("--reached", type=Path, required=True)
    return parser.parse_args(arguments)


# -- where the points are ----------------------------------------------------------------------------------


def _mark_joiner(armed: Armed) -> None:
    import joiner.worker
    import photon.core.disk
    import photon.logs.writer

    _replace(joiner.worker, "Worker", lambda real: functools.partial(real, checkpoint=armed))
    _halve(photon.core.disk, armed, {"/intents/": "intent half written"})
    _halve(photon.logs.writer, armed, {"/joined/": "output half written"})
    # Behind the first look at the lease, and before the second one.
    log = photon.logs.writer.RotatingLog
    _after(log, "append", armed, "lines written", lambda log, _: log.directory.parent.name == "joined")


def _mark_dispatcher(armed: Armed) -> None:
    from dispatcher.ledger import Ledger, LedgerFile, RetryQueue, Rows
    from dispatcher.sender import Sender

    _mark_letters(armed)
    _after(Sender, "_look_up", armed, "ids looked up")
    _after(Sender, "send", armed, "answered")
    _after(Rows, "put_file", armed, "offset put", lambda _, state: state.offset > 0)
    _after(Rows, "drop_retry", armed, "retry dropped")
    _after(
        Ledger, "_write", armed, "retries put", lambda _ledger, _rows, _after, entry, *_: bool(entry.retries)
    )
    _replace(LedgerFile, "write", lambda real: lambda self: _Commit(real(self), armed))
    _after(RetryQueue, "settled", armed, "recorded")


def _mark_eventstore(armed: Armed) -> None:
    from eventstore import log_file_map
    from eventstore.cache import Filling
    from eventstore.log_file_map import LogFileMap

    log_file_map.__dict__["FLUSH_ENTRIES"] = _SEGMENT_ENTRIES
    _mark_letters(armed)
    _before(LogFileMap, "write", armed, "group read")
    _after(LogFileMap, "write", armed, "map written")
    _after(LogFileMap, "_write_segment", armed, "segment written")
    _after(LogFileMap, "_put_manifest", armed, "segment listed")
    _after(LogFileMap, "_merge", armed, "segments merged")
    _after(Filling, "put_many", armed, "cache filled")


def _mark_registry(armed: Armed) -> None:
    import idregistry.server
    import photon.core.disk
    from photon.raft import snapshot as compaction
    from photon.raft.journal import Journal
    from photon.raft.snapshot import SnapshotStore
    from photon.raft.store import HardState

    limits = {"compact_entries": _COMPACT_ENTRIES, "tail_entries": _COMPACT_ENTRIES // 4}
    _replace(idregistry.server, "RaftLimits", lambda real: functools.partial(real, **limits))
    _after(HardState, "store", armed, "vote stored")
    _halve(photon.core.disk, armed, {"journal": "entries half written"})
    _before(photon.core.disk, "sync_data", armed, "entries written")
    _after(Journal, "sync", armed, "entries synced")
    _after(compaction, "write_snapshot", armed, "snapshot written")
    _after(SnapshotStore, "adopt", armed, "snapshot adopted")
    _after(Journal, "drop_before", armed, "entries dropped")


_MARKERS: Final = {
    "joiner": _mark_joiner,
    "dispatcher": _mark_dispatcher,
    "eventstore": _mark_eventstore,
    "registry": _mark_registry,
}


def _mark_letters(armed: Armed) -> None:
    """Of the dead letters: the one log of their kind that dispatchers and event stores append to."""
    import photon.logs.writer

    log = photon.logs.writer.RotatingLog
    _halve(photon.logs.writer, armed, {"/dead-letters/": "letters half written"})
    _after(log, "append", armed, "letters appended")
    _after(log, "sync", armed, "letters synced")


class _Commit:
    """A write transaction, which is a context: the point is behind its commit."""

    def __init__(self, transaction: Any, armed: Armed) -> None:
        self._transaction = transaction
        self._armed = armed

    def __enter__(self) -> Any:
        return self._transaction.__enter__()

    def __exit__(self, kind: type[BaseException] | None, *error: Any) -> Any:
        answer = self._transaction.__exit__(kind, *error)
        if kind is None:
            self._armed("committed")
        return answer


def _replace(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    setattr(owner, name, make(getattr(owner, name)))


def _after(
    owner: Any, name: str, armed: Armed, point: str, counts: Callable[..., bool] = lambda *_: True
) -> None:
    """The point is behind each call that did its work, where `counts` (called with its arguments) says so."""
    real = getattr(owner, name)

    @functools.wraps(real)
    def wrapped(*given: Any, **named: Any) -> Any:
        answer = real(*given, **named)
        if counts(*given):
            armed(point)
        return answer

    setattr(owner, name, wrapped)


def _before(owner: Any, name: str, armed: Armed, point: str) -> None:
    real = getattr(owner, name)

    @functools.wraps(real)
    def wrapped(*given: Any, **named: Any) -> Any:
        armed(point)
        return real(*given, **named)

    setattr(owner, name, wrapped)


def _halve(module: ModuleType, armed: Armed, points: Mapping[str, str]) -> None:
    """`points`: part of a file's path -> the point in the midst of a write to it."""
    real = module.__dict__["write_all"]

    def write_all(fd: int, data: bytes) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        for part, point in points.items():
            if part in path and armed.is_due(point):
                real(fd, data[: len(data) // 2])
                armed.strike()
        real(fd, data)

    module.__dict__["write_all"] = write_all


if __name__ == "__main__":
    main(sys.argv[1:])
