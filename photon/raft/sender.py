"""What a leader sends to its followers: entries, or a snapshot where its log begins too late."""

from collections.abc import Collection
from pathlib import Path
from typing import IO, Protocol

from photon.raft.core import RaftCore
from photon.raft.journal import storage_errors
from photon.raft.port import RaftLimits
from photon.raft.rules.codec import APPEND_ENTRIES, Message, SnapshotPiece, encode
from photon.raft.snapshot import SnapshotId, verified
from photon.raft.store import ReplicaStore

# A snapshot waits while more than this part of what may wait for a peer does.
SNAPSHOT_SHARE = 4


class Wire(Protocol):
    """The way to the peers.

    In order, and whole, on each connection; a lost connection is told to the replica.
    """

    def send(self, peer: str, data: bytes) -> None:
        """Queue a message; it is lost where there is no connection."""

    def room(self, peer: str) -> int:
        """Bytes that may still be queued for the peer."""


class Transfer:
    """A snapshot on its way to one peer. It goes on reading its file though a newer one takes the name.

    Each chunk is verified before it goes: what has rotted here would be refused there, and asked for again
    without end, where it is this replica that must be replaced.
    """

    def __init__(self, path: Path, covers: SnapshotId) -> None:
        self.covers = covers
        self._path = path
        with storage_errors(path, "reading a snapshot to send it"):
            self._file: IO[bytes] = path.open("rb")
            self._total = path.stat().st_size
        self._offset = 0
        self._unsent = bytearray()
        self._chunks = verified(path, self)

    def read(self, size: int) -> bytes:
        """What is read to be verified is to be sent."""
        data = self._file.read(size)
        self._unsent += data
        return data

    def piece(self, size: int) -> SnapshotPiece:
        """The next piece, of up to `size` bytes (none of it with 0). CorruptStateError, StorageError."""
        with storage_errors(self._path, "reading a snapshot to send it"):
            while len(self._unsent) < size and next(self._chunks, None) is not None:
                pass
        data = bytes(self._unsent[:size])
        del self._unsent[:size]
        piece = SnapshotPiece(self.covers.index, self.covers.term, self._offset, self._total, data)
        self._offset += len(data)
        return piece

    def close(self) -> None:
        self._file.close()


class Sender:
    """Sends to every connected peer what it lacks, as far as there is room on the way."""

    def __init__(self, core: RaftCore, store: ReplicaStore, wire: Wire, limits: RaftLimits) -> None:
        self._core = core
        self._journal = store.journal
        self._snapshots = store.snapshots
        self._wire = wire
        self._limits = limits
        self._transfers: dict[str, Transfer] = {}
        self._encoded: dict[tuple[int, int], bytes] = {}
        self.behind = False  # something is left that found no room

    def send_all(self, heartbeat: bool) -> None:
        """To each peer what is new; with `heartbeat` something even where nothing is."""
        self.behind = False
        for peer in self._core.connected():
            if self._core.next_index(peer) <= self._journal.first_index:
                self._send_snapshot(peer, heartbeat)
            else:
                self.forget(peer)
                self._send_entries(peer, heartbeat)
        self._encoded.clear()

    def forget(self, peer: str) -> None:
        """Give up what is on its way to the peer."""
        transfer = self._transfers.pop(peer, None)
        if transfer is not None:
            transfer.close()

    def forget_others(self, peers: Collection[str]) -> None:
        """Give up what is on its way to anybody else."""
        for peer in self._transfers.keys() - set(peers):
            self.forget(peer)

    def forget_all(self) -> None:
        for peer in list(self._transfers):
            self.forget(peer)

    @property
    def transferring(self) -> bool:
        """Whether a snapshot is on its way, whose following entries should be kept."""
        return bool(self._transfers)

    def _send_entries(self, peer: str, heartbeat: bool) -> None:
        core, journal = self._core, self._journal
        while True:
            start = core.next_index(peer)
            count = self._batch(start, self._wire.room(peer))
            if count or heartbeat:
                self._wire.send(peer, self._append_entries(start, count))
            heartbeat = False
            core.set_next_index(peer, start + count)
            if not count or start + count > journal.last_index:
                break
        self.behind |= core.next_index(peer) <= journal.last_index

    def _batch(self, start: int, room: int) -> int:
        """How many entries from `start` on go into one message: up to the bound, and as many as fit."""
        entries = self._journal.entries
        begin = at = start - self._journal.first_index
        left = min(room, self._limits.batch_bytes)
        while at < len(entries) and (left := left - len(entries[at][0])) >= 0:
            at += 1
        return at - begin

    def _append_entries(self, start: int, count: int) -> bytes:
        """Most followers lack the same entries: the bytes are made once a turn."""
        data = self._encoded.get((start, count))
        if data is None:
            at = start - self._journal.first_index
            message: Message = {
                "type": APPEND_ENTRIES,
                "term": self._core.term,
                "commit_index": self._core.commit_index,
                "prevLogIdx": start - 1,
                "prevLogTerm": self._journal.entries[at - 1][2],
                "entries": self._journal.entries[at : at + count],
            }
            data = self._encoded[start, count] = encode(message)
        return data

    def _send_snapshot(self, peer: str, heartbeat: bool) -> None:
        transfer = self._transfers.get(peer)
        if transfer is None:
            covers = self._snapshots.current
            assert covers is not None, "a log that does not begin at 1 has a snapshot"
            transfer = self._transfers[peer] = Transfer(self._snapshots.path, covers)
        limits = self._limits
        self.behind = True
        # The rest of the room is for the entries of other groups, which share the connection.
        while self._wire.room(peer) >= limits.outgoing_bytes - limits.outgoing_bytes // SNAPSHOT_SHARE:
            heartbeat = False
            if self._send_piece(peer, transfer.piece(limits.snapshot_piece_bytes)):
                self._core.set_next_index(peer, transfer.covers.index + 1)
                self.forget(peer)
                return
        if heartbeat:
            self._send_piece(peer, transfer.piece(0))

    def _send_piece(self, peer: str, piece: SnapshotPiece) -> bool:
        """Returns whether it was the last one."""
        message: Message = {
            "type": APPEND_ENTRIES,
            "term": self._core.term,
            "commit_index": self._core.commit_index,
            "serialized": piece,
        }
        self._wire.send(peer, encode(message))
        return piece.last
