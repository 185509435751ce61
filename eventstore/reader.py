"""The reader of the primary logs: fills the log file map and the cache, in one thread (paper 3.4.1, 3.4.2).

What it takes up is kept as a group until the map has it; then the cache gets it, and the other event stores
of the datacenter hear of it (Sharing). While it catches up a group is many chunks: all that is
done with a group is faster with many events at once.
"""

import os
import sys
import threading
from collections.abc import Callable, Container, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from eventstore.cache import Block
from eventstore.log_file_map import Counts, LogFileMap, Rows
from eventstore.peers import Peers
from eventstore.rules.entries import Ints
from photon.core.clock import Backoff, Clock
from photon.core.columns import take_ids, unpack_times
from photon.core.errors import CorruptStateError, StorageError
from photon.core.fates import Fate
from photon.core.ids import ID_BYTES
from photon.core.settings import Logs
from photon.core.status import Notices
from photon.logs.files import FileState
from photon.logs.follow import LogFollower
from photon.logs.formats import JsonLines, Lines
from photon.logs.text import ALL_READ, LINGER_S, Part, Text, gather, oversized_letter
from photon.logs.writer import DeadLetter, RotatingLog, dead_letter_lines
from photon.rpc import eventstore_pb2 as pb

GROUP_BYTES_MAX: Final = 32 << 20
_RETRIES: Final = Backoff(0.05, 5.0)
_UNENDED_EVERY_S: Final = 1.0
KEPT_EVERY_S: Final = 3.0
"""At most so often is made durable what was counted of logs that are gone."""
LOOKS_S_MAX: Final = 3 * _UNENDED_EVERY_S
"""A reader that has not looked at its logs for so long stands still: with nothing to do it looks each
second."""

STANDS_S: Final = 3.0
EARLY_MAX: Final = 4096
"""Stretches of logs that are not seen here yet, or not so far; more are read here instead."""


def key_of(state: FileState) -> str:
    """What a log is known by on every machine; devices have other numbers there."""
    return state.version or str(state.inode)


@dataclass(slots=True)
class _Read:
    """Events, in the order they were read, and how far their logs are read by that."""

    ids: list[bytes] = field(default_factory=list)
    files: list[Ints] = field(default_factory=list)
    starts: list[Ints] = field(default_factory=list)
    lengths: list[Ints] = field(default_factory=list)
    states: dict[int, FileState] = field(default_factory=dict)

    def rows(self) -> Rows | None:
        if not self.ids:
            return None
        columns = (np.concatenate(column) for column in (self.files, self.starts, self.lengths))
        return Rows(b"".join(self.ids), *columns)


@dataclass(slots=True)
class Followed(_Read):
    """What others have read."""

    malformed: int = 0


class Sharing:
    """Of several event stores each reads some logs, and takes from the others what they have read of theirs.

    What one has read of a log, from here to there, goes into the map of each as if it were read there: the
    map says for each log how far it has it, so what comes twice is passed by and what was missed is noticed.
    Nothing is lost where a message is, and no log waits for anybody: a log that others are to read and that
    nobody has told of for STANDS_S is read here, by whoever notices. So logs need no owner that all agree on.

    For the reader's thread. `newest` gets, by number, up to which event time (us) a log is read.
    """

    def __init__(
        self, peers: Peers, follower: LogFollower, clock: Clock, newest: Callable[[int, int], None]
    ) -> None:
        self._peers, self.feed = peers, peers.feed
        self._follower = follower
        self._clock = clock
        self._newest = newest
        self._told: dict[int, float] = {}
        """When others told of a log last, so that it follows upon what is known here."""
        self._numbers: dict[str, list[FileState]] = {}
        self._early: list[tuple[float, pb.Stretch]] = []

    def room(self, state: FileState) -> int:
        """How much of a log is read here: nothing while another one reads it."""
        if not self._peers.others:
            return sys.maxsize
        membership = self._peers.membership()
        if membership.reader(state.name) == self._peers.address:
            return sys.maxsize
        told = self._told.get(state.number, float("-inf"))
        return 0 if self._clock.monotonic() - told <= STANDS_S else sys.maxsize

    def found(self, fresh: Iterable[FileState], known: Mapping[int, FileState]) -> None:
        """A scan has found logs: `known` are all, `fresh` those of which others have had no time to tell."""
        now = self._clock.monotonic()
        for state in fresh:
            self._told.setdefault(state.number, now)
        self._numbers = {}
        for state in known.values():
            self._numbers.setdefault(key_of(state), []).append(state)

    def forget(self, number: int) -> None:
        self._told.pop(number, None)

    def take(self, positions: Mapping[int, FileState], pending: Container[int]) -> Followed:
        """What others have read that is not known here. `pending`: logs that are read past what `positions`
        says; they wait."""
        followed = Followed()
        now = self._clock.monotonic()
        waiting = [*self._early, *((now, stretch) for stretch in self._peers.take())]
        self._early = []
        for came, stretch in waiting:
            state = self._state_of(stretch, followed.states, positions)
            if state is None or state.number in pending or not _holds(state, stretch.end):
                if now - came <= STANDS_S and len(self._early) < EARLY_MAX:
                    self._early.append((came, stretch))
            elif stretch.start <= state.offset:
                self._told[state.number] = now
                self._newest(state.number, stretch.newest_us or ALL_READ)
                if stretch.end > state.offset:
                    self._take(followed, state, stretch)
        return followed

    def tell(
        self, rows: Rows | None, read: Mapping[int, tuple[int, FileState, int]], malformed: Rows
    ) -> None:
        """To the others what was read here. `read`: by number, from where, the state now, newest_us;
        `malformed`: lines without ids."""
        by_file = _split(rows) if rows is not None else {}
        bad = _split(malformed)
        stretches = []
        for number, (start, state, newest_us) in read.items():
            part, wrong = by_file.get(number), bad.get(number)
            stretch = pb.Stretch(
                key=key_of(state),
                name=state.name,
                head_bytes=state.head_bytes,
                head=state.head,
                start=start,
                end=state.offset,
                newest_us=newest_us,
                malformed=wrong.starts.astype("<u8").tobytes() if wrong else b"",
            )
            if rows is not None and part is not None:
                stretch.ids = part.ids
                stretch.starts = part.starts.astype("<u8").tobytes()
                stretch.lengths = part.lengths.astype("<u4").tobytes()
            stretches.append(stretch)
        if stretches:
            self.feed.tell(stretches)

    def _state_of(
        self, stretch: pb.Stretch, taken: Mapping[int, FileState], positions: Mapping[int, FileState]
    ) -> FileState | None:
        """Of the log that is meant, as it is known now; None if it has not been seen here."""
        found = []
        for one in self._numbers.get(stretch.key, ()):
            state = taken.get(one.number) or positions.get(one.number)
            if state is None or state.gone or not self._follower.knows(state.number):
                continue
            if state.head_bytes == stretch.head_bytes and state.head != stretch.head:
                continue  # another log that has got its inode
            found.append(state)
        if len(found) > 1:  # on several devices
            found = [state for state in found if state.name == stretch.name]
        return found[0] if len(found) == 1 else None

    def _take(self, followed: Followed, state: FileState, stretch: pb.Stretch) -> None:
        try:
            followed.states[state.number] = self._follower.passed_over(state.number, stretch.end)
        except OSError:
            return
        starts = np.frombuffer(stretch.starts, "<u8").astype(np.int64)
        bad = np.frombuffer(stretch.malformed, "<u8").astype(np.int64)
        followed.malformed += int((bad >= state.offset).sum())
        chosen = np.flatnonzero(starts >= state.offset)
        if len(chosen):
            followed.ids.append(take_ids(stretch.ids, chosen))
            followed.starts.append(starts[chosen])
            followed.lengths.append(np.frombuffer(stretch.lengths, "<u4").astype(np.int64)[chosen])
            followed.files.append(np.full(len(chosen), state.number, np.int64))


def _holds(state: FileState, end: int) -> bool:
    """A mount may show another machine's writes late."""
    try:
        return os.stat(state.path).st_size >= end
    except OSError:
        return False


def _split(rows: Rows) -> dict[int, Rows]:
    """By file number, in order."""
    order = np.argsort(rows.files, kind="stable")
    numbers, first = np.unique(rows.files[order], return_index=True)
    parts = np.split(order, first[1:]) if len(numbers) else []
    found = {}
    for number, part in zip(numbers.tolist(), parts, strict=True):
        ids = take_ids(rows.ids, part) if rows.ids else b""
        found[number] = Rows(ids, rows.files[part], rows.starts[part], rows.lengths[part])
    return found


@dataclass(slots=True)
class _Group(_Read):
    """Chunks that are parsed and not yet in the map."""

    lines: list[Lines] = field(default_factory=list)
    letters: list[DeadLetter] = field(default_factory=list)
    bad_files: list[int] = field(default_factory=list)
    bad_starts: list[int] = field(default_factory=list)
    tails: set[int] = field(default_factory=set)
    bytes: int = 0
    lost_bytes: int = 0

    def malformed(self) -> Rows:
        """Without ids and lengths."""
        files = np.array(self.bad_files, np.int64)
        return Rows(b"", files, np.array(self.bad_starts, np.int64), np.zeros(len(files), np.int64))


@dataclass
class Reader:
    """Use `start` and `stop`, or call `step` (tests). `on_failure` gets what no retry can mend; `on_read`, up
    to about which time of events (us) all logs are read, or ALL_READ. `peers`: the other event stores;
    `on_followed` gets ids of events that one of them has read, once the map has them."""

    follower: LogFollower
    log_file_map: LogFileMap
    fill: Callable[[Block], None]
    log_format: JsonLines
    dead_letters: RotatingLog
    settings: Logs
    clock: Clock
    notices: Notices
    on_failure: Callable[[Exception], None] = lambda _: None
    wake: threading.Event = field(default_factory=threading.Event)
    on_read: Callable[[int], None] = lambda _: None
    peers: Peers | None = None
    on_followed: Callable[[bytes], None] = lambda _: None

    def __post_init__(self) -> None:
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="primary-reader", daemon=True)
        self._group = _Group()
        self.dead_letters.truncate(self.log_file_map.counts.dead_letters)
        self._next_unended = self._next_kept = float("-inf")
        self.caught_up = False
        """Every byte that the follower has seen is in map and cache; in a drain it has seen a log."""
        self._looked_at = float("-inf")
        self._goal: tuple[float, dict[int, int]] | None = None
        self._reached_at = float("-inf")
        self.has_caught_up = False
        """It was up to date once since the start."""
        self.positions = {state.number: state for state in self.log_file_map.states() if not state.gone}
        """How far the map knows each log; of one that is new, nothing. For other threads to look at."""
        self.storage_error: str | None = None
        self.unended: dict[str, int] = {}
        self.unreadable: dict[str, str] = {}
        self._newest: dict[int, int] = {}
        """The event time (us) up to which each log is read, while there is more: all advance together."""
        self.follower.order = lambda number: self._newest.get(number, 0)
        self._sharing: Sharing | None = None
        if self.peers is not None:
            self._sharing = Sharing(self.peers, self.follower, self.clock, self._newest.__setitem__)
            self.follower.room = self._sharing.room

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End after the group under way. What can't be made durable then is read again at the next start."""
        self._stopping.set()
        self.wake.set()
        if self._thread.is_alive():
            self._thread.join()
        with suppress(StorageError):
            self._flush()
        self.follower.close()

    def step(self) -> bool:
        """Read and store one group; was there anything? StorageError: call again, the group is kept."""
        held = self.log_file_map
        if held.flush_due or (held.holds_last and self.clock.monotonic() >= self._next_kept):
            self._flush()
        group = self._group
        changed = self.follower.scan_if_due()
        for state in changed:
            group.states[state.number] = state
            self.positions.setdefault(state.number, state)
        first = self._looked_at == float("-inf")
        if self._sharing and (changed or first):
            self._sharing.found(() if first else changed, self.positions)
        group.lost_bytes += self.follower.take_lost()
        looked_at = self.clock.monotonic()
        self.follower.poll()
        self.caught_up = self.caught_up and self.follower.caught_up
        self._looked_at = looked_at
        worked = self._follow()
        while group.bytes < GROUP_BYTES_MAX and not self._stopping.is_set():
            parts, oversized = gather(self.follower, self.settings.chunk_bytes // 2)
            self.caught_up = self.caught_up and not (parts or oversized)
            if self._take(parts, oversized):
                break
        if group.states:
            worked = True
            self._write()
        self.caught_up = self.follower.caught_up and self._in_sight()
        self._note_goal(looked_at)
        self.has_caught_up = self.has_caught_up or self.is_up_to_date
        self.on_read(self._read_to_us())
        self.unreadable = self.follower.unreadable
        if worked or self.clock.monotonic() >= self._next_unended:
            self.unended = self.follower.unended()
            self._next_unended = self.clock.monotonic() + _UNENDED_EVERY_S
        return worked

    def _read_to_us(self) -> int:
        """A log that says no times, or can't be read, does not count."""
        if self.caught_up:
            return ALL_READ
        return min((self._newest.get(one.number, 0) for one in self.follower.growing()), default=ALL_READ)

    @property
    def is_up_to_date(self) -> bool:
        """All that a look has found a moment ago is read: a process that stood still, or whose reader gets no
        CPU, does not know what was written meanwhile. For other threads."""
        looked_at = self._looked_at  # before the other: what that look has found shows in it
        looked_at = looked_at if self.caught_up else self._reached_at
        return self.clock.monotonic() - looked_at <= LOOKS_S_MAX

    def _note_goal(self, looked_at: float) -> None:
        """What others read comes a little later all the time, so there may be no moment without anything
        unread: up to date is also who has read what a look of a moment ago has found. Not in a drain, which
        has an end."""
        if self.peers is None or not self.peers.others or self.caught_up or self.follower.drain:
            self._goal = None
        elif self._goal is None:
            self._goal = looked_at, self.follower.unread_to()
        elif self.follower.is_past(self._goal[1], {n: one.offset for n, one in self.positions.items()}):
            self._reached_at, self._goal = self._goal[0], None

    def _follow(self) -> bool:
        """Take up what others have read; was there anything?"""
        if self._sharing is None:
            return False
        followed = self._sharing.take(self.positions, self._group.states)
        if not followed.states:
            return False
        rows, counts = followed.rows(), self.log_file_map.counts
        events = len(rows.starts) if rows else 0
        counts = msgspec.structs.replace(
            counts,
            primary_events=counts.primary_events + events,
            malformed=counts.malformed + followed.malformed,
        )
        self.log_file_map.write(rows, followed.states.values(), counts)
        self.positions |= followed.states
        if rows:
            self.on_followed(rows.ids)
        return True

    def _in_sight(self) -> bool:
        """False while logs that grow no more are to be read and none is there, as before a disk is mounted:
        absent is final then, and all events would be given up."""
        if self.positions or not self.follower.drain:
            return True
        self.notices.tell("no primary log is in sight, so nothing is given up: check 'primary' and its disk")
        return False

    def _run(self) -> None:
        failures = 0
        try:
            while not self._stopping.is_set():
                try:
                    worked = self.step()
                except StorageError as error:
                    # A restart mends the latter: it looks at what is on disk.
                    if isinstance(error, CorruptStateError) or self.dead_letters.broken:
                        raise
                    failures += 1
                    self._tell(error)
                    self._stopping.wait(_RETRIES.delay_s(failures))
                    continue
                failures, self.storage_error = 0, None
                if not worked:
                    self.wake.wait(self._pause_s())
                    self.wake.clear()
                elif self.caught_up:
                    self._stopping.wait(LINGER_S)
        except Exception as error:
            self.caught_up = False
            self.storage_error = str(error)
            self.notices.tell(f"the reader stopped: {error}")
            self.on_failure(error)

    def _pause_s(self) -> float:
        """Until there may be something to do, unless the follower wakes the reader before."""
        others = self._next_unended - self.clock.monotonic()
        return min(self.follower.patience_s, max(others, self.settings.poll_interval_ms / 1000))

    def _tell(self, error: StorageError) -> None:
        if self.storage_error != str(error):
            self.notices.tell(f"{error}; tried again until it works")
        self.storage_error = str(error)

    def _take(self, parts: Sequence[Part], oversized: Part | None) -> bool:
        """Add chunks to the group. True if they are all for now: nothing more is known, or a file grows by
        little bits and these wait no longer."""
        group, tails = self._group, set()
        if parts:
            self._parse(parts)
        if oversized is not None:
            group.letters.append(oversized_letter(oversized, self.settings.line_bytes_max))
            group.bad_files.append(oversized[0].number)
            group.bad_starts.append(oversized[1].start)
            parts = [*parts, oversized]
        for file, chunk in parts:
            group.bytes += chunk.end - chunk.start
            group.states[file.number] = self.follower.advanced(file.number, chunk.end)
            if chunk.end - chunk.start < self.settings.chunk_bytes // 2:
                tails.add(file.number)
        again = not tails.isdisjoint(group.tails)
        group.tails |= tails
        return again or not parts

    def _parse(self, parts: Sequence[Part]) -> None:
        group, text = self._group, Text(parts)
        batch = self.log_format.parse_primary(text.data)
        group.letters += [
            DeadLetter(Fate.MALFORMED, bad.reason, bad.line, *text.origin(bad.start))
            for bad in batch.malformed
        ]
        numbers = np.array([file.number for file, _ in parts], np.int64)
        if batch.malformed:
            bad_starts = np.array([bad.start for bad in batch.malformed], np.int64)
            group.bad_files += numbers[text.parts_of(bad_starts)].tolist()
            group.bad_starts += text.offsets(bad_starts).tolist()
        found = batch.found
        if not len(found):
            return
        group.ids.append(batch.ids)
        group.lines.append(found)
        group.lengths.append(found.lengths)
        group.starts.append(text.offsets(found.starts))
        group.files.append(numbers[text.parts_of(found.starts)])
        for (file, chunk), last in zip(parts, text.last_rows(found.starts), strict=True):
            if chunk.more and last is not None:
                own = batch.ids[last * ID_BYTES : (last + 1) * ID_BYTES]
                times, _ = self.log_format.primary_times(own, found.take([last]).lines)
                self._newest[file.number] = int(unpack_times(times)[0]) or ALL_READ

    def _write(self) -> None:
        """The group to the dead letters, the map, the cache; then a new group begins."""
        group, counts = self._group, self.log_file_map.counts
        rows = group.rows()
        hashes, firsts = self.log_file_map.write(rows, group.states.values(), self._with_letters(counts))
        if self._sharing and self._sharing.feed.followed:
            self._sharing.tell(rows, self._read_in(group), group.malformed())
        self._group = _Group()
        for number, state in group.states.items():
            if state.gone:
                self.positions.pop(number, None)
                self.follower.forget(number)
                self._newest.pop(number, None)
                if self._sharing:
                    self._sharing.forget(number)
            else:
                self.positions[number] = state
        if rows is not None:
            self.fill(Block(rows.ids, group.lines, hashes, firsts))

    def _read_in(self, group: _Group) -> dict[int, tuple[int, FileState, int]]:
        """By number, of each log: from where it was read, its state now, and up to which event time it is
        read while there is more."""
        more = {state.number for state in self.follower.growing()}
        newest = {number: self._newest.get(number, 0) for number in more}
        return {
            number: (self.positions[number].offset, state, newest.get(number, 0))
            for number, state in group.states.items()
            if not state.gone and state.offset > self.positions[number].offset
        }

    def _flush(self) -> None:
        """Make what was read durable; the dead letters before the map, which says where they end."""
        self.caught_up = False  # however long it takes, nothing is read meanwhile
        self.dead_letters.sync()
        self.log_file_map.flush()
        self._next_kept = self.clock.monotonic() + KEPT_EVERY_S

    def _with_letters(self, counts: Counts) -> Counts:
        """Append the group's dead letters, all or none. What the map is to say of them."""
        group = self._group
        position = counts.dead_letters
        if group.letters:
            position = self.dead_letters.append(dead_letter_lines(group.letters))
        return Counts(
            counts.primary_events + sum(map(len, group.lines)),
            counts.malformed + len(group.letters),
            position.file,
            position.offset,
            counts.lost_bytes + group.lost_bytes,
        )


def follower_of(
    log_file_map: LogFileMap,
    patterns: Sequence[str],
    directory: Path,
    settings: Logs,
    clock: Clock,
    notices: Notices,
    wake: threading.Event,
    drain: bool = False,
) -> LogFollower:
    """Of logs that go on being read from where the map in `directory` has them."""
    return LogFollower(
        patterns,
        directory / "spool",
        settings,
        clock,
        log_file_map.states(),
        drain,
        notices.tell,
        wake=wake.set,
        first=log_file_map.next_number,
    )
