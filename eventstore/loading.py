"""Loading a built log file map in bulk: it becomes the map of an event store that does not run.

All is written beside the place where it counts: the segment of the opaque ids under a name that no list has,
the rest as an LMDB file in a directory of its own. The rename of that file is the one step that counts;
killed before it, there is no map, and the next call begins anew.
"""

import os
import shutil
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import msgspec

from eventstore.built_map import (
    BuiltFile,
    Manifest,
    dense_columns,
    dense_entries_of,
    identity_digest,
    letters,
    read_manifest,
    sparse_records,
    split_records,
)
from eventstore.dense import FAN, FLUSH_ENTRIES
from eventstore.rules.entries import repeated_entries
from eventstore.segments import (
    LOADED_LETTERS,
    LOADING,
    LOADING_LETTERS,
    META_KEY,
    SEGMENTS_KEY,
    SPARSE_TABLES,
    TABLES,
    Columns,
    Counts,
    Listed,
    Writer,
    identity_of,
    new_meta,
    segment_name,
)
from photon.core.disk import DirectoryLock, LmdbFile, make_directory, replace, storage_errors
from photon.core.errors import DiskFullError, StorageError, UsageError
from photon.core.settings import Settings
from photon.logs.files import (
    HEAD_BYTES,
    TAIL_BYTES,
    FileState,
    Identity,
    SeenFile,
    digest,
    pack_file_state,
    read_at,
)
from photon.logs.packed import Spool, is_packed


def known_states(files: Sequence[BuiltFile], spool: Spool) -> tuple[list[FileState], list[str]]:
    """Of the logs that are there, and the names of the others. Archives are unpacked into the spool, where
    the event store reads them.

    UsageError if a name holds another log now and its own is nowhere, StorageError if one can't be read.
    """
    named = [_named_state(file, file.name, spool) for file in files]
    elsewhere = _Elsewhere({state.source for state in named if state is not None})
    states, missing = [], []
    for file, there in zip(files, named, strict=True):
        state = there or elsewhere.state(file, spool)
        if state is not None:
            states.append(state)
        elif os.path.exists(file.name):
            raise UsageError(
                f"{file.name}: not the log that the map was built of, it was overwritten or cut since; "
                "run `photon logmap build` again, then load"
            )
        else:
            missing.append(file.name)
    return states, missing


@dataclass(frozen=True, slots=True)
class _Candidate:
    """`head`: its first bytes; of an archive none."""

    name: str
    source: Identity
    archive: tuple[int, int] | None
    head: bytes


class _Elsewhere:
    """Finds logs under other names. `taken`: files that are known to be logs of the map already.

    Links are not followed: what they lead to has a name of its own.
    """

    def __init__(self, taken: Collection[Identity]) -> None:
        self._taken = set(taken)
        self._listed: dict[str, list[_Candidate]] = {}
        self._indexed: dict[tuple[str, int], dict[object, list[_Candidate]]] = {}

    def state(self, file: BuiltFile, spool: Spool) -> FileState | None:
        """None if no file of its directory is that log."""
        if not file.head_bytes and file.archive is None:
            return None  # nothing is known of it but its name
        key = file.archive or file.head
        for candidate in self._index(os.path.dirname(file.name), file.head_bytes).get(key, ()):
            if candidate.source in self._taken:
                continue
            state = _named_state(file, candidate.name, spool)
            if state is not None:
                self._taken.add(state.source)
                return state
        return None

    def _index(self, directory: str, head_bytes: int) -> dict[object, list[_Candidate]]:
        """By size and time of change of archives, by the digests of so many first bytes of the others."""
        index = self._indexed.get((directory, head_bytes))
        if index is None:
            index = self._indexed[directory, head_bytes] = {}
            for candidate in self._list(directory):
                key = candidate.archive or digest(candidate.head[:head_bytes]).hex()
                index.setdefault(key, []).append(candidate)
        return index

    def _list(self, directory: str) -> list[_Candidate]:
        found = self._listed.get(directory)
        if found is None:
            found = self._listed[directory] = []
            try:
                with os.scandir(directory) as entries:
                    names = sorted(entry.path for entry in entries if entry.is_file(follow_symlinks=False))
            except FileNotFoundError:
                return found
            except OSError as error:
                raise _unreadable(directory, error) from error
            found += [candidate for name in names if (candidate := _candidate(name)) is not None]
        return found


def _candidate(name: str) -> _Candidate | None:
    """None for one that can't be read: it may be anybody's."""
    try:
        status = os.stat(name)
        packed = is_packed(name)
        head = b"" if packed else read_at(name, 0, HEAD_BYTES)
    except OSError:
        return None
    archive = (status.st_size, status.st_mtime_ns) if packed else None
    return _Candidate(name, (status.st_dev, status.st_ino), archive, head)


def _named_state(file: BuiltFile, name: str, spool: Spool) -> FileState | None:
    """None if there is no such name, or it holds something else. StorageError if it can't be read."""
    try:
        status = os.stat(name)
        source = (status.st_dev, status.st_ino)
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


DATA: Final = "data.mdb"
_REPEATED: Final = b"repeated"


@dataclass(frozen=True, slots=True)
class Loaded:
    """What the map holds now; `missing`: names of logs that were not found, whose entries were left out.

    `letters`: malformed lines became dead letters (else they are counted, and kept in the built map).
    """

    files: int
    events: int
    malformed: int
    sparse: int
    dense: int
    repeated: int
    letters: bool
    missing: list[str]

    def as_document(self) -> dict[str, Any]:
        """For --json."""
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
        with storage_errors(into):
            if (into / LOADING).exists():  # of a load that was killed
                shutil.rmtree(into / LOADING)
        if (into / DATA).exists():
            raise UsageError(
                f"{into}: holds a log file map already; remove the directory first (its event store rebuilds "
                "what the built map lacks), or name another"
            )
        with storage_errors(into):
            for path in into.glob("dense-*"):  # likewise
                path.unlink()
        return _Load(built, into, manifest, settings, dead_letters).run()


class _Load:
    """One load."""

    def __init__(
        self, built: Path, into: Path, manifest: Manifest, settings: Settings, dead_letters: Path | None
    ) -> None:
        self._built, self._into = built, into
        self._manifest = manifest
        self._settings = settings
        self._dead_letters = dead_letters
        self._file = LmdbFile(
            into / LOADING,
            what="the log file map",
            setting="eventstore.map_bytes_max",
            mend="load it again",
        )
        self._env: Any = None

    def run(self) -> Loaded:
        spool = Spool(self._into.parent / "spool", self._settings.logs.spool_bytes_max)
        states, missing = known_states(self._manifest.live, spool)
        gone = {file.number for file in self._manifest.files} - {state.number for state in states}
        with self._file.errors():
            self._env = self._file.open(self._settings.eventstore.map_bytes_max, sync=False)
            try:
                dense, repeated = self._write_dense(gone)
                sparse = self._write_sparse(gone)
                counts = self._write_letters(gone)
                self._write_rest(states, counts, dense)
                self._env.sync(True)
            finally:
                self._env.close()
        self._commit()
        written = self._dead_letters is not None
        return Loaded(
            len(states), counts.primary_events, counts.malformed, sparse, dense, repeated, written, missing
        )

    def _write_dense(self, gone: set[int]) -> tuple[int, int]:
        """The first places to the segment, the others to their table; how many there are of each."""
        capacity = dense_entries_of(self._manifest)
        if not capacity:
            return 0, 0
        if Writer.bytes_of(capacity) > self._settings.eventstore.map_bytes_max:
            raise DiskFullError(
                f"{self._into}: the log file map would be larger than 'eventstore.map_bytes_max'; raise it "
                "and load again"
            )
        repeated = self._env.open_db(_REPEATED)
        path, count = self._into / segment_name(0), 0
        writer = Writer(path, capacity)
        for first, others in dense_columns(self._built, self._manifest, gone):
            writer.append(first)
            count += len(others)
            if len(others):
                self._put(repeated, *_repeated(others), append=False)
        writer.close()
        if not writer.count:
            path.unlink()
        return writer.count, count

    def _write_sparse(self, gone: set[int]) -> int:
        tables = [self._env.open_db(name) for name in SPARSE_TABLES]
        count = 0
        for level, append, records in sparse_records(self._built, self._manifest, gone):
            self._put(tables[level], *split_records(records), append=append)
            count += len(records)
        return count

    def _put(self, table: Any, keys: Sequence[bytes], values: Sequence[bytes], append: bool) -> None:
        """`append`: they come after all that are there."""
        with self._env.begin(write=True, db=table) as transaction:
            transaction.cursor().putmulti(zip(keys, values, strict=True), append=append)

    def _write_letters(self, gone: Collection[int]) -> Counts:
        """The counts, and the position in the dead letters that goes with them: both of the same logs."""
        live = [file for file in self._manifest.live if file.number not in gone]
        counts = Counts(sum(file.events for file in live), sum(file.malformed for file in live))
        if self._dead_letters is None:
            return counts
        path = self._dead_letters / LOADED_LETTERS
        with storage_errors(path):
            make_directory(self._dead_letters)
            temporary = path.with_name(LOADING_LETTERS)
            with temporary.open("wb") as file:
                file.writelines(letters(self._built, self._manifest, gone))
                size = file.tell()
                file.flush()
                os.fsync(file.fileno())
            # Later files than this one the reader cuts off: its map does not know of them.
            replace(temporary, path)
        return msgspec.structs.replace(counts, dead_letter_offset=size)

    def _write_rest(self, states: Sequence[FileState], counts: Counts, dense: int) -> None:
        tables = {name: self._env.open_db(name) for name in TABLES}
        meta = new_meta(identity_of(self._settings), self._manifest.interval_us, counts)
        listed = [Listed(0, _level(dense))] if dense else []
        with self._env.begin(write=True) as transaction:
            for state in states:
                key = state.number.to_bytes(4, "big")
                transaction.put(key, pack_file_state(state), db=tables[b"files"])
            transaction.put(META_KEY, msgspec.msgpack.encode(meta), db=tables[b"meta"])
            transaction.put(SEGMENTS_KEY, msgspec.msgpack.encode(listed), db=tables[b"meta"])

    def _commit(self) -> None:
        with storage_errors(self._into):
            replace(self._into / LOADING / DATA, self._into / DATA)
            shutil.rmtree(self._into / LOADING)


def _level(entries: int) -> int:
    """Of a segment of so many entries, as merges would have made it."""
    level = 0
    while entries >= FLUSH_ENTRIES * FAN ** (level + 1):
        level += 1
    return level


def _repeated(others: Columns) -> tuple[list[bytes], list[bytes]]:
    return repeated_entries(others.high, others.low, others.file, others.offset, others.length)
