"""Frames: they survive any cut of the stream, and no change of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon.raft.links import FrameError, FrameReader, FrameWriter

KEY = b"a session's key"
Frames = list[tuple[int, bytes]]


def written(frames: Frames, key: bytes | None = KEY) -> list[bytes]:
    writer = FrameWriter(key)
    return [writer.header(group, message) + message for group, message in frames]


@pytest.mark.parametrize("key", [KEY, None])
@given(st.lists(st.tuples(st.integers(0, 2**32 - 1), st.binary(max_size=50)), max_size=6), st.data())
def test_frames_survive_any_cut_of_the_stream(key: bytes | None, frames: Frames, data: st.DataObject) -> None:
    """With MACs, and without them, as they are inside TLS."""
    stream = b"".join(written(frames, key))
    reader = FrameReader(key, 100)
    read = []
    while stream:
        size = data.draw(st.integers(1, len(stream)))
        read += reader.feed(stream[:size])
        stream = stream[size:]
    assert read == frames


def test_any_flipped_bit_ends_the_stream() -> None:
    (frame,) = written([(7, b"message")])
    for bit in range(len(frame) * 8):
        damaged = bytearray(frame)
        damaged[bit // 8] ^= 1 << bit % 8
        reader = FrameReader(KEY, 100)
        with pytest.raises(FrameError):
            # What follows completes a frame that was made longer.
            assert not reader.feed(bytes(damaged)) and not reader.feed(bytes(200))


@pytest.mark.parametrize("order", [(0, 0), (1,), (1, 0), (0, 2), (0, 1, 1), (0, 1, 0)])
def test_a_frame_that_is_repeated_moved_or_left_out_ends_the_stream(order: tuple[int, ...]) -> None:
    """Two of the frames are the same, but for their place."""
    frames = written([(1, b"same"), (1, b"same"), (1, b"other")])
    with pytest.raises(FrameError, match="does not verify"):
        FrameReader(KEY, 100).feed(b"".join(frames[at] for at in order))


def test_frames_of_another_session_or_direction_do_not_verify() -> None:
    (frame,) = written([(1, b"message")], b"another key")
    with pytest.raises(FrameError, match="does not verify"):
        FrameReader(KEY, 100).feed(frame)


def test_bytes_moved_between_header_and_message_do_not_verify() -> None:
    """What is signed says where each field ends."""
    writer = FrameWriter(KEY)
    header = writer.header(0x41414141, b"BB")
    moved = header[:4] + b"BBBB" + header[8:] + b"AA"
    with pytest.raises(FrameError, match="does not verify"):
        FrameReader(KEY, 100).feed(moved)


@pytest.mark.parametrize("key", [KEY, None])
@pytest.mark.parametrize("length", [101, 1 << 20, 0x7FFFFFFF, 0xFFFFFFFF])
def test_a_giant_length_is_refused_before_anything_is_kept(key: bytes | None, length: int) -> None:
    header_bytes = len(FrameWriter(key).header(1, b""))
    assert header_bytes == (24 if key else 8)
    with pytest.raises(FrameError, match="where 100 is the most"):
        FrameReader(key, 100).feed(length.to_bytes(4, "little") + bytes(header_bytes - 4))


@pytest.mark.parametrize("key", [KEY, None])
def test_a_reader_keeps_no_more_than_one_frame_and_one_read(key: bytes | None) -> None:
    reader = FrameReader(key, 1000)
    for frame in written([(1, bytes(1000))] * 50, key):
        reader.feed(frame[:500])
        reader.feed(frame[500:])
        assert len(reader._buffer) == 0
