"""What goes wrong, and when. Each seed draws its own mix: some runs are all cuts, others all power losses."""

import random
from dataclasses import dataclass, replace
from itertools import permutations

from photon.raft.port import RaftLimits
from tests.simulation.node import Node, World

_NEVER = float("inf")
_NETWORK = ("cut", "cut_one_way", "isolate", "split", "heal", "heal_all", "reset", "slow")
_NODES = ("kill", "power", "blackout", "pause", "transfer", "rot")
ACTS = _NETWORK + _NODES
_DRAWN = tuple(act for act in ACTS if act not in ("heal", "heal_all", "rot"))


@dataclass(frozen=True, slots=True)
class Profile:
    """Weights of the faults against each other, chances, and sizes."""

    period_s: float = 0.15
    drift: float = 0.1
    cut: float = 1.0  # both ways
    cut_one_way: float = 1.0
    isolate: float = 1.0
    split: float = 0.5
    heal: float = 2.0
    heal_all: float = 1.0
    reset: float = 0.5
    slow: float = 1.0
    kill: float = 1.0
    power: float = 1.0
    blackout: float = 0.1  # power for all at once
    pause: float = 0.5
    transfer: float = 0.3
    rot: float = 0.0
    crash_chance: float = 0.002  # at each point that touches the disk
    error_chance: float = 0.0
    slow_disk_chance: float = 0.01
    down_s: float = 2.0
    leader_first: float = 0.4  # how often it hits the leader
    tail_entries: int = 3
    piece_bytes: int = 100

    def limits(self, usual: RaftLimits) -> RaftLimits:
        """The bounds of a workload, changed."""
        return replace(
            usual,
            tail_entries=self.tail_entries,
            snapshot_piece_bytes=min(self.piece_bytes, usual.outgoing_bytes - usual.batch_bytes),
        )


def draw_profile(rng: random.Random) -> Profile:
    """A mix: each kind of fault is left out, rare, or frequent."""
    weights = {kind: rng.choice((0.0, 0.3, 1.0, 1.0, 3.0)) for kind in _DRAWN}
    weights["blackout"] *= 0.2
    return Profile(
        period_s=rng.choice((0.1, 0.2, 0.5)),
        drift=rng.choice((0.0, 0.05, 0.2)),
        crash_chance=rng.choice((0.0, 0.001, 0.005, 0.02)),
        error_chance=rng.choice((0.0, 0.0, 0.001)),
        slow_disk_chance=rng.choice((0.0, 0.01, 0.1)),
        down_s=rng.choice((0.5, 2.0, 5.0)),
        leader_first=rng.choice((0.2, 0.6)),
        tail_entries=rng.choice((0, 3, 10)),
        piece_bytes=rng.choice((60, 150, 5000)),
        **weights,
    )


class Faults:
    """`step` at `due_at`: one thing goes wrong, or right again."""

    def __init__(
        self, rng: random.Random, profile: Profile, world: World, first_after_s: float = 1.0
    ) -> None:
        self._rng = rng
        self._world = world
        self._profile = profile
        self._ended = False
        self._founders = len(world.names)
        self._resumes: dict[str, float] = {}
        self._acts = [getattr(self, f"_{act}") for act in ACTS]
        self._weights = [getattr(profile, act) for act in ACTS]
        disks = world.disks
        disks.crash_chance = profile.crash_chance
        disks.error_chance = profile.error_chance
        disks.slow_chance = profile.slow_disk_chance
        self._next_at = world.clock.at + first_after_s

    @property
    def due_at(self) -> float:
        return min([self._next_at, *self._resumes.values()])

    def step(self) -> None:
        now = self._world.clock.at
        for name in [name for name, at in self._resumes.items() if at <= now]:
            self._resume(name)
        if now >= self._next_at:
            self._rng.choices(self._acts, self._weights)[0]()
            self._next_at = now + self._rng.expovariate(1 / self._profile.period_s)

    def down_s(self) -> float:
        """How long a node that died stays down."""
        return 0.3 if self._ended else self._rng.random() * self._profile.down_s

    def end(self) -> None:
        """Everything is mended."""
        world = self._world
        self._ended = True
        self._next_at = _NEVER
        world.disks.crash_chance = world.disks.error_chance = world.disks.slow_chance = 0.0
        world.disks.liars.clear()
        world.network.calm = True
        world.network.slow.clear()
        self._heal_all()
        for name in list(self._resumes):
            self._resume(name)
        for name in world.down:
            world.down[name] = min(world.down[name], world.clock.at + 0.3)

    # -- who --------------------------------------------------------------------------------------------

    def _victim(self) -> Node | None:
        living = self._world.living()
        leaders = [node for node in living if node.leads]
        if leaders and self._rng.random() < self._profile.leader_first:
            living = leaders
        return self._rng.choice(living) if living else None

    def _pair(self) -> tuple[str, str]:
        one, other = self._rng.sample(self._world.names, 2)
        return one, other

    # -- the network ------------------------------------------------------------------------------------

    def _cut(self) -> None:
        one, other = self._pair()
        self._part([one], [other])

    def _cut_one_way(self) -> None:
        one, other = self._pair()
        self._world.tell("-", f"cut {one}->{other}")
        self._world.network.cut_one_way(one, other)

    def _isolate(self) -> None:
        victim = self._victim()
        if victim is not None:
            self._part([victim.name], [name for name in self._world.names if name != victim.name])

    def _split(self) -> None:
        names = self._rng.sample(self._world.names, len(self._world.names))
        at = self._rng.randint(1, len(names) - 1)
        self._part(names[:at], names[at:])

    def _part(self, some: list[str], others: list[str]) -> None:
        self._world.tell("-", f"cut {some} | {others}")
        for one in some:
            for other in others:
                self._world.network.cut_one_way(one, other)
                self._world.network.cut_one_way(other, one)

    def _heal(self) -> None:
        cuts = sorted(self._world.network.cut)
        if cuts:
            one, other = self._rng.choice(cuts)
            self._world.tell("-", f"heal {one}-{other}")
            self._world.network.heal(one, other)
            self._world.network.heal(other, one)

    def _heal_all(self) -> None:
        self._world.tell("-", "heal the network")
        for one, other in permutations(self._world.names, 2):
            self._world.network.heal(one, other)

    def _reset(self) -> None:
        one, other = self._pair()
        self._world.tell("-", f"reset {one}-{other}")
        self._world.network.reset(one, other)

    def _slow(self) -> None:
        self._world.network.slow[self._pair()] = self._rng.choice([0.0, 0.0, 0.1, 0.5, 1.5])

    # -- the nodes --------------------------------------------------------------------------------------

    def _kill(self) -> None:
        victim = self._victim()
        if victim is not None:
            self._end_node(victim, power=False)

    def _power(self) -> None:
        victim = self._victim()
        if victim is not None:
            self._end_node(victim, power=True)

    def _blackout(self) -> None:
        for node in self._world.living():
            self._end_node(node, power=True)

    def _end_node(self, node: Node, power: bool) -> None:
        self._resumes.pop(node.name, None)
        node.die(power)

    def _pause(self) -> None:
        victim = self._victim()
        if victim is not None and not victim.paused:
            self._world.tell(victim.name, "stands still")
            victim.paused = True
            victim.wake_at = _NEVER
            self._resumes[victim.name] = self._world.clock.at + self._rng.random() * 4

    def _resume(self, name: str) -> None:
        del self._resumes[name]
        node = self._world.nodes[name]
        if node.paused:
            self._world.tell(name, "goes on")
            node.resume()
            self._world.network.changed()

    def _transfer(self) -> None:
        for node in self._world.living():
            if node.leads and not node.paused:
                self._world.tell(node.name, "is to hand over")
                node.hand_over()

    def _rot(self) -> None:
        """A machine goes down, and its disk is damaged when it comes back; a minority at most."""
        world, victim = self._world, self._victim()
        lost = sum(node.lost for node in world.nodes.values())
        if victim is None or 2 * (lost + 1) >= self._founders:
            return
        self._end_node(victim, power=True)
        where = world.disks.rot(victim.name)
        if where is not None:
            victim.lost = True
            world.tell(victim.name, f"is damaged: {where}")
