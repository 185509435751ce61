"""Virtual time. The world has one clock; each node has its own, with another zero and another rate."""

import random
from dataclasses import dataclass

# A look at the clock takes a little, as in life; else a loop that waits for it would never end.
_LOOK_S = 1e-6


@dataclass(slots=True)
class NodeClock:
    """Reads `zero + rate x world seconds`."""

    zero: float
    rate: float

    def local(self, world: float) -> float:
        return self.zero + self.rate * world

    def world(self, local: float) -> float:
        return (local - self.zero) / self.rate


class Clock:
    """`at`: world seconds. Called, it is the clock of `node`, whose turn it is, `lag` into its turn."""

    def __init__(self) -> None:
        self.at = 100.0
        self.lag = 0.0
        self.node = NodeClock(0.0, 1.0)

    def __call__(self) -> float:
        self.lag += _LOOK_S
        return self.node.zero + self.node.rate * (self.at + self.lag)

    @property
    def now(self) -> float:
        """World seconds, at this point of the turn."""
        return self.at + self.lag


def random_clock(rng: random.Random, drift: float) -> NodeClock:
    """A node's clock after a boot; its rate is off by up to `drift`."""
    return NodeClock(rng.random() * 1000.0, 1.0 + rng.uniform(-drift, drift))
