"""What a process was at when it ended, and how often: what ends it each time is found, and can be left out.

Code of a user's may end its process, or never return. So what it works on stands in a mapped page, which
outlives the process; who starts next finds it there, and counts.
"""

import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import msgspec

from photon.core.disk import storage_errors, write_json

DEATHS_MAX: Final = 3
"""One may be anybody's: a machine that fails, a person who kills the process."""
SUSPECTS_MAX: Final = 1_000


class Suspects:
    """Of the lives of one process, one after the other. `mark`: the id of what it is at, zeros for nothing;
    whoever works sets it."""

    def __init__(self, directory: Path, name: str, width: int) -> None:
        """`width`: bytes of an id. Counts the death that it finds. StorageError."""
        self._path, self._at = directory / f"{name}.suspects", directory / f"{name}.mark"
        self.deaths: dict[bytes, int] = {}
        """By id; of the SUSPECTS_MAX that it found last."""
        self.found: bytes | None = None
        """What the life before ended at."""
        with storage_errors(self._path):
            self.deaths = {id_: n for id_, n in _read(self._path).items() if len(id_) == width}
            self.mark = _mapped(self._at, width)
            if any(found := bytes(self.mark)):
                self._note(found)

    def close(self) -> None:
        self.mark.close()

    def forgive(self) -> None:
        """The process is about to be stopped: if it is killed, that is not for what it is at."""
        self._at.unlink(missing_ok=True)

    def clear(self, ids: Iterable[bytes]) -> None:
        """These are suspected no more. StorageError."""
        cleared = [id_ for id_ in ids if self.deaths.pop(id_, 0)] if self.deaths else []
        if cleared:
            self._store()

    def _note(self, id_: bytes) -> None:
        self.found = id_
        self.deaths[id_] = self.deaths.pop(id_, 0) + 1
        while len(self.deaths) > SUSPECTS_MAX:
            del self.deaths[next(iter(self.deaths))]
        self._store()
        self.mark[:] = bytes(len(self.mark))

    def _store(self) -> None:
        write_json(self._path, {id_.hex(): n for id_, n in self.deaths.items()})


def _mapped(path: Path, width: int) -> mmap.mmap:
    with path.open("a+b") as file:
        if file.seek(0, os.SEEK_END) < width:
            # Written, not only made longer: a page without room kills who writes to it.
            file.truncate(0)
            file.write(bytes(width))
            file.flush()
        return mmap.mmap(file.fileno(), width)


def _read(path: Path) -> dict[bytes, int]:
    try:
        stored = msgspec.json.decode(path.read_bytes(), type=dict[str, int])
        return {bytes.fromhex(id_): deaths for id_, deaths in stored.items()}
    except (FileNotFoundError, ValueError):  # a hint, worth no stop
        return {}
