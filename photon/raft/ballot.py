"""The durable term and vote of one replica (Raft's `currentTerm` and `votedFor`), and whose they are."""

import struct
import zlib
from pathlib import Path

from photon.raft import disk

_MAGIC = b"PHRAFTB1"
_FIXED = struct.Struct("<8sQQHH")  # magic, term, group, length of node, length of vote (0xFFFF: none)
_NO_VOTE = 0xFFFF
_FILE = "ballot"


class Ballot:
    """`store` returns when term and vote are on disk: only then may any message speak of them."""

    def __init__(self, directory: Path, node: str, group: int) -> None:
        """Read the file where there is one.

        Raises CorruptStateError when it is damaged or another replica's.
        """
        self.path = directory / _FILE
        self.node = node
        self.group = group
        self.term = 0
        self.vote: str | None = None
        self.exists = self.path.exists()
        if self.exists:
            self._read()

    def store(self, term: int, vote: str | None) -> None:
        """Raises StorageError."""
        if self.exists and (term, vote) == (self.term, self.vote):
            return
        node = self.node.encode()
        named = b"" if vote is None else vote.encode()
        length = _NO_VOTE if vote is None else len(named)
        body = _FIXED.pack(_MAGIC, term, self.group, len(node), length) + node + named
        try:
            disk.write_file(self.path, body + struct.pack("<I", zlib.crc32(body)))
        except OSError as error:
            raise disk.storage_error(self.path, "writing term and vote", error) from error
        self.term, self.vote, self.exists = term, vote, True

    def _read(self) -> None:
        try:
            data = self.path.read_bytes()
        except OSError as error:
            raise disk.storage_error(self.path, "reading term and vote", error) from error
        body = data[:-4]
        if len(body) < _FIXED.size or struct.pack("<I", zlib.crc32(body)) != data[-4:]:
            raise disk.corrupt(
                self.path, "term and vote are damaged (a replica without them could vote twice)"
            )
        magic, term, group, node_length, vote_length = _FIXED.unpack_from(body)
        split = _FIXED.size + node_length
        node = body[_FIXED.size : split].decode()
        if magic != _MAGIC or (node, group) != (self.node, self.group):
            raise disk.corrupt(
                self.path,
                f"this is the state of {node} in group {group}, not {self.node} in group {self.group}",
            )
        self.term = term
        self.vote = None if vote_length == _NO_VOTE else body[split : split + vote_length].decode()
