"""Scans: what they tell, who may tell it, and that they end, by their deadline if by nothing else."""

import itertools
import random
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent import futures
from dataclasses import replace

import grpc
import numpy as np
import pytest

from idregistry.rules.commands import Boundary, Commit, Configure, encode
from idregistry.rules.packing import BUCKET_US, NO_BOUNDARY, SCAN_S_MAX
from idregistry.rules.surveys import SCAN_IDS_MAX, Scanned
from idregistry.service import SCANS_MAX
from photon.core.columns import split_ids
from photon.core.errors import UnavailableError, UsageError
from photon.core.ids import Token
from photon.core.settings import BATCH_IDS_MAX
from photon.rpc import idregistry_pb2 as pb
from photon.rpc.idregistry_pb2_grpc import (
    IdRegistryServicer,
    add_IdRegistryServicer_to_server,
)
from tests.idregistry.kit import (
    NOW_US,
    OWN,
    commit_command,
    event_id,
    event_ids,
    new_state,
    one_shard,
    same_times,
    token,
)
from tests.idregistry.nodes import Ensemble, Node
from tests.waiting import wait_until

ENDLESS = Scanned(
    bytes(16 * SCAN_IDS_MAX),
    bytes(8 * SCAN_IDS_MAX),
    [b"t"],
    np.zeros(SCAN_IDS_MAX, np.uint32),
    np.zeros(SCAN_IDS_MAX, np.int64),
    [False],
)


@pytest.fixture
def node(ensemble: Ensemble) -> Node:
    (node,) = ensemble.add(1)
    return node


@pytest.fixture
def trio(ensemble: Ensemble) -> Ensemble:
    ensemble.add(3)
    return ensemble


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


def ids_of(pieces: Iterable[Scanned]) -> set[bytes]:
    return {key for piece in pieces for key in split_ids(piece.ids)}


def test_of_ids_that_are_asked_for_only_those_that_are_there_are_told_with_their_tokens(
    trio: Ensemble,
) -> None:
    trio.lead("r0")
    client = trio.client()
    ids = event_ids(*range(6))
    for row in (0, 2, 4):
        client.commit(ids[16 * row : 16 * (row + 1)], same_times(1), token(f"j{row}"))
    (piece,) = client.scan(0, ids=ids)
    assert dict(zip(split_ids(piece.ids), piece.tokens, strict=True)) == {
        event_id(row): token(f"j{row}") for row in (0, 2, 4)
    }
    (none,) = client.scan(0, ids=event_id(7))
    assert none.ids == b""


@pytest.mark.parametrize("ids", [b"i" * 15, bytes(16 * (BATCH_IDS_MAX + 1))])
def test_ids_that_are_none_or_too_many_are_refused(node: Node, ids: bytes) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        list(node.stub.Scan(pb.ScanRequest(shard=0, ids=ids), timeout=5.0))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize("timeout_s", [None, 2 * SCAN_S_MAX])
def test_a_scan_that_could_hold_its_slot_for_ever_is_refused(node: Node, timeout_s: float | None) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        list(node.stub.Scan(pb.ScanRequest(shard=0), timeout=timeout_s))
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "deadline" in raised.value.details()
    assert "3600 s" in raised.value.details()


@pytest.mark.parametrize("timeout_s", [0.0, -1.0, SCAN_S_MAX + 1, float("inf"), float("nan")])
def test_the_client_asks_for_no_such_scan(ensemble: Ensemble, timeout_s: float) -> None:
    ensemble.add(1)
    client = ensemble.client(1.5)
    with pytest.raises(UsageError, match="up to 3600 s"):
        next(client.scan(0, timeout_s=timeout_s))
    assert ids_of(client.scan(0, timeout_s=SCAN_S_MAX)) == set()


def test_clients_that_stall_give_their_slots_back_at_their_deadlines(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = node.shards[0].state
    with monkeypatch.context() as patched:
        # Far more than gRPC holds ready for who does not draw it.
        patched.setattr(type(state), "scan", lambda _state: itertools.repeat(ENDLESS))
        stalled = [node.stub.Scan(pb.ScanRequest(shard=0), timeout=2.0) for _ in range(SCANS_MAX)]
        for call in stalled:
            next(call)
        with pytest.raises(grpc.RpcError) as raised:
            list(node.stub.Scan(pb.ScanRequest(shard=0), timeout=2.0))
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED

    def all_are_free() -> bool:
        calls = [node.stub.Scan(pb.ScanRequest(shard=0), timeout=5.0) for _ in range(SCANS_MAX)]
        try:
            return len([list(call) for call in calls]) == SCANS_MAX
        except grpc.RpcError:
            return False

    wait_until(all_are_free)


@pytest.mark.parametrize(
    ("named", "fresh", "told"), [(True, False, "deadline_exceeded"), (False, True, "no leader")]
)
def test_a_replica_that_hangs_holds_no_scan_up_for_long(
    ensemble: Ensemble, hung: str, named: bool, fresh: bool, told: str
) -> None:
    """Where nobody else can be asked: as the one that was named, or as the one that leads."""
    client = ensemble.client(1.5, hung)
    begun = time.monotonic()
    with pytest.raises(UnavailableError, match=told):
        list(client.scan(0, hung if named else None, 0.5 if named else 60.0, fresh))
    assert 0.4 < time.monotonic() - begun < 30.0


def test_a_replica_that_hangs_is_passed_over_where_any_will_do(ensemble: Ensemble, hung: str) -> None:
    ensemble.add(1)
    client = ensemble.client(1.5, hung)
    begun = time.monotonic()
    assert ids_of(client.scan(0)) == set()
    assert time.monotonic() - begun < 30.0


def test_a_piece_tells_each_ids_token_by_its_holder_and_time() -> None:
    joiner = Token("10.0.0.1:4242", (1 << 64) - 1, 7)
    tokens = [
        joiner.pack(),
        replace(joiner, time_us=-8).pack(),
        replace(joiner, address="").pack(),
        b"odd",
    ]
    state = new_state()
    state.apply(commit_command(*((packed, range(10 * n, 10 * n + 10)) for n, packed in enumerate(tokens))))
    first, piece = state.scan()
    assert (first.ids, first.holders, first.token_table) == (b"", [], [])
    assert dict(zip(split_ids(piece.ids), piece.tokens, strict=True)) == {
        event_id(n): tokens[n // 10] for n in range(40)
    }
    assert sorted(piece.token_table) == sorted(tokens)
    assert [piece.token_table[row] for row in piece.token_of] == piece.tokens
    assert sorted(piece.holders) == sorted(
        [replace(joiner, time_us=0).pack(), replace(joiner, address="", time_us=0).pack(), b"odd"]
    )
    assert set(np.frombuffer(piece.times, "<i8").tolist()) == {NOW_US // BUCKET_US * BUCKET_US}, "its hour"
    odd = piece.holders.index(b"odd")
    assert set(piece.token_times[piece.holder_of == odd].tolist()) == {0}


def test_many_ids_come_in_pieces_of_a_bounded_size_and_few_in_one() -> None:
    state = new_state()
    for count, pieces in ((1000, 1), (100_000, 101_000 // SCAN_IDS_MAX + 1)):
        ids = random.Random(count).randbytes(16 * count)
        state.apply(encode(Commit(NOW_US, [b"a"], [count], ids, same_times(count), [OWN])))
        told = list(state.scan())
        sizes = [len(piece.ids) // 16 for piece in told]
        assert sum(sizes) == state.ids
        assert sizes[0] == 0
        assert len(sizes) - 1 == pieces
        assert max(sizes) <= SCAN_IDS_MAX
        assert set(split_ids(ids)) <= ids_of(told)


def test_every_piece_tells_the_boundary_also_where_there_are_no_ids(ensemble: Ensemble, node: Node) -> None:
    client = ensemble.client(1.5)
    assert [piece.boundary_us for piece in client.scan(0)] == [NO_BOUNDARY]
    state = node.shards[0].state
    state.apply(encode(Configure(NOW_US, one_shard())))
    for time_us in (NOW_US, NOW_US + 2 * BUCKET_US):
        state.apply(commit_command((b"a", [time_us]), time_us=time_us))
    state.apply(encode(Boundary(NOW_US, NOW_US + BUCKET_US)))
    told = list(client.scan(0))
    assert {piece.boundary_us for piece in told} == {NOW_US + BUCKET_US}
    assert ids_of(told) == {event_id(NOW_US + 2 * BUCKET_US)}


def test_a_fresh_scan_is_the_leaders(trio: Ensemble) -> None:
    """Nothing is replicated here: each node has only what it was told as the leader."""
    client = trio.client()
    for number, node in enumerate(trio.nodes):
        trio.lead(node.logs[0].node)
        client.commit(event_ids(number), same_times(1), token("a"))
    for number, node in enumerate(trio.nodes):
        trio.lead(node.logs[0].node)
        assert ids_of(client.scan(0, fresh=True)) == {event_id(number)}
        assert ids_of(client.scan(0, node.address, fresh=True)) == {event_id(number)}
        assert ids_of(client.scan(0)) == {event_id(0)}, "any other is the nearest's"


def test_who_does_not_lead_refuses_a_fresh_scan_and_names_who_does(trio: Ensemble) -> None:
    trio.lead("r2")
    client = trio.client()
    with pytest.raises(UnavailableError, match=f"leader={trio.nodes[2].address}"):
        list(client.scan(0, trio.nodes[0].address, fresh=True))
    assert ids_of(client.scan(0, trio.nodes[0].address)) == set()


def test_a_fresh_scan_waits_for_what_was_proposed_before(trio: Ensemble) -> None:
    """A new leader has entries in its log that it acknowledged to nobody, but another did."""
    trio.lead("r1")
    log = trio.nodes[1].logs[0]
    log.held = True
    before = len(log.proposed)
    client = trio.client()
    with futures.ThreadPoolExecutor(2) as pool:
        commit = pool.submit(client.commit, event_ids(1), same_times(1), token("a"))
        wait_until(lambda: len(log.proposed) == before + 1)
        scan = pool.submit(lambda: ids_of(client.scan(0, fresh=True)))
        wait_until(lambda: len(log.proposed) == before + 2)
        assert not scan.done()
        log.held = False
        log.apply_held()
        assert scan.result(60.0) == {event_id(1)}
        assert set(commit.result(60.0)) == {0}


def test_a_fresh_scan_goes_to_the_next_leader_where_its_barrier_is_lost(trio: Ensemble) -> None:
    trio.lead("r1")
    client = trio.client()
    client.commit(event_ids(1), same_times(1), token("a"))
    trio.nodes[1].logs[0].held = True
    before = len(trio.nodes[1].logs[0].proposed)
    with futures.ThreadPoolExecutor(1) as pool:
        scan = pool.submit(lambda: ids_of(client.scan(0, fresh=True)))
        wait_until(lambda: len(trio.nodes[1].logs[0].proposed) == before + 1)
        trio.nodes[1].logs[0].lose_leadership("r2")
        trio.lead("r2")
        assert scan.result(60.0) == set(), "r2 was told nothing"


def test_a_fresh_scan_without_a_leader_ends_in_time(trio: Ensemble) -> None:
    client = trio.client(timeout_s=0.5)
    begun = time.monotonic()
    with pytest.raises(UnavailableError, match="no leader"):
        list(client.scan(0, fresh=True))
    assert time.monotonic() - begun < 30.0
