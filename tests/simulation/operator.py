"""The operator: adds, promotes and removes replicas, replaces those that are lost, a step at a time."""

import random

from photon.raft.port import Change, ChangeKind, Members
from tests.simulation.node import Node, World

_PERIOD_S = 0.6
_NEVER = float("inf")
_JOIN_MAX = 5


class Operator:
    """Looks at the members, where it finds a leader, and takes a step towards as many voters as at first."""

    def __init__(self, rng: random.Random, world: World, active: bool, shrinks: bool) -> None:
        """`shrinks`: whether there may be fewer voters than at first, for a while."""
        self._rng = rng
        self._world = world
        self._size = len(world.names)
        self._shrinks = shrinks
        self._joined = 0
        self.changes = 0
        self.due_at = world.clock.at + 1.5 if active else _NEVER

    def end(self) -> None:
        self.due_at = _NEVER

    def step(self) -> None:
        self.due_at = self._world.clock.at + self._rng.random() * 2 * _PERIOD_S
        leaders = [node for node in self._world.living() if node.leads and not node.paused]
        if not leaders:
            return
        leader = self._rng.choice(leaders)
        assert leader.replica is not None
        change = self._next(leader, leader.replica.members)
        if change is not None:
            self._world.tell(leader.name, f"is asked to {change.kind.name} {change.node}")
            leader.change_members(change)
            self.changes += 1

    def _next(self, leader: Node, members: Members) -> Change | None:
        rng = self._rng
        if members.learners:
            learner = rng.choice(members.learners)
            kind = ChangeKind.REMOVE if rng.random() < 0.15 else ChangeKind.PROMOTE
            return Change(kind, learner)
        if len(members.voters) > self._size or (
            self._shrinks and len(members.voters) > 2 and rng.random() < 0.15
        ):
            return self._removal(leader, members)
        if self._joined < _JOIN_MAX and rng.random() < 0.7:
            self._joined += 1
            return Change(ChangeKind.ADD_LEARNER, self._joiner())
        return None

    def _removal(self, leader: Node, members: Members) -> Change | None:
        lost = [name for name in members.voters if self._world.nodes[name].lost]
        name = self._rng.choice(lost or members.voters)
        if name == leader.name:
            leader.hand_over()
            return None
        return Change(ChangeKind.REMOVE, name)

    def _joiner(self) -> str:
        """An empty replica; it may be there before it is a member, or only after."""
        name = f"n{self._joined}"
        self._world.join(name)
        return name
