"""A ReplicatedLog without replicas: it applies at once or on demand, loses leadership, or answers Unknown."""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from photon.raft.port import (
    Applied,
    Change,
    ChangeKind,
    Members,
    Outcome,
    Refusal,
    Refused,
    ReplicatedLog,
    StateMachine,
    Status,
    Unknown,
)


@dataclass
class FakeLog(ReplicatedLog):
    """`held` makes proposals wait until `apply_held`, `forget_held` or `lose_leadership`."""

    machine: StateMachine
    node: str = "r0"
    held: bool = False
    proposed: list[bytes] = field(default_factory=list)
    of_group: Members = field(default_factory=Members)
    of_group_committed: Members | None = None
    """Where those are not committed yet: the ones before."""
    behind: dict[str, int] = field(default_factory=dict)
    changes: list[Change] = field(default_factory=list)
    handed_to: list[str | None] = field(default_factory=list)
    """Who was asked to take over."""
    ready: bool = True
    """Whether a successor has everything."""
    entries_behind: int = 0
    under_way: dict[int, bytes] = field(default_factory=dict)
    """Index -> command, of those that are in the log and not applied."""
    _leader: str | None = "r0"
    _waiting: list[tuple[bytes, Callable[[Outcome], None]]] = field(default_factory=list)
    _index: int = 0

    def propose(self, command: bytes, done: Callable[[Outcome], None]) -> None:
        if not self.is_leader:
            done(Refused(Refusal.NOT_LEADER, self._leader))
            return
        self.proposed.append(command)
        self._waiting.append((command, done))
        if not self.held:
            self.apply_held()

    def apply_held(self) -> None:
        waiting, self._waiting = self._waiting, []
        for command, done in waiting:
            self._index += 1
            done(Applied(self._index, self.machine.apply(command)))

    def forget_held(self, applied: bool = False) -> None:
        """Answer Unknown to all that wait, whether they were `applied` or not."""
        waiting, self._waiting = self._waiting, []
        for command, done in waiting:
            if applied:
                self._index += 1
                self.machine.apply(command)
            done(Unknown())

    def lose_leadership(self, to: str | None) -> None:
        self._leader = to
        self.forget_held()

    def hand_over(self, to: str | None = None) -> bool:
        if self.is_leader and self.ready:
            self.handed_to.append(to)
            return True
        return False

    def change_members(self, change: Change, done: Callable[[Outcome], None]) -> None:
        self.changes.append(change)
        voters, learners = set(self.of_group.voters), set(self.of_group.learners)
        match change.kind:
            case ChangeKind.ADD_LEARNER:
                learners.add(change.node)
            case ChangeKind.PROMOTE:
                learners.discard(change.node)
                voters.add(change.node)
            case ChangeKind.REMOVE:
                voters.discard(change.node)
                learners.discard(change.node)
        self.of_group = Members(tuple(sorted(voters)), tuple(sorted(learners)))
        self._index += 1
        done(Applied(self._index, None))

    @property
    def members(self) -> Members:
        return self.of_group

    @property
    def committed_members(self) -> Members:
        return self.of_group if self.of_group_committed is None else self.of_group_committed

    @property
    def is_leader(self) -> bool:
        return self._leader == self.node

    @property
    def leader(self) -> str | None:
        return self._leader

    @property
    def lag(self) -> int:
        return self.entries_behind

    def unapplied(self) -> list[tuple[int, int, memoryview]]:
        return [(index, 1, memoryview(command)) for index, command in self.under_way.items()]

    @property
    def in_flight(self) -> int:
        return len(self._waiting)

    def status(self) -> Status:
        return Status(
            0,
            self.node,
            self._leader,
            self.is_leader,
            1,
            self._index,
            self._index,
            0,
            self._leader is not None,
            self.of_group.voters,
            self.of_group.learners,
            self.behind,
        )


class Turner:
    """The raft thread's stand-in: calls `on_tick` for each log whenever woken, until closed."""

    def __init__(self) -> None:
        self._ticks: list[tuple[Callable[[ReplicatedLog], None], FakeLog]] = []
        self._woken = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def add(self, on_tick: Callable[[ReplicatedLog], None], log: FakeLog) -> None:
        self._ticks.append((on_tick, log))

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        self._woken.set()

    def close(self) -> None:
        self._stopping = True
        self._woken.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            self._woken.wait(0.05)
            self._woken.clear()
            for on_tick, log in self._ticks:
                on_tick(log)
