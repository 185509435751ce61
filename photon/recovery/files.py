"""The files of recovery: its plans, and what joiners have left on this machine (paper 3.3.3).

A plan says what is about to be released, and keeps the lines, so that no end of the process loses them:

<directory>/<name>.jsonl    the events' lines, as they are put into the inbox
<directory>/<name>.json     the plan: ids, times and tokens to release, where the lines go

The lines are durable before the plan, the plan before anything is released, and both stay until the lines are
in the inbox. One run at a time has the directory.

Where the locks of a joiner are free its process has ended: while recovery holds them, it takes off the
unfinished line that a crash left at the end of a joined log. A joiner whose locks are held is left alone: its
lease is what keeps it from writing.
"""

import contextlib
import os
import re
import secrets
import zlib
from collections.abc import Callable, Container, Iterator, Sequence
from pathlib import Path
from typing import Final, Self

import msgspec

from dispatcher.workers import RECOVERED, put
from joiner.output_files import (
    MANIFEST,
    CompleteFile,
    Manifest,
    complete_files,
    is_there,
    note_recovered,
    read_lives,
)
from photon.core.columns import split_ids
from photon.core.disk import (
    DirectoryLock,
    make_directory,
    read_json,
    storage_errors,
    sync_directory,
    write_file,
    write_json,
)
from photon.core.errors import CorruptStateError, LockedError
from photon.logs.writer import RotatingLog
from spark.losses import LostEvents

_PLAN: Final = ".json"
_LINES: Final = ".jsonl"
_NAME: Final = re.compile(re.escape(RECOVERED) + r"[0-9a-f]{16}")


class Plan(msgspec.Struct, frozen=True):
    """A plan as it is kept. `crc32` and `size` are of the file of its lines."""

    name: str
    inbox: str
    ids: bytes
    times: bytes
    tokens: list[bytes]
    counts: list[int]
    crc32: int
    size: int

    @property
    def events(self) -> int:
        """Distinct ids: one whose lines tell several times stands there with each of them."""
        return len({*split_ids(self.ids)})


class Plans:
    """The plans of one directory. A context: it holds the directory's lock."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __enter__(self) -> Self:
        """LockedError, StorageError."""
        try:
            self._lock = DirectoryLock(self._directory)
        except LockedError as error:
            raise LockedError(f"{self._directory}: another `photon recover` runs; wait for it") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def left(self) -> Iterator[Plan]:
        """Those that an earlier run did not finish, oldest first. CorruptStateError, StorageError."""
        for path in sorted(self._directory.glob(f"{RECOVERED}*{_PLAN}"), key=_age):
            yield self._read(path)

    def count(self) -> int:
        """How many there are; for those who do not hold the lock."""
        return len(list(self._directory.glob(f"{RECOVERED}*{_PLAN}")))

    def tidy(self) -> None:
        """Remove lines that no plan was made of: nothing of them is released."""
        with storage_errors(self._directory):
            for path in self._directory.glob(f"{RECOVERED}*"):
                stem = path.name.split(".", 1)[0]
                if _NAME.fullmatch(stem) and not (self._directory / f"{stem}{_PLAN}").exists():
                    path.unlink()

    def write(self, events: LostEvents, inbox: Path, checkpoint: Callable[[str], None]) -> Plan:
        """Durably. DiskFullError, StorageError: there is no plan."""
        name = f"{RECOVERED}{secrets.token_hex(8)}"
        lines = self._directory / f"{name}{_LINES}"
        with storage_errors(lines):
            make_directory(self._directory)
            write_file(lines, events.lines)
        checkpoint("lines kept")
        held = (events.ids, events.times, events.tokens, events.counts)
        plan = Plan(name, str(inbox), *held, zlib.crc32(events.lines), len(events.lines))
        write_json(self._directory / f"{name}{_PLAN}", plan)
        return plan

    def inject(self, plan: Plan, checkpoint: Callable[[str], None]) -> None:
        """Put its lines into the inbox; again does no harm. CorruptStateError, StorageError."""
        lines = self._directory / f"{plan.name}{_LINES}"
        self._check(lines, plan)
        put(lines, Path(plan.inbox), lines.name, lambda: checkpoint("lines copied"))

    def forget(self, plan: Plan) -> None:
        """It is done. StorageError: it is done once more, which does no harm."""
        for suffix in (_PLAN, _LINES):  # lines without a plan mean nothing
            path = self._directory / f"{plan.name}{suffix}"
            with storage_errors(path):
                path.unlink(missing_ok=True)
                sync_directory(self._directory)

    def _read(self, path: Path) -> Plan:
        plan = read_json(path, Plan, f"no plan of recovery ({{}}); {_MEND}")
        rows = sum(plan.counts) if plan else 0
        if not plan or plan.name != path.stem or (len(plan.ids), len(plan.times)) != (16 * rows, 8 * rows):
            raise CorruptStateError(f"{path}: not the plan that was written; {_MEND}")
        self._check(path.with_suffix(_LINES), plan)
        return plan

    def _check(self, lines: Path, plan: Plan) -> None:
        """CorruptStateError unless they are the plan's: nothing may be released that can't be injected."""
        with storage_errors(lines):
            data = lines.read_bytes() if lines.exists() else b""
        if (len(data), zlib.crc32(data)) != (plan.size, plan.crc32):
            raise CorruptStateError(f"{lines}: not the lines that were written; {_MEND}")


_MEND: Final = (
    "restore it, or put the events of its ids into an inbox yourself and move both files of the plan away: "
    "what it had released stands in no registry and no joined log (`photon verify` calls it pending)"
)


def _age(path: Path) -> tuple[int, str]:
    return path.stat().st_mtime_ns, path.name


_DIRECTORY: Final = re.compile(r"joiner(-\d+)?")
_NEVER: Final = 1 << 62


@contextlib.contextmanager
def ended_joiners(work: Path | None, outs: Sequence[Path]) -> Iterator[int]:
    """Hold the locks of all that have ended, with whole lines only at the ends of their logs. How many bytes
    of unfinished ones were cut off. `outs`: with joined/ in them. StorageError, CorruptStateError.
    """
    torn_bytes = 0
    with contextlib.ExitStack() as held:
        for stem, directories in sorted(_stems(outs).items()):
            home = _home(work, stem, directories[0].name)
            manifests = None if home is None else _locked(held, home, stem, directories)
            if manifests is not None:
                first = max(manifest.next_number for manifest in manifests)
                torn_bytes += sum(_cut_torn(directory, stem, first) for directory in directories)
        yield torn_bytes


def named_lives(outs: Sequence[Path]) -> set[int]:
    """The incarnations that any of the outputs tells of. Each is there before it registers anything."""
    return {incarnation for directory in _datacenters(outs) for incarnation in read_lives(directory)}


def note_settled(outs: Sequence[Path], incarnations: Container[int]) -> None:
    """Say in the outputs that tell of these lives that nothing of theirs is lost. StorageError."""
    for directory in _datacenters(outs):
        note_recovered(directory, [life for life in read_lives(directory) if life in incarnations])


def note_gone(work: Path, outs: Sequence[Path]) -> None:
    """Begin anew the outputs that hold nothing of a joiner of this machine: they are gone for good, so its
    next start shall not wait for them. LockedError where it has just made one itself; StorageError."""
    for home in sorted(work.glob("*/joiner*")):
        stem = f"joiner-{home.parent.name}{home.name.removeprefix('joiner')}"
        for directory in (out / "joined" / home.parent.name for out in outs):
            if _DIRECTORY.fullmatch(home.name) and not is_there(directory, stem):
                Manifest(directory, stem).close()


def missing_files(outs: Sequence[Path]) -> list[CompleteFile]:
    """Those that a manifest lists and that are in none of the outputs: taken away, or deleted."""
    there: set[str] = set()
    listed: dict[str, CompleteFile] = {}
    for directory in _datacenters(outs):
        with storage_errors(directory):
            there.update(os.listdir(directory))
        listed.update(complete_files(directory))
    return sorted((e for n, e in listed.items() if n not in there and e.lines), key=lambda e: e.file)


def _datacenters(outs: Sequence[Path]) -> list[Path]:
    return [path for out in outs for path in sorted((out / "joined").glob("*")) if path.is_dir()]


def _stems(outs: Sequence[Path]) -> dict[str, list[Path]]:
    """Joiner (`joiner-east-1`) -> the directories of its manifests."""
    found: dict[str, list[Path]] = {}
    for directory in _datacenters(outs):
        for manifest in directory.glob(f"joiner-*{MANIFEST}"):
            found.setdefault(manifest.name.removesuffix(MANIFEST), []).append(directory)
    return found


def _home(work: Path | None, stem: str, datacenter: str) -> Path | None:
    """The joiner's own directory (photon.cluster.topology.Pipeline); None where it is not here.

    Then its process may be on another machine, and what it has locked can't be told from here.
    """
    name = "joiner" + stem.removeprefix(f"joiner-{datacenter}")
    path = None if work is None else work / datacenter / name
    return path if path is not None and _DIRECTORY.fullmatch(name) and path.is_dir() else None


def _locked(
    held: contextlib.ExitStack, home: Path, stem: str, directories: Sequence[Path]
) -> list[Manifest] | None:
    """All its locks, or none. A directory that was deleted tells nothing, so the manifests are asked too."""
    with contextlib.ExitStack() as tried:
        try:
            tried.enter_context(DirectoryLock(home))
            opened = (contextlib.closing(Manifest(directory, stem)) for directory in directories)
            manifests = list(map(tried.enter_context, opened))
        except LockedError:
            return None
        held.push(tried.pop_all())
        return manifests


def _cut_torn(directory: Path, stem: str, first: int) -> int:
    """Bytes cut; `first`: the file after the complete ones."""
    with contextlib.closing(RotatingLog(directory, stem, _NEVER, first=first)) as log:
        cut = log.cut_torn_line()
        log.sync()  # what is read now shall be there after a power cut
        return cut
