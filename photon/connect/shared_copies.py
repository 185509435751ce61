"""Copies that several machines share, of which one at a time copies (MillWheel on several machines).

They lie on storage that all reach; how far each partition is copied, and where each log ends, stand in a
ledger that shuts out whoever copied before (paper 6.2). Lines are appended and durable first; then the ledger
says so; then readers are told. So what a log holds beyond its end there was never said to be copied: a
machine that died, or was cut off and does not know yet, left it. Nobody reads it, and it is copied anew, into
a file of who copies now: names of files say whose they are, so no two ever write to one.
"""

import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Protocol

from photon.connect.copies import CopiedLogs, drop_copy, end_of
from photon.connect.ports import Batch
from photon.core.disk import make_directory, storage_errors, write_file
from photon.core.errors import UsageError
from photon.logs.writer import LogPosition

GONE_S: Final = 120.0
"""A file that nobody sees for so long was deleted: another machine may see a new one late."""
_FILES_MAX: Final = 10**6
"""Of a claim, so its files have numbers that no other's have."""
_FIRST: Final = 10**15
"""Numbers have the same length, all of them, so names are in the order of numbers."""
_END: Final = b"e"
_MARK: Final = b"m"
_MARK_FILE: Final = "of-run"


class Ledger(Protocol):
    """Of the copies of one source. `reign`: greater than that of who copied on another machine before."""

    reign: int

    def claim(self) -> tuple[int, dict[bytes, bytes]]:
        """A number that rises with each claim, and the rows there are; from here on no former claim puts any.
        FencedError if another has a later reign; StorageError."""
        ...

    def put(self, rows: Mapping[bytes, bytes | None]) -> None:
        """All of them, durably; None deletes one. FencedError if another one claimed since; StorageError:
        they may be there or not."""
        ...


class SharedCopies(CopiedLogs):
    """The copies of one source, by who claims them now."""

    def __init__(self, directory: Path, file_bytes_max: int, source: str, ledger: Ledger) -> None:
        """UsageError for a directory that has other copies; FencedError, StorageError."""
        self._ledger = ledger
        with storage_errors(directory):
            make_directory(directory)
        number, rows = ledger.claim()
        self._own(directory, rows.pop(_MARK, None))
        self._first = _FIRST + number * _FILES_MAX
        super().__init__(directory, file_bytes_max, source, self._first, ledger.reign)
        self._ended: dict[str, int] = {}
        """File -> up to where it is copied to, of all that are there."""
        self._unseen: dict[str, float] = {}
        """Those that are not there, it seems, and since when."""
        for key, value in rows.items():
            if not self._take_in(key, value):
                self._ended[key[len(_END) :].decode()] = int.from_bytes(value, "big")

    def _own(self, directory: Path, mark: bytes | None) -> None:
        """A directory belongs to the ledger that knows its mark."""
        path = directory / _MARK_FILE
        with storage_errors(path):
            found = path.read_bytes() if path.exists() else None
            if mark is None:
                if any(not other.name.startswith(_MARK_FILE) for other in directory.iterdir()):
                    has = "other files" if found is None else "the copies of another run"
                    raise UsageError(f"{directory}: holds {has}; name another directory for `copies`")
                mark = found or secrets.token_hex(16).encode()
                write_file(path, mark)
                self._ledger.put({_MARK: mark})
            elif found is None:
                raise UsageError(
                    f"{directory}: the copies of this run are not there; name the directory that has them"
                )
            elif found != mark:
                raise UsageError(
                    f"{directory}: holds the copies of another run; name another directory for `copies`"
                )

    def _put(self, rows: Mapping[bytes, bytes | None]) -> None:
        self._ledger.put(rows)

    def _append(
        self,
        by_log: Mapping[int, Sequence[Batch]],
        starts: Mapping[int, LogPosition],
        rows: Mapping[bytes, bytes],
    ) -> None:
        self._write(by_log)
        ends = dict(end_of(self._logs[stripe]) for stripe in starts)
        self._put({**rows, **{_END + name.encode(): end.to_bytes(8, "big") for name, end in ends.items()}})
        self._ended |= ends

    def _ends(self) -> Iterable[tuple[str, int]]:
        return sorted((dict(map(end_of, self._logs)) | self._ended).items())

    def sweep(self, keep_s: float, now_s: float) -> int:
        """The same; what nobody is to read goes, too."""
        with storage_errors(self.directory):
            there = {path.name for path in self.directory.iterdir()}
            for name in there - self._ended.keys():
                log = name.endswith(".jsonl") and int(name.rpartition("-")[2][: -len(".jsonl")]) < self._first
                if log or (name.startswith("known-") and name != self.known):
                    drop_copy(self.directory / name)
        growing = {name for name, _ in map(end_of, self._logs)}
        self._unseen = {name: self._unseen.get(name, now_s) for name in self._ended.keys() - there - growing}
        gone = [name for name, since in self._unseen.items() if now_s - since > GONE_S]
        if gone:  # a worker has read them
            self._put({_END + name.encode(): None for name in gone})
        for name in gone:
            del self._ended[name], self._unseen[name]
        return super().sweep(keep_s, now_s)
