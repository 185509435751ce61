"""One replica of one shard: the registry thread of Fig. 3 (paper 2.1, 2.2.1).

RPC handlers only `offer` requests to the queue. The raft thread is the paper's registry thread: in `on_tick`
it takes what waits and makes one command of it; the conflicts in it are resolved when the command is applied
(`state`), in its order, alike on all replicas; then the answers go out.
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Final

from idregistry.rules.batching import (
    Answer,
    CommitQueue,
    Errand,
    NotLeader,
    Overloaded,
    Request,
    Settled,
    answer_unapplied,
    build_command,
    split_outcomes,
)
from idregistry.rules.commands import encode
from idregistry.rules.directory import DirectoryState
from idregistry.rules.packing import BATCH_BYTES_MAX
from idregistry.rules.placement import Steward, command_due
from idregistry.rules.state import NO_BOUNDARY, ShardState
from photon.core.clock import Clock
from photon.core.settings import Registry
from photon.raft.port import Applied, Outcome, ReplicatedLog

ERRANDS_WAITING_MAX: Final = 64
_LATE: Final = "the deadline passed while the request waited in the queue; send less at a time"
_TIDY_EVERY_S: Final = 0.05
"""A step of local work (some milliseconds) is taken so often while commits wait, and without a pause while
none do."""


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
        self._errands: deque[Errand] = deque()
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

    def offer(self, request: Request | Errand) -> Answer | None:
        """Queue a request; its answer where it can't even wait. Any thread."""
        with self._lock:
            if self._closed:
                return NotLeader(None)
            if isinstance(request, Errand):
                if len(self._errands) >= ERRANDS_WAITING_MAX:
                    return Overloaded(f"{ERRANDS_WAITING_MAX} releases wait already; back off")
                self._errands.append(request)
            elif not self._queue.put(request):
                return Overloaded(
                    f"shard {self.number}: {self._queue.ids} ids wait already (registry.queue_ids_max is "
                    f"{self._settings.queue_ids_max}); back off and retry"
                )
        self._wake()
        return None

    def close(self) -> None:
        """Take no more requests; who waits is told to go elsewhere. Any thread."""
        self._closed = True
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
        with self._lock:
            errand = self._errands.popleft() if self._errands else None
        if errand is None:  # `close` emptied it meanwhile
            return
        if errand.deadline <= self._clock.monotonic():
            errand.answer(Overloaded(_LATE))
            return
        log.propose(errand.command(self._clock.now_us()), lambda outcome: errand.answer(_answer_to(outcome)))

    def _send_elsewhere(self, leader: str | None) -> None:
        with self._lock:
            waiting: list[Request | Errand] = [*self._queue.drain(), *self._errands]
            self._errands.clear()
        _answer_all(waiting, NotLeader(leader))

    def _answer_batch(self, batch: list[Request], outcome: Outcome) -> None:
        answer = _answer_to(outcome)
        if isinstance(answer, Settled):
            self._commits += 1
            self._committed_ids += sum(request.count for request in batch)
            for request, column in zip(batch, split_outcomes(batch, answer.outcomes), strict=True):
                request.answer(Settled(column))
        else:
            for request in batch:
                request.answer(answer)

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


def _answer_all(requests: Sequence[Request | Errand], answer: Answer) -> None:
    for request in requests:
        request.answer(answer)


def _answer_to(outcome: Outcome) -> Answer:
    if not isinstance(outcome, Applied):
        return answer_unapplied(outcome)
    assert isinstance(outcome.result, bytes), f"ids were answered {outcome.result!r}"
    return Settled(outcome.result)
