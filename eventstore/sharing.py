"""Of several event stores each reads some logs, and takes from the others what they have read of theirs.

What one has read of a log, from here to there, goes into the map of each as if it were read there: the map
says for each log how far it has it, so what comes twice is passed by and what was missed is noticed. Nothing
is lost where a message is, and no log waits for anybody: a log that others are to read and that nobody has
told of for STANDS_S is read here, by whoever notices. So logs need no owner that all agree on.
"""

from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass, field
from os import stat
from typing import Final

import numpy as np

from eventstore.log_file_map import Rows
from eventstore.peers import Peers
from eventstore.rules.entries import Ints
from photon.core.clock import Clock
from photon.core.columns import take_ids
from photon.logs.files import FileState
from photon.logs.follow import LogFollower
from photon.logs.text import ALL_READ
from photon.rpc import eventstore_pb2 as pb

STANDS_S: Final = 3.0
EARLY_MAX: Final = 4096
"""Stretches of logs that are not seen here yet, or not so far; more are read here instead."""


def key_of(state: FileState) -> str:
    """What a log is known by on every machine; devices have other numbers there."""
    return state.version or str(state.inode)


@dataclass(slots=True)
class Followed:
    """What others have read: events, in the order they were read, and how far their logs are read by that."""

    ids: list[bytes] = field(default_factory=list)
    files: list[Ints] = field(default_factory=list)
    starts: list[Ints] = field(default_factory=list)
    lengths: list[Ints] = field(default_factory=list)
    states: dict[int, FileState] = field(default_factory=dict)
    malformed: int = 0

    def rows(self) -> Rows | None:
        if not self.ids:
            return None
        columns = (np.concatenate(column) for column in (self.files, self.starts, self.lengths))
        return Rows(b"".join(self.ids), *columns)


class Sharing:
    """For the reader's thread. `newest` gets, by number, up to which event time (us) a log is read."""

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

    def leaves(self, state: FileState) -> bool:
        """Whether another one reads this log."""
        if not self._peers.others:
            return False
        membership = self._peers.membership()
        if membership.reader(state.name) == self._peers.address:
            return False
        told = self._told.get(state.number, float("-inf"))
        return self._clock.monotonic() - told <= STANDS_S

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
        return stat(state.path).st_size >= end
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
