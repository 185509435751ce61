"""Server-side batching (paper 2.2.1): what waits becomes one command, its result everybody's answer. Pure.

There is no minimum batch: a request that is alone goes alone, at once. Not for several threads at a time;
`shard` holds the lock.
"""

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from idregistry.answers import Answer
from idregistry.commands import Commit, Release, encode
from idregistry.messages import request_bytes
from photon.core.ids import ID_BYTES


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
