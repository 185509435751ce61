"""Where to begin to read the foreign logs when the state is lost or shall not count (paper 3.2.2).

Writes the states of the files while no worker runs: from their starts, from their ends, or from the first
event of a time on. What was counted, what waits for a retry and what is in the inbox stays as it is.
"""

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal

import numpy as np

from dispatcher.ledger import LedgerFile
from dispatcher.workers import Inbox, fix_workers, mine_of, worker_directory
from photon.core.clock import Clock
from photon.core.columns import unpack_times
from photon.core.disk import DirectoryLock
from photon.core.errors import StorageError
from photon.core.settings import Settings
from photon.logs.files import FileState, check_patterns, end_of_last_line, read_chunk
from photon.logs.follow import LogFollower
from photon.logs.formats import json_lines

Start = Literal["start", "now"] | int
"""From a file's start, from its end as it is now, or from the first event whose time (us) is not before."""

_SETTLE_S: Final = 600.0  # so long no archive may come any further: a large one takes minutes to unpack
_LOOK_S: Final = 0.2


def initialise(
    directory: Path,
    patterns: Sequence[str],
    settings: Settings,
    start: Start,
    clock: Clock,
    notice: Callable[[str], None] = lambda _: None,
    workers: int = 1,
) -> dict[str, int]:
    """File name -> offset from which it will be read, of all files that match now.

    A file that was last changed before the time is passed whole, else it is read to find the place. Archives
    are waited for while they are written to or unpacked. `notice` is told of files that can't be read: they
    stay as they were. LockedError while a worker runs; UsageError; StorageError, also if an archive is never
    whole: nothing is changed then.
    """
    check_patterns(patterns)
    fix_workers(directory, workers)
    offsets: dict[str, int] = {}
    with contextlib.ExitStack() as held:
        found = []
        for worker in range(workers):
            place = worker_directory(directory, worker)
            held.enter_context(DirectoryLock(place))
            file = LedgerFile(place, settings.dispatcher.state_bytes_max)
            held.callback(file.close)
            with file.read() as rows:
                known = rows.files()
            woken = threading.Event()
            inbox = Inbox(directory, file.sync)
            follower = LogFollower(
                patterns,
                place / "spool",
                settings.logs,
                clock,
                known,
                notice=notice,
                mine=mine_of(worker, workers),
                wake=woken.set,
                by_name=inbox.holds,
            )
            with contextlib.closing(follower):
                known += _all_scanned(follower, clock, woken)
            for name, reason in follower.unreadable.items():
                where = "a dispatcher begins where it ended before, or at its start"
                notice(f"{name} is left as it was ({reason}): {where}")
            states = {state.number: state for state in known}
            for state in [
                state for state in states.values() if not state.gone and not inbox.holds(state.path)
            ]:
                try:
                    offset = _offset(state, start, settings)
                    states[state.number] = follower.passed_over(state.number, offset)
                except (OSError, StorageError) as error:
                    notice(f"{state.name} cannot be read ({error}); it is left as it was")
                    continue
                offsets[state.name] = offset
            found.append((file, states))
        for file, states in found:
            with file.write() as rows:
                for state in states.values():
                    rows.put_file(state)
    return offsets


def _all_scanned(follower: LogFollower, clock: Clock, woken: threading.Event) -> list[FileState]:
    """Scan until no archive is left for later. StorageError if that does not come about."""
    changed: list[FileState] = []
    settling: frozenset[str] | None = None
    until = 0.0
    while True:
        changed += follower.scan_if_due()
        if not follower.settling:
            return changed
        if follower.settling != settling:
            settling, until = follower.settling, clock.monotonic() + _SETTLE_S
        elif clock.monotonic() >= until:
            raise StorageError(
                f"{', '.join(sorted(settling))}: still written to or being unpacked after {_SETTLE_S:.0f} s; "
                "no place to begin at was written. Try again when they are whole, or leave them out"
            )
        woken.wait(_LOOK_S)
        woken.clear()


def _offset(state: FileState, start: Start, settings: Settings) -> int:
    if start == "start":
        return 0
    if start == "now" or os.stat(state.name).st_mtime_ns // 1_000 < start:
        with open(state.path, "rb", buffering=0) as file:
            return end_of_last_line(file.fileno(), os.fstat(file.fileno()).st_size)
    # Where the first event of the time begins; the end if there is none.
    logs, lines, offset = settings.logs, json_lines(settings), 0
    while chunk := read_chunk(state.path, offset, logs.chunk_bytes, logs.line_bytes_max):
        offset = chunk.end
        if chunk.oversized:
            continue
        parsed = lines.parse_foreign(chunk.data)
        rows = np.flatnonzero(unpack_times(parsed.times) >= start)
        if len(rows):
            return chunk.start + int(parsed.starts[rows[0]])
    return offset
