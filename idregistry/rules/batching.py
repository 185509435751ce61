"""Server-side batching (paper 2.2.1): what waits becomes one command, its result everybody's answer. Pure.

There is no minimum batch: a request that is alone goes alone, at once. Not for several threads at a time;
`shard` holds the lock.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from idregistry.rules.commands import Commit, encode
from idregistry.rules.packing import request_bytes
from photon.core.ids import ID_BYTES
from photon.raft.port import Applied, Outcome, Refusal, Refused, Unknown


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
