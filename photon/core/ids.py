"""Event ids in 16 bytes (paper 3.1; docs/decisions/002-event-ids.md).

Three kinds, told apart by the first nibble, so that an id carries its kind wherever it goes:

    0x0-0xD  photon id of an IPv4 server   ip (4) | process id (4) | timestamp us (8)
    0xF      photon id of an IPv6 server   keyed digest of ip and process id (8) | timestamp us (8)
    0xE      opaque id                     keyed digest of the text (16)

0xE0/4 is multicast and 0xF0/4 is reserved: no server has such an address. The first 8 bytes of a photon
id are its *server key*; ids of one server and process sort by time.

A token says who asked the IdRegistry for an id, unique for ever (3.3.2): version (1), incarnation (8), time
us (8), little endian, then the joiner's address in UTF-8. An incarnation is one life of a joiner process, a
random number.
"""

import hashlib
import ipaddress
import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Final

import numpy as np
import numpy.typing as npt

ID_BYTES: Final = 16
DEFAULT_KEY: Final = b"photon"

_SERVER_CACHE_MAX: Final = 65_536
_DIGITS_MAX: Final = 18  # fits a signed 64-bit integer whatever the digits
_TAIL: Final = 16  # digits of a timestamp of our days
_WIDTHS: Final = 48, 72  # of a padded id: IPv4 or a short IPv6 address; any
_OPAQUE_NIBBLE: Final = 0xE0
_IPV6_NIBBLE: Final = 0xF0
_HIGH_NIBBLES: Final = np.uint64(0xF0F0F0F0F0F0F0F0)
_LOW_NIBBLES: Final = np.uint64(0x0F0F0F0F0F0F0F0F)
_ZEROS: Final = np.uint64(0x3030303030303030)
_SIXES: Final = np.uint64(0x0606060606060606)
_PAIRS: Final = np.uint64(10 * 2**8 + 1)
_QUADS: Final = np.uint64(100 * 2**16 + 1)
_EIGHTS: Final = np.uint64(10_000 * 2**32 + 1)
_SERVER: Final = re.compile(r"(?:(\d+\.\d+\.\d+\.\d+)|\[([0-9a-f:]+)\]):(0|[1-9]\d*)", re.ASCII)


class IdPacker:
    """Packs id texts into 16-byte columns. `key` makes the digests unguessable; all rooms share it.

    Not for several threads at once (it caches the servers it has seen).
    """

    def __init__(self, key: bytes = DEFAULT_KEY) -> None:
        self._digest = hashlib.blake2b(digest_size=ID_BYTES, key=key)
        self._servers: dict[str, bytes] = {}
        self._padded: dict[bytes, bytes] = {}

    def pack(self, ids: Sequence[str | int]) -> bytes:
        """N ids -> 16 x N bytes, in order. A number stands for its text; a text that is no canonical photon
        id is an opaque id."""
        if not ids:
            return b""
        try:
            joined = "".join(ids)  # type: ignore[arg-type]
        except TypeError:
            return self.pack(list(map(str, ids)))
        texts: Sequence[str] = ids  # type: ignore[assignment]
        if ":" not in joined:
            return self._pack_opaque(texts)
        packed = self._pack_alike(texts, joined)
        if packed is not None:
            return packed
        heads, _, tails = zip(*[t.rpartition(":") for t in texts], strict=True)
        keys = self._server_keys(heads)
        if None not in keys and _all_canonical(tails):
            return _photon_column(keys, _times(tails))
        return self._pack_mixed(texts, keys, tails)

    def _pack_alike(self, texts: Sequence[str], joined: str) -> bytes | None:
        """The common batch at a quarter of the cost: photon ids of the years 2001 to 2286; None for others.

        The texts are written right-aligned into rows of one width, which are then worked on as numbers.
        """
        count = len(texts)
        for width in _WIDTHS:
            table = (f"%{width}s" * count) % tuple(texts)
            if len(table) == width * count:
                break
        else:
            return None
        if not joined.isascii():
            return None
        rows = np.frombuffer(table.encode("ascii"), np.uint8).reshape(count, width)
        # A text that begins with a space is another one than that without.
        if np.count_nonzero(rows != ord(" ")) != len(joined):
            return None
        times = _digits_to_numbers(np.ascontiguousarray(rows[:, -_TAIL:]))
        if times is None or (rows[:, -_TAIL] == ord("0")).any():
            return None
        heads = np.ascontiguousarray(rows[:, :-_TAIL]).view(f"V{width - _TAIL}")[:, 0].tolist()
        try:
            keys = list(map(self._padded.__getitem__, heads))
        except KeyError:
            if not self._learn(set(heads)):
                return None  # some head is of no server
            keys = list(map(self._padded.__getitem__, heads))
        return _photon_column(keys, times)

    def _learn(self, heads: set[bytes]) -> bool:
        """Remember the servers of padded heads, each closed by its colon. False if one is no server."""
        unknown = heads - self._padded.keys()
        if len(self._padded) + len(unknown) > _SERVER_CACHE_MAX:
            self._padded.clear()
            unknown = heads
        for head in unknown:
            text = head.decode("ascii").lstrip(" ")
            key = self._parse_server(text[:-1]) if text.endswith(":") else None
            if key is None:
                return False
            self._padded[head] = key
        return True

    def _pack_mixed(self, texts: Sequence[str], keys: Sequence[bytes | None], tails: Sequence[str]) -> bytes:
        """Photon and opaque ids in one batch: each kind is packed by itself and put in its rows."""
        photon = [key is not None and _all_canonical((tail,)) for key, tail in zip(keys, tails, strict=True)]
        if not any(photon):
            return self._pack_opaque(texts)
        rows = np.array(photon, np.bool_)
        column = np.empty(len(texts), f"V{ID_BYTES}")
        column[~rows] = np.frombuffer(self._pack_opaque(list(compress(texts, ~rows))), f"V{ID_BYTES}")
        packed = _photon_column(list(compress(keys, photon)), _times(list(compress(tails, photon))))
        column[rows] = np.frombuffer(packed, f"V{ID_BYTES}")
        return column.tobytes()

    def _pack_opaque(self, texts: Sequence[str]) -> bytes:
        try:
            encoded = list(map(str.encode, texts))
        except UnicodeEncodeError:
            encoded = [text.encode("utf-8", "surrogatepass") for text in texts]
        fresh = self._digest.copy
        digests = []
        for text in encoded:  # nothing to gain without the loop: the digest itself is the cost
            digest = fresh()
            digest.update(text)
            digests.append(digest.digest())
        column = np.frombuffer(bytearray(b"".join(digests)), np.uint8).reshape(-1, ID_BYTES)
        column[:, 0] = column[:, 0] & 0x0F | _OPAQUE_NIBBLE
        return column.tobytes()

    def _server_keys(self, heads: Sequence[str]) -> list[bytes | None]:
        try:
            return list(map(self._servers.__getitem__, heads))
        except KeyError:
            keys = {head: self._servers.get(head) or self._parse_server(head) for head in set(heads)}
        if len(self._servers) + len(keys) > _SERVER_CACHE_MAX:
            self._servers.clear()
        # Texts that only look like ids have a head each: they must not push the servers out.
        self._servers |= {head: key for head, key in keys.items() if key is not None}
        return list(map(keys.__getitem__, heads))

    def _parse_server(self, head: str) -> bytes | None:
        """`10.0.0.1:4242` or `[2001:db8::1]:4242` -> 8 bytes; None if not in canonical form."""
        match = _SERVER.fullmatch(head)
        if match is None or len(match[3]) > 10 or int(match[3]) > 0xFFFF_FFFF:
            return None
        process = int(match[3]).to_bytes(4, "big")
        try:
            if match[1]:
                packed = ipaddress.IPv4Address(match[1]).packed
                return packed + process if packed[0] < _OPAQUE_NIBBLE else None
            address = ipaddress.IPv6Address(match[2])
        except ValueError:
            return None
        # How Python writes a mapped IPv4 address depends on its version: no canonical form, so no photon id.
        if address.ipv4_mapped is not None or str(address) != match[2]:
            return None
        digest = self._digest.copy()
        digest.update(b"server" + address.packed + process)
        key = digest.digest()[:8]
        return bytes([key[0] & 0x0F | _IPV6_NIBBLE]) + key[1:]


def _digits_to_numbers(digits: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint64] | None:
    """N x 16 ASCII digits -> N numbers, eight digits at a time in a word; None if one is no digit."""
    words = digits.view("<u8")
    if ((words & _HIGH_NIBBLES) != _ZEROS).any() or (((words + _SIXES) & _HIGH_NIBBLES) != _ZEROS).any():
        return None
    words = (words & _LOW_NIBBLES) * _PAIRS >> np.uint64(8)
    words = (words & np.uint64(0x00FF00FF00FF00FF)) * _QUADS >> np.uint64(16)
    words = (words & np.uint64(0x0000FFFF0000FFFF)) * _EIGHTS >> np.uint64(32)
    numbers: npt.NDArray[np.uint64] = words[:, 0] * np.uint64(10**8) + words[:, 1]
    return numbers


def _times(tails: Sequence[str]) -> npt.NDArray[np.int64]:
    return np.fromiter(map(int, tails), np.int64, len(tails))


def _photon_column(
    keys: Sequence[bytes | None], times: npt.NDArray[np.int64] | npt.NDArray[np.uint64]
) -> bytes:
    """N server keys and N timestamps -> 16 x N bytes."""
    column = np.empty((len(keys), 2), ">u8")
    column[:, 0] = np.frombuffer(b"".join(keys), ">u8")  # type: ignore[arg-type]
    column[:, 1] = times
    return column.tobytes()


def _all_canonical(tails: Sequence[str]) -> bool:
    """Decimal without sign or leading zeros and small enough: one text for one number."""
    joined = "".join(tails)
    if not (joined.isascii() and joined.isdigit()) or "" in tails or max(map(len, tails)) > _DIGITS_MAX:
        return False
    return min(tails) >= "1" or not any(t[0] == "0" and t != "0" for t in tails)


def opaque_mask(ids: bytes) -> npt.NDArray[np.bool_]:
    """16 x N bytes -> N flags: which ids are opaque."""
    first: npt.NDArray[np.uint8] = np.frombuffer(ids, np.uint8)[::ID_BYTES]
    mask: npt.NDArray[np.bool_] = (first & 0xF0) == _OPAQUE_NIBBLE
    return mask


def server_keys(ids: bytes) -> npt.NDArray[np.uint64]:
    """16 x N bytes -> N server keys (native uint64, same order as the bytes). Meaningless for opaque ids."""
    return np.frombuffer(ids, ">u8")[::2].astype(np.uint64)


def timestamps_us(ids: bytes) -> npt.NDArray[np.int64]:
    """16 x N bytes -> N event times in microseconds. Meaningless for opaque ids."""
    return np.frombuffer(ids, ">i8")[1::2].astype(np.int64)


_HEAD: Final = struct.Struct("<BQq")
_VERSION: Final = 1
TOKEN_BYTES_MIN: Final = _HEAD.size
TOKEN_BYTES_MAX: Final = 1024


@dataclass(frozen=True, slots=True)
class Token:
    """Joiner's server address, incarnation of its process, and a time (us) unique in that incarnation."""

    address: str
    incarnation: int
    time_us: int

    def pack(self) -> bytes:
        return _HEAD.pack(_VERSION, self.incarnation, self.time_us) + self.address.encode()


def parse_token(packed: bytes) -> Token:
    """The reverse of `Token.pack`. ValueError for bytes that are no token of this version."""
    if not TOKEN_BYTES_MIN <= len(packed) <= TOKEN_BYTES_MAX or packed[0] != _VERSION:
        raise ValueError(f"not a joiner's token of version {_VERSION}: {packed[:32]!r}")
    _, incarnation, time_us = _HEAD.unpack_from(packed)
    return Token(packed[_HEAD.size :].decode(), incarnation, time_us)


# --- Marks: what the IdRegistry remembers of primary events, beside the foreign events joined with them.
#
# *Matched* and *unmatched* exclude each other in all datacenters: both are registered under the same id,
# which is the primary event's own with its bits turned, and the first wins. A token of each kind is the same
# for all, so a mark that is set is set for whoever sets it again, at any time, from anywhere.

MATCHED: Final = Token("matched", 1, 0).pack()
"""A joiner sets it before it registers an event that it joined with the primary event."""
UNMATCHED: Final = Token("unmatched", 2, 0).pack()
"""Set by whoever says that the primary event has no match, and never will."""
_DECIDED: Final = "decided"
MARK_ADDRESSES: Final = frozenset({"matched", "unmatched", _DECIDED})
"""In place of a joiner's: tokens of these hold marks, not events."""

_TURNED: Final = np.frombuffer(bytes.fromhex("9e3779b97f4a7c15f39cc0605cedc834"), np.uint8)


def decided_token(datacenter: str) -> bytes:
    """Of a datacenter that decides a result of MillWheel: the same in each of its lives, so that it wins
    again what it had won before."""
    digest = hashlib.blake2b(datacenter.encode(), digest_size=8).digest()
    return Token(_DECIDED, int.from_bytes(digest, "big"), 0).pack()


def mark_ids(ids: bytes) -> bytes:
    """16 x N ids of primary events, or of results -> those of their marks, no event's."""
    return (np.frombuffer(ids, np.uint8).reshape(-1, ID_BYTES) ^ _TURNED).tobytes()
