"""What the dispatchers of a run know, read from their directories: how far each log was read, and who waits.

Of one that runs too. Recovery's plans are read before the inboxes and these before the ledgers, as events
move from one to the next: an event on its way is in one of them, or in what is read later, the outputs.
"""

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dispatcher.ledger import Ledger, LedgerFile
from dispatcher.rules.events import unpack_id
from dispatcher.workers import read_totals, worker_directories
from joiner.joined_lines import blocks_of
from photon.cluster.topology import Pipeline, Topology
from photon.core.ids import IdPacker
from photon.core.settings import Settings
from photon.logs.files import FileState, Identity, SeenFile, goes_on, seen_as
from photon.logs.formats import json_lines
from photon.logs.packed import Spool

if TYPE_CHECKING:
    from spark.verification.verify import Question


def known_to(question: "Question", topology: Topology, work: Path) -> "Question":
    """The question of a verification, with what the dispatchers know; as it is where a datacenter's directory
    is not on this machine. Called before anything else is read. CorruptStateError, StorageError."""
    homes = [pipeline.home("dispatcher") for pipeline in topology.pipelines]
    if not all(home.parent.is_dir() for home in homes):
        return question
    waiting = [
        ids
        for directory in (work / "recovery", *(home / "inbox" for home in homes))
        for ids in _ids_in(sorted(directory.glob("*.jsonl")), topology.settings)
    ]
    read = []
    for home in homes:
        states: dict[Identity, FileState] = {}
        for directory in worker_directories(home).values():
            ledger = LedgerFile(directory, topology.settings.dispatcher.state_bytes_max, readonly=True)
            with closing(ledger) as file, file.read() as rows, rows.retries() as cursor:
                states |= {_identity(state): state for state in rows.files()}
                waiting.append(b"".join([unpack_id(value) for _, value in cursor]))
        read.append(states)
    return replace(question, positions=partial(_positions, read), waiting=waiting)


def _positions(
    read: Sequence[Mapping[Identity, FileState]], paths: Iterable[str]
) -> dict[str, tuple[int, int]]:
    """Log -> the bytes of it that every datacenter that knows it has read, and that at least one has.

    A log is known by its inode, as a name may be another file's by now, and by what was read of it, as it may
    have been cut, or its inode be another's. One that nobody knows is left out: it may be a copy, or packed
    since.
    """
    found = {}
    for path in paths:
        with contextlib.suppress(OSError):
            seen = seen_as(path, os.stat(path))
            known = [states[seen.source] for states in read if seen.source in states]
            ends = [state.offset for state in known if _is_of(state, seen)]
            if ends:
                found[path] = min(ends), max(ends)
    return found


def _is_of(state: FileState, seen: SeenFile) -> bool:
    """OSError."""
    if state.version:
        return state.version == Spool.version(seen)
    return goes_on(seen, state, state.offset)


def ledger_of(topology: Topology, pipeline: Pipeline) -> dict[str, Any]:
    """What the dispatcher of a run that has ended counted, however it ended. LockedError, CorruptStateError,
    StorageError."""
    letters = topology.dead_letters_directory(pipeline.datacenter)
    return read_totals(pipeline.home("dispatcher"), letters, topology.settings.dispatcher.state_bytes_max)


def waiting_in(topology: Topology, pipeline: Pipeline, packed: bytes) -> dict[str, Any] | None:
    """What the ledgers of a run that has ended say of an event that waits (Ledger.find_waiting); None of
    another. LockedError, CorruptStateError, StorageError."""
    letters = topology.dead_letters_directory(pipeline.datacenter)
    for worker, directory in worker_directories(pipeline.home("dispatcher")).items():
        bytes_max = topology.settings.dispatcher.state_bytes_max
        with closing(Ledger(directory, letters, bytes_max, worker)) as ledger:
            if (found := ledger.find_waiting(packed)[0]) is not None:
                return found
    return None


def _identity(state: FileState) -> Identity:
    """Of the log itself: what is read of an archive is a copy."""
    return state.source if state.version else (state.device, state.inode)


def _ids_in(paths: Iterable[Path], settings: Settings) -> Iterator[bytes]:
    lines = json_lines(settings, IdPacker(settings.ids.key.encode()))
    for path in paths:
        with contextlib.suppress(FileNotFoundError):  # read to its end, and recorded
            for _, data in blocks_of(path):
                yield lines.parse_foreign(data).ids
