"""The network between the nodes, in one of two moods.

As in life: each two nodes have one connection, in order and whole in each direction. A cut, one way or both,
holds back what is sent; who hears nothing for too long closes the connection, and what was under way is lost.
The two ends learn of it at different times, and so they do of the next connection.

Hostile: there are connections too, but each message goes by itself: late, lost, twice, before an earlier one,
and even after its connection was closed.
"""

import random
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations, count
from typing import Protocol

from tests.simulation.clock import Clock

SILENCE_S = 1.5
UP, DOWN, FRAME = "up", "down", "frame"
_RECONNECT_S = (0.05, 0.4)
_HANDSHAKE_S = 0.5
_POLL_S = 0.05
_IDLE_S = 5.0
_DELAY_S = 0.02
_HOSTILE_DELAY_S = (0.005, 0.005, 0.02, 0.1, 1.0)
_HOSTILE_LOSS = 0.03
_HOSTILE_TWICE = 0.08


@dataclass(order=True, slots=True)
class Arrival:
    """Something that reaches a node at world time `at`. `connection` numbers the connection it came on."""

    at: float
    number: int
    kind: str
    peer: str
    connection: int
    data: bytes = b""


class Receiver(Protocol):
    """A node's process."""

    paused: bool

    def arrive(self, arrival: Arrival) -> None: ...


class Network:
    """`alive` are the nodes whose process runs, or is paused."""

    def __init__(self, seed: int, clock: Clock, hostile: bool) -> None:
        self._seed = seed
        # Dice of their own for each way: the library asks for votes in the order of a set.
        self._dice: dict[tuple[str, str], random.Random] = {}
        self._clock = clock
        self.hostile = hostile
        self.calm = False  # from healing on: no message is lost any more
        self.alive: dict[str, Receiver] = {}
        self.cut: dict[tuple[str, str], float] = {}  # since when nothing passes from one to the other
        self.slow: dict[tuple[str, str], float] = defaultdict(float)
        self._connection: dict[tuple[str, str], int] = defaultdict(int)  # what one end has, 0: none
        self._ended: dict[tuple[str, str], int] = defaultdict(int)  # of which it will hear that it is gone
        self._dial_at: dict[tuple[str, str], float] = {}
        self._last: dict[tuple[str, str], float] = defaultdict(float)
        self._held: dict[tuple[str, str], list[Arrival]] = defaultdict(list)
        self._queued: dict[tuple[str, str], int] = defaultdict(int)
        self._numbers = count(1)
        self._connections = count(1)
        self.due_at = 0.0  # when `tick` must be called next

    # -- what the nodes see -----------------------------------------------------------------------------

    def post(self, sender: str, receiver: str, data: bytes) -> None:
        """Send on the connection the sender has; without one the message is lost."""
        link = sender, receiver
        connection = self._connection[link]
        if not connection:
            return
        if self.hostile and not self.calm:
            rng = self._rng(link)
            if rng.random() < _HOSTILE_LOSS:
                return
            if rng.random() < _HOSTILE_TWICE:
                self._send(link, connection, data)
        self._send(link, connection, data)

    def _send(self, link: tuple[str, str], connection: int, data: bytes) -> None:
        arrival = Arrival(self._clock.now, next(self._numbers), FRAME, link[0], connection, data)
        if link in self.cut:
            self._held[link].append(arrival)
            self._queued[link] += len(data)
        elif link[1] in self.alive:
            self._queued[link] += len(data)
            self._deliver(link, arrival)

    def queued(self, sender: str, receiver: str) -> int:
        """Bytes that the sender has written and the receiver has not taken."""
        return self._queued[sender, receiver]

    def take(self, receiver: str, arrival: Arrival) -> bool:
        """Whether what arrives is to be heard: on the connection that the receiver has now."""
        link = receiver, arrival.peer
        if arrival.kind == FRAME:
            self._queued[arrival.peer, receiver] -= len(arrival.data)
            return self._connection[link] == arrival.connection or (
                self.hostile and bool(self._connection[link])
            )
        if arrival.kind == DOWN:
            if self._connection[link] != arrival.connection:
                return False
            self._lose(link)
            return True
        self._connection[link] = arrival.connection
        return True

    def has(self, node: str, peer: str) -> bool:
        """Whether a node believes in its connection to the peer."""
        return bool(self._connection[node, peer])

    # -- what happens to it -----------------------------------------------------------------------------

    def join(self, node: str, receiver: Receiver) -> None:
        """A process starts."""
        self.alive[node] = receiver
        self._due()

    def leave(self, node: str, quietly: bool) -> None:
        """A process ends, and its connections. `quietly`: without a word, as a machine without power."""
        del self.alive[node]
        for link in [link for link in self._queued if link[1] == node]:
            self._held.pop(link, None)
            self._queued[link] = 0
        for other in sorted(self.alive):
            self._connection[node, other] = 0
            if quietly:
                self._end(other, node, SILENCE_S, SILENCE_S)
            elif (node, other) not in self.cut:
                self._end(other, node, 0.0, _DELAY_S)
        self._due()

    def changed(self) -> None:
        """A node goes on: it can shake hands again."""
        self._due()

    def cut_one_way(self, sender: str, receiver: str) -> None:
        self.cut.setdefault((sender, receiver), self._clock.at)
        self._due()

    def heal(self, sender: str, receiver: str) -> None:
        """What was held back comes now, if its connection is still there."""
        link = sender, receiver
        self.cut.pop(link, None)
        for arrival in self._held.pop(link, []):
            if receiver in self.alive:
                self._deliver(link, arrival)
            else:
                self._queued[link] -= len(arrival.data)
        self._due()

    def reset(self, one: str, other: str) -> None:
        """The connection breaks, with what is under way on it."""
        self._end(one, other, 0.0, _DELAY_S)
        self._end(other, one, 0.0, _DELAY_S)
        self._due()

    def tick(self) -> None:
        """Close what has been silent for too long; connect who are not connected."""
        now = self._clock.at
        for (sender, receiver), since in list(self.cut.items()):
            if now >= since + SILENCE_S and self._stands(receiver, sender):
                self._end(receiver, sender, 0.0, 0.0)
                if (receiver, sender) not in self.cut:
                    self._end(sender, receiver, 0.0, 10 * _DELAY_S)
        for one, other in self._pairs():
            if not self._unconnected(one, other):
                self._dial_at.pop((one, other), None)
                continue
            at = self._dial_at.setdefault((one, other), now + self._rng((one, other)).uniform(*_RECONNECT_S))
            if now >= at:
                self._dial_at[one, other] = now + _HANDSHAKE_S
                self._connect(one, other)
        self._due()

    # -- connections ------------------------------------------------------------------------------------

    def _pairs(self) -> Iterator[tuple[str, str]]:
        """Who can shake hands."""
        return combinations(sorted(node for node, to in self.alive.items() if not to.paused), 2)

    def _unconnected(self, one: str, other: str) -> bool:
        open_ways = (one, other) not in self.cut and (other, one) not in self.cut
        return open_ways and not (self._connection[one, other] and self._connection[other, one])

    def _stands(self, node: str, peer: str) -> bool:
        """Whether this end has its connection, and does not know of its end."""
        connection = self._connection[node, peer]
        return node in self.alive and connection > self._ended[node, peer]

    def _connect(self, one: str, other: str) -> None:
        connection = next(self._connections)
        for node, peer in ((one, other), (other, one)):
            self._last[peer, node] = 0.0
            # Nothing is heard on it before it is there.
            self._last[peer, node] = self._tell(node, UP, peer, connection, 0.0, 2 * _DELAY_S)

    def _end(self, node: str, peer: str, least_s: float, most_s: float) -> None:
        """One end learns that the connection is gone, so much later."""
        if self._stands(node, peer):
            self._ended[node, peer] = self._connection[node, peer]
            self._tell(node, DOWN, peer, self._connection[node, peer], least_s, most_s)

    def _lose(self, link: tuple[str, str]) -> None:
        """An end is gone, and what it held back to send."""
        self._connection[link] = 0
        self._queued[link] -= sum(len(arrival.data) for arrival in self._held.pop(link, []))

    def _tell(self, node: str, kind: str, peer: str, connection: int, least_s: float, most_s: float) -> float:
        at = max(self._clock.now + self._rng((peer, node)).uniform(least_s, most_s), self._last[peer, node])
        self.alive[node].arrive(Arrival(at, next(self._numbers), kind, peer, connection))
        return at

    def _rng(self, link: tuple[str, str]) -> random.Random:
        rng = self._dice.get(link)
        if rng is None:
            rng = self._dice[link] = random.Random(f"{self._seed} {link}")
        return rng

    def _deliver(self, link: tuple[str, str], arrival: Arrival) -> None:
        rng = self._rng(link)
        if self.hostile and not self.calm:
            delay = rng.random() * rng.choice(_HOSTILE_DELAY_S) + self.slow[link]
            arrival.at = self._clock.now + delay
        else:
            at = self._clock.now + rng.random() * _DELAY_S + self.slow[link]
            arrival.at = self._last[link] = max(at, self._last[link])
        self.alive[link[1]].arrive(arrival)

    def _due(self) -> None:
        """When something is to be looked at next."""
        now = self._clock.at
        silent = [since + SILENCE_S for (sender, to), since in self.cut.items() if self._stands(to, sender)]
        dial = any(self._unconnected(one, other) for one, other in self._pairs())
        self.due_at = min([*silent, now + (_POLL_S if dial else _IDLE_S)])
