"""A store that puts a commit at the end of its worker's log, as one blob, and writes rows to their table only
when the log has grown: those that came and went in between never (paper 5.2). Where these are is its
subclasses' matter.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

import msgspec

from millwheel.engine.store import Changes
from photon.core.errors import CorruptStateError

LOG_ROWS_MAX: Final = 50_000
LOG_BYTES_MAX: Final = 16 << 20
_encode: Final = msgspec.msgpack.encode
_blob: Final = msgspec.msgpack.Decoder(dict[bytes, bytes | None]).decode


class LoggedStore(ABC):
    """millwheel.engine.store.Store. `commit` may run in another thread than the rest."""

    def __init__(self) -> None:
        self._sequencer = 0
        self._lane = 0
        self._next = 0
        self._recent: Changes = {}
        """What is in the log of this worker and not in the table."""
        self._bytes = 0

    def claim(self, slots: Sequence[int], me: int, workers: int) -> int:
        """Own these slots, and the logs of the lanes that fall to worker `me`, which are written to their
        table: from there on no former owner can commit. The newest sequencer."""
        self._sequencer = self._take(slots, me, workers)
        self._lane = me
        self._recent, self._bytes, self._next = {}, 0, 0
        return self._sequencer

    def read(self, rows: Sequence[bytes]) -> list[bytes | None]:
        recent = self._recent
        found = self._get(rows)
        return [recent.get(row, value) for row, value in zip(rows, found, strict=True)]

    @abstractmethod
    def scan(self, prefix: bytes, behind: Sequence[bytes] = (b"",)) -> Iterator[tuple[bytes, bytes]]: ...

    def logged(self) -> Changes:
        """What the logs of all workers have before the table has it, as of now. StorageError."""
        return put_together(self._blobs(), {}, self)

    def commit(self, changes: Mapping[bytes, bytes | None]) -> None:
        """As the port says; DiskFullError, StorageError: then nothing of it is there."""
        blob = _encode(changes)
        if len(self._recent) > LOG_ROWS_MAX or self._bytes + len(blob) > LOG_BYTES_MAX:
            self._fold(changes)
            self._recent, self._bytes = {}, 0
        else:
            self._append(blob)
            self._recent.update(changes)
            self._bytes += len(blob)
        self._next += 1

    @abstractmethod
    def numbers(self, row: bytes, value: bytes | None = None) -> bytes | None:
        """A row of the run as a whole, which no worker changes: put it, if a value is given, and get it."""

    @abstractmethod
    def close(self) -> None: ...

    @abstractmethod
    def _take(self, slots: Sequence[int], me: int, workers: int) -> int: ...

    @abstractmethod
    def _blobs(self) -> list[bytes]:
        """Of all lanes, those of each in their order."""

    @abstractmethod
    def _get(self, rows: Sequence[bytes]) -> list[bytes | None]:
        """From the table."""

    @abstractmethod
    def _append(self, blob: bytes) -> None:
        """Number `_next` of the log. ZombieError."""

    @abstractmethod
    def _fold(self, changes: Mapping[bytes, bytes | None]) -> None:
        """The log, and these, to the table; the log is empty then. ZombieError."""


def put_together(blobs: Sequence[bytes], more: Mapping[bytes, bytes | None], where: object) -> Changes:
    """The rows of commits, in their order, and these."""
    rows: Changes = {}
    for blob in blobs:
        try:
            rows.update(_blob(blob))
        except msgspec.DecodeError as error:
            raise CorruptStateError(f"{where}: a commit can't be read ({error})") from error
    rows.update(more)
    return rows
