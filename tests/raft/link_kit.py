"""Parts for the tests of links: an ear, two transports turned by the test, a man in the middle."""

import random
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from photon.raft.addresses import Endpoint
from photon.raft.core import now
from photon.raft.port import RaftLimits, RaftTiming
from photon.raft.rules.codec import MessageError
from photon.raft.store import LIFE_BYTES
from photon.raft.transport import Transport
from photon.rpc.network import Tls
from tests.ports import free_ports
from tests.simulation.proxy import Proxy

LIMITS = RaftLimits(command_bytes_max=1 << 20, batch_bytes=2 << 20, outgoing_bytes=4 << 20)
TIMING = RaftTiming(reconnect_s_min=0.01, reconnect_s_max=0.02)


def life_of(node: str) -> bytes:
    return node.encode().ljust(LIFE_BYTES, b".")


class Ear:
    """Receives what a transport tells; refuses the identities that it is told to."""

    def __init__(self) -> None:
        self.up: list[str] = []
        self.down: list[str] = []
        self.frames: list[tuple[str, int, bytes]] = []
        self.seen: list[tuple[str, bytes, bytes]] = []
        self.refuses: str | None = None

    def peer_up(self, peer: str) -> None:
        self.up.append(peer)

    def peer_down(self, peer: str) -> None:
        self.down.append(peer)

    def frame(self, peer: str, group: int, message: bytes) -> None:
        if message == b"nonsense":
            raise MessageError("nonsense")
        self.frames.append((peer, group, message))

    def last_life(self, peer: str) -> bytes:
        return peer.encode().ljust(LIFE_BYTES, b"-")

    def life_seen(self, peer: str, life: bytes, last_life: bytes) -> str | None:
        self.seen.append((peer, life, last_life))
        return self.refuses


class Net:
    """Transports on loopback, each of all others, turned by the test."""

    def __init__(
        self,
        nodes: str = "ab",
        secrets: Sequence[bytes] = (),
        tls: Sequence[Tls | None] = (),
        timing: RaftTiming = TIMING,
    ) -> None:
        self.addresses = {
            node: ("127.0.0.1", port) for node, port in zip(nodes, free_ports(len(nodes)), strict=True)
        }
        self.ears = {node: Ear() for node in nodes}
        self.tls = any(tls)
        self.nodes = {
            node: Transport(
                Endpoint(node, self.addresses[node], secret, files),
                life_of(node),
                self.others(node),
                self.ears[node],
                timing,
                LIMITS,
                random.Random(1),
            )
            for node, secret, files in zip(
                nodes, secrets or [b"s"] * len(nodes), tls or [None] * len(nodes), strict=True
            )
        }

    def others(self, node: str) -> dict[str, tuple[str, int]]:
        return {other: address for other, address in self.addresses.items() if other != node}

    def listen(self, stack: ExitStack) -> "Net":
        for node in self.nodes.values():
            node.listen()
            stack.callback(node.close)
        return self

    def through_proxy(self, stack: ExitStack) -> Proxy:
        """From now on a dials b through one in the middle."""
        proxy = Proxy({"b": self.addresses["b"][1]}, lambda port: "a")
        stack.callback(proxy.close)
        self.nodes["a"].set_peers({"b": ("127.0.0.1", proxy.ports["b"])})
        return proxy

    def turn(self) -> None:
        for node in self.nodes.values():
            node.tick(now())
            node.poll(0.002)
            node.flush()

    def turn_for(self, seconds: float) -> None:
        deadline = now() + seconds
        while now() < deadline:
            self.turn()

    def turn_until(self, condition: Callable[[], object], turns: int = 2000) -> None:
        for _ in range(turns):
            if condition():
                return
            self.turn()
        raise AssertionError("it did not happen in time")

    def connect(self) -> "Net":
        self.turn_until(lambda: all(len(ear.up) >= len(self.nodes) - 1 for ear in self.ears.values()))
        return self


MakeNet = Callable[..., Net]
