"""Once a fence is told, no shard lets the incarnation win (paper 3.3.3): real processes, and fake logs."""

from collections.abc import Callable

import grpc
import pytest

from idregistry.service import FENCES_WAITING_MAX
from photon.core.errors import UnavailableError
from photon.core.ids import Token
from photon.rpc import idregistry_pb2 as pb
from tests.idregistry.cluster import Cluster
from tests.idregistry.kit import FENCED, event_ids, same_times
from tests.idregistry.nodes import Ensemble, Node

SHARDS = 4
ROUNDS = 60


@pytest.mark.cluster
@pytest.mark.long
def test_right_after_the_fence_is_told_no_shard_lets_the_incarnation_win(
    make_cluster: Callable[..., Cluster],
) -> None:
    cluster = make_cluster(shards=SHARDS, clock_skew_s=0.5)
    leaders = {cluster.leader(shard) for shard in range(SHARDS)}
    client = cluster.client()
    client.commit(event_ids(1), same_times(1), Token("joiner:1", 1, 1).pack())
    for incarnation in range(100, 100 + ROUNDS):
        token = Token("joiner:1", incarnation, 1).pack()
        numbers = range(incarnation * 1000, incarnation * 1000 + 40)
        assert client.fence(incarnation).fenced
        outcomes = client.commit(event_ids(*numbers), same_times(40), token)
        assert outcomes == bytes([FENCED] * 40), f"round {incarnation - 100}, led by {leaders}"


@pytest.fixture
def node(ensemble: Ensemble) -> Node:
    return ensemble.leading(SHARDS, request_timeout_s=2.0)


def fence(node: Node, timeout_s: float) -> pb.FenceResponse:
    return node.stub.Fence(pb.FenceRequest(incarnation=7), timeout=timeout_s)


def test_a_shard_that_does_not_commit_leaves_it_unknown_until_it_does(ensemble: Ensemble, node: Node) -> None:
    node.logs[3].held = True
    with pytest.raises(UnavailableError, match="retry"):
        ensemble.client(0.4).fence(7)
    assert [shard.state.fences for shard in node.shards] == [1, 1, 1, 0]
    with pytest.raises(grpc.RpcError) as raised:
        fence(node, 20.0)  # longer than the server lets a call wait
    assert raised.value.code() is grpc.StatusCode.UNAVAILABLE
    assert "not every shard knows" in raised.value.details()
    node.logs[3].held = False
    node.logs[3].apply_held()
    assert fence(node, 5.0).fenced
    assert node.directory.fences == [7]


def test_a_shard_that_is_not_open_here_is_waited_for(node: Node) -> None:
    missing = node.hosted.pop(2)
    with pytest.raises(grpc.RpcError):
        fence(node, 0.3)
    node.hosted[2] = missing
    assert fence(node, 5.0).fenced


def test_fences_that_wait_leave_room_for_everything_else(node: Node) -> None:
    node.logs[3].held = True
    calls = [node.stub.Fence.future(pb.FenceRequest(incarnation=7), timeout=1.5) for _ in range(30)]
    renewal = pb.KeepAliveRequest(address="j:1", incarnation=8, lease_s=1.0)
    assert not node.stub.KeepAlive(renewal, timeout=1.0).fenced
    codes = [call.code() for call in calls]
    refused = codes.count(grpc.StatusCode.RESOURCE_EXHAUSTED)
    assert refused == 30 - FENCES_WAITING_MAX
