"""Sweeping entries of deleted logs out of the log file map, a few at a time.

The map's keys are ids and times, not files: what a deleted log has left there is found by going through
all of it, slowly, while the reader has nothing else to do. Until then it costs room, and lookups pass it by.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

ENTRIES_A_STEP: Final = 8192


class Transaction(Protocol):
    """Opens one on the map's environment."""

    def __call__(self, write: bool = False) -> AbstractContextManager[Any]: ...


FilesOf = Callable[[Sequence[tuple[bytes, bytes]]], npt.NDArray[np.int64]]
"""Entries (key, value) -> the numbers of the files they point to."""


@dataclass(frozen=True, slots=True)
class Table:
    """A database of the map and how to tell which file an entry points to."""

    database: Any
    files_of: FilesOf


class Sweep:
    """One pass over all tables for the files that were `gone` when it began."""

    def __init__(self, transaction: Transaction, tables: Sequence[Table], gone: Collection[int]) -> None:
        self.gone = frozenset(gone)
        self.swept = 0
        self._gone_column = np.fromiter(self.gone, np.int64, len(self.gone))
        self._transaction = transaction
        self._tables = list(tables)
        self._next_key = b""

    @property
    def done(self) -> bool:
        return not self._tables

    def step(self) -> None:
        """Look through some thousand entries. StorageError: call again, nothing was swept by this call."""
        table = self._tables[0]
        with self._transaction() as transaction:
            cursor = transaction.cursor(table.database)
            there = cursor.set_range(self._next_key) if self._next_key else cursor.first()
            entries = list(islice(cursor.iternext(), ENTRIES_A_STEP)) if there else []
        if entries:
            files = table.files_of(entries)
            rows = np.flatnonzero(np.isin(files, self._gone_column)).tolist()
            if rows:
                with self._transaction(write=True) as transaction:
                    for row in rows:
                        transaction.delete(entries[row][0], db=table.database)
                self.swept += len(rows)
            self._next_key = entries[-1][0] + b"\0"
        if len(entries) < ENTRIES_A_STEP:
            self._tables.pop(0)
            self._next_key = b""
