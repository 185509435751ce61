"""How far the clearing of tokens has come, and from where on it may go; kept in the joiner's directory.

`cleared` is a Place. `keeps-id` is a JSON number: of the first file all of whose lines tell which events they
are of (joiner.adapter.Adapter.keeps_id), null while none does; 0 where there is no such file. A file may be
cleared long after it was written, by a life with another adapter.
"""

from pathlib import Path
from typing import Final, Self

import msgspec

from joiner.output_files import PARQUET, CompleteFile
from photon.core.disk import storage_errors, write_file
from photon.core.errors import CorruptStateError

_PLACE: Final = "cleared"
KEEPS_ID: Final = "keeps-id"


class Place(msgspec.Struct, frozen=True):
    """`end` of the last part (joiner.joined_ids) of a listed file that was cleared."""

    file: str
    crc32: str
    end: int

    @classmethod
    def after(cls, entry: CompleteFile) -> Self:
        """The whole file is done."""
        return cls(entry.file, entry.crc32, _end_of(entry))

    def is_in(self, entry: CompleteFile) -> bool:
        return (self.file, self.crc32) == (entry.file, entry.crc32)

    def is_after(self, entry: CompleteFile) -> bool:
        """For a place in the file."""
        return self.end >= _end_of(entry)


def _end_of(entry: CompleteFile) -> int:
    return entry.lines if entry.file.endswith(PARQUET) else entry.bytes


def read_place(state: Path) -> Place | None:
    """StorageError. None for a damaged one: nothing hangs on it but work."""
    path = state / _PLACE
    with storage_errors(path):
        if not path.exists():
            return None
        try:
            return msgspec.json.decode(path.read_bytes(), type=Place)
        except msgspec.DecodeError:
            return None


def write_place(state: Path, place: Place) -> None:
    """Durably. StorageError."""
    path = state / _PLACE
    with storage_errors(path):
        write_file(path, msgspec.json.encode(place))


def first_to_clear(state: Path, keeps_id: bool, file: int, batches_left: bool) -> int | None:
    """Number of the first file that may be cleared, None for none in this life; noted, durably.

    To be called before this life's first line, which stands in `file` or later. `batches_left`: it ends what
    an earlier life's adapter joined. CorruptStateError, StorageError.
    """
    before = _read_first(state)
    first = before
    if not keeps_id:
        first = None
    elif before is None and not batches_left:
        first = file
    if first != before:
        path = state / KEEPS_ID
        with storage_errors(path):
            write_file(path, msgspec.json.encode(first))
    return first


def all_keep_ids(state: Path) -> bool:
    """Whether all lines that the joiner ever wrote tell which events they are of. CorruptStateError,
    StorageError."""
    return _read_first(state) == 0


def _read_first(state: Path) -> int | None:
    path = state / KEEPS_ID
    with storage_errors(path):
        if not path.exists():
            return 0
        try:
            return msgspec.json.decode(path.read_bytes(), type=int | None)
        except msgspec.DecodeError as error:
            raise CorruptStateError(
                f"{path}: no number of a file ({error}); write null into it and start once more: tokens of "
                "what was written before are kept then"
            ) from error
