"""A disk that is full."""

import errno
import os


def no_space():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def full_after(monkeypatch, room, then=lambda: None):
    """From now on so many bytes are written, and then nothing more: `then` is called at once."""
    real, left = os.write, [room]

    def write(fd, data):
        if not left[0]:
            then()
            no_space()
        written = real(fd, data[: left[0]])
        left[0] -= written
        return written

    monkeypatch.setattr(os, "write", write)
