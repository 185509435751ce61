"""Messages on a byte stream: length, checksum, group, bytes. Pure: no socket.

A frame with the wrong checksum or a length past the bound ends the connection: the stream can't be trusted
after it.
"""

import struct
import zlib

from photon.core.errors import PhotonError

_HEADER = struct.Struct("<III")  # length of the message, crc of group and message, group
HEADER_BYTES = _HEADER.size
# A frame of this group, without a message, only says that its sender is alive.
PING_GROUP = 0xFFFFFFFF


class FrameError(PhotonError):
    """Bytes of a peer that are no frame. Its connection is closed."""


def _checksum(group: int, message: bytes) -> int:
    return zlib.crc32(message, group & 0xFFFFFFFF)


def pack_frame(group: int, message: bytes) -> bytes:
    """The header to send before the message."""
    return _HEADER.pack(len(message), _checksum(group, message), group)


class FrameReader:
    """Cuts a stream into frames."""

    def __init__(self, bytes_max: int) -> None:
        """`bytes_max`: the longest message believed."""
        self._bytes_max = bytes_max
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[tuple[int, bytes]]:
        """The frames that are complete now, as (group, message). Raises FrameError."""
        self._buffer += data
        frames = []
        offset = 0
        while len(self._buffer) - offset >= HEADER_BYTES:
            length, crc, group = _HEADER.unpack_from(self._buffer, offset)
            if length > self._bytes_max:
                raise FrameError(f"a frame of {length} bytes, where {self._bytes_max} is the most")
            end = offset + HEADER_BYTES + length
            if end > len(self._buffer):
                break
            message = bytes(memoryview(self._buffer)[offset + HEADER_BYTES : end])
            if _checksum(group, message) != crc:
                raise FrameError("a frame whose checksum is wrong")
            frames.append((group, message))
            offset = end
        if offset:
            del self._buffer[:offset]
        return frames
