"""Server-side batching (paper 2.2.1): what waits becomes one command, its result everybody's answer. Pure.

There is no minimum batch: a request that is alone goes alone, at once. Not for several threads at a time;
`shard` holds the lock.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from idregistry.rules.commands import Commit, Release, encode
from idregistry.rules.packing import request_bytes
from photon.core.ids import ID_BYTES
from photon.raft.port import Refusal, Refused, Unknown

# --- What becomes of one waiting request. Pure.


@dataclass(frozen=True, slots=True)
class Settled:
    """The command was applied: `outcomes` is the request's own column (core.fates)."""

    outcomes: bytes


@dataclass(frozen=True, slots=True)
class Decided:
    """The directory's command was applied: what it answered (directory_commands)."""

    result: object


@dataclass(frozen=True, slots=True)
class NotLeader:
    """Nothing was done: `leader` (a node id) is who to ask instead, where one is known."""

    leader: str | None


@dataclass(frozen=True, slots=True)
class Overloaded:
    """Nothing was done: too much waits, or the request's deadline passed before its turn came."""

    why: str


@dataclass(frozen=True, slots=True)
class OutcomeUnknown:
    """It may have been committed, or may yet be: ask again, with the same token."""


Answer = Settled | Decided | NotLeader | Overloaded | OutcomeUnknown


def answer_unapplied(outcome: Refused | Unknown) -> Answer:
    """For a command that was not applied, or of which that is not known."""
    match outcome:
        case Refused(Refusal.OVERLOADED):
            return Overloaded("the log has too many commands in flight; back off and retry")
        case Refused(_, leader):
            return NotLeader(leader)
        case Unknown():
            return OutcomeUnknown()


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


@dataclass(frozen=True, slots=True, eq=False)
class Errand:
    """Recovery's release, `tokens[i]` for the next `counts[i]` ids: a command of its own."""

    ids: bytes
    times: bytes
    tokens: Sequence[bytes]
    counts: Sequence[int]
    deadline: float
    answer: Callable[[Answer], None]

    def command(self, time_us: int) -> bytes:
        return encode(Release(time_us, self.tokens, self.counts, self.ids, self.times))


def barrier(deadline: float, answer: Callable[[Answer], None]) -> Errand:
    """A release of nothing: once it is applied, all that was acknowledged before it was asked for is."""
    return Errand(b"", b"", (), (), deadline, answer)


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
