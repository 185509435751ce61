"""One replica of one shard: the registry thread of Fig. 3 (paper 2.1, 2.2.1).

RPC handlers only `offer` requests to the queue. The raft thread is the paper's registry thread: in `on_tick`
it takes what waits and makes one command of it, its result everybody's answer; the conflicts in it are
resolved when the command is applied (`state`), in its order, alike on all replicas. There is no minimum
batch: a request that is alone goes alone, at once.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, Generic, TypeVar

from msgspec.structs import replace

from idregistry.rules.commands import Commit, Release, encode
from idregistry.rules.directory import DirectoryState
from idregistry.rules.packing import BATCH_BYTES_MAX, request_bytes
from idregistry.rules.placement import Steward, command_due
from idregistry.rules.state import NO_BOUNDARY, ShardState
from photon.core.clock import Clock
from photon.core.ids import ID_BYTES
from photon.core.settings import Registry
from photon.raft.port import Applied, Outcome, Refusal, Refused, ReplicatedLog, Unknown


@dataclass(frozen=True, slots=True)
class Settled:
    """The command was applied: `result` is what it is answered, of a batch the request's own column."""

    result: Any


@dataclass(frozen=True, slots=True)
class NotLeader:
    """Nothing was done: `leader` (a node id) is who to ask instead, where one is known."""

    leader: str | None


@dataclass(frozen=True, slots=True)
class Overloaded:
    """Nothing was done: too much waits, or the request's deadline passed before its turn came."""

    why: str


Answer = Settled | NotLeader | Overloaded | Unknown


def answer_to(outcome: Outcome) -> Answer:
    """What the log says of a command -> what its client is told."""
    match outcome:
        case Applied(_, result):
            return Settled(result)
        case Refused(Refusal.OVERLOADED):
            return Overloaded("the log has too many commands in flight; back off and retry")
        case Refused(_, leader):
            return NotLeader(leader)
        case Unknown():
            return outcome


@dataclass(frozen=True, slots=True, eq=False)
class Request:
    """A client's conditional commit. `answer` is called once; `deadline` is in monotonic seconds."""

    ids: bytes
    times: bytes
    token: bytes
    deadline: float
    answer: Callable[[Answer], None]

    @property
    def count(self) -> int:
        return len(self.ids) // ID_BYTES


class CommitQueue:
    """Requests in the order of their arrival, bounded by ids."""

    def __init__(self, ids_max: int) -> None:
        self._ids_max = ids_max
        self._waiting: deque[Request] = deque()
        self.ids = 0
        """Ids that wait."""

    def put(self, request: Request) -> bool:
        """Whether there was room. An empty queue takes any request, or a large one could never pass."""
        if self._waiting and self.ids + request.count > self._ids_max:
            return False
        self._waiting.append(request)
        self.ids += request.count
        return True

    def take(self, ids_max: int, bytes_max: int, now: float) -> tuple[list[Request], list[Request]]:
        """(what goes into the next command, what is too late to be proposed).

        All that waits, while it stays within `ids_max` ids and `bytes_max` bytes, but at least one request.
        """
        batch: list[Request] = []
        late: list[Request] = []
        ids = size = 0
        while self._waiting:
            request = self._waiting[0]
            if request.deadline > now:
                ids += request.count
                size += request_bytes(request.ids, request.token)
                if batch and (ids > ids_max or size > bytes_max):
                    break
            self._waiting.popleft()
            self.ids -= request.count
            (batch if request.deadline > now else late).append(request)
        return batch, late

    def drain(self) -> list[Request]:
        """Everything that waits, taken out."""
        waiting = list(self._waiting)
        self._waiting.clear()
        self.ids = 0
        return waiting


def build_command(batch: Sequence[Request], time_us: int) -> bytes:
    """One COMMIT of all requests, in their order: of two that want the same id, the first gets it."""
    return encode(
        Commit(
            time_us,
            [request.token for request in batch],
            [request.count for request in batch],
            b"".join([request.ids for request in batch]),
            b"".join([request.times for request in batch]),
        )
    )


def split_outcomes(batch: Sequence[Request], outcomes: bytes) -> list[bytes]:
    """The command's outcome column -> one column a request."""
    columns = []
    start = 0
    for request in batch:
        columns.append(outcomes[start : start + request.count])
        start += request.count
    assert start == len(outcomes), "a COMMIT is answered id by id"
    return columns


ERRANDS_WAITING_MAX: Final = 64
_LATE: Final = "the deadline passed while the request waited in the queue; send less at a time"
_TIDY_EVERY_S: Final = 0.05
"""A step of local work (some milliseconds) is taken so often while commits wait, and without a pause while
none do."""


What = TypeVar("What")


@dataclass(frozen=True, slots=True, eq=False)
class Ask(Generic[What]):
    """A request that is a command of its own, as far as its client can make it: times are the leader's."""

    what: What
    deadline: float
    answer: Callable[[Answer], None]


def barrier(deadline: float, answer: Callable[[Answer], None]) -> Ask[Release]:
    """A release of nothing: once it is applied, all that was acknowledged before it was asked for is."""
    return Ask(Release(0, (), (), b"", b""), deadline, answer)


class Line(Generic[What]):
    """Who waits for the raft thread, in the order of arrival. `full` and `late` are told to whom it sends
    away; `wake` makes the raft thread turn. Any thread.
    """

    def __init__(self, most: int, wake: Callable[[], None], full: str, late: str) -> None:
        self._most = most
        self._wake = wake
        self._full = full
        self._late = late
        self._lock = threading.Lock()
        self._waiting: deque[Ask[What]] = deque()
        self._closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def offer(self, ask: Ask[What]) -> Answer | None:
        """Let it wait; its answer where it can't even do that."""
        with self._lock:
            if self._closed:
                return NotLeader(None)
            if len(self._waiting) >= self._most:
                return Overloaded(self._full)
            self._waiting.append(ask)
        self._wake()
        return None

    def take(self, now: float) -> Ask[What] | None:
        """The first one; None where it came too late, or nobody waits any more."""
        with self._lock:
            ask = self._waiting.popleft() if self._waiting else None
        if ask is not None and ask.deadline <= now:
            ask.answer(Overloaded(self._late))
            return None
        return ask

    def send_elsewhere(self, leader: str | None) -> None:
        with self._lock:
            waiting = list(self._waiting)
            self._waiting.clear()
        for ask in waiting:
            ask.answer(NotLeader(leader))

    def close(self) -> None:
        """Take no more; who waits is told to go elsewhere."""
        self._closed = True
        self.send_elsewhere(None)


class Shard:
    """Queue, state and housekeeping of a shard on this replica. `wake` makes the raft thread turn.

    `trusted_us`: the time that the clocks of a majority have reached, None where it is not known.
    """

    def __init__(
        self,
        number: int,
        settings: Registry,
        clock: Clock,
        wake: Callable[[], None],
        directory: DirectoryState,
        trusted_us: Callable[[], int | None],
    ) -> None:
        self.number = number
        self.state = ShardState(number)
        self._settings = settings
        self._clock = clock
        self._wake = wake
        self._directory = directory
        self._trusted_us = trusted_us
        self._steward = Steward(number, settings.leaders, clock)
        self._lock = threading.Lock()
        self._queue = CommitQueue(settings.queue_ids_max)
        self._errands: Line[Release] = Line(
            ERRANDS_WAITING_MAX, wake, f"{ERRANDS_WAITING_MAX} releases wait already; back off", _LATE
        )
        self._errands_turn = False
        self._closed = False
        self._housekeeping = False
        self._tidy_at = 0.0
        self._commits = 0
        self._committed_ids = 0

    @property
    def waiting_ids(self) -> int:
        """Ids in the queue. Any thread."""
        return self._queue.ids

    # --- RPC handlers' side

    def offer(self, request: Request | Ask[Release]) -> Answer | None:
        """Queue a request; its answer where it can't even wait. Any thread."""
        if isinstance(request, Ask):
            return self._errands.offer(request)
        with self._lock:
            if self._closed:
                return NotLeader(None)
            if not self._queue.put(request):
                return Overloaded(
                    f"shard {self.number}: {self._queue.ids} ids wait already (registry.queue_ids_max is "
                    f"{self._settings.queue_ids_max}); back off and retry"
                )
        self._wake()
        return None

    def close(self) -> None:
        """Take no more requests; who waits is told to go elsewhere. Any thread."""
        self._closed = True
        self._errands.close()
        self._send_elsewhere(None)

    # --- raft thread

    def on_tick(self, log: ReplicatedLog) -> None:
        """Propose what waits, then what housekeeping is due."""
        may_propose = self._steward.on_tick(log, self._directory.view)
        if not log.is_leader:
            if self._queue.ids or self._errands:
                self._send_elsewhere(log.leader)
        elif may_propose:
            self._propose(log)
        self._tidy(log)

    def _propose(self, log: ReplicatedLog) -> None:
        # In turn, or one kind would wait for ever where the other never ends.
        while (self._queue.ids or self._errands) and log.in_flight < self._settings.batches_in_flight_max:
            errands_turn = self._errands_turn or not self._queue.ids
            self._errands_turn = not errands_turn
            if errands_turn and self._errands:
                self._propose_errand(log)
            else:
                self._propose_batch(log)
        if self._housekeeping:
            return
        command = command_due(
            self.state,
            self._directory.view,
            self._directory.fences,
            self._clock.now_us(),
            self._trusted_us() if self._settings.retention_days > 0 else None,
            self._settings.retention_days,
        )
        if command is not None:
            self._housekeeping = True
            log.propose(encode(command), self._housekeeping_done)

    def _propose_batch(self, log: ReplicatedLog) -> None:
        with self._lock:
            batch, late = self._queue.take(
                self._settings.batch_ids_max, BATCH_BYTES_MAX, self._clock.monotonic()
            )
        _answer_all(late, Overloaded(_LATE))
        if batch:
            log.propose(
                build_command(batch, self._clock.now_us()), lambda outcome: self._answer_batch(batch, outcome)
            )

    def _propose_errand(self, log: ReplicatedLog) -> None:
        if errand := self._errands.take(self._clock.monotonic()):
            command = replace(errand.what, time_us=self._clock.now_us())
            log.propose(encode(command), lambda outcome: errand.answer(answer_to(outcome)))

    def _send_elsewhere(self, leader: str | None) -> None:
        with self._lock:
            waiting = self._queue.drain()
        _answer_all(waiting, NotLeader(leader))
        self._errands.send_elsewhere(leader)

    def _answer_batch(self, batch: list[Request], outcome: Outcome) -> None:
        answer = answer_to(outcome)
        if not isinstance(answer, Settled):
            _answer_all(batch, answer)
            return
        assert isinstance(answer.result, bytes), f"ids were answered {answer.result!r}"
        self._commits += 1
        self._committed_ids += sum(request.count for request in batch)
        for request, column in zip(batch, split_outcomes(batch, answer.result), strict=True):
            request.answer(Settled(column))

    def _housekeeping_done(self, _outcome: Outcome) -> None:
        # Whatever came of it: the next turn looks at the state and sees what is still due.
        self._housekeeping = False

    def _tidy(self, log: ReplicatedLog) -> None:
        """One step of what every replica does by itself in its memory."""
        now = self._clock.monotonic()
        if now < self._tidy_at:
            return
        more = self.state.tidy()
        if more and not self._queue.ids and not log.in_flight:
            self._tidy_at = now
            self._wake()
        else:
            self._tidy_at = now + _TIDY_EVERY_S

    def status(self, log: ReplicatedLog) -> dict[str, object]:
        """What the Status RPC says of this shard. Any thread."""
        status = log.status()
        state, members = self.state, log.members
        return {
            "shard": self.number,
            "leader": status.leader,
            "is_leader": status.is_leader,
            "ids": state.ids,
            "commits": self._commits,
            "committed_ids": self._committed_ids,
            "term": status.term,
            "commit_index": status.commit_index,
            "applied_index": status.applied_index,
            "has_quorum": status.has_quorum,
            "boundary_us": None if state.boundary_us == NO_BOUNDARY else state.boundary_us,
            "version": 0 if state.configuration is None else state.configuration.version,
            "voters": list(members.voters),
            "learners": list(members.learners),
        }


def _answer_all(requests: Sequence[Request], answer: Answer) -> None:
    for request in requests:
        request.answer(answer)
