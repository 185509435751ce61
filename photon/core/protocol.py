"""The protocol version: one number for all that Photon writes to disks and into replicated logs, and says
between processes.

A build reads versions OLDEST to NEWEST, so that processes are replaced one by one. What all replicas must
read, commands and snapshots, is written in the version *in force*: the directory raises it once every replica
knows a newer one (idregistry.coordinator); from then on no build that lacks it can take part. A process's
own directory is written in NEWEST at once.

Of gRPC messages fields are added and never change: who does not know one passes it over.
"""

from pathlib import Path
from typing import Final

from photon.core.disk import make_directory, storage_errors, write_file
from photon.core.errors import CorruptStateError

NEWEST: Final = 1
OLDEST: Final = 1


def is_read(version: int) -> bool:
    """Whether this build reads what was written in the version."""
    return OLDEST <= version <= NEWEST


def not_read(version: object) -> str:
    """What is wrong with one that is not read, and what to do."""
    return (
        f"protocol version {version}, and this build reads {OLDEST} to {NEWEST}: run the build that wrote it"
    )


def mark(path: Path) -> None:
    """Say NEWEST in a file of a process's own directory, durably. CorruptStateError where it says one that is
    not read, or none; StorageError."""
    with storage_errors(path):
        make_directory(path.parent)
        try:
            found = path.read_text("ascii", "replace").strip()
        except FileNotFoundError:
            found = ""
        if found and not found.isdigit():
            raise CorruptStateError(
                f"{path}: it is damaged, it holds no protocol version; remove it if no newer build than this "
                "one has run in the directory"
            )
        if found and not is_read(int(found)):
            raise CorruptStateError(f"{path}: it is of {not_read(found)}")
        if found != str(NEWEST):
            write_file(path, f"{NEWEST}\n".encode())
