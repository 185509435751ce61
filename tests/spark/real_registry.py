"""A real registry of one replica, in a process of its own."""

import random
from collections.abc import Sequence
from pathlib import Path

from idregistry.client import RegistryAt, RegistryClient
from photon.core.clock import SystemClock
from photon.core.columns import pack_times
from photon.core.fates import Committed
from photon.core.ids import IdPacker, Token
from photon.rpc.network import Network, Tls
from tests.forked import Child
from tests.idregistry import replica
from tests.ports import free_ports

ROOT = Path(__file__).parents[2]


class RealRegistry:
    """Ends with `close`."""

    def __init__(self, directory: Path, shards: int = 1, tls: Tls | None = None, **settings: float) -> None:
        directory.mkdir(exist_ok=True)
        grpc, raft = free_ports(2)
        self.address = f"127.0.0.1:{grpc}"
        given = {
            "node": "r0",
            "grpc": {"r0": self.address},
            "raft": {"r0": raft},
            "directory": str(directory / "r0"),
            "log": str(directory / "r0.log"),
            "settings": {"shards": shards, "replicas": 1, **settings},
            "joining": False,
            "tls": tls and [str(tls.cert), str(tls.key), str(tls.ca), tls.name],
        }
        self._process = Child(replica.main, given)
        self.at = RegistryAt((self.address,), Network(tls))
        self.client = RegistryClient([self.address], 20.0, SystemClock(), random.Random(), Network(tls))

    def commit(self, ids: Sequence[str], token: Token, *times_us: int) -> None:
        """Register event ids as texts, with a time for each, or one for all; every one must be won."""
        packed = IdPacker().pack(list(ids))
        outcomes = self.client.commit(packed, _times(ids, times_us), token.pack())
        assert set(outcomes) <= {Committed.WON}, outcomes

    def close(self) -> None:
        self.client.close()
        self._process.kill()
        self._process.wait()


def _times(ids: Sequence[str], times_us: Sequence[int]) -> bytes:
    return pack_times(list(times_us) if len(times_us) > 1 else list(times_us or (2,)) * len(ids))
