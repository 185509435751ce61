"""Loading a built log file map: its segments become those of an event store that does not run.

They are linked into its place, or copied from another disk, under names that no manifest has. The manifest is
the one step that counts; killed before it, there is no map, and the next call begins anew.
"""

import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from eventstore.built_map import (
    BuiltFile,
    Manifest,
    identity_digest,
    letters,
    read_manifest,
    segments_of,
)
from eventstore.log_file_map import FLUSH_ENTRIES
from eventstore.rules.entries import Listed, level_of
from eventstore.segments import (
    LOADED_LETTERS,
    LOADING_LETTERS,
    MANIFEST,
    Counts,
    Writer,
    identity_of,
    new_manifest,
    segment_name,
    with_states,
    write_manifest,
)
from photon.core.disk import DirectoryLock, make_directory, replace, storage_errors, sync_directory
from photon.core.errors import DiskFullError, StorageError, UsageError
from photon.core.settings import Settings
from photon.logs.files import HEAD_BYTES, TAIL_BYTES, FileState, Identity, SeenFile, digest, read_at
from photon.logs.packed import Spool, is_packed

Stamp = tuple[int, int]
"""Size and time of change (ns) of an archive."""


def known_states(files: Sequence[BuiltFile], spool: Spool) -> tuple[list[FileState], list[str]]:
    """Of the logs that are there, and the names of the others. Archives are unpacked into the spool, where
    the event store reads them.

    UsageError if a name holds another log now and its own is nowhere, StorageError if one can't be read.
    """
    named = [_named_state(file, file.name, spool) for file in files]
    taken = {state.source for state in named if state is not None}
    listed = cache(lambda directory: list(_candidates(directory)))

    @cache
    def index(directory: str, head_bytes: int) -> dict[object, list[str]]:
        """Names by the stamps of archives, and by the digests of so many first bytes of the others."""
        names: dict[object, list[str]] = {}
        for name, stamp, head in listed(directory):
            names.setdefault(stamp or digest(head[:head_bytes]).hex(), []).append(name)
        return names

    def elsewhere(file: BuiltFile) -> FileState | None:
        """Under another name in its directory. Links are not followed: what they lead to has its own name."""
        if not file.head_bytes and file.archive is None:
            return None  # nothing is known of it but its name
        found = index(os.path.dirname(file.name), file.head_bytes).get(file.archive or file.head, ())
        states = (_named_state(file, name, spool, taken) for name in found)
        return next((state for state in states if state is not None), None)

    states, missing = [], []
    for file, there in zip(files, named, strict=True):
        state = there or elsewhere(file)
        if state is not None:
            taken.add(state.source)
            states.append(state)
        elif os.path.exists(file.name):
            raise UsageError(
                f"{file.name}: not the log that the map was built of, it was overwritten or cut since; "
                "run `photon logmap build` again, then load"
            )
        else:
            missing.append(file.name)
    return states, missing


def _candidates(directory: str) -> Iterator[tuple[str, Stamp | None, bytes]]:
    """Name, stamp (of archives), first bytes (of others) of each file that can be read. StorageError."""
    try:
        with os.scandir(directory) as entries:
            names = sorted(entry.path for entry in entries if entry.is_file(follow_symlinks=False))
    except FileNotFoundError:
        return
    except OSError as error:
        raise _unreadable(directory, error) from error
    for name in names:
        with suppress(OSError):  # one that can't be read may be anybody's
            status = os.stat(name)
            if is_packed(name):
                yield name, (status.st_size, status.st_mtime_ns), b""
            else:
                yield name, None, read_at(name, 0, HEAD_BYTES)


def _named_state(
    file: BuiltFile, name: str, spool: Spool, taken: Collection[Identity] = ()
) -> FileState | None:
    """None if there is no such name, it is taken, or it holds something else. StorageError if unreadable."""
    try:
        status = os.stat(name)
        source = (status.st_dev, status.st_ino)
        if source in taken:
            return None
        seen = SeenFile(name, name, *source, status.st_size, status.st_ctime_ns, source, status.st_mtime_ns)
        read = spool.unpack(seen) if is_packed(name) else seen
        if not _holds(read, file):
            return None
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unreadable(name, error) from error
    packed = read is not seen
    return FileState(
        file.number,
        read.path,
        read.name,
        read.device,
        read.inode,
        file.offset,
        file.head_bytes,
        bytes.fromhex(file.head),
        False,
        source,
        file.offset if file.tail else 0,
        bytes.fromhex(file.tail),
        spool.version(seen) if packed else "",
        read.size if packed else 0,
    )


def _holds(read: SeenFile, file: BuiltFile) -> bool:
    """Whether it begins as the log did, and what was read last stands where it stood. OSError."""
    if read.size < file.offset or not file.head_bytes:
        return read.size >= file.offset
    length = min(TAIL_BYTES, file.offset)
    head = digest(read_at(read.path, 0, file.head_bytes)).hex()
    tail = digest(read_at(read.path, file.offset - length, length)).hex()
    return (head, tail) == (file.head, file.tail)


def _unreadable(name: str, error: OSError) -> StorageError:
    return StorageError(f"{name} cannot be read ({error.strerror}); see to its permissions")


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the map holds now; `missing`: names of logs that were not found, whose entries were left out.

    `letters`: malformed lines became dead letters (else they are counted, and kept in the built map).
    """

    files: int
    events: int
    malformed: int
    entries: int
    letters: bool
    missing: list[str]

    def as_document(self) -> dict[str, Any]:
        return asdict(self)


def load(built: Path, into: Path, settings: Settings, dead_letters: Path | None = None) -> Loaded:
    """The built map in `built` becomes the map in the directory `into`, which must hold none.

    `dead_letters`: of the datacenter; its primary-*.jsonl become those of the built map. UsageError for a map
    of other ids, a log that was overwritten since, or a place that is taken; LockedError while an event store
    runs there; CorruptStateError for a damaged built map, StorageError.
    """
    manifest = read_manifest(built)
    if manifest is None:
        raise UsageError(f"{built}: no built log file map; make one with `photon logmap build`")
    if manifest.identity != identity_digest(identity_of(settings)):
        raise UsageError(
            f"{built}: built with other ids ([primary] id or [ids] key); load it with the settings it was "
            "built with"
        )
    with DirectoryLock(into):
        if (into / MANIFEST).exists():
            raise UsageError(
                f"{into}: holds a log file map already; remove the directory first (its event store rebuilds "
                "what the built map lacks), or name another"
            )
        with storage_errors(into):
            for path in into.glob("segment-*"):  # of a load that was killed
                path.unlink()
        return _Load(built, into, manifest, settings, dead_letters).run()


@dataclass
class _Load:
    built: Path
    into: Path
    manifest: Manifest
    settings: Settings
    dead_letters: Path | None

    def run(self) -> Loaded:
        spool = Spool(self.into.parent / "spool", self.settings.logs.spool_bytes_max)
        states, missing = known_states(self.manifest.live, spool)
        gone = {file.number for file in self.manifest.files} - {state.number for state in states}
        segments = segments_of(self.built, self.manifest)
        entries = sum(count for _, count in segments)
        if Writer.bytes_of(entries) > self.settings.eventstore.map_bytes_max:
            raise DiskFullError(
                f"{self.into}: the log file map would be larger than 'eventstore.map_bytes_max'; raise it "
                "and load again"
            )
        with storage_errors(self.into):
            for number, (path, _) in enumerate(segments):
                _link(path, self.into / segment_name(number))
            sync_directory(self.into)
        listed = [
            Listed(number, level_of(count, FLUSH_ENTRIES)) for number, (_, count) in enumerate(segments)
        ]
        manifest = new_manifest(identity_of(self.settings), self._write_letters(gone))
        manifest = with_states(manifest, states, self.manifest.next_number)
        write_manifest(self.into, msgspec.structs.replace(manifest, segments=listed))
        counts, written = manifest.counts, self.dead_letters is not None
        return Loaded(len(states), counts.primary_events, counts.malformed, entries, written, missing)

    def _write_letters(self, gone: Collection[int]) -> Counts:
        """The counts, and the position in the dead letters that goes with them: both of the same logs."""
        live = [file for file in self.manifest.live if file.number not in gone]
        counts = Counts(sum(file.events for file in live), sum(file.malformed for file in live))
        if self.dead_letters is None:
            return counts
        path = self.dead_letters / LOADED_LETTERS
        with storage_errors(path):
            make_directory(self.dead_letters)
            temporary = path.with_name(LOADING_LETTERS)
            with temporary.open("wb") as file:
                file.writelines(letters(self.built, self.manifest, gone))
                size = file.tell()
                file.flush()
                os.fsync(file.fileno())
            # Later files than this one the reader cuts off: its map does not know of them.
            replace(temporary, path)
        return msgspec.structs.replace(counts, dead_letter_offset=size)


def _link(path: Path, name: Path) -> None:
    """Durable when its directory is. The built map keeps its own name of it. OSError."""
    try:
        os.link(path, name)
    except OSError:
        shutil.copyfile(path, name)
        with name.open("rb") as file:
            os.fsync(file.fileno())
