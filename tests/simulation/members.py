"""Members of a group whose shares move between them, by production clients, each in a task of its own.

A member says that it is there, takes up what is kept of each share that it is given, counts on, and writes
the count down. It is killed, and comes back with a new life; or it stands still for longer than its lease,
and goes on as if nothing had been.
"""

import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from idregistry.client import RegistryClient
from photon.core.errors import PhotonError
from photon.raft.rules.placement import BEAT_EVERY_S, MEMBER_LEASE_S, Group
from tests.simulation.clock import Clock
from tests.simulation.history import History, Kept, Seen
from tests.simulation.tasks import Tasks

GROUP = "east-dispatchers"
_KEY = b"count"
_STAND_STILL = 0.03
_DIE = 0.03
_LEAVE = 0.01
_DRAIN = 0.01
"""Chances of each, at each beat."""
_SERVED_S = 3 * MEMBER_LEASE_S


@dataclass
class _Life:
    """`counts`: share -> (sequencer, count) of those that it has taken up."""

    number: int
    counts: dict[int, tuple[int, int]] = field(default_factory=dict)


class Members:
    """`count` of them, and twice as many shares. `over`: all is healed, and nobody dies any more."""

    def __init__(self, seed: int, count: int, clock: Clock, tasks: Tasks, history: History) -> None:
        self.over = False
        self._rng = random.Random(seed + 11)
        self._count = count
        self._shares = 2 * count
        self._clock = clock
        self._tasks = tasks
        self._history = history
        self._lives = 0
        self._written: dict[int, float] = {}
        """When each share was written last."""
        self._over_at: float | None = None
        self.moves = self.deaths = self.writes = 0

    def begin(self, registry: Callable[[int], RegistryClient]) -> None:
        for number in range(self._count):
            self._tasks.begin(lambda number=number: self._member(f"m{number}", registry(number)))

    @property
    def served(self) -> bool:
        """Whether each share was written since all was healed."""
        if not self.over:
            return False
        if self._over_at is None:
            self._over_at = self._clock.at
        # Each of them, a while after: who stood still when all was healed has lost its shares by then.
        since = self._over_at + _SERVED_S
        return all(self._written.get(share, 0.0) > since for share in range(self._shares))

    def _member(self, name: str, registry: RegistryClient) -> None:
        life = self._born()
        while not self.served:
            self._tasks.sleep(BEAT_EVERY_S * (0.5 + self._rng.random()))
            dice = 1.0 if self.over else self._rng.random()
            if dice < _DIE:
                self.deaths += 1
                self._tasks.sleep(self._rng.random() * 2 * MEMBER_LEASE_S)
                life = self._born()
            elif dice < _DIE + _STAND_STILL:
                self._tasks.sleep(self._rng.random() * 3 * MEMBER_LEASE_S)
                self._count_on(name, life, registry)  # before it hears that others have its shares
            elif dice < _DIE + _STAND_STILL + _LEAVE:
                with suppress(PhotonError):
                    registry.drain(GROUP, name, life.number)
                life = self._born()
            elif dice < _DIE + _STAND_STILL + _LEAVE + _DRAIN:
                with suppress(PhotonError):
                    registry.drain(GROUP, name)
                self._tasks.sleep(MEMBER_LEASE_S)
                life = self._born()
            with suppress(PhotonError):
                group = registry.beat(GROUP, name, life.number, f"{name}:1", self._shares)
                self._follow(name, life, group, registry)
            self._count_on(name, life, registry)

    def _born(self) -> _Life:
        self._lives += 1
        return _Life(self._lives)

    def _follow(self, name: str, life: _Life, group: Group, registry: RegistryClient) -> None:
        """Take up what it was given, let go of what is to be another's."""
        for number, share in group.owned(name).items():
            known = life.counts.get(number)
            if known is None or known[0] != share.sequencer:
                taken = registry.write_share(GROUP, number, share.sequencer, {}, read=True)
                if not taken.stands:
                    continue
                count = int(taken.rows.get(_KEY, b"0"))
                life.counts[number] = share.sequencer, count
                self.moves += 1
                self._tell(number, share.sequencer, name, life, count, taken=True)
            if share.heir:
                del life.counts[number]
                registry.write_share(GROUP, number, share.sequencer, {}, release=True)

    def _count_on(self, name: str, life: _Life, registry: RegistryClient) -> None:
        for number, (sequencer, count) in list(life.counts.items()):
            rows = {_KEY: b"%d" % (count + 1)}
            try:
                stands = registry.write_share(GROUP, number, sequencer, rows).stands
            except PhotonError:
                continue  # it may be written: the same is written again
            if stands:
                life.counts[number] = sequencer, count + 1
                self.writes += 1
                self._written[number] = self._clock.at
                self._tell(number, sequencer, name, life, count + 1)
            else:
                del life.counts[number]

    def _tell(
        self, share: int, sequencer: int, name: str, life: _Life, count: int, taken: bool = False
    ) -> None:
        member = f"{name}/{life.number}"
        self._history.append(Kept(self._clock.at, share, sequencer, member, count, taken))

    def end(self) -> None:
        """All has had time to heal."""
        for share in range(self._shares):
            if self._over_at is None or self._written.get(share, 0.0) <= self._over_at + _SERVED_S:
                self._history.append(Seen(self._clock.at, "unserved", f"share {share} is nobody's"))
