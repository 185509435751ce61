"""A scan ends: by its deadline, if by nothing else, and its slot is free again. Over real gRPC."""

import itertools
import random
import threading
import time
from collections.abc import Iterator
from concurrent import futures

import grpc
import pytest

from idregistry.client import RegistryClient
from idregistry.messages import SCAN_S_MAX
from idregistry.scanning import SCAN_IDS_MAX, Scanned
from idregistry.service import SCANS_MAX
from photon.core.clock import SystemClock
from photon.core.errors import UnavailableError, UsageError
from photon.wire import idregistry_pb2 as pb
from photon.wire.idregistry_pb2_grpc import (
    IdRegistryServicer,
    IdRegistryStub,
    add_IdRegistryServicer_to_server,
)
from photon.wire.rpc import open_channel
from tests.idregistry.cluster import wait_until
from tests.idregistry.test_service import Node

ENDLESS = Scanned(bytes(16 * SCAN_IDS_MAX), bytes(8 * SCAN_IDS_MAX), [b"t"] * SCAN_IDS_MAX)


@pytest.fixture
def node() -> Iterator[Node]:
    made = Node("r0", 1, {})
    yield made
    made.stop()


@pytest.fixture
def stub(node: Node) -> Iterator[IdRegistryStub]:
    with open_channel(node.address) as channel:
        yield IdRegistryStub(channel)  # type: ignore[no-untyped-call]


class Hung(IdRegistryServicer):
    """Takes every call and says nothing, until it is `over`."""

    def __init__(self) -> None:
        self.over = threading.Event()

    def GetDirectory(
        self, request: pb.DirectoryRequest, context: grpc.ServicerContext
    ) -> pb.DirectoryResponse:
        self.over.wait()
        return pb.DirectoryResponse()

    def Scan(self, request: pb.ScanRequest, context: grpc.ServicerContext) -> Iterator[pb.ScanResponse]:
        self.over.wait()
        yield from ()


@pytest.fixture
def hung() -> Iterator[str]:
    """The address of a replica that hangs."""
    servicer = Hung()
    server = grpc.server(futures.ThreadPoolExecutor(8))
    add_IdRegistryServicer_to_server(servicer, server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield f"127.0.0.1:{port}"
    servicer.over.set()
    server.stop(0.0)


def client_of(*addresses: str) -> RegistryClient:
    return RegistryClient(addresses, 1.5, SystemClock(), random.Random(1))


@pytest.mark.parametrize("timeout_s", [None, 2 * SCAN_S_MAX])
def test_a_scan_that_could_hold_its_slot_for_ever_is_refused(
    stub: IdRegistryStub, timeout_s: float | None
) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        list(stub.Scan(pb.ScanRequest(shard=0), timeout=timeout_s))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "deadline" in raised.value.details()
    assert "3600 s" in raised.value.details()


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, SCAN_S_MAX + 1, float("inf"), float("nan")])
def test_the_client_asks_for_no_such_scan(node: Node, timeout_s: float) -> None:
    client = client_of(node.address)
    with pytest.raises(UsageError, match="up to 3600 s"):
        next(client.scan(0, timeout_s=timeout_s))
    assert list(client.scan(0, timeout_s=SCAN_S_MAX)) == []
    client.close()


def test_clients_that_stall_give_their_slots_back_at_their_deadlines(
    node: Node, stub: IdRegistryStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = node.shards[0].state
    with monkeypatch.context() as patched:
        # Far more than gRPC holds ready for who does not draw it.
        patched.setattr(type(state), "scan", lambda _state: itertools.repeat(ENDLESS))
        stalled = [stub.Scan(pb.ScanRequest(shard=0), timeout=2.0) for _ in range(SCANS_MAX)]
        for call in stalled:
            next(call)
        with pytest.raises(grpc.RpcError) as raised:
            list(stub.Scan(pb.ScanRequest(shard=0), timeout=2.0))
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    def all_are_free() -> bool:
        calls = [stub.Scan(pb.ScanRequest(shard=0), timeout=5.0) for _ in range(SCANS_MAX)]
        return all(call.code() is grpc.StatusCode.OK for call in calls)

    wait_until(all_are_free, timeout_s=8.0)


def test_a_scan_of_a_replica_that_hangs_ends_in_time(hung: str) -> None:
    client = client_of(hung)
    begun = time.monotonic()
    with pytest.raises(UnavailableError, match="deadline_exceeded"):
        list(client.scan(0, hung, timeout_s=0.5))
    assert 0.4 < time.monotonic() - begun < 3.0
    client.close()


def test_a_replica_that_hangs_is_passed_over_where_any_will_do(node: Node, hung: str) -> None:
    client = client_of(hung, node.address)
    begun = time.monotonic()
    assert list(client.scan(0)) == []
    assert time.monotonic() - begun < 3.0
    client.close()
