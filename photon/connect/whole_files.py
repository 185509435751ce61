"""Files as sources, each whole when it is found: on disks, or objects of a store. A file is a partition, a
record's number its row or line.

A file is known by its content's version, too: one that changes is read from its start.
"""

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import IO, Final, NamedTuple, Protocol

from photon.connect.ports import Batch, Fields, Loss, State
from photon.core.errors import UnavailableError, UsageError, first_line
from photon.logs.formats import NOT_UTF8

ROWS_MAX: Final = 16_384
BLOCK_BYTES: Final = 4 << 20
_FILES_A_READ: Final = 256
_NO_UTF8: Final = ("invalid UTF8", "'utf-8' codec")
"""In what Arrow says of values and of names."""


class Rows(NamedTuple):
    """Records of a file that follow each other. `lines`: all but the first so many, a JSON object a line."""

    records: int
    lines: Callable[[int], bytes]


class Opened(NamedTuple):
    """`version`: of what is in the file, which is that version to its end."""

    version: str
    file: IO[bytes]


class Shelf(Protocol):
    """Where files lie. Its methods may raise UsageError and UnavailableError; `open` anything."""

    look_every_s: float

    def find(self) -> Mapping[str, str]:
        """Name -> version of what is there now."""
        ...

    def told(self) -> str:
        """What could not be looked into at the last look, and was not told yet."""
        ...

    def open(self, name: str, following: Iterator[str]) -> Opened:
        """`following`: what is likely to be opened next."""
        ...

    def has(self, name: str) -> bool: ...

    def close(self) -> None: ...


RowsOf = Callable[[str, IO[bytes], Fields], Iterator[Rows]]
"""Of a file by its name. It may raise anything for one that it can't read."""


class WholeFiles:
    """photon.connect.ports.Source."""

    def __init__(self, shown: str, shelf: Shelf, rows_of: RowsOf, fields: Fields) -> None:
        self._shown, self._shelf, self._rows_of, self._fields = shown, shelf, rows_of, fields
        self._after: dict[str, int] = {}
        self._read: dict[str, str] = {}
        """Name -> the version that was read last, or found."""
        self._drain = False
        self._waiting: dict[str, None] = {}
        self._again: dict[str, None] = {}
        """Those that could not be read: behind all others, so that they hold up none."""
        self._current: tuple[str, IO[bytes], Iterator[Rows]] | None = None
        self._row = 0
        self._looked_s = float("-inf")
        self._looked_us = self._known_us = 0
        """When it looked last, and up to when all files that there were are read."""
        self._failed: UsageError | UnavailableError | None = None
        """To be told once what was read before it is taken."""

    def open(self, after: Mapping[str, int], drain: bool) -> None:
        self._leave()
        self._after, self._drain = dict(after), drain
        self._read, self._waiting, self._again, self._failed = {}, {}, {}, None
        self._looked_s = float("-inf")
        self._look()
        if drain and not self._waiting:
            raise UsageError(f"{self._shown}: no file matches")

    def _look(self) -> None:
        if time.monotonic() < self._looked_s + self._shelf.look_every_s or (self._drain and self._read):
            return
        self._looked_s, self._looked_us = time.monotonic(), time.time_ns() // 1_000
        for name, version in self._shelf.find().items():
            if version != self._read.get(name):
                self._read[name] = version
                self._waiting[name] = None
                self._again.pop(name, None)
        if reason := self._shelf.told():
            self._failed = UsageError(reason) if self._drain else UnavailableError(reason)
            if self._drain:
                raise self._failed

    def read(self, wait_s: float) -> Sequence[Batch]:
        if not (self._waiting or self._again or self._failed):
            time.sleep(max(0.0, min(wait_s, self._looked_s + self._shelf.look_every_s - time.monotonic())))
        if self._current is None:
            self._look()
        batches: list[Batch] = []
        rows = size = 0
        for _ in range(0 if self._failed else _FILES_A_READ):
            tells = self._failed is not None and (self._drain or not self._waiting)
            if tells or not (self._waiting or self._again) or rows >= ROWS_MAX or size >= BLOCK_BYTES:
                break
            try:
                batch = self._next()
            except (UsageError, UnavailableError) as error:
                self._failed = self._failed or error  # the others are told of when they are tried again
                if isinstance(error.__cause__, UnavailableError):
                    break  # so would all others be
                continue
            if batch is not None:
                batches.append(batch)
                rows, size = rows + batch.runs[0][1], size + len(batch.lines)
        if not (self._waiting or self._again or self._failed):
            self._known_us = self._looked_us
        if self._failed is not None and not batches:
            failed, self._failed = self._failed, None
            raise failed
        return batches

    def _next(self) -> Batch | None:
        """The next of the file in hand, or of the first that waits; None: it has no more. UsageError,
        UnavailableError."""
        name = next(iter(self._waiting or self._again)) if self._current is None else self._current[0]
        try:
            if self._current is None:
                opened = self._shelf.open(name, itertools.chain(self._waiting, self._again))
                self._read[name], self._row = opened.version, 0
                self._current = name, opened.file, self._rows_of(name, opened.file, self._fields)
            found = next(self._current[2], None)
        except Exception as error:
            self._leave()  # what is left of it would say that the file ends here
            raise self._in_words(name, error) from error
        if found is None:
            self._leave()
            self._put_off(name)
            return None
        first, self._row = self._row, self._row + found.records
        partition = f"{name}\0{self._read[name]}"
        skipped = min(found.records, max(0, self._after.get(partition, -1) + 1 - first))
        if skipped == found.records:
            return None
        self._after[partition] = self._row - 1
        return Batch(partition, found.lines(skipped), ((first + skipped, found.records - skipped),))

    def _in_words(self, name: str, error: Exception) -> UsageError | UnavailableError:
        """What is wrong with a file; it is tried again behind the others."""
        if isinstance(error, UnavailableError):
            self._put_off(name, again=True)
            return error
        reason = first_line(error)
        if any(sign in reason for sign in _NO_UTF8):
            reason = f"{NOT_UTF8}: convert the file, as by iconv -f LATIN1 -t UTF-8"
        elif self._drain and not isinstance(error, UsageError):
            reason += "; is it whole?"
        if self._drain:
            return UsageError(f"{name}: {reason}")
        if not self._shelf.has(name):  # it may come again
            self._put_off(name)
            del self._read[name]
            return UnavailableError(
                f"{name} is gone, though it was not read to its end: what it had more is not imported"
            )
        self._put_off(name, again=True)
        again = "tried again: write it under another name and rename it"
        return UnavailableError(f"{name}: {reason}; {again}")

    def _put_off(self, name: str, again: bool = False) -> None:
        self._waiting.pop(name, None)
        self._again.pop(name, None)
        if again:
            self._again[name] = None

    def _leave(self) -> None:
        if self._current is not None:
            self._current[1].close()
            self._current = None

    def state(self) -> State:
        if self._waiting or self._again or self._failed:
            return State.ACTIVE
        return State.FINISHED if self._drain else State.IDLE

    def losses(self) -> Sequence[Loss]:
        return []

    def behind(self) -> int | None:
        return None if self._waiting or self._again else 0

    def known_to(self) -> int:
        return self._known_us

    def kept(self, upto: Mapping[str, int]) -> None:
        pass

    def close(self) -> None:
        self._leave()
        self._shelf.close()
