"""What an event store shall remember of the logs of a built map: the same log must still be there, under its
name or, rotated since, under another one in its directory."""

import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from eventstore.built_map import BuiltFile
from photon.core.chunks import HEAD_BYTES, digest, read_at
from photon.core.errors import StorageError, UsageError
from photon.core.logfiles import TAIL_BYTES, FileState, SeenFile, Source
from photon.core.packed import Spool, is_packed


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
    source: Source
    archive: tuple[int, int] | None
    head: bytes


class _Elsewhere:
    """Finds logs under other names. `taken`: files that are known to be logs of the map already.

    Links are not followed: what they lead to has a name of its own.
    """

    def __init__(self, taken: Collection[Source]) -> None:
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
