"""Files of a state machine beside its snapshot (port.Filing): kept, let go, fetched where some are missing.

Of one name every replica has the same bytes, so they may be asked for from whoever is there, and what was
fetched stays good though the snapshot that named it comes to nothing.
"""

import logging
import os
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path
from typing import IO, Final

from photon.core import disk
from photon.raft.journal import storage_errors
from photon.raft.port import FileId, Filing, RaftLimits
from photon.raft.rules.codec import ASK_FILE, FILE_PIECE, Message

_log = logging.getLogger(__name__)

_DIRECTORY: Final = "files"
_TEMPORARY: Final = ".tmp"
_INCOMING: Final = ".incoming.tmp"
ASKED_MAX: Final = 4
"""Pieces under way at a time."""
ASK_AGAIN_S: Final = 0.5


class FileShelf:
    """The files of one replica. Raft thread only, but for `path`."""

    def __init__(self, directory: Path, machine: object) -> None:
        """What a crash left unfinished is dropped. Raises StorageError."""
        self.directory = directory / _DIRECTORY
        self.machine = machine if isinstance(machine, Filing) else None
        self.pinned: tuple[FileId, ...] = ()
        """What a snapshot needs that is taken in."""
        if self.machine is None:
            return
        with storage_errors(self.directory, "making room for files"):
            self.directory.mkdir(exist_ok=True)  # durable once there is a file
            for path in sorted(self.directory.glob(f"*{_TEMPORARY}")):
                path.unlink()
        self.machine.open_in(self.directory)

    def path(self, name: str) -> Path:
        return self.directory / name

    def lacks(self, files: Collection[FileId]) -> list[FileId]:
        """Those that are not here. Any thread. Raises StorageError."""
        with storage_errors(self.directory, "looking at files"):
            return [file for file in files if not self._is_here(file)]

    def _is_here(self, file: FileId) -> bool:
        path = self.path(file.name)
        return path.exists() and path.stat().st_size == file.size

    def needless(self, files: Collection[FileId]) -> list[Path]:
        """All others than these and those that the machine uses now. Raises StorageError."""
        used = None if self.machine is None else self.machine.files()
        if used is None:
            return []  # it says so later
        names = {file.name for file in (*files, *used, *self.pinned)}
        with storage_errors(self.directory, "looking at files"):
            found = sorted(self.directory.iterdir())
        return [path for path in found if path.name not in names and not path.name.endswith(_TEMPORARY)]

    def piece(self, message: Message, bytes_max: int) -> Message:
        """The answer to who asks for a part of a file, less its term. Raises StorageError."""
        name, offset = message["name"], message["offset"]
        data, total = b"", 0
        with storage_errors(self.path(name), "reading a file to send it"):
            try:
                with self.path(name).open("rb") as file:
                    total = os.fstat(file.fileno()).st_size
                    data = os.pread(file.fileno(), min(message["length"], bytes_max), offset)
            except FileNotFoundError:
                pass
        if offset > total:
            offset = total = 0
        return {"type": FILE_PIECE, "name": name, "offset": offset, "total": total, "data": data}


def delete(paths: Iterable[Path]) -> None:
    """Any thread: it takes its time where files are large. Raises StorageError."""
    for path in paths:
        with storage_errors(path, "deleting a file"):
            path.unlink(missing_ok=True)


class Fetch:
    """Fetches files from peers into their incoming places, one after the other. Raft thread only."""

    def __init__(
        self,
        shelf: FileShelf,
        files: Sequence[FileId],
        ask: Callable[[str, Message], None],
        limits: RaftLimits,
    ) -> None:
        """`ask`: sends a message to a peer, less its term."""
        self.files = tuple(files)
        self._left = deque(files)
        self._shelf = shelf
        self._ask = ask
        self._piece_bytes = limits.snapshot_piece_bytes
        self._peer: str | None = None
        self._refused: set[str] = set()
        self._file: IO[bytes] | None = None
        self._written = 0
        self._asked_to = 0
        self._heard_at = float("-inf")

    @property
    def done(self) -> bool:
        return not self._left

    def incoming(self, file: FileId) -> Path:
        """Where it comes in."""
        return self._shelf.path(file.name + _INCOMING)

    def tick(self, now: float, peers: Sequence[str]) -> bool:
        """Ask the first, or the next in turn where nothing comes. False: none of them has it."""
        if self.done or now - self._heard_at < ASK_AGAIN_S:
            return True
        there = [peer for peer in peers if peer not in self._refused]
        if not there:
            return not peers
        self._peer = self._next(there)
        self._heard_at, self._asked_to = now, self._written
        self._ask_on()
        return True

    def _next(self, there: list[str]) -> str:
        at = there.index(self._peer) + 1 if self._peer in there else 0
        return there[at % len(there)]

    def _ask_on(self) -> None:
        assert self._peer is not None
        file, most = self._left[0], self._written + ASKED_MAX * self._piece_bytes
        while self._asked_to < file.size and self._asked_to < most:
            length = min(self._piece_bytes, file.size - self._asked_to)
            message = {"type": ASK_FILE, "name": file.name, "offset": self._asked_to, "length": length}
            self._ask(self._peer, message)
            self._asked_to += length

    def take(self, now: float, peer: str, message: Message) -> None:
        """A piece; one that was not asked for, or comes out of order, is dropped. Raises StorageError."""
        if self.done or peer != self._peer or message["name"] != self._left[0].name:
            return
        file = self._left[0]
        if message["total"] != file.size:
            self._refused.add(peer)
            self._heard_at = float("-inf")
            return
        if message["offset"] != self._written or not message["data"]:
            return
        path = self.incoming(file)
        with storage_errors(path, "writing a file that comes in"):
            if self._file is None:
                self._file = path.open("wb")
            self._file.write(message["data"])
            self._written += len(message["data"])
            if self._written == file.size:
                self._file.flush()
        self._heard_at = now
        if self._written < file.size:
            self._ask_on()
            return
        self.drop()
        self._left.popleft()
        self._written = self._asked_to = 0
        self._refused.clear()
        self._heard_at = float("-inf")

    def put(self) -> bool:
        """Sync all that has come in, and put in place what is whole; whether all is. Any thread. Raises
        StorageError."""
        machine = self._shelf.machine
        assert machine is not None
        whole = True
        for file in self.files:
            path = self.incoming(file)
            with storage_errors(path, "syncing a file that came in"):
                with path.open("rb") as opened:
                    os.fsync(opened.fileno())
                if machine.verify(path, file):
                    path.rename(self._shelf.path(file.name))
                else:
                    _log.warning("%s: damaged on its way, asked for again", path)
                    path.unlink()
                    whole = False
        with storage_errors(self._shelf.directory, "syncing the directory"):
            disk.make_directory(self._shelf.directory)
            disk.sync_directory(self._shelf.directory)
        return whole

    def drop(self) -> None:
        """Close what is open."""
        if self._file is not None:
            self._file.close()
        self._file = None
