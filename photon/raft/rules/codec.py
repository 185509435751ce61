"""The messages between replicas as bytes. Nine kinds and nothing else; no pickle.

A message is the dict that pysyncobj's handlers take, so that nothing is translated twice. What is read here
could be said by somebody: whether it may be believed is for `guards`.
"""

import operator
import re
import struct
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from photon.core.errors import PhotonError

Message = dict[str, Any]

APPEND_ENTRIES = "append_entries"
NEXT_NODE_IDX = "next_node_idx"
REQUEST_PRE_VOTE = "request_pre_vote"
REQUEST_VOTE = "request_vote"
RESPONSE_PRE_VOTE = "response_pre_vote"
RESPONSE_VOTE = "response_vote"
TIMEOUT_NOW = "timeout_now"
ASK_FILE = "ask_file"  # of a file that a snapshot names, the bytes from `offset` on, up to `length`
FILE_PIECE = "file_piece"  # these, `data`; of a file of `total` bytes, 0 where there is none of that name

FILE_NAME = re.compile(r"[0-9a-z]{1,64}\.[0-9a-z]{1,8}")
"""What a file may be called that a snapshot names."""

_APPEND, _PIECE, _ACK, _ASK_VOTE, _VOTE, _TIMEOUT, _ASK_PRE_VOTE, _PRE_VOTE, _ASK_FILE, _FILE = b"ASNRVTPGFB"
_APPEND_FIXED = struct.Struct("<BQQQQI")  # kind, term, commit, previous index, previous term, entries
_ENTRY = struct.Struct("<QI")  # term, length
_PIECE_FIXED = struct.Struct("<BQQQQQQ")  # kind, term, commit, snapshot's index and term, offset, total
_ACK_FIXED = struct.Struct("<BQQB")  # kind, term, next index, flags
_FILE_FIXED = struct.Struct(
    "<BQQQH"
)  # kind, term, offset, length or total, length of the name, which follows
_RESET, _SUCCESS = 1, 2
_LAST = ("last_log_index", "last_log_term")
# Those about elections: their kind, their fields, and how these follow it.
_ELECTION: dict[int, tuple[str, tuple[str, ...], struct.Struct]] = {
    # `transfer`: whether the leader asked for it.
    _ASK_VOTE: (REQUEST_VOTE, ("term", *_LAST, "transfer"), struct.Struct("<BQQQ?")),
    _ASK_PRE_VOTE: (REQUEST_PRE_VOTE, ("term", "round", *_LAST), struct.Struct("<BQQQQ")),
    _PRE_VOTE: (RESPONSE_PRE_VOTE, ("term", "round"), struct.Struct("<BQQ")),
    _VOTE: (RESPONSE_VOTE, ("term",), struct.Struct("<BQ")),
    _TIMEOUT: (TIMEOUT_NOW, ("term",), struct.Struct("<BQ")),
}
_KINDS = {kind: byte for byte, (kind, _, _) in _ELECTION.items()}
# No term, index or size comes to this; whatever is added to it still fits its field.
NUMBER_BOUND = 1 << 62


class MessageError(PhotonError):
    """Bytes of a peer that are no message of ours. Its connection is closed."""


@dataclass(frozen=True, slots=True)
class SnapshotPiece:
    """Bytes from `offset` on of a snapshot file, of `total` bytes, up to entry `index` of `term`."""

    index: int
    term: int
    offset: int
    total: int
    data: bytes

    @property
    def last(self) -> bool:
        """Whether the file ends with this piece."""
        return self.offset + len(self.data) == self.total


def encode(message: Message) -> bytes:
    """The bytes of a message; MessageError for a kind that is never sent."""
    kind = message["type"]
    term = message["term"]
    if kind == APPEND_ENTRIES:
        piece = message.get("serialized")
        return _encode_append(message) if piece is None else _encode_piece(message, piece)
    if kind == NEXT_NODE_IDX:
        flags = _RESET * message["reset"] + _SUCCESS * message["success"]
        return _ACK_FIXED.pack(_ACK, term, message["next_node_idx"], flags)
    if kind in (ASK_FILE, FILE_PIECE):
        name = message["name"].encode()
        byte, size = (_ASK_FILE, message["length"]) if kind == ASK_FILE else (_FILE, message["total"])
        fixed = _FILE_FIXED.pack(byte, term, message["offset"], size, len(name))
        return b"".join((fixed, name, message.get("data", b"")))
    return _encode_election(kind, message)


def decode(data: bytes) -> Message:
    """The message; MessageError, and nothing else, for any other bytes, and for what no replica can mean."""
    try:
        return _decode(data)
    except struct.error as error:
        raise MessageError("a message of the wrong size") from error


def _encode_election(kind: str, message: Message) -> bytes:
    if kind not in _KINDS:
        raise MessageError(f"{kind!r} is not a message that replicas send")
    _, fields, packing = _ELECTION[_KINDS[kind]]
    said = {"transfer": False, **message}
    return packing.pack(_KINDS[kind], *(said[name] for name in fields))


def _encode_append(message: Message) -> bytes:
    entries = message["entries"]
    lengths = [_ENTRY.pack(term, len(command)) for command, _, term in entries]
    fixed = _APPEND_FIXED.pack(
        _APPEND,
        message["term"],
        message["commit_index"],
        message["prevLogIdx"],
        message["prevLogTerm"],
        len(entries),
    )
    return b"".join([fixed, *lengths, *[entry[0] for entry in entries]])


def _encode_piece(message: Message, piece: SnapshotPiece) -> bytes:
    fixed = _PIECE_FIXED.pack(
        _PIECE, message["term"], message["commit_index"], piece.index, piece.term, piece.offset, piece.total
    )
    return fixed + piece.data


def _check_bounds(*numbers: int) -> None:
    if max(numbers) >= NUMBER_BOUND:
        raise MessageError("a message with a term, an index or a size past all bounds")


def _decode(data: bytes) -> Message:
    kind = data[0] if data else None
    if kind == _APPEND:
        return _decode_append(data)
    if kind == _PIECE:
        return _decode_piece(data)
    if kind == _ACK:
        _, term, index, flags = _ACK_FIXED.unpack(data)
        if flags > _RESET + _SUCCESS:
            raise MessageError("an acknowledgement with unknown flags")
        _check_bounds(term, index)
        return {
            "type": NEXT_NODE_IDX,
            "term": term,
            "next_node_idx": index,
            "reset": bool(flags & _RESET),
            "success": bool(flags & _SUCCESS),
        }
    if kind in (_ASK_FILE, _FILE):
        return _decode_file(kind, data)
    return _decode_election(kind, data)


def _decode_file(kind: int, data: bytes) -> Message:
    _, term, offset, size, length = _FILE_FIXED.unpack_from(data)
    start = _FILE_FIXED.size + length
    name, rest = data[_FILE_FIXED.size : start].decode("ascii", "replace"), data[start:]
    _check_bounds(term, offset, size)
    if not FILE_NAME.fullmatch(name) or len(name) != length:
        raise MessageError("a message about a file with a name that none has")
    if kind == _ASK_FILE:
        if rest:
            raise MessageError("a message of the wrong size")
        return {"type": ASK_FILE, "term": term, "name": name, "offset": offset, "length": size}
    if offset + len(rest) > size:
        raise MessageError("a piece that lies outside its file")
    return {"type": FILE_PIECE, "term": term, "name": name, "offset": offset, "total": size, "data": rest}


def _decode_election(kind: int | None, data: bytes) -> Message:
    if kind not in _ELECTION:
        raise MessageError(f"a message of unknown kind {kind}")
    name, fields, packing = _ELECTION[kind]
    _, *values = packing.unpack(data)
    _check_bounds(*values)
    message = {"type": name, **dict(zip(fields, values, strict=True))}
    if encode(message) != data:
        raise MessageError("a request for a vote with unknown flags")
    return message


def _decode_append(data: bytes) -> Message:
    _, term, commit, previous, previous_term, count = _APPEND_FIXED.unpack_from(data)
    start = _APPEND_FIXED.size
    body = start + count * _ENTRY.size
    if body > len(data):
        raise MessageError("an append_entries that ends within its entries")
    _check_bounds(term, commit, previous + count, previous_term)
    heads = list(_ENTRY.iter_unpack(data[start:body]))
    terms = [entry_term for entry_term, _ in heads]
    lengths = [length for _, length in heads]
    ends = list(accumulate(lengths, initial=body))
    if ends[-1] != len(data):
        raise MessageError("an append_entries whose entries do not add up to its size")
    if not all(lengths):
        raise MessageError("an append_entries with an empty command")
    if any(map(operator.gt, [previous_term, *terms], [*terms, term])):
        raise MessageError("an append_entries with entries whose terms fall, or lie above their leader's")
    indices = range(previous + 1, previous + 1 + count)
    entries = [
        (data[begin:end], index, entry_term)
        for entry_term, begin, end, index in zip(terms, ends, ends[1:], indices, strict=False)
    ]
    return {
        "type": APPEND_ENTRIES,
        "term": term,
        "commit_index": commit,
        "prevLogIdx": previous,
        "prevLogTerm": previous_term,
        "entries": entries,
    }


def _decode_piece(data: bytes) -> Message:
    _, term, commit, index, snapshot_term, offset, total = _PIECE_FIXED.unpack_from(data)
    piece = SnapshotPiece(index, snapshot_term, offset, total, data[_PIECE_FIXED.size :])
    if offset + len(piece.data) > total:
        raise MessageError("a piece that lies outside its snapshot")
    _check_bounds(term, commit, index, total)
    if snapshot_term > term:
        raise MessageError("a piece of a snapshot of a later term than its leader is in")
    return {"type": APPEND_ENTRIES, "term": term, "commit_index": commit, "serialized": piece}
