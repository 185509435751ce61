"""The joiners whose directories and output roots are on this machine, as recovery finds them (paper 3.3.3).

Where the locks of a joiner are free its process has ended, and nothing can come back: while recovery holds
them, it takes off what a crash left at the end of the joined log, as that joiner's own next start would. A
joiner whose locks are held is left alone: its lease is what keeps it from writing.
"""

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from joiner.manifest import Manifest
from joiner.output_files import MANIFEST, CompleteFile, complete_files
from joiner.tails import common_end, cut_file
from photon.core.disk import DirectoryLock, storage_errors
from photon.core.errors import LockedError
from photon.core.logwriter import LogPosition, RotatingLog

_DIRECTORY: Final = re.compile(r"joiner(-\d+)?")
_NEVER: Final = 1 << 62
_BLOCK_BYTES: Final = 1 << 20


@dataclass(slots=True)
class Tails:
    """What was done to the ends of joined logs, and what could not be."""

    ended: list[str] = field(default_factory=list)
    """Joiners whose locks are held by recovery."""
    running: list[str] = field(default_factory=list)
    """The others: they run, or stand still, or are on another machine."""
    torn_bytes: int = 0
    levelled_bytes: int = 0
    unequal: list[str] = field(default_factory=list)
    """Files that differ between roots by more than a crash leaves."""

    def notes(self) -> list[str]:
        found = [f"{path} differs between output roots by more than a crash leaves" for path in self.unequal]
        if cut := self.torn_bytes + self.levelled_bytes:
            found.append(
                f"took {cut} bytes off the ends of joined logs whose joiner has ended: unfinished lines, and "
                "lines that stood in some of the output roots only"
            )
        return found


@contextlib.contextmanager
def ended_joiners(work: Path | None, outs: Sequence[Path], batch_lines_max: int) -> Iterator[Tails]:
    """Hold the locks of all that have ended, with whole lines only, and the same in each root, at the ends of
    their logs. `outs`: directories with joined/ in them. A crash leaves one batch in some of the roots at
    most. StorageError, CorruptStateError."""
    tails = Tails()
    with contextlib.ExitStack() as held:
        for stem, directories in sorted(_stems(outs).items()):
            home = _home(work, stem, directories[0].name)
            manifests = None if home is None else _locked(held, home, stem, directories)
            if manifests is None:
                tails.running.append(stem)
                continue
            tails.ended.append(stem)
            _mend(manifests, stem, directories, batch_lines_max, tails)
        yield tails


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
    """The joiner's own directory (photon.app.topology.Place); None where it is not here.

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


def _mend(
    manifests: Sequence[Manifest], stem: str, directories: Sequence[Path], lines_max: int, tails: Tails
) -> None:
    first = max(manifest.next_number for manifest in manifests)
    with contextlib.ExitStack() as opened:
        logs = []
        for directory in directories:
            log = RotatingLog(directory, stem, _NEVER, first=first)
            opened.callback(log.close)
            logs.append(log)
            tails.torn_bytes += log.cut_torn_line()
        end = common_end(logs, LogPosition(first, 0)) if len(logs) > 1 else None
        if end is not None:
            _level(logs, end, lines_max, tails)
        for log in logs:
            log.sync()  # what is read now shall be there after a power cut


def _level(logs: Sequence[RotatingLog], end: LogPosition, lines_max: int, tails: Tails) -> None:
    """Cut what some roots have beyond their common end, if a crash can have left it."""
    more = [
        (log, path, end.offset if number == end.file else 0)
        for log in logs
        for number in log.file_numbers()
        if number >= end.file
        and (path := log.path(number)).stat().st_size > (end.offset if number == end.file else 0)
    ]
    shorter = [log for log in logs if all(log is not longer for longer, _, _ in more)]
    last = {path.name for _, path, _ in more}
    lines = max((_count_lines(path, start) for _, path, start in more), default=0)
    if more and (not shorter or len(last) > 1 or lines > lines_max or not _have(shorter, last)):
        tails.unequal.append(str(more[0][1]))
        return
    tails.levelled_bytes += sum(cut_file(path, start) for _, path, start in more)


def _have(logs: Sequence[RotatingLog], names: set[str]) -> bool:
    """All roots go to a new file before a line is written to any of them: one that is missing was deleted."""
    return all((log.directory / name).exists() for log in logs for name in names)


def _count_lines(path: Path, start: int) -> int:
    count = 0
    with storage_errors(path), path.open("rb", buffering=0) as file:
        file.seek(start)
        while block := file.read(_BLOCK_BYTES):
            count += block.count(b"\n")
    return count
