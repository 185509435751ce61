"""The output roots of a joiner: which there are, which are new, and that each is its own (paper 3.3.1).

`<directory>/roots` names the additional roots that the life before wrote to: a JSON object, path to the
number of the first file that it got. What a root's own files say of unfinished batches counts from there on.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from joiner.manifest import Manifest
from photon.core.disk import make_directory, storage_errors, write_file
from photon.core.errors import CorruptStateError, SettingsError
from photon.core.logwriter import LogPosition, RotatingLog

_NAME: Final = "roots"
_NEVER: Final = 1 << 62  # files are left when all roots leave them


@dataclass(frozen=True, slots=True)
class Root:
    """`since`: number of the first file that is the same as in the other roots; None for a new one."""

    directory: Path
    manifest: Manifest
    log: RotatingLog
    since: int | None
    torn_bytes: int
    """Of an unfinished last line that a crash had left; cut off."""

    def close(self) -> None:
        self.log.close()
        self.manifest.close()


def output_directories(output_root: Path, more: Sequence[str], datacenter: str) -> list[Path]:
    """`joined/<datacenter>` in each root, made where it is missing. SettingsError if two are the same."""
    roots = [str(output_root), *more]
    directories = [Path(os.path.abspath(root), "joined", datacenter) for root in roots]
    seen: dict[tuple[int, int], str] = {}
    for root, directory in zip(roots, directories, strict=True):
        with storage_errors(directory):
            make_directory(directory)
            status = directory.stat()
        key = status.st_dev, status.st_ino
        if key in seen:
            raise same_directory(root, seen[key])
        seen[key] = root
    return directories


def same_directory(root: str, other: str) -> SettingsError:
    """The error to raise; both named as they were configured."""
    return SettingsError(
        f"joiner.output_roots: {root} and {other} are the same directory, so each line would stand in it "
        "twice; name different ones"
    )


def open_roots(state: Path, directories: Sequence[Path], stem: str) -> list[Root]:
    """The first directory is never new. LockedError, CorruptStateError, StorageError."""
    known = _read_known(state)
    roots: list[Root] = []
    try:
        roots.append(_open_root(directories[0], stem, 0, 0))
        for directory in (d for d in directories[1:] if str(d) in known):
            _check_there(directory, stem)
            roots.append(_open_root(directory, stem, known[str(directory)], 0))
        number = max(root.log.position.file for root in roots)  # new ones come in where the others are
        for directory in (d for d in directories[1:] if str(d) not in known):
            roots.append(_open_root(directory, stem, None, number))
    except BaseException:
        for root in roots:
            root.close()
        raise
    return roots


def _open_root(directory: Path, stem: str, since: int | None, first: int) -> Root:
    manifest = Manifest(directory, stem)
    try:
        log = RotatingLog(directory, stem, _NEVER, first=manifest.next_number)
        torn_bytes = log.cut_torn_line()
        if log.position.file < first:
            log.rotate(past=first - 1)
        return Root(directory, manifest, log, since, torn_bytes)
    except BaseException:
        manifest.close()
        raise


def _read_known(state: Path) -> dict[str, int]:
    """The additional directories that the life before wrote to, each with its first file."""
    path = state / _NAME
    with storage_errors(path):
        if not path.exists():
            return {}
        try:
            return msgspec.json.decode(path.read_bytes(), type=dict[str, int])
        except msgspec.DecodeError as error:
            raise CorruptStateError(
                f"{path}: no record of output roots ({error}); move it away and start once more"
            ) from error


def write_known(state: Path, roots: Sequence[Root], first: int) -> None:
    """To be called when all logs have begun and nothing is appended yet; `first`: file of the new roots."""
    path = state / _NAME
    known = {str(root.directory): first if root.since is None else root.since for root in roots[1:]}
    with storage_errors(path):
        if _read_known(state) != known:
            write_file(path, msgspec.json.encode(known))


def _check_there(directory: Path, stem: str) -> None:
    """CorruptStateError if a root that was written to holds nothing: its disk is not mounted, perhaps."""
    with storage_errors(directory):
        names = os.listdir(directory)
    ours = re.compile(re.escape(stem) + r"(-\d+)?\.[a-z]+")  # not those of `<stem>-1`
    if not any(map(ours.fullmatch, names)):
        raise CorruptStateError(
            f"{directory}: this joiner wrote here, and nothing of it is there; mount the disk or bring the "
            "files back, or take the root out of joiner.output_roots for one start"
        )


def check_new(root: Root, earliest: LogPosition) -> None:
    """SettingsError if files of a new root may hold lines of batches without an end: it was moved?"""
    if any(root.log.path(n).stat().st_size for n in root.log.file_numbers() if n >= earliest.file):
        raise SettingsError(
            f"joiner.output_roots: {root.directory} holds files of this joiner but was none of its roots "
            "when it ended with batches under way; name it as before for one start, or move the files away"
        )
