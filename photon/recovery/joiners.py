"""The joiners whose directories and output roots are on this machine, as recovery finds them (paper 3.3.3).

Where the locks of a joiner are free its process has ended: while recovery holds them, it takes off the
unfinished line that a crash left at the end of a joined log. A joiner whose locks are held is left alone: its
lease is what keeps it from writing.
"""

import contextlib
import os
import re
from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from joiner.output_files import (
    MANIFEST,
    CompleteFile,
    Manifest,
    complete_files,
    is_there,
    note_recovered,
    read_lives,
)
from photon.core.disk import DirectoryLock, storage_errors
from photon.core.errors import LockedError
from photon.logs.writer import RotatingLog

_DIRECTORY: Final = re.compile(r"joiner(-\d+)?")
_NEVER: Final = 1 << 62


@dataclass(slots=True)
class Tails:
    """What was done to the ends of joined logs."""

    ended: list[str] = field(default_factory=list)
    """Joiners whose locks are held by recovery."""
    running: list[str] = field(default_factory=list)
    """The others: they run, or stand still, or are on another machine."""
    torn_bytes: int = 0

    def notes(self) -> list[str]:
        if not self.torn_bytes:
            return []
        return [
            f"took {self.torn_bytes} bytes of unfinished lines off the ends of joined logs whose joiner has "
            "ended"
        ]


@contextlib.contextmanager
def ended_joiners(work: Path | None, outs: Sequence[Path]) -> Iterator[Tails]:
    """Hold the locks of all that have ended, with whole lines only at the ends of their logs. `outs`:
    directories with joined/ in them. StorageError, CorruptStateError."""
    tails = Tails()
    with contextlib.ExitStack() as held:
        for stem, directories in sorted(_stems(outs).items()):
            home = _home(work, stem, directories[0].name)
            manifests = None if home is None else _locked(held, home, stem, directories)
            if manifests is None:
                tails.running.append(stem)
                continue
            tails.ended.append(stem)
            first = max(manifest.next_number for manifest in manifests)
            tails.torn_bytes += sum(_cut_torn(directory, stem, first) for directory in directories)
        yield tails


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
        manifests = []
        try:
            tried.enter_context(DirectoryLock(home))
            for directory in directories:
                manifest = Manifest(directory, stem)
                tried.callback(manifest.close)
                manifests.append(manifest)
        except LockedError:
            return None
        held.push(tried.pop_all())
        return manifests


def _cut_torn(directory: Path, stem: str, first: int) -> int:
    """Bytes cut; `first`: the file after the complete ones."""
    log = RotatingLog(directory, stem, _NEVER, first=first)
    try:
        cut = log.cut_torn_line()
        log.sync()  # what is read now shall be there after a power cut
        return cut
    finally:
        log.close()
