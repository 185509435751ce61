"""What is kept of a share in the registry, so that another dispatcher can go on with it when a machine is
lost with its disk (docs/dispatcher.md): how far each file is read, the counts, and where the events stand
that wait and those that are dead letters. It is as of a transaction of the ledger, so all fit each other.

    s         the counts (rules/verdicts.Totals)
    e         whose dead letters end where (_End)
    f number  a file's FileState
    l number  where dead letters stand (rules/letters)
    o number  offsets of the events of that file that wait, sorted

Dead letters are lines of the logs with a reason, so who goes on with a share writes those again that it can't
see; where the disk is shared that is none.

What was decided after the last checkpoint is read again by whoever goes on: the registry makes that harmless,
and it is counted once, though as a duplicate where it had been joined.
"""

import os
import sys
import threading
import zlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import numpy.typing as npt

from dispatcher.ledger import DEAD_LETTER_FILE_BYTES_MAX, SCANNED_MAX, Entry, Ledger
from dispatcher.rules.events import Events, pack_values, unpack_places
from dispatcher.rules.letters import LetterPlace, letters_stem, names_letters, unpack_letters
from dispatcher.rules.verdicts import NOTHING, Totals
from photon.core.disk import storage_errors
from photon.core.errors import CorruptStateError
from photon.core.fates import Fate
from photon.logs.files import (
    FileState,
    SeenFile,
    digest,
    find,
    pack_file_state,
    read_at,
    shown,
    unpack_file_state,
)
from photon.logs.formats import JsonLines
from photon.logs.inventory import place_of
from photon.logs.packed import is_packed, unpacked
from photon.logs.writer import DeadLetter, LogPosition, RotatingLog, dead_letter_lines

Files = npt.NDArray[np.uint32]
Offsets = npt.NDArray[np.int64]
Places = tuple[Files, Offsets]
"""Of N events: the number of the file, and where in it the line stands."""

_COUNTS: Final = b"s"
_END: Final = b"e"
_LETTERS: Final = b"l"
_FILE: Final = b"f"
_OPEN: Final = b"o"
_NUMBER_BYTES: Final = 8
_FAST: Final = 1
_LINE_STEP: Final = 4096
_NO_OFFSETS: Final = np.empty(0, np.int64)
_LOOKED_THROUGH_BYTES: Final = 2 * DEAD_LETTER_FILE_BYTES_MAX
"""The newest of the dead letters that are on the disk: more than rows have places for."""


class _End(msgspec.Struct, array_like=True):
    """`process`: by its number."""

    process: int
    position: LogPosition


class Book:
    """The rows of a share as its ledger has them. `note` is for the thread that records; `rows` for another.

    `letters`: where the ledger's dead letters ended then.
    """

    def __init__(self, ledger: Ledger) -> None:
        """StorageError, CorruptStateError."""
        self._ledger = ledger
        self._mutex = threading.Lock()
        self._packed: dict[bytes, bytes] = {}
        self._files = {state.number: state for state in ledger.files()}
        self._open: dict[int, Offsets] = {}
        self._opened: dict[int, list[Offsets]] = defaultdict(list)
        self._ended: dict[int, list[Offsets]] = defaultdict(list)
        self._totals, self.letters, self._placed = ledger.totals, ledger.letters, ledger.placed
        self._dirty = set(self._files)
        waiting = ledger.waiting()
        while values := [value for _, value in islice(waiting, SCANNED_MAX)]:
            _sort_in(self._opened, unpack_places(values))
        letters = (place.log for place in unpack_letters(self._placed.values()))
        self.next_number = 1 + max([0, *self._files, *self._opened, *letters])
        """Of a file: no event that waits and no dead letter stands in one of that number, or of a higher one,
        also where those files are gone."""

    def note(self, files: Iterable[FileState], opened: Places, ended: Places) -> None:
        """A transaction is done: the states of these files, events that wait from now on, and that wait no
        more."""
        with self._mutex:
            for state in files:
                self._files[state.number] = state
                self._dirty.add(state.number)
            _sort_in(self._opened, opened)
            _sort_in(self._ended, ended)
            self._totals, self.letters = self._ledger.totals, self._ledger.letters
            self._placed = self._ledger.placed

    def rows(self) -> tuple[dict[bytes, bytes], LogPosition]:
        """All, and `letters`, as of the last transaction."""
        with self._mutex:
            self._packed[_COUNTS] = msgspec.msgpack.encode(self._totals)
            self._packed[_END] = msgspec.msgpack.encode(_End(self._ledger.process, self.letters))
            placed = {_key(_LETTERS, number): row for number, row in self._placed.items()}
            for key in [key for key in self._packed if key[:1] == _LETTERS and key not in placed]:
                del self._packed[key]
            self._packed.update(placed)
            for number in self._dirty:
                key, state = _key(_FILE, number), self._files[number]
                if state.gone:
                    del self._files[number]
                    self._packed.pop(key, None)
                else:
                    self._packed[key] = pack_file_state(state)
            for number in self._opened.keys() | self._ended.keys():
                opened = np.concatenate([self._open.pop(number, _NO_OFFSETS), *self._opened[number]])
                still = np.setdiff1d(opened, np.concatenate([_NO_OFFSETS, *self._ended[number]]))
                if len(still):
                    self._open[number] = still
                    steps = np.diff(still, prepend=0).astype("<i8").tobytes()
                    self._packed[_key(_OPEN, number)] = zlib.compress(steps, _FAST)
                else:
                    self._packed.pop(_key(_OPEN, number), None)
            self._dirty = set()
            self._opened.clear()
            self._ended.clear()
            return dict(self._packed), self.letters


def differing(
    rows: Mapping[bytes, bytes], kept: Mapping[bytes, bytes]
) -> tuple[dict[bytes, bytes], list[bytes]]:
    """What is to be written and removed so that what is `kept` becomes `rows`."""
    return {k: v for k, v in rows.items() if kept.get(k) != v}, [k for k in kept if k not in rows]


@dataclass(slots=True)
class Kept:
    """Rows, unpacked."""

    totals: Totals = NOTHING
    end: _End | None = None
    files: dict[int, FileState] = field(default_factory=dict)
    open: dict[int, Offsets] = field(default_factory=dict)
    letters: list[LetterPlace] = field(default_factory=list)


def unpack_rows(rows: Mapping[bytes, bytes]) -> Kept:
    """CorruptStateError."""
    kept = Kept()
    try:
        for key, value in sorted(rows.items()):
            number = int.from_bytes(key[1:], "big")
            if key == _COUNTS:
                kept.totals = msgspec.msgpack.decode(value, type=Totals)
            elif key == _END:
                kept.end = msgspec.msgpack.decode(value, type=_End)
            elif key[:1] == _LETTERS:
                kept.letters += unpack_letters([value])
            elif key[:1] == _FILE:
                kept.files[number] = unpack_file_state(value)
            elif key[:1] == _OPEN:
                kept.open[number] = np.cumsum(np.frombuffer(zlib.decompress(value), "<i8"))
    except (msgspec.DecodeError, zlib.error, LookupError, ValueError) as error:
        raise CorruptStateError(f"what the registry keeps of a share can't be read: {error}") from error
    return kept


@dataclass(frozen=True, slots=True)
class Lost:
    """How many events that wait, and dead letters, are lost, as their lines can't be read any more."""

    events: int
    letters: int


def cut_letters(dead_letters: Path, worker: int, process: int, end: LogPosition) -> None:
    """Those of a process after the ones that are counted, where they can be seen: they are decided on again.
    While nobody has the worker's ledger open there. StorageError."""
    stem = letters_stem(worker, process)
    if (dead_letters / f"{stem}-{end.file:06d}.jsonl").exists():
        with closing(RotatingLog(dead_letters, stem, DEAD_LETTER_FILE_BYTES_MAX)) as letters:
            letters.truncate(end)


def restore(
    ledger: Ledger,
    kept: Kept,
    patterns: Sequence[str],
    dead_letters: Path,
    log_format: JsonLines,
    now_us: int,
) -> Lost:
    """Put what is kept into a ledger that is new. Events that waited and are lost are taken out of the
    counts, and a byte of each is told as lost. StorageError."""
    found = find(patterns, lambda *_: None)
    here = {number: _found_here(state, found) for number, state in kept.files.items()}
    values: list[bytes] = []
    for number, offsets in kept.open.items():
        state = here.get(number)
        lines = {} if state is None else _lines_at(state, found, offsets)
        events = _parsed(number, shown(state.name) if state else "", lines, log_format, now_us)
        values += pack_values(events) if len(events) else []
    lost = kept.totals.waiting - len(values)
    if lost < 0:
        raise CorruptStateError(f"what the registry keeps of a share has {-lost} events too many that wait")
    totals = kept.totals.plus(Totals(-lost, {}, 0, NOTHING.latencies, lost))
    due_us = np.full(len(values), now_us, np.int64)
    letters = list(_letters(kept.letters, here, found))
    standing = _standing(dead_letters, ledger.worker) if kept.letters else set()
    written = [dead_letter_lines([letter]) for letter in letters]
    missing = b"".join(line for line in written if _mark(line) not in standing)
    states = list(here.values())
    ledger.record(Entry(states, totals, missing, due_us=due_us, retries=values, placed=letters))
    told = {(fate, offset) for fate, offset, _ in standing}
    told.update((letter.fate.value, letter.offset) for letter in letters)
    return Lost(lost, sum((place.fate, place.offset) not in told for place in kept.letters))


def _letters(
    places: Sequence[LetterPlace], here: Mapping[int, FileState], found: Sequence[SeenFile]
) -> Iterator[DeadLetter]:
    """Those whose events can be read."""
    by_log: dict[int, list[LetterPlace]] = defaultdict(list)
    for place in places:
        by_log[place.log].append(place)
    for log, of_log in by_log.items():
        if (state := here.get(log)) is None:
            continue
        most = max(place.size for place in of_log)
        lines = _lines_at(state, found, np.unique([place.offset for place in of_log]), most)
        for place in of_log:
            event = lines.get(place.offset, b"")[: place.size]
            if len(event) == place.size:
                fate = Fate(place.fate)
                yield DeadLetter(fate, place.reason, event, shown(state.name), place.offset, log)


class _Letter(msgspec.Struct):
    fate: str
    event: msgspec.Raw
    offset: int


_decode_letter: Final = msgspec.json.Decoder(_Letter).decode


_Mark = tuple[str, int, bytes]


def _mark(line: bytes) -> _Mark | None:
    """By which a dead letter is known, whatever its log was called when it was written; None of what can't be
    read as one."""
    with suppress(msgspec.DecodeError, RecursionError):
        letter = _decode_letter(line)
        return letter.fate, letter.offset, bytes(letter.event)
    return None


def _standing(dead_letters: Path, worker: int) -> set[_Mark]:
    """The newest dead letters of that share that can be seen here, whichever process wrote them."""
    name = names_letters(worker)
    marks: set[_Mark] = set()
    with storage_errors(dead_letters):
        paths = [path for path in dead_letters.iterdir() if name.fullmatch(path.name)]
        left = _LOOKED_THROUGH_BYTES
        for path in sorted(paths, key=lambda path: path.stat().st_mtime_ns, reverse=True):
            for line in path.open("rb") if left > 0 else ():
                left -= len(line)
                if (mark := _mark(line)) is not None:
                    marks.add(mark)
    return marks


def _found_here(state: FileState, found: Sequence[SeenFile]) -> FileState:
    """Its device has another number on each machine, and it may have another name since."""
    if state.version:
        return state  # an archive is known by what is in it
    same = [one for one in found if one.inode == state.inode and not is_packed(one.name)]
    for one in sorted(same, key=lambda one: one.path != state.path):
        with suppress(OSError):
            if digest(read_at(one.path, 0, state.head_bytes)) == state.head or not state.head_bytes:
                return replace(state, **place_of(one))
    return state


def _lines_at(
    state: FileState, found: Sequence[SeenFile], offsets: Offsets, most: int = sys.maxsize
) -> dict[int, bytes]:
    """Offset -> line, of those that can be read; of a line of more than `most` bytes at least so many."""
    with suppress(OSError, EOFError, ValueError):
        if state.version:
            [archive] = [one for one in found if one.source == state.source or one.name == state.name][:1]
            return _cut(unpacked(archive.path), offsets.tolist(), most)
        with open(state.path, "rb", buffering=0) as file:
            fd = file.fileno()
            if digest(os.pread(fd, state.head_bytes, 0)) != state.head and state.head_bytes:
                return {}  # another log has the name by now
            return {offset: line for offset in offsets.tolist() if (line := _line(fd, offset, most))}
    return {}


def _line(fd: int, offset: int, most: int) -> bytes:
    data = b""
    while b"\n" not in data and len(data) < most:
        more = os.pread(fd, _LINE_STEP, offset + len(data))
        if not more:
            break
        data += more
    return data.partition(b"\n")[0]


def _cut(pieces: Iterable[bytes], offsets: Sequence[int], most: int = sys.maxsize) -> dict[int, bytes]:
    """Lines at sorted offsets of what the pieces are together; of a longer one at least `most` bytes."""
    lines: dict[int, bytes] = {}
    begin, held, wanted = 0, b"", iter(offsets)
    offset = next(wanted, None)
    for piece in pieces:
        held += piece
        while (
            offset is not None
            and offset < begin + len(held)
            and ((end := held.find(b"\n", offset - begin)) >= 0 or len(held) - (offset - begin) >= most)
        ):
            lines[offset] = held[offset - begin : end if end >= 0 else None]
            offset = next(wanted, None)
        if offset is None:
            break
        keep = max(0, min(len(held), offset - begin))
        begin, held = begin + keep, held[keep:]
    return lines


def _parsed(number: int, name: str, lines: Mapping[int, bytes], log_format: JsonLines, now_us: int) -> Events:
    """The events that stand there, each by itself: a line that is none is left out."""
    text = b"".join(line + b"\n" for line in lines.values())
    parsed = log_format.parse_foreign(text)
    starts = np.cumsum([0, *(len(line) + 1 for line in lines.values())])[:-1]
    chosen = np.searchsorted(starts, parsed.starts)
    count = len(parsed.lines)
    return Events(
        ids=parsed.ids,
        primary_ids=parsed.primary_ids,
        times=parsed.times,
        lines=parsed.lines,
        tries=np.zeros(count, np.uint32),
        sends=np.zeros(count, np.uint32),
        first_seen=np.full(count, now_us, np.int64),
        files=np.full(count, number, np.uint32),
        offsets=np.array(list(lines), np.int64)[chosen],
        names=[name],
        name_from=[0],
    )


def _sort_in(into: dict[int, list[Offsets]], places: Places) -> None:
    files, offsets = places
    for number in np.unique(files).tolist():
        into[number].append(offsets[files == number])


def _key(kind: bytes, number: int) -> bytes:
    return kind + number.to_bytes(_NUMBER_BYTES, "big")
