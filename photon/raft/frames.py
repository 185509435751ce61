"""Messages on a byte stream: length, group, MAC, bytes. Pure: no socket.

The MAC is keyed BLAKE2b, 16 bytes, over the frame's number on its connection and direction, its length and
group, and its message. The number is counted at both ends and never sent: a frame that is changed, left out,
repeated or moved does not verify, and that ends the connection, as the stream can't be trusted after it.

Where there is no secret (loopback only) the key is one that anybody could make: then the MAC is a checksum.
"""

import hashlib
import hmac
import struct

from photon.core.errors import PhotonError

_HEAD = struct.Struct("<II")  # length of the message, group
_SIGNED = struct.Struct("<QII")  # number of the frame, and the head
MAC_BYTES = 16
HEADER_BYTES = _HEAD.size + MAC_BYTES
# A frame of this group, without a message, only says that its sender is alive.
PING_GROUP = 0xFFFFFFFF


class FrameError(PhotonError):
    """Bytes of a peer that are no frame. Its connection is closed."""


class _Signer:
    """Counts the frames of one direction, and signs them in their order."""

    def __init__(self, key: bytes) -> None:
        self._keyed = hashlib.blake2b(key=key, digest_size=MAC_BYTES)  # a copy is cheaper than a new one
        self._number = 0

    def sign(self, group: int, message: bytes | memoryview) -> bytes:
        mac = self._keyed.copy()
        mac.update(_SIGNED.pack(self._number, len(message), group))
        mac.update(message)
        self._number += 1
        return mac.digest()


class FrameWriter:
    """Makes the headers of what one end sends."""

    def __init__(self, key: bytes) -> None:
        """`key`: the session's of this direction, 1 to 64 bytes."""
        self._signer = _Signer(key)

    def header(self, group: int, message: bytes) -> bytes:
        """What to send before the message; the frames are to be sent in the order of the calls."""
        return _HEAD.pack(len(message), group) + self._signer.sign(group, message)


class FrameReader:
    """Cuts a stream into frames, and believes none that does not verify."""

    def __init__(self, key: bytes, bytes_max: int) -> None:
        """`key`: that of the writer at the other end. `bytes_max`: the longest message believed."""
        self._signer = _Signer(key)
        self._bytes_max = bytes_max
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """The frames that are complete now, as (group, message). Raises FrameError."""
        self._buffer += data
        frames = []
        offset = 0
        while len(self._buffer) - offset >= HEADER_BYTES:
            length, group = _HEAD.unpack_from(self._buffer, offset)
            if length > self._bytes_max:
                raise FrameError(f"a frame of {length} bytes, where {self._bytes_max} is the most")
            start = offset + HEADER_BYTES
            end = start + length
            if end > len(self._buffer):
                break
            message = bytes(memoryview(self._buffer)[start:end])
            mac = self._buffer[start - MAC_BYTES : start]
            if not hmac.compare_digest(mac, self._signer.sign(group, message)):
                raise FrameError("a frame that does not verify: it was changed, repeated or moved on its way")
            frames.append((group, message))
            offset = end
        if offset:
            del self._buffer[:offset]
        return frames
