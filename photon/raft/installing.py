"""A snapshot of a leader, from its first piece until it is the state: synced, verified, read beside the work.

Nothing is replaced before all of it is verified, and the other groups of the host go on meanwhile.
"""

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO

from photon.core.errors import PhotonError
from photon.raft import journal as disk
from photon.raft.port import Preparing, StateMachine
from photon.raft.rules.codec import SnapshotPiece
from photon.raft.snapshot import Head, Job, Jobs, SnapshotId, StateMachineError, read_chunks, read_head

_log = logging.getLogger(__name__)


class Incoming:
    """Takes the pieces of one snapshot of one leader in one term, in order; any other begins anew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file: IO[bytes] | None = None
        self._source: tuple[str, int, int, int, int] | None = None
        self._received = 0

    def take(self, peer: str, term: int, piece: SnapshotPiece) -> bool:
        """Whether the snapshot is complete now, at `path`, neither synced nor verified. Raises StorageError.

        A piece out of order is dropped: the leader notices, when what follows the snapshot does not fit, and
        sends it again.
        """
        source = (peer, term, piece.index, piece.term, piece.total)
        try:
            if piece.offset == 0 and piece.data:
                self._begin(source)
            if self._file is None or source != self._source or piece.offset != self._received:
                return False
            self._file.write(piece.data)
            self._received += len(piece.data)
            if self._received < piece.total:
                return False
            self._file.flush()
        except OSError as error:
            raise disk.storage_error(self.path, "writing a snapshot that comes in", error) from error
        self.drop()
        return True

    def drop(self) -> None:
        """Give up what came in so far."""
        if self._file is not None:
            self._file.close()
        self._file = self._source = None

    def _begin(self, source: tuple[str, int, int, int, int]) -> None:
        self.drop()
        self._file = self.path.open("wb")
        self._source = source
        self._received = 0


class _Abandoned(Exception):
    """The replica stops before the snapshot is its state."""


class Installation:
    """One snapshot; `work` is what a job does."""

    def __init__(self, peer: str, expected: SnapshotId, path: Path, machine: StateMachine) -> None:
        self.peer = peer
        self.expected = expected
        self.head: Head | None = None  # once it is verified
        self._path = path
        self._machine = machine
        self._put: Callable[[], None] | None = None
        self._abandoned = False

    def work(self) -> None:
        """Raises StorageError, and what the state machine raises."""
        try:
            with self._path.open("rb") as file:
                os.fsync(file.fileno())
        except OSError as error:
            raise disk.storage_error(self._path, "syncing a snapshot that came in", error) from error
        self.head = self._verified()
        if self.head is not None and isinstance(self._machine, Preparing):
            self._put = self._machine.prepare(self._chunks())

    def abandon(self) -> None:
        """End soon; nobody asks for the result."""
        self._abandoned = True

    def put_state(self, installed: Path) -> None:
        """The snapshot has been put in place at `installed`: its state takes the present one's."""
        if self._put is not None:
            self._put()
        else:
            self._machine.restore(read_chunks(installed))

    def _chunks(self) -> Iterator[bytes]:
        for chunk in read_chunks(self._path):
            if self._abandoned:
                raise _Abandoned
            yield chunk

    def _verified(self) -> Head | None:
        try:
            head = read_head(self._path)
            if head.covers == self.expected:
                for _ in self._chunks():
                    pass
                return head
            _log.warning(
                "%s: came in as another snapshot than it was said to be; asking for it again", self._path
            )
        except disk.DamagedError as error:
            # Only what came in: this replica has lost nothing.
            _log.warning(
                "%s: damaged on its way from %s, asked for again: %s", self._path, self.peer, error.what
            )
        return None


class Installer:
    """One at a time, when the host has a job free. Raft thread only."""

    def __init__(self, machine: StateMachine, path: Path, jobs: Jobs) -> None:
        """`path`: where a snapshot comes in."""
        self._machine = machine
        self._path = path
        self._jobs = jobs
        self._installation: Installation | None = None
        self._job: Job | None = None

    @property
    def busy(self) -> bool:
        """Whether a snapshot has come in that is not dealt with: no other may come in over it."""
        return self._installation is not None

    def begin(self, peer: str, covers: SnapshotId) -> None:
        """The peer's snapshot has come in whole."""
        assert not self.busy
        self._installation = Installation(peer, covers, self._path, self._machine)

    def abandon(self) -> None:
        """The replica stops; what came in is dropped at the next start."""
        if self._installation is not None:
            self._installation.abandon()

    def poll(self) -> Installation | None:
        """The one that is ready now (its `head` None where it was damaged). Raises StorageError,
        StateMachineError.
        """
        if self._installation is None:
            return None
        if self._job is None:
            if not self._jobs.busy():
                self._job = self._jobs.start(self._installation.work)
            return None
        if not self._job.done():
            return None
        job, self._job = self._job, None
        installation, self._installation = self._installation, None
        try:
            job.result()
        except PhotonError:
            raise
        except Exception as error:
            raise StateMachineError(f"the state machine's prepare raised {error!r}") from error
        return installation
