"""One replica of one shard: the registry thread of Fig. 3 (paper 2.1, 2.2.1).

RPC handlers only `offer` requests to the queue. The raft thread is the paper's registry thread: in `on_tick`
it takes what waits and makes one command of it; the conflicts in it are resolved when the command is applied
(`state`), in its order, alike on all replicas; then the answers go out.
"""

import threading
from collections.abc import Callable
from typing import Final

from idregistry.answers import Answer, NotLeader, OutcomeUnknown, Overloaded, Settled
from idregistry.batching import CommitQueue, Request, build_command, split_outcomes
from idregistry.boundary import COLLECT_IDS, boundary_due
from idregistry.commands import Boundary, Collect, Command, encode
from idregistry.messages import BATCH_BYTES_MAX
from idregistry.state import NO_BOUNDARY, ShardState
from photon.core.clock import Clock
from photon.core.settings import Registry
from photon.raft.port import Applied, Outcome, Refusal, Refused, ReplicatedLog, Unknown

_LATE: Final = "the deadline passed while the request waited in the queue; send less at a time"


class Shard:
    """Queue, state and housekeeping of a shard on this replica. `wake` makes the raft thread turn."""

    def __init__(self, number: int, settings: Registry, clock: Clock, wake: Callable[[], None]) -> None:
        self.number = number
        self.state = ShardState()
        self._settings = settings
        self._clock = clock
        self._wake = wake
        self._lock = threading.Lock()
        self._queue = CommitQueue(settings.queue_ids_max)
        self._closed = False
        self._housekeeping = False

    @property
    def waiting_ids(self) -> int:
        """Ids in the queue. Any thread."""
        return self._queue.ids

    # --- RPC handlers' side

    def offer(self, request: Request) -> Answer | None:
        """Queue a request; its answer where it can't even wait. Any thread."""
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
        with self._lock:
            self._closed = True
            waiting = self._queue.drain()
        _answer_all(waiting, NotLeader(None))

    # --- raft thread

    def on_tick(self, log: ReplicatedLog) -> None:
        """Propose what waits, then what housekeeping is due."""
        if not log.is_leader:
            self._send_elsewhere(log.leader)
            return
        while self._queue.ids and log.in_flight < self._settings.batches_in_flight_max:
            self._propose_batch(log)
        if not self._housekeeping:
            command = self._due()
            if command is not None:
                self._housekeeping = True
                log.propose(encode(command), self._housekeeping_done)

    def _send_elsewhere(self, leader: str | None) -> None:
        if not self._queue.ids:
            return
        with self._lock:
            waiting = self._queue.drain()
        _answer_all(waiting, NotLeader(leader))

    def _propose_batch(self, log: ReplicatedLog) -> None:
        with self._lock:
            batch, late = self._queue.take(
                self._settings.batch_ids_max, BATCH_BYTES_MAX, self._clock.monotonic()
            )
        _answer_all(late, Overloaded(_LATE))
        if batch:
            log.propose(
                build_command(batch, self._clock.now_us()), lambda outcome: _answer_batch(batch, outcome)
            )

    def _due(self) -> Command | None:
        """The next step of garbage collection. Only the leader takes it; the log carries it to all."""
        now_us = self._clock.now_us()
        boundary_us = boundary_due(now_us, self.state.boundary_us, self._settings.retention_days)
        if boundary_us is not None:
            return Boundary(now_us, boundary_us)
        return Collect(COLLECT_IDS) if self.state.collectable() else None

    def _housekeeping_done(self, _outcome: Outcome) -> None:
        # Whatever came of it: the next turn looks at the state and sees what is still due.
        self._housekeeping = False

    def status(self, log: ReplicatedLog) -> dict[str, object]:
        """What the Status RPC says of this shard. Any thread."""
        status = log.status()
        boundary_us = self.state.boundary_us
        return {
            "shard": self.number,
            "leader": status.leader,
            "is_leader": status.is_leader,
            "ids": self.state.ids,
            "term": status.term,
            "commit_index": status.commit_index,
            "applied_index": status.applied_index,
            "has_quorum": status.has_quorum,
            "boundary_us": None if boundary_us == NO_BOUNDARY else boundary_us,
        }


def _answer_all(requests: list[Request], answer: Answer) -> None:
    for request in requests:
        request.answer(answer)


def _answer_batch(batch: list[Request], outcome: Outcome) -> None:
    match outcome:
        case Applied(result=bytes() as outcomes):
            for request, column in zip(batch, split_outcomes(batch, outcomes), strict=True):
                request.answer(Settled(column))
        case Refused(Refusal.OVERLOADED):
            _answer_all(batch, Overloaded("the log has too many commands in flight; back off and retry"))
        case Refused(_, leader):
            _answer_all(batch, NotLeader(leader))
        case Unknown():
            _answer_all(batch, OutcomeUnknown())
        case Applied(result=other):
            raise AssertionError(f"a COMMIT was answered {other!r}")
