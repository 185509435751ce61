"""Clients of the log: they want ids by tokens, are told or not, and ask again with the same token."""

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from photon.core.fates import Committed
from photon.raft.port import Applied, Outcome, Refused
from tests.simulation.clock import Clock
from tests.simulation.history import Act, Asked, Commit, Fence, History, Lookup, Raise, Release, Told
from tests.simulation.machines import Workload

_JOINERS = 4
_RECENT = 10  # ids that are fought for at a time
_KEPT = 200  # settled wishes that may be asked for once more
_BOUNDARY_LAG = 25


@dataclass(slots=True)
class Wish:
    """What a client wants until it is told."""

    op: int
    act: Act
    told: bool = False


@dataclass(slots=True, eq=False)
class Attempt:
    """The wishes of one command, offered to one node. Answered once, or never if the node dies."""

    wishes: list[Wish]
    answered: bool = False


@dataclass
class Clients:
    """All clients at once. `offer(attempt)` gives it to a node that is drawn; False where none lives."""

    rng: random.Random
    clock: Clock
    workload: Workload
    history: History
    offer: Callable[[Attempt], bool]
    look: Callable[[Lookup], tuple[int, ...] | None]
    counts: Counter[str] = field(default_factory=Counter)
    waiting: deque[Wish] = field(default_factory=deque)
    settled: deque[Wish] = field(default_factory=lambda: deque(maxlen=_KEPT))
    under_way: set[Attempt] = field(default_factory=set)
    _newest: int = 0
    _ops: int = 0
    _tokens: int = 0
    _held: dict[int, bytes] = field(default_factory=dict)  # a joiner's token, while it uses it again
    _lives: list[int] = field(default_factory=lambda: [100 + joiner for joiner in range(_JOINERS)])
    _fenced: list[int] = field(default_factory=list)

    # -- asking -----------------------------------------------------------------------------------------

    def step(self) -> None:
        """One client does something."""
        dice = self.rng.random()
        if self.waiting and dice < 0.4:
            self._ask([self._again()])
        elif self.settled and dice < 0.45:
            self.counts["retried"] += 1
            self._ask([self.rng.choice(self.settled)])
        elif dice < 0.55 and Lookup in self.workload.kinds:
            self._look()
        else:
            self._ask(self._new())

    def settle(self) -> None:
        """Ask again for all that is not told yet, a few at a time."""
        for _ in range(min(len(self.waiting), 4)):
            self._ask([self._again()])

    @property
    def done(self) -> bool:
        return not self.waiting and not self.under_way

    def _again(self) -> Wish:
        self.waiting.rotate(self.rng.randrange(len(self.waiting)))
        return self.waiting.popleft()

    def _ask(self, wishes: list[Wish]) -> None:
        if self._attempt(wishes) and self.rng.random() < 0.04:  # somebody who does not wait for the answer
            self._attempt(wishes)

    def _attempt(self, wishes: list[Wish]) -> bool:
        for wish in wishes:
            self.history.append(Asked(self.clock.now, wish.op, wish.act))
        attempt = Attempt(wishes)
        self.under_way.add(attempt)
        if not self.offer(attempt):
            self.lost(attempt)
            return False
        return True

    def _look(self) -> None:
        numbers = [self._recent() for _ in range(3)]
        act = Lookup(*self._columns(numbers))
        at = self.clock.now
        outcomes = self.look(act)
        if outcomes is not None:
            self._ops += 1
            self.history.append(Asked(at, self._ops, act))
            self.history.append(Told(at, self._ops, outcomes))

    # -- what is wanted ---------------------------------------------------------------------------------

    def _new(self) -> list[Wish]:
        kinds, dice = self.workload.kinds, self.rng.random()
        if dice < 0.04 and Raise in kinds:
            return [
                self._wish(Raise(self.workload.time_us(self._newest - self.rng.randrange(_BOUNDARY_LAG, 60))))
            ]
        if dice < 0.06 and Fence in kinds:
            return [self._wish(self._fence())]
        if dice < 0.12 and Release in kinds and self._fenced:
            return [self._wish(self._release())]
        several = 1 if self.workload.ids_max == 1 else self.rng.choice((1, 1, 2, 3))
        return [self._wish(self._commit()) for _ in range(several)]

    def _wish(self, act: Act) -> Wish:
        self._ops += 1
        return Wish(self._ops, act)

    def _commit(self) -> Commit:
        rng = self.rng
        self._newest += rng.random() < 0.4
        joiner = rng.randrange(_JOINERS)
        if joiner not in self._held or rng.random() < 0.7 or self.workload.ids_max == 1:
            self._tokens += 1
            self._held[joiner] = self.workload.token(joiner, self._lives[joiner], self._tokens)
        numbers = {self._recent() for _ in range(rng.randint(1, self.workload.ids_max))}
        ids, times = self._columns(sorted(numbers))
        return Commit(ids, times, self._held[joiner], self._lives[joiner])

    def _fence(self) -> Fence:
        """A joiner begins a new life; the one before is fenced. The list only grows, and is told whole."""
        joiner = self.rng.randrange(_JOINERS)
        self._fenced.append(self._lives[joiner])
        self._lives[joiner] += _JOINERS
        self._held.pop(joiner, None)
        return Fence(tuple(self._fenced))

    def _release(self) -> Release:
        """Recovery takes out what a life that is over had registered (or some that it had not).

        Now and then somebody wants what is not recovery's: the life goes on.
        """
        alive = self.rng.random() < 0.2
        owned = [
            wish.act
            for wish in self.settled
            if isinstance(wish.act, Commit) and (wish.act.incarnation in self._fenced) is not alive
        ]
        if owned:
            act = self.rng.choice(owned)
            return Release(act.ids, act.times, act.token)
        ids, times = self._columns([self._recent()])
        return Release(ids, times, self.workload.token(0, self._fenced[0], 1))

    def _recent(self) -> int:
        return max(0, self._newest - self.rng.randrange(_RECENT))

    def _columns(self, numbers: list[int]) -> tuple[tuple[bytes, ...], tuple[int, ...]]:
        return tuple(map(self.workload.key, numbers)), tuple(map(self.workload.time_us, numbers))

    # -- being told -------------------------------------------------------------------------------------

    def answer(self, attempt: Attempt, outcome: Outcome) -> None:
        """The log's answer to one attempt."""
        assert not attempt.answered, "answered twice"
        attempt.answered = True
        if attempt not in self.under_way:
            return  # the node died in between: nobody listens
        if not isinstance(outcome, Applied):
            self.counts["unknown"] += not isinstance(outcome, Refused)
            self.lost(attempt)
            return
        self.under_way.discard(attempt)
        results = self.workload.outcomes([wish.act for wish in attempt.wishes], outcome.result)
        for wish, outcomes in zip(attempt.wishes, results, strict=True):
            if Committed.MISROUTED in outcomes and isinstance(wish.act, Commit):
                self._wait(wish)
                continue
            self.history.append(Told(self.clock.now, wish.op, outcomes))
            self.counts["acknowledged"] += 1
            wish.told = True
            self.settled.append(wish)

    def lost(self, attempt: Attempt) -> None:
        """Nobody knows what came of it."""
        if attempt in self.under_way:
            self.under_way.discard(attempt)
            for wish in attempt.wishes:
                self._wait(wish)

    def _wait(self, wish: Wish) -> None:
        if not wish.told:
            self.waiting.append(wish)
