"""Where to begin to read the foreign logs when the state is lost or shall not count (paper 3.2.2).

Writes the states of the files while no worker runs: from their starts, from their ends, or from the first
event of a time on. What was counted, what waits for a retry and what is in the inbox stays as it is.
"""

import dataclasses
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Literal

import numpy as np

from dispatcher.inbox import Inbox
from dispatcher.rows import FORMAT, LedgerFile, State
from dispatcher.slots import hold_directory
from photon.core.clock import Clock
from photon.core.columns import unpack_times
from photon.core.errors import StorageError
from photon.core.settings import Logs, Settings
from photon.logs.chunks import read_chunk
from photon.logs.files import FileState, check_patterns
from photon.logs.follow import LogFollower
from photon.logs.formats import JsonLines, json_lines

Start = Literal["start", "now"] | int
"""From a file's start, from its end as it is now, or from the first event whose time (us) is not before."""

_STEP_BYTES: Final = 1 << 16
_SETTLE_S: Final = 600.0  # so long no archive may come any further: a large one takes minutes to unpack
_LOOK_S: Final = 0.2


def initialise(
    directory: Path,
    patterns: Sequence[str],
    settings: Settings,
    start: Start,
    clock: Clock,
    notice: Callable[[str], None] = lambda _: None,
) -> dict[str, int]:
    """File name -> offset from which it will be read, of all files that match now.

    A file that was last changed before the time is passed whole, else it is read to find the place. Archives
    are waited for while they are written to or unpacked. `notice` is told of files that can't be read: they
    stay as they were. LockedError while a worker runs; UsageError; StorageError, also if an archive is never
    whole: nothing is changed then.
    """
    check_patterns(patterns)
    lock = hold_directory(directory, alone=True)
    try:
        file = LedgerFile(directory, settings.dispatcher.state_bytes_max)
        try:
            return _initialise(file, directory, patterns, settings, start, clock, notice)
        finally:
            file.close()
    finally:
        lock.release()


def _initialise(
    file: LedgerFile,
    directory: Path,
    patterns: Sequence[str],
    settings: Settings,
    start: Start,
    clock: Clock,
    notice: Callable[[str], None],
) -> dict[str, int]:
    inbox = Inbox(directory, file.sync)
    with file.read() as rows:
        known = {state.number: state for state in rows.files()}
    woken = threading.Event()
    follower = LogFollower(
        patterns, directory / "spool", settings.logs, clock, known.values(), notice=notice, wake=woken.set
    )
    try:
        known |= {state.number: state for state in _all_scanned(follower, clock, woken)}
    finally:
        follower.close()
    for name, reason in follower.unreadable.items():
        notice(
            f"{name} is left as it was ({reason}): a dispatcher begins where it ended before, or at its start"
        )
    lines = json_lines(settings)
    offsets = {}
    for state in [state for state in known.values() if not state.gone and not inbox.holds(state)]:
        try:
            offset = _offset(state, start, settings.logs, lines)
            known[state.number] = follower.passed_over(state.number, offset)
        except (OSError, StorageError) as error:
            notice(f"{state.name} cannot be read ({error}); it is left as it was")
            continue
        offsets[state.name] = offset
    with file.write() as rows:
        before = rows.state() or State(FORMAT)
        numbers = [before.next_file, *(number + 1 for number in known)]
        rows.put_state(dataclasses.replace(before, epoch=before.epoch + 1, next_file=max(numbers)))
        for state in known.values():
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


def _offset(state: FileState, start: Start, logs: Logs, lines: JsonLines) -> int:
    if start == "start":
        return 0
    if start == "now" or os.stat(state.name).st_mtime_ns // 1_000 < start:
        return _end_of_last_line(state.path)
    return _first_from(state, start, logs, lines)


def _end_of_last_line(path: str) -> int:
    with open(path, "rb", buffering=0) as file:
        position = os.fstat(file.fileno()).st_size
        while position > 0:
            step = min(_STEP_BYTES, position)
            newline = os.pread(file.fileno(), step, position - step).rfind(b"\n")
            if newline >= 0:
                return position - step + newline + 1
            position -= step
    return 0


def _first_from(state: FileState, time_us: int, logs: Logs, lines: JsonLines) -> int:
    """Where the first event of the time begins; the end if there is none."""
    offset = 0
    while chunk := read_chunk(state.path, offset, logs.chunk_bytes, logs.line_bytes_max):
        offset = chunk.end
        if chunk.oversized:
            continue
        parsed = lines.parse_foreign(chunk.data)
        rows = np.flatnonzero(unpack_times(parsed.times) >= time_us)
        if len(rows):
            return chunk.start + int(parsed.starts[rows[0]])
    return offset
