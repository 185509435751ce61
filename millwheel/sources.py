"""Injectors (paper 5.2): what brings records in, and the bound below which it brings no more.

Files are shared among workers by their slot, as dispatchers share them. A file that was read to its end is
idle: all that was written up to the last look at it was read. What can't be read is no idle file and holds
its bound. Copies of a source are as far as its importer promises, once they are read to where it promised it.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import msgspec

from millwheel.computation import BEFORE, NEVER
from millwheel.engine.lateness import Lateness
from millwheel.engine.lines import LineParser
from millwheel.engine.records import SLOTS, Records
from millwheel.engine.store import POSITION, Changes, position_row
from millwheel.sinks import complete_files
from millwheel.topology import PUSHED, Input, Logs
from photon.connect.copies import Known, known_to, stripe_of
from photon.core.clock import Clock
from photon.core.settings import Logs as Reading
from photon.logs.files import FileState, file_size, find, pack_file_state, shown, unpack_file_state
from photon.logs.follow import LogFollower
from photon.logs.packed import is_packed
from photon.logs.shares import slot_of, unrotated

CHUNK_BYTES: Final = 512 << 10
_FILE_SHARE: Final = 1 / 128
"""What a file takes of a chunk, however little it has."""
_LOOK_US: Final = 1_000_000
_COPIED_S: Final = 0.02
_encode: Final = msgspec.msgpack.encode
_position: Final = msgspec.msgpack.Decoder(tuple[int, bytes]).decode


class Injection(NamedTuple):
    """Records by input, the rows that say that they were read, lines that are none. `slot`: of the
    file. `share`: of a chunk, that this takes."""

    records: dict[int, Records]
    positions: Changes
    letters: list[dict[str, Any]]
    slot: int
    share: float


class Listed:
    """Which files a manifest beside them lists (`a-000007.jsonl`: `a.manifest`): they never change again."""

    def __init__(self) -> None:
        self._names: dict[Path, tuple[tuple[int, int, int], set[str]]] = {}

    def has(self, path: str) -> bool:
        """StorageError for a manifest that can't be read."""
        manifest = Path(path).parent / f"{Path(path).name.rpartition('-')[0]}.manifest"
        try:
            stat = manifest.stat()
        except OSError:
            return False
        version = stat.st_ino, stat.st_mtime_ns, stat.st_size
        known = self._names.get(manifest)
        if known is None or known[0] != version:
            names = {entry.file for entry in complete_files(manifest)}
            known = self._names[manifest] = version, names
        return Path(path).name in known[1]


class _Copies:
    """Up to when those of one source have all that it got, as far as they are read. `reign`: as of
    `known_to`."""

    def __init__(self, directory: Path, reign: int) -> None:
        self._directory, self._reign = directory, reign
        self._latest = Known()
        self._promise = Known()
        """That is not kept yet."""
        self._ends: dict[str, int] = {}
        self.upto = BEFORE

    def look(self, read: Mapping[str, int], unread: Set[str], mine: Callable[[str], bool]) -> Sequence[str]:
        """`read`: how far each file of this worker is; `unread`: those of them that have more. The notices
        of the importer, if they are this worker's to tell."""
        self._latest = known_to(self._directory, self._reign)
        self._ends = {str(self._directory / file): offset for file, offset in self._latest.ends}
        if not self._promise.ends:  # a later one only once this was kept: else none ever might be
            self._promise = self._latest
        ends = [(str(self._directory / file), offset) for file, offset in self._promise.ends]
        if ends and all(_is_past(end, offset, read, unread) for end, offset in ends if mine(end)):
            self.upto = NEVER if self._promise.finished else max(self.upto, self._promise.upto_us)
            self._promise = Known()
        return self._latest.notices if ends and mine(ends[0][0]) else ()

    def end(self, path: str) -> int:
        """Up to where a file of shared ones counts."""
        return self._ends.get(path, 0)

    def why(self) -> dict[str, Any]:
        """`upto_us`: up to when they have all; `trouble`: why they have no more."""
        return {
            "copies": shown(str(self._directory)),
            "upto_us": self._latest.upto_us,
            "trouble": self._latest.trouble,
        }

    def spent(self, known: Iterable[FileState]) -> list[Path]:
        """Files that are read and grow no more."""
        grow = {stripe_of(end): end for end in self._ends}
        old = [state for state in known if state.name < grow.get(stripe_of(state.name), "")]
        if self._reign:
            whole = [self._ends.get(state.name) for state in old]
        else:
            whole = [file_size(state.path, (state.device, state.inode)) for state in old]
        return [Path(state.path) for state, size in zip(old, whole, strict=True) if state.offset == size]


class LogSource:
    """The files of one injector that are this worker's. For one thread."""

    def __init__(
        self,
        name: str,
        number: int,
        injector: Logs,
        inputs: dict[int, Input],
        rows: Iterable[tuple[bytes, bytes]],
        mine: Callable[[int], bool],
        first: int,
        drain: bool,
        spool: Path,
        clock: Clock,
        wake: Callable[[], None],
        notice: Callable[[str], None],
        lateness: tuple[bytes, Lateness] | None = None,
        imported: bool = False,
        reign: int = 0,
    ) -> None:
        """`rows`: positions from the store. `mine`: of a slot. `first`: number for a file that is new.
        `lateness`: what counts lines for the percentile, and its row. `imported`: the files are copies, which
        several machines share where `reign` says which one copies (photon.connect.shared_copies).
        """
        self.name, self._number, self._injector, self._clock = name, number, injector, clock
        self._whole = injector.log == "directory"  # one worker's, who alone can tell where it is
        homes = [Path(pattern).parent for pattern in injector.patterns] if imported else []
        self._copies = {str(home): _Copies(home, reign) for home in homes}
        self._notice = notice
        self._mine: Callable[[str], bool] = lambda path: mine(self._slot(path))
        self._listed = Listed() if injector.listed else None
        self._parser = LineParser(injector, inputs)
        self._newest: dict[int, int] = {}
        states = []
        # Renamed while nobody looked, or found by another spelling, a file may be another worker's now.
        named = imported or bool(injector.listen)  # by names that come once; what is deleted leaves its inode
        shared = not (named or all(map(mine, range(SLOTS))))
        names = {file.source: file.name for file in find(injector.patterns, _pass_over)} if shared else {}
        for _, packed in rows:
            newest, state = _position(packed)
            file = unpack_file_state(state)
            if self._mine(names.get(file.source, file.name)):
                states.append(file)
                self._newest[file.number] = newest
        self._follower = LogFollower(
            injector.patterns,
            spool,
            Reading(chunk_bytes=CHUNK_BYTES),
            clock,
            states,
            drain and not imported,
            notice,
            self._is_read,
            wake,
            keep_copies=False,
            first=first,
            by_name=lambda _: named,
        )
        self._follower.order = lambda number: self._newest.get(number, BEFORE)
        self._reign = reign
        if reign:
            self._follower.room = lambda state: self._copies_of(state.name).end(state.name) - state.offset
        self._drain = drain
        self._lateness, self._skew = round(injector.lateness_s * 1e6), round(injector.skew_max_s * 1e6)
        self._expected = list(injector.expected)
        self._next_look = self._next_spent = 0
        self._looked = BEFORE
        self._counted = lateness
        self._trusted = BEFORE
        """The look by which the last bound took files for read to their end."""
        self._behind_since: dict[int, int] = {}
        """Files that it did not, and the look by which they had been."""
        self._known: dict[int, FileState] = {state.number: state for state in states}
        self._stand_for = stand_for(self._known.values(), injector.log)

    @property
    def patience_s(self) -> float:
        if self._reign and self._follower.growing():
            return _COPIED_S  # nothing tells of the ledger's
        return self._follower.patience_s

    def look(self) -> Changes:
        """Find files and growth. Rows of files that are new, renamed or gone."""
        now = self._clock.now_us()
        changes: Changes = {}
        for state in self._follower.scan_if_due():
            row = position_row(self._number, state.number)
            if state.gone:
                changes[row] = None
                self._known.pop(state.number, None)
                self._newest.pop(state.number, None)
                self._follower.forget(state.number)
            else:
                self._known[state.number] = state
                changes[row] = self._packed(state)
        if changes:
            self._stand_for = stand_for(self._known.values(), self._injector.log)
        self._follower.poll()
        self._looked = max(self._looked, self._follower.known_to(now))
        if self._copies:
            read = {state.name: state.offset for state in self._known.values()}
            behind = self._follower.behind()
            unread = {state.name for state in behind if self._follower.room(state) > 0}
            for copies in self._copies.values():
                for line in copies.look(read, unread, self._mine):
                    self._notice(line)
            self._trusted = min(copies.upto for copies in self._copies.values())
        return changes

    def allow(self, lateness_us: int) -> None:
        """How far behind the bound stays from now on."""
        self._lateness = lateness_us

    def late(self) -> bytes | None:
        """Lines read lately, by lateness, where a percentile is wanted."""
        return None if self._counted is None else self._counted[1].packed()

    def read(self, share: float = 1.0) -> Injection | None:
        """The next lines of the file that is least far: about this share of a chunk, one line at least."""
        found = self._follower.next_chunk(max(1, int(share * CHUNK_BYTES)))
        if found is None:
            return None
        state, chunk = found
        newest = self._newest.get(state.number, BEFORE)
        rows: Changes = {}
        parsed = self._parser.parse_chunk(chunk)
        letters = parsed.letters(self.name, shown(state.name))
        upto = self._clock.now_us() + self._skew
        if self._counted is not None:
            row, lateness = self._counted
            promised = max(newest, self._behind_since.get(state.number, self._trusted))
            promised = self._trusted if self._copies else promised
            lateness.saw(parsed.times, promised, upto)
            rows[row] = lateness.packed()
        self._newest[state.number] = int(parsed.times[parsed.times <= upto].max(initial=newest))
        state = self._known[state.number] = self._follower.advanced(state.number, chunk.end)
        rows[position_row(self._number, state.number)] = self._packed(state)
        took = max((chunk.end - chunk.start) / CHUNK_BYTES, _FILE_SHARE)
        return Injection(parsed.records, rows, letters, self._slot(state.name), took)

    def bound(self) -> int:
        """Nothing older will come that is not late."""
        if self._await_expected():
            return BEFORE
        if self._copies:
            return self._trusted if self._trusted in (BEFORE, NEVER) else self._trusted - self._lateness
        follower = self._follower
        if self._drain and follower.caught_up and not follower.unreadable:
            return NEVER
        behind = {state.number for state in follower.behind()}
        if self._drain or self._injector.silent == "hold":
            bounds = [self._newest.get(number, BEFORE) for number in behind]
            bounds += self._silent(behind).values()
            return min(bounds, default=BEFORE if self._drain else self._looked) - self._lateness
        self._behind_since = {number: self._behind_since.get(number, self._trusted) for number in behind}
        self._trusted = self._looked
        bounds = [self._newest.get(number, BEFORE) for number in behind]
        return min([self._looked, *bounds]) - self._lateness

    @property
    def settling(self) -> bool:
        """An archive is being unpacked, or written to still."""
        return bool(self._follower.settling)

    def why(self) -> dict[str, Any]:
        """What the bound hangs on."""
        behind = self._follower.behind()
        least = sorted(behind, key=lambda state: self._newest.get(state.number, BEFORE))[:3]
        silent = self._silent({state.number for state in behind})
        upto = min((self._newest.get(state.number, BEFORE) for state in least), default=NEVER)
        least_silent = [number for number in sorted(silent, key=silent.__getitem__) if silent[number] < upto]
        quiet = [self._known[number].name for number in least_silent[:3]]
        return {
            "files": self._follower.files,
            "unread_bytes": self._follower.unread_bytes(),
            "least_far": [shown(state.name) for state in least],
            "unreadable": self._follower.unreadable,
            "expected": list(self._expected),
            "quiet": [shown(_directory(name) if self._whole else name) for name in quiet],
            "lateness_s": self._lateness / 1e6,
            "percentile": self._injector.percentile,
            "copies": [copies.why() for copies in self._copies.values()],
        }

    def spent(self) -> list[Path]:
        """Files of what was pushed that are complete and read: nobody needs them once that is durable."""
        now = self._clock.now_us()
        if not (self._injector.listen or self._copies) or now < self._next_spent:
            return []
        self._next_spent = now + _LOOK_US
        if self._copies:
            known = list(self._known.values())
            return [path for copies in self._copies.values() for path in copies.spent(known)]
        directory = Path(self._injector.patterns[0]).parent
        lengths = {entry.file: entry.bytes for entry in complete_files(directory / f"{PUSHED}-0.manifest")}
        paths = ((Path(shown(state.name)), state.offset) for state in self._known.values())
        return [path for path, offset in paths if lengths.get(path.name) == offset]

    def close(self) -> None:
        self._follower.close()

    def _copies_of(self, path: str) -> _Copies:
        return self._copies[_directory(path)]

    def _slot(self, path: str) -> int:
        if self._copies:
            path = stripe_of(path)
        return slot_of(_directory(path) if self._whole else path, SLOTS)

    def _is_read(self, path: str) -> bool:
        return self._mine(path) and (self._listed is None or self._listed.has(path))

    def _silent(self, behind: set[int]) -> dict[int, int]:
        """Where those logs stand that hold the bound though they were read to their end: at their newest
        line, also of what was rotated away. One of which something is unread is held by that alone."""
        if self._injector.silent != "hold" or self._drain:
            return {}
        unread = {self._stand_for.get(number) for number in behind}
        stands = newest_of_logs(self._stand_for, self._newest)
        return {log: newest for log, newest in stands.items() if log not in unread}

    def _await_expected(self) -> bool:
        now = self._clock.now_us()
        if self._expected and now >= self._next_look:
            self._next_look = now + _LOOK_US
            known = {state.name for state in self._known.values()}
            self._expected = [
                glob
                for glob in self._expected
                if not (files := find([glob], _pass_over))
                or any(self._is_read(file.name) and file.name not in known for file in files)
            ]
        return bool(self._expected)

    def _packed(self, state: FileState) -> bytes:
        return pack_position(self._newest.get(state.number, BEFORE), state)


def _is_past(end: str, offset: int, read: Mapping[str, int], unread: Set[str]) -> bool:
    """Whether a log of copies is read up to there. A file that is not found yet is not, though nothing may
    stand in it: who has not found it may not have seen the one before it grow."""
    files = [name for name in read if stripe_of(name) == stripe_of(end)]
    if any(name < end and name in unread for name in files):
        return False
    return read[end] >= offset if end in read else any(name > end for name in files)


def _pass_over(name: str, reason: str) -> None:
    """The follower finds it, too, and tells of it."""


def _directory(path: str) -> str:
    return path.rpartition("/")[0]


def stand_for(files: Iterable[FileState], log: Literal["file", "directory"]) -> dict[int, int]:
    """Number of each file that still counts once it is read to its end -> of the one that it counts for: of
    one that was rotated away, the log that goes on under the name it had; or of any, one of its directory. An
    archive grows no more."""
    numbers = {file.name: file.number for file in files}
    if log == "directory":
        first: dict[str, int] = {}
        return {number: first.setdefault(name.rpartition("/")[0], number) for name, number in numbers.items()}
    logs = {number: numbers.get(unrotated(name), number) for name, number in numbers.items()}
    return {
        number: logs[number]
        for name, number in numbers.items()
        if logs[number] != number or not is_packed(name)
    }


def newest_of_logs(logs: Mapping[int, int], newest: Mapping[int, int]) -> dict[int, int]:
    """Of each log the newest time in its files. `logs`: as of stand_for; `newest`: by number of the file."""
    stands: dict[int, int] = {}
    for number, log in logs.items():
        stands[log] = max(newest.get(number, BEFORE), stands.get(log, BEFORE))
    return stands


def pack_position(newest: int, state: FileState) -> bytes:
    """The row of a file: the newest time in it, and how far it is read."""
    return _encode((newest, pack_file_state(state)))


def position_rows(number: int) -> bytes:
    """What the rows of an injector's positions start with."""
    return POSITION + number.to_bytes(2, "big")
