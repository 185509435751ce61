"""Short reads of the primary logs, through a few files kept open."""

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from eventstore.entries import Place
from photon.core.logfiles import FileState

_OPEN_MAX: Final = 64
SPAN_BYTES_MAX: Final = 256 * 1024
GAP_BYTES_MAX: Final = 4096
"""Reading over so much that nobody asked for is cheaper than one more read."""


@dataclass(frozen=True, slots=True)
class Span:
    """Bytes that are read at once, and the places in them, in order."""

    place: Place
    places: list[Place]


def spans_of(places: Sequence[Place]) -> list[Span]:
    """Sorted places -> spans of those that overlap or are close; a place is never cut. Pure."""
    spans: list[Span] = []
    for place in places:
        end = place.offset + place.length
        if spans:
            last = spans[-1].place
            reach = max(end, last.offset + last.length)
            if (
                place.file == last.file
                and place.offset <= last.offset + last.length + GAP_BYTES_MAX
                and reach - last.offset <= SPAN_BYTES_MAX
            ):
                spans[-1].places.append(place)
                spans[-1] = Span(Place(last.file, last.offset, reach - last.offset), spans[-1].places)
                continue
        spans.append(Span(place, [place]))
    return spans


class OpenLogs:
    """The log files read lately. Not for several threads at once: each has its own."""

    def __init__(self) -> None:
        self._files: dict[tuple[int, int, int], int] = {}
        self.bytes_read = 0

    def read_ahead(self, places: Iterable[Place], states: Mapping[int, FileState]) -> None:
        """Let the kernel fetch all these places side by side: cold, they cost 0.4 ms one by one."""
        for place in places:
            fd = self._open(states[place.file])
            if fd is not None:
                os.posix_fadvise(fd, place.offset, place.length, os.POSIX_FADV_WILLNEED)

    def read(self, place: Place, state: FileState) -> bytes | None:
        """The bytes there; None if the file is gone, is another one by now, shrank or can't be read."""
        fd = self._open(state)
        if fd is None:
            return None
        try:
            data = os.pread(fd, place.length, place.offset)
        except OSError:
            return None
        self.bytes_read += len(data)
        return data if len(data) == place.length else None

    def close(self) -> None:
        while self._files:
            os.close(self._files.popitem()[1])

    def _open(self, state: FileState) -> int | None:
        key = (state.number, state.device, state.inode)
        fd = self._files.get(key)
        if state.gone:
            if fd is not None:
                os.close(self._files.pop(key))
            return None
        if fd is not None:
            return fd
        try:
            fd = os.open(state.path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        status = os.fstat(fd)
        if (status.st_dev, status.st_ino) != (state.device, state.inode):
            os.close(fd)
            return None
        if len(self._files) >= _OPEN_MAX:
            os.close(self._files.pop(next(iter(self._files))))  # the one opened longest ago
        self._files[key] = fd
        return fd

    def __del__(self) -> None:
        self.close()
