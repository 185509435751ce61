"""One replica of one shard: the registry thread of Fig. 3 (paper 2.1, 2.2.1).

RPC handlers only `offer` requests to the queue. The raft thread is the paper's registry thread: in `on_tick`
it takes the commits that wait and makes one command of them, its result everybody's answer; the conflicts in
it are resolved when the command is applied (`state`), in its order, alike on all replicas. There is no
minimum batch: a request that is alone goes alone, at once.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

import numpy as np
from msgspec.structs import replace

from idregistry.rules.commands import Command, CommandError, Commit, Release, decode, encode
from idregistry.rules.directory import DirectoryState, View, shard_of_group
from idregistry.rules.packing import BATCH_BYTES_MAX, NO_BOUNDARY, request_bytes
from idregistry.rules.state import ShardState
from idregistry.rules.steward import DAY_US, Steward, boundary_due, command_due
from idregistry.segment_file import SegmentFiles
from photon.core.clock import Clock
from photon.core.columns import split_ids
from photon.core.fates import Registered
from photon.core.settings import Registry
from photon.raft.port import Applied, Outcome, Refusal, Refused, ReplicatedLog, Unknown


@dataclass(frozen=True, slots=True)
class Settled:
    """The command was applied: `result` is what it is answered, of a batch the request's own column."""

    result: Any


@dataclass(frozen=True, slots=True)
class Overloaded:
    """Nothing was done: too much waits, or the request's deadline passed before its turn came."""

    why: str


Answer = Settled | Overloaded | Refused | Unknown


def answer_to(outcome: Outcome) -> Answer:
    """What the log says of a command -> what its client is told."""
    return Settled(outcome.result) if isinstance(outcome, Applied) else outcome


What = TypeVar("What")


@dataclass(frozen=True, slots=True, eq=False)
class Ask(Generic[What]):
    """A command as far as its client can make it: times are the leader's. `answer` is called once; `deadline`
    is in monotonic seconds.
    """

    what: What
    deadline: float
    answer: Callable[[Answer], None]

    @property
    def weight(self) -> int:
        """A commit's ids."""
        return sum(self.what.counts) if isinstance(self.what, Commit) else 1

    @property
    def size(self) -> int:
        """What a commit adds to a command, bytes. Nothing shares the command of another."""
        return (
            request_bytes(self.what.ids, *self.what.tokens)
            if isinstance(self.what, Commit)
            else BATCH_BYTES_MAX
        )


def barrier(deadline: float, answer: Callable[[Answer], None]) -> Ask[Commit | Release]:
    """A release of nothing: once it is applied, all that was acknowledged before it was asked for is."""
    return Ask(Release(0, (), (), b"", b"", (), False), deadline, answer)


class Line(Generic[What]):
    """Who waits for the raft thread, in the order of arrival. Any thread.

    At most `weight_max` of them. `full` (with a place for the weight that waits) and `late` are told to whom
    it sends away; `wake` makes the raft thread turn.
    """

    def __init__(self, weight_max: int, wake: Callable[[], None], full: str, late: str) -> None:
        self._weight_max = weight_max
        self._wake = wake
        self._full = full
        self._late = late
        self._lock = threading.Lock()
        self._waiting: deque[Ask[What]] = deque()
        self._closed = False
        self.weight = 0
        """Of all that wait."""

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, item: Ask[What]) -> Answer | None:
        """Let it wait; its answer where it can't even do that. An empty line takes any, or a large one could
        never pass."""
        with self._lock:
            if self._closed:
                return Refused(Refusal.NOT_LEADER, None)
            if self._waiting and self.weight + item.weight > self._weight_max:
                return Overloaded(self._full.format(self.weight))
            self._waiting.append(item)
            self.weight += item.weight
        self._wake()
        return None

    def take(self, now: float, weight_max: int = 1, size_max: int = 0) -> list[Ask[What]]:
        """All that wait, while they stay within the bounds, but at least one. Who is late is told so."""
        taken: list[Ask[What]] = []
        late: list[Ask[What]] = []
        weight = size = 0
        with self._lock:
            while self._waiting:
                item = self._waiting[0]
                if item.deadline > now:
                    weight += item.weight
                    size += item.size
                    if taken and (weight > weight_max or size > size_max):
                        break
                self._waiting.popleft()
                self.weight -= item.weight
                (taken if item.deadline > now else late).append(item)
        _answer_all(late, Overloaded(self._late))
        return taken

    def send_elsewhere(self, leader: str | None) -> None:
        with self._lock:
            waiting = list(self._waiting)
            self._waiting.clear()
            self.weight = 0
        _answer_all(waiting, Refused(Refusal.NOT_LEADER, leader))

    def close(self) -> None:
        """Take no more; who waits is told to go elsewhere."""
        self._closed = True
        self.send_elsewhere(None)


def _answer_all(waiting: Sequence[Ask[Any]], answer: Answer) -> None:
    for one in waiting:
        one.answer(answer)


def together(commits: Sequence[Commit], time_us: int) -> Commit:
    """One of all, in their order: of two that want the same id, the first gets it."""
    return Commit(
        time_us,
        [token for one in commits for token in one.tokens],
        [count for one in commits for count in one.counts],
        b"".join([one.ids for one in commits]),
        b"".join([one.times for one in commits]),
        [route for one in commits for route in one.routes],
    )


_NONE: frozenset[bytes] = frozenset()


class Pending:
    """Ids whose commit is under way, as a replica that does not lead sees it, too. For many threads at once.

    A commit takes a round trip or two between datacenters, and a follower has it in its log long before it
    applies it. A client that looks an id up meanwhile may wait for the outcome, instead of a wasted join
    (paper 4.4). It is a hint: an entry in a log may never be committed, and a commit may find the id taken,
    or another shard's. Each command of a log is read once.
    """

    def __init__(self) -> None:
        self._ids: dict[tuple[int, int], frozenset[bytes]] = {}  # (index, term) ->; replaced as a whole
        self._lock = threading.Lock()

    def mark(self, outcomes: bytes, ids: bytes, under_way: Sequence[tuple[int, int, memoryview]]) -> bytes:
        """N core.fates.Registered of 16 x N ids: PENDING in place of ABSENT where the id is `under_way`
        (photon.raft.port.ReplicatedLog.unapplied)."""
        if not under_way:
            self._ids = {}  # what was under way last is held no longer
            return outcomes
        if outcomes.find(Registered.ABSENT) < 0:
            return outcomes
        keys = split_ids(ids)
        wanted = frozenset(keys)
        found = _NONE.union(*(wanted & one for one in self._read(under_way)))
        if not found:
            return outcomes
        column = np.frombuffer(outcomes, np.uint8).copy()
        is_pending = np.fromiter(map(found.__contains__, keys), np.bool_, len(keys))
        column[is_pending & (column == Registered.ABSENT)] = Registered.PENDING
        return column.tobytes()

    def _read(self, under_way: Sequence[tuple[int, int, memoryview]]) -> list[frozenset[bytes]]:
        with self._lock:
            known = self._ids
            self._ids = {
                (index, term): known[index, term] if (index, term) in known else _ids_of(command)
                for index, term, command in under_way
            }
            return list(self._ids.values())


def _ids_of(command: memoryview) -> frozenset[bytes]:
    try:
        decoded = decode(bytes(command))
    except CommandError:  # whoever applies it will say so
        return _NONE
    return frozenset(split_ids(decoded.ids)) if isinstance(decoded, Commit) else _NONE


_FILING_EVERY_S: Final = 0.1
"""So often it is looked whether ids are to be sealed, or segments to be merged."""


class Shard:
    """Queue (for any thread), state and housekeeping of a shard on this replica. `wake` makes the raft thread
    turn.

    `group`: its Raft group. A shard that was retired and came again is another group, and what the directory
    said of the one before is not true of it: a replica that starts reads the directory from long ago, and may
    lead the new group meanwhile.
    `reached_us`: as of steward.reached_us. `furthest_us`: the boundary of the shard that has come furthest.
    """

    def __init__(
        self,
        group: int,
        settings: Registry,
        clock: Clock,
        wake: Callable[[], None],
        directory: DirectoryState,
        reached_us: Callable[[], int | None],
        furthest_us: Callable[[], int] = lambda: NO_BOUNDARY,
    ) -> None:
        self.number = number = shard_of_group(group)[0]
        self.group = group
        self.state = ShardState(number, SegmentFiles)
        self.pending = Pending()
        self.log: ReplicatedLog
        """Given by who hosts it, before anybody but the raft thread may ask for it."""
        self._settings = settings
        self._clock = clock
        self._wake = wake
        self._directory = directory
        self._reached_us = reached_us
        self._furthest_us = furthest_us
        self._steward = Steward(number, settings.leaders, clock)
        self.queue: Line[Commit | Release] = Line(
            settings.queue_ids_max,
            wake,
            f"shard {number}: {{}} ids wait already (registry.queue_ids_max is {settings.queue_ids_max}); "
            "back off and retry",
            "the deadline passed while the request waited in the queue; send less at a time",
        )
        self._housekeeping = False
        self._boundary_us = NO_BOUNDARY  # as last seen by this replica as the leader
        self._boundary_moved_at = clock.monotonic()
        self._file_at = 0.0
        self._commits = 0
        self._committed_ids = 0

    def on_tick(self, log: ReplicatedLog) -> None:
        """Propose what waits, then what housekeeping is due."""
        view = self._directory.view
        known = self.number in view.founders and view.group(self.number) == self.group
        may_propose = self._steward.on_tick(log, view) if known else True
        if not log.is_leader:
            self.queue.send_elsewhere(log.leader)
        elif may_propose:
            self._propose(log, view if known else None)

    def _propose(self, log: ReplicatedLog, view: View | None) -> None:
        """`view`: None while the directory here does not know the group yet."""
        while self.queue and log.in_flight < self._settings.batches_in_flight_max:
            self._propose_next(log)
        if self._housekeeping or view is None:
            return
        command = command_due(
            self.state,
            view,
            self._directory.fences,
            self._clock.now_us(),
            self._boundary_due(),
        )
        if command is None:
            command = self._filing_due()
        if command is not None:
            self._housekeeping = True
            log.propose(encode(command, view.protocol), self._housekeeping_done)

    def _boundary_due(self) -> int | None:
        now, boundary_us = self._clock.monotonic(), self.state.boundary_us
        if boundary_us != self._boundary_us:
            self._boundary_us, self._boundary_moved_at = boundary_us, now
        days = self._settings.retention_days
        reached_us = self._reached_us() if days > 0 else None
        if reached_us is None:
            return None
        still_s = now - self._boundary_moved_at
        held_us, furthest_us = self._directory.held_us, self._furthest_us()
        return boundary_due(reached_us, boundary_us, days, still_s, held_us, furthest_us)

    def _propose_next(self, log: ReplicatedLog) -> None:
        """All commits before the next release, or that release."""
        now_us, version = self._clock.now_us(), self._directory.view.protocol
        taken = self.queue.take(self._clock.monotonic(), self._settings.batch_ids_max, BATCH_BYTES_MAX)
        if commits := [ask.what for ask in taken if isinstance(ask.what, Commit)]:
            command = encode(together(commits, now_us), version)
            log.propose(command, lambda outcome: self._answer_commits(taken, outcome))
        elif taken:
            release = replace(taken[0].what, time_us=now_us)
            log.propose(encode(release, version), lambda outcome: taken[0].answer(answer_to(outcome)))

    def _answer_commits(self, taken: Sequence[Ask[Any]], outcome: Outcome) -> None:
        """Each has its own part of the outcome column."""
        answer = answer_to(outcome)
        if not isinstance(answer, Settled):
            _answer_all(taken, answer)
            return
        column, start = answer.result, 0
        assert isinstance(column, bytes), f"ids were answered {column!r}"
        for ask in taken:
            end = start + ask.weight
            ask.answer(Settled(column[start:end]))
            start = end
        assert start == len(column), "a COMMIT is answered id by id"
        self._commits += 1
        self._committed_ids += start

    def _housekeeping_done(self, _outcome: Outcome) -> None:
        # Whatever came of it: the next turn looks at the state and sees what is still due.
        self._housekeeping = False

    def _filing_due(self) -> Command | None:
        """Looked at now and then: there are many turns."""
        now = self._clock.monotonic()
        if now < self._file_at:
            return None
        self._file_at = now + _FILING_EVERY_S
        return self.state.filing_due()

    def status(self) -> dict[str, object]:
        """What the Status RPC says of this shard. Any thread."""
        state, status = self.state, self.log.status()
        kept_us = round(self._settings.retention_days * DAY_US)
        held_us = self._clock.now_us() - kept_us - state.boundary_us if kept_us else 0
        segments, file_bytes = state.filed()
        return {
            "shard": self.number,
            **group_status(self.log),
            "ids": state.ids,
            "segments": segments,
            "file_bytes": file_bytes,
            "commits": self._commits,
            "committed_ids": self._committed_ids,
            "commit_index": status.commit_index,
            "applied_index": status.applied_index,
            "boundary_us": None if state.boundary_us == NO_BOUNDARY else state.boundary_us,
            "boundary_held_s": 0.0 if state.boundary_us == NO_BOUNDARY else round(max(0, held_us) / 1e6, 1),
            "version": state.version,
        }


def group_status(log: ReplicatedLog) -> dict[str, object]:
    """What the Status RPC says of any group. Any thread."""
    status, members = log.status(), log.members
    return {
        "leader": status.leader,
        "is_leader": status.is_leader,
        "term": status.term,
        "has_quorum": status.has_quorum,
        "voters": list(members.voters),
        "learners": list(members.learners),
    }
