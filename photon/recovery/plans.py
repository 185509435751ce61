"""Plans of recovery on disk: what is about to be released, and its lines, so that no end of the process loses
them (paper 3.3.3).

<directory>/<name>.jsonl    the events' lines, as they are put into the inbox
<directory>/<name>.json     the plan: ids, times and tokens to release, where the lines go

The lines are durable before the plan, the plan before anything is released, and both stay until the lines are
in the inbox. One run at a time has the directory.
"""

import os
import re
import secrets
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, Self

import msgspec

from dispatcher.workers import RECOVERED, put
from photon.core.columns import split_ids
from photon.core.disk import (
    DirectoryLock,
    make_directory,
    replace,
    storage_errors,
    sync_directory,
    write_file,
)
from photon.core.errors import CorruptStateError, LockedError
from spark.recovery.rules import LostEvents

_PLAN: Final = ".json"
_LINES: Final = ".jsonl"
_NAME: Final = re.compile(re.escape(RECOVERED) + r"[0-9a-f]{16}")


class Plan(msgspec.Struct, frozen=True):
    """A plan as it is kept. `crc32` and `size` are of the file of its lines."""

    name: str
    inbox: str
    ids: bytes
    times: bytes
    tokens: list[bytes]
    counts: list[int]
    crc32: int
    size: int

    @property
    def events(self) -> int:
        """Distinct ids: one whose lines tell several times stands there with each of them."""
        return len({*split_ids(self.ids)})

    @property
    def inbox_name(self) -> str:
        return f"{self.name}{_LINES}"


class Plans:
    """The plans of one directory. A context: it holds the directory's lock."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __enter__(self) -> Self:
        """LockedError, StorageError."""
        try:
            self._lock = DirectoryLock(self._directory)
        except LockedError as error:
            raise LockedError(f"{self._directory}: another `photon recover` runs; wait for it") from error
        return self

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def left(self) -> Iterator[Plan]:
        """Those that an earlier run did not finish, oldest first. CorruptStateError, StorageError."""
        for path in sorted(self._directory.glob(f"{RECOVERED}*{_PLAN}"), key=_age):
            yield self._read(path)

    def count(self) -> int:
        """How many there are; for those who do not hold the lock."""
        return len(list(self._directory.glob(f"{RECOVERED}*{_PLAN}")))

    def tidy(self) -> None:
        """Remove lines that no plan was made of: nothing of them is released."""
        with storage_errors(self._directory):
            for path in self._directory.glob(f"{RECOVERED}*"):
                stem = path.name.split(".", 1)[0]
                if _NAME.fullmatch(stem) and not (self._directory / f"{stem}{_PLAN}").exists():
                    path.unlink()

    def write(self, events: LostEvents, inbox: Path, checkpoint: Callable[[str], None]) -> Plan:
        """Durably. DiskFullError, StorageError: there is no plan."""
        name = f"{RECOVERED}{secrets.token_hex(8)}"
        lines = self._directory / f"{name}{_LINES}"
        temporary = lines.with_suffix(".tmp")
        with storage_errors(lines):
            make_directory(self._directory)
            with temporary.open("wb") as file:
                file.write(events.lines)
                file.flush()
                os.fsync(file.fileno())
            replace(temporary, lines)
        checkpoint("lines kept")
        plan = Plan(
            name,
            str(inbox),
            events.ids,
            events.times,
            events.tokens,
            events.counts,
            zlib.crc32(events.lines),
            len(events.lines),
        )
        path = self._directory / f"{name}{_PLAN}"
        with storage_errors(path):
            write_file(path, msgspec.json.encode(plan))
        return plan

    def inject(self, plan: Plan, checkpoint: Callable[[str], None]) -> None:
        """Put its lines into the inbox; again does no harm. CorruptStateError, StorageError."""
        lines = self._directory / f"{plan.name}{_LINES}"
        self._check(lines, plan)
        put(lines, Path(plan.inbox), plan.inbox_name, lambda: checkpoint("lines copied"))

    def forget(self, plan: Plan) -> None:
        """It is done. StorageError: it is done once more, which does no harm."""
        for suffix in (_PLAN, _LINES):  # lines without a plan mean nothing
            path = self._directory / f"{plan.name}{suffix}"
            with storage_errors(path):
                path.unlink(missing_ok=True)
                sync_directory(self._directory)

    def _read(self, path: Path) -> Plan:
        with storage_errors(path):
            data = path.read_bytes()
        try:
            plan = msgspec.json.decode(data, type=Plan)
        except msgspec.DecodeError as error:
            raise CorruptStateError(f"{path}: no plan of recovery ({error}); {_MEND}") from error
        rows = sum(plan.counts)
        if plan.name != path.stem or len(plan.ids) != 16 * rows or len(plan.times) != 8 * rows:
            raise CorruptStateError(f"{path}: not the plan that was written; {_MEND}")
        self._check(path.with_suffix(_LINES), plan)
        return plan

    def _check(self, lines: Path, plan: Plan) -> None:
        """CorruptStateError unless they are the plan's: nothing may be released that can't be injected."""
        with storage_errors(lines):
            data = lines.read_bytes() if lines.exists() else b""
        if (len(data), zlib.crc32(data)) != (plan.size, plan.crc32):
            raise CorruptStateError(f"{lines}: not the lines that were written; {_MEND}")


_MEND: Final = (
    "restore it, or put the events of its ids into an inbox yourself and move both files of the plan away: "
    "what it had released stands in no registry and no joined log (`photon verify` calls it pending)"
)


def _age(path: Path) -> tuple[int, str]:
    return path.stat().st_mtime_ns, path.name
