"""Old ids in files, on real replica processes: killed, away for long, replaced by empty ones."""

from collections.abc import Callable

import numpy as np
import pytest

from idregistry.client import RegistryClient
from photon.core.columns import pack_times
from photon.core.fates import Committed
from photon.core.ids import Token
from tests.idregistry.cluster import NODES, Cluster
from tests.idregistry.kit import NOW_US
from tests.waiting import wait_until

pytestmark = pytest.mark.cluster
SEAL_IDS = 3_000
BATCH = 20


class Writer:
    """Registers ids of its own; remembers them."""

    def __init__(self, client: RegistryClient) -> None:
        self._client = client
        self._rng = np.random.default_rng(1)
        self.batches: list[bytes] = []

    def write(self, batches: int, ids: int = BATCH) -> None:
        for _ in range(batches):
            batch = self._rng.bytes(16 * ids)
            assert self.commit(batch, "a:1") == bytes([Committed.WON] * ids)
            self.batches.append(batch)

    def commit(self, batch: bytes, joiner: str) -> bytes:
        count = len(batch) // 16
        token = Token(joiner, 1, NOW_US).pack()
        return self._client.commit(batch, pack_times([NOW_US] * count), token)

    def assert_all_taken(self) -> None:
        for start in range(0, len(self.batches), 50):
            batch = b"".join(self.batches[start : start + 50])
            assert self.commit(batch, "b:1") == bytes([Committed.DUPLICATE] * (len(batch) // 16))


def files(cluster: Cluster, node: str) -> dict[str, bytes]:
    found = (cluster.directory / node).glob("**/files/*.ids")
    return {path.name: path.read_bytes() for path in found if path.exists()}


def settled(cluster: Cluster, *nodes: str) -> Callable[[], bool]:
    """Whether all of them have the newest file; older ones stay until the next snapshot."""

    def look() -> bool:
        names = [files(cluster, node).keys() for node in nodes]
        return all(names) and len({max(some) for some in names}) == 1

    return look


@pytest.mark.long
@pytest.mark.timeout(300)
def test_what_is_in_files_is_kept_through_kills_absence_and_replacement(
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = make_cluster(seal_ids=SEAL_IDS, clock_skew_s=0.5)
    writer = Writer(cluster.client(15.0))
    writer.write(10, SEAL_IDS)
    for node in NODES:
        cluster.kill(node)
        writer.write(2, SEAL_IDS)
        cluster.start(node)
        wait_until(lambda node=node: cluster.shard_status(node).get("applied_index"))
    away = next(node for node in NODES if node != cluster.leader())
    cluster.kill(away)
    # So many commands that the log is cut: it needs a snapshot, and the files that this names.
    writer.write(10_500)
    known = files(cluster, away)
    cluster.start(away)
    writer.write(3)
    wait_until(settled(cluster, *NODES), 60, "all have the newest file")
    assert len(set(files(cluster, away)) - set(known)) > 0
    lost = next(node for node in NODES if node != cluster.leader())
    cluster.lose(lost)
    cluster.client(10.0).replace(lost, "r3", *cluster.join("r3"))
    left = [node for node in NODES if node != lost]
    wait_until(settled(cluster, "r3", *left), 60, "the new one has the newest file")
    one, *others = (files(cluster, node) for node in ("r3", *left))
    assert all(one.items() <= other.items() for other in others), "replicas agree to the byte"
    writer.assert_all_taken()
    cluster.kill(left[0])
    cluster.start(left[0])
    wait_until(lambda: cluster.shard_status(left[0]).get("ids") == sum(map(len, writer.batches)) // 16)
    writer.assert_all_taken()
