"""The commands that wait for their outcome. Each is told exactly once, in bounded time."""

from collections.abc import Callable
from dataclasses import dataclass

from photon.raft.port import Applied, Outcome, Unknown

Done = Callable[[Outcome], None]


@dataclass(frozen=True, slots=True)
class _Waiting:
    term: int
    deadline: float
    done: Done


class Proposals:
    """Raft thread only, but for `len`. Entries wait only while their proposer leads, in one term."""

    def __init__(self) -> None:
        self._waiting: dict[int, _Waiting] = {}  # by index, oldest first
        self._lost: list[Done] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, index: int, term: int, deadline: float, done: Done) -> None:
        """The command stands in the log at `index`; by `deadline` its proposer is told `Unknown`."""
        self._waiting[index] = _Waiting(term, deadline, done)

    def applied(self, index: int, term: int, result: object) -> None:
        """The entry at `index` was applied: tell who waits for it, if it is the one that was proposed."""
        waiting = self._waiting.pop(index, None)
        if waiting is not None:
            waiting.done(Applied(index, result) if waiting.term == term else Unknown())

    def lose(self) -> None:
        """Nothing is known any more of what waits.

        It is told by the next `tell_lost`, not from within a message.
        """
        self._lost += [waiting.done for waiting in self._waiting.values()]
        self._waiting.clear()

    def expire(self, now: float) -> None:
        """Give up on what waits for too long."""
        while self._waiting:
            index, oldest = next(iter(self._waiting.items()))
            if oldest.deadline > now:
                return
            del self._waiting[index]
            self._lost.append(oldest.done)

    def tell_lost(self) -> None:
        """Tell `Unknown` to all that were given up."""
        while self._lost:
            lost, self._lost = self._lost, []
            for done in lost:
                done(Unknown())
