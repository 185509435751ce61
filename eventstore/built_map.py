"""A log file map that was built outside of an event store, as files: `photon logmap build` writes it, in
generations; `photon logmap load` makes it the map of an event store that does not run (docs/logmap.md).

    files.json                    the manifest: which log files, how far read; which generations count
    generation-NNNNNN/
        segment-...               segments of the map (eventstore.segments); those of a generation are of
                                  ranges of hashes that do not overlap
        malformed-....jsonl       dead letters, those of a log together

The manifest is replaced as a whole when a generation is complete: what it does not name is nothing.

Loaded segments are linked into their place, or copied from another disk, under names that no manifest has.
The event store's manifest is the one step that counts; killed before it, there is no map, and the next call
begins anew.
"""

import dataclasses
import os
import shutil
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from eventstore import segments
from eventstore.log_file_map import FLUSH_ENTRIES
from eventstore.rules.entries import Listed, level_of
from eventstore.segments import (
    LOADED_LETTERS,
    LOADING_LETTERS,
    Counts,
    Segment,
    Writer,
    identity_of,
    segment_name,
    with_states,
)
from photon.core.disk import (
    DirectoryLock,
    make_directory,
    read_json,
    replace,
    storage_errors,
    sync_directory,
    write_file,
)
from photon.core.errors import CorruptStateError, DiskFullError, StorageError, UsageError
from photon.core.settings import Settings
from photon.logs.files import (
    HEAD_BYTES,
    FileState,
    Identity,
    SeenFile,
    digest,
    goes_on,
    names_by_inode,
    read_at,
    seen_as,
)
from photon.logs.packed import Spool, is_packed

FORMAT: Final = 3
MANIFEST: Final = "files.json"

Stamp = tuple[int, int]
"""Size and time of change (ns) of an archive."""


class BuiltFile(msgspec.Struct, frozen=True):
    """A log file and how far it is read: all in its first `offset` bytes (unpacked, of an archive).

    Head and tail as of photon.logs.files.FileState, in hex. `archive`: size and time of change of an
    archive. `gone`: it holds something else by now, or is deleted; its entries count no more.
    """

    number: int
    name: str
    offset: int = 0
    head_bytes: int = 0
    head: str = ""
    tail: str = ""
    events: int = 0
    malformed: int = 0
    archive: Stamp | None = None
    gone: bool = False

    def state(self, read: SeenFile) -> FileState:
        """As an event store's reader remembers the log, if its bytes are in that file."""
        return FileState(
            self.number,
            read.path,
            read.name,
            read.device,
            read.inode,
            self.offset,
            self.head_bytes,
            bytes.fromhex(self.head),
            source=read.source,
            tail_at=self.offset if self.tail else 0,
            tail=bytes.fromhex(self.tail),
        )


class Span(msgspec.Struct, frozen=True, array_like=True):
    """The dead letters of a file: that many bytes of their part, behind those of the span before."""

    file: int
    bytes: int


class Part(msgspec.Struct, frozen=True):
    """A file of a generation; `spans`: of dead letters, all of the part."""

    name: str
    count: int
    spans: list[Span] = []


class Generation(msgspec.Struct, frozen=True):
    """What one build found."""

    name: str
    segments: list[Part]
    malformed: list[Part]


class Manifest(msgspec.Struct, frozen=True):
    """`identity`: digest of what ids are made with."""

    format: int
    identity: str
    next_number: int = 0
    files: list[BuiltFile] = []
    generations: list[Generation] = []

    @property
    def live(self) -> list[BuiltFile]:
        return [file for file in self.files if not file.gone]


def identity_digest(settings: Settings) -> str:
    """Of what ids are made with: the settings' own text names the key."""
    return digest(identity_of(settings).encode("utf-8", "surrogatepass")).hex()


def read_manifest(directory: Path) -> Manifest | None:
    """None if nothing was built there yet. CorruptStateError, StorageError."""
    path = directory / MANIFEST
    manifest = read_json(path, Manifest, "not a built log file map ({}); build it anew")
    if manifest is not None and manifest.format != FORMAT:
        raise CorruptStateError(
            f"{path}: a built map of format {manifest.format}, this Photon reads {FORMAT}; build it anew"
        )
    return manifest


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Durably, all or nothing. StorageError."""
    path = directory / MANIFEST
    with storage_errors(path):
        write_file(path, msgspec.json.format(msgspec.json.encode(manifest), indent=1))


def check_ids(directory: Path, manifest: Manifest, settings: Settings) -> None:
    """UsageError unless the settings make the same ids."""
    if manifest.identity != identity_digest(settings):
        raise UsageError(
            f"{directory}: built with other ids ([primary] id or [ids] key); use the settings it was built "
            "with, or build a new one"
        )


def _damaged(path: Path, why: str) -> CorruptStateError:
    return CorruptStateError(f"{path}: not the file that was built ({why}); build the map anew")


_LETTER_BYTES_A_STEP: Final = 1 << 20


def segments_of(directory: Path, manifest: Manifest) -> list[tuple[Path, int]]:
    """Where they are, and how many entries each has: the oldest first. CorruptStateError."""
    found = []
    for generation in manifest.generations:
        for part in generation.segments:
            path = directory / generation.name / part.name
            try:
                segment = Segment(path)
            except (OSError, ValueError) as error:
                raise _damaged(path, str(error)) from error
            if len(segment) != part.count:
                raise _damaged(path, f"{len(segment)} entries, not {part.count}")
            found.append((path, part.count))
    return found


def letters(directory: Path, manifest: Manifest, gone: Collection[int]) -> Iterator[bytes]:
    """Dead letters as they were built, in pieces; not those of `gone`. CorruptStateError."""
    for generation in manifest.generations:
        for part in generation.malformed:
            path = directory / generation.name / part.name
            with storage_errors(path), path.open("rb") as file:
                size = sum(span.bytes for span in part.spans)
                if os.fstat(file.fileno()).st_size != size:
                    raise _damaged(path, f"not of {size} bytes")
                for span in part.spans:
                    end = file.tell() + span.bytes
                    if span.file in gone:
                        file.seek(end)
                    while file.tell() < end:
                        yield file.read(min(_LETTER_BYTES_A_STEP, end - file.tell()))


_Held = TypeVar("_Held")


def locate(
    files: Sequence[BuiltFile],
    place: Callable[[BuiltFile], str],
    names_in: Callable[[str], Iterable[str]],
    held: Callable[[SeenFile, BuiltFile], _Held | None],
) -> dict[int, _Held]:
    """Number -> what `held` makes of the file that a log stands in now; nothing of a log that is gone.

    That file has the name of the log, or is another of those in its place. A file is one log's. StorageError
    if one can't be read.
    """
    found: dict[int, _Held] = {}
    taken: set[Identity] = set()
    listed = cache(lambda where: list(_beginnings(names_in(where))))

    @cache
    def index(where: str, head_bytes: int) -> dict[object, list[str]]:
        """Names by the stamps of archives, and by the digests of so many first bytes of the others."""
        names: dict[object, list[str]] = {}
        for name, stamp, head in listed(where):
            names.setdefault(stamp or digest(head[:head_bytes]).hex(), []).append(name)
        return names

    def look(file: BuiltFile, names: Iterable[str]) -> None:
        for name in names:
            try:
                seen = seen_file(name)
                there = None if seen.source in taken else held(seen, file)
            except FileNotFoundError:
                continue
            except OSError as error:
                raise unreadable(name, error) from error
            if there is not None:
                taken.add(seen.source)
                found[file.number] = there
                return

    for file in files:
        look(file, [file.name])
    for file in files:
        # Of one without a whole line nothing is known but its name.
        if file.number not in found and (file.head_bytes or file.archive is not None):
            look(file, index(place(file), file.head_bytes).get(file.archive or file.head, ()))
    return found


def seen_file(name: str) -> SeenFile:
    """OSError."""
    return seen_as(name, os.stat(name))


def stamp_of(seen: SeenFile) -> Stamp | None:
    """None of what is no archive."""
    return (seen.size, seen.modified_ns) if is_packed(seen.name) else None


def unreadable(name: str, error: OSError) -> StorageError:
    return StorageError(f"{name} cannot be read ({error.strerror}); see to its permissions")


def _beginnings(names: Iterable[str]) -> Iterator[tuple[str, Stamp | None, bytes]]:
    """Name, stamp (of archives), first bytes (of others) of each file that can be read."""
    for name in names:
        with suppress(OSError):  # one that can't be read may be anybody's
            stamp = stamp_of(seen_file(name))
            yield name, stamp, b"" if stamp else read_at(name, 0, HEAD_BYTES)


def known_states(files: Sequence[BuiltFile], spool: Spool) -> tuple[list[FileState], list[str]]:
    """Of the logs that are there, and the names of the others. Archives are unpacked into the spool, where
    the event store reads them. A log may have another name in its directory; links are not followed.

    UsageError if a name holds another log now and its own is nowhere, StorageError if one can't be read.
    """

    def state(seen: SeenFile, file: BuiltFile) -> FileState | None:
        read = spool.unpack(seen) if is_packed(seen.name) else seen
        found = file.state(read)
        if not goes_on(read, found, file.offset):
            return None
        if read is seen:
            return found
        return dataclasses.replace(found, version=spool.version(seen), unpacked=read.size)

    found = locate(files, lambda file: os.path.dirname(file.name), _files_in, state)
    missing = [file.name for file in files if file.number not in found]
    if overwritten := [*filter(os.path.exists, missing)]:
        raise UsageError(
            f"{overwritten[0]}: not the log that the map was built of, it was overwritten or cut since; "
            "run `photon logmap build` again, then load"
        )
    return [found[file.number] for file in files if file.number in found], missing


def _files_in(directory: str) -> list[str]:
    try:
        return sorted(names_by_inode(directory).values())
    except OSError as error:
        raise unreadable(directory, error) from error


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
    check_ids(built, manifest, settings)
    with DirectoryLock(into):
        if (into / segments.MANIFEST).exists():
            raise UsageError(
                f"{into}: holds a log file map already; remove the directory first (its event store rebuilds "
                "what the built map lacks), or name another"
            )
        with storage_errors(into):
            for path in into.glob("segment-*"):  # of a load that was killed
                path.unlink()
        spool = Spool(into.parent / "spool", settings.logs.spool_bytes_max)
        states, missing = known_states(manifest.live, spool)
        parts = segments_of(built, manifest)
        entries = sum(count for _, count in parts)
        if Writer.bytes_of(entries) > settings.eventstore.map_bytes_max:
            raise DiskFullError(
                f"{into}: the log file map would be larger than 'eventstore.map_bytes_max'; raise it and "
                "load again"
            )
        with storage_errors(into):
            for number, (path, _) in enumerate(parts):
                _link(path, into / segment_name(number))
            sync_directory(into)
        gone = {file.number for file in manifest.files} - {state.number for state in states}
        counts = _write_letters(built, manifest, gone, dead_letters)
        held = with_states(segments.Manifest(identity_of(settings), counts), states, manifest.next_number)
        listed = [Listed(number, level_of(count, FLUSH_ENTRIES)) for number, (_, count) in enumerate(parts)]
        segments.write_manifest(into, msgspec.structs.replace(held, segments=listed))
        written = dead_letters is not None
        return Loaded(len(states), counts.primary_events, counts.malformed, entries, written, missing)


def _write_letters(
    built: Path, manifest: Manifest, gone: Collection[int], dead_letters: Path | None
) -> Counts:
    """The counts, and the position in the dead letters that goes with them: both of the same logs."""
    live = [file for file in manifest.live if file.number not in gone]
    counts = Counts(sum(file.events for file in live), sum(file.malformed for file in live))
    if dead_letters is None:
        return counts
    path = dead_letters / LOADED_LETTERS
    with storage_errors(path):
        make_directory(dead_letters)
        temporary = path.with_name(LOADING_LETTERS)
        with temporary.open("wb") as file:
            file.writelines(letters(built, manifest, gone))
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
