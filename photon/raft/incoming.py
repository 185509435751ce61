"""A snapshot while it comes in from the leader, piece by piece."""

from pathlib import Path
from typing import IO

from photon.raft import disk
from photon.raft.codec import SnapshotPiece


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
