"""What an event store shall remember of the logs of a built map: the same log must still be there."""

import os

from eventstore.built_map import BuiltFile
from photon.core.chunks import digest, read_at
from photon.core.errors import StorageError, UsageError
from photon.core.logfiles import TAIL_BYTES, FileState, SeenFile
from photon.core.packed import Spool, is_packed


def known_state(file: BuiltFile, spool: Spool) -> FileState | None:
    """None if the log is no more; an archive is unpacked into the spool, where the event store reads it.

    UsageError if it is not the log that was read, StorageError if it can't be read.
    """
    try:
        status = os.stat(file.name)
        source = (status.st_dev, status.st_ino)
        seen = SeenFile(
            file.name, file.name, *source, status.st_size, status.st_ctime_ns, source, status.st_mtime_ns
        )
        read = spool.unpack(seen) if is_packed(file.name) else seen
        _check(file, read)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StorageError(
            f"{file.name} cannot be read ({error.strerror}); see to its permissions"
        ) from error
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


def _check(file: BuiltFile, read: SeenFile) -> None:
    """OSError."""
    whole = read.size >= file.offset
    if whole and file.head_bytes:
        length = min(TAIL_BYTES, file.offset)
        head = digest(read_at(read.path, 0, file.head_bytes)).hex()
        tail = digest(read_at(read.path, file.offset - length, length)).hex()
        whole = (head, tail) == (file.head, file.tail)
    if not whole:
        raise UsageError(
            f"{file.name}: not the log that the map was built of, it was overwritten or cut since; "
            "run `photon logmap build` again, then load"
        )
