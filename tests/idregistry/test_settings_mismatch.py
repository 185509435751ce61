"""Joiners that make other ids of the same events get no lease: the directory, gRPC, real replicas."""

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from idregistry.rules.commands import EndLease, Fence, KeepAlive, Mismatched, encode
from idregistry.rules.directory import DirectoryState
from photon.core.errors import SettingsError, SettingsMismatchError
from photon.rpc import idregistry_pb2 as pb
from photon.rpc.idregistry_pb2_grpc import IdRegistryStub
from photon.rpc.network import LOOPBACK
from tests.idregistry.kit import NOW_US
from tests.idregistry.nodes import Ensemble, Node
from tests.idregistry.test_directory import Directory

OURS, OTHERS = b"a" * 16, b"b" * 16


def keep(incarnation: int, settings: bytes = b"") -> KeepAlive:
    return KeepAlive(NOW_US, incarnation, "j:1", 10**6, settings)


def test_who_is_refused_holds_no_lease_and_founds_nothing() -> None:
    directory = Directory()
    directory.put(Fence(NOW_US, 7, 0))
    assert directory.put(keep(7, b"f" * 16)) is False, "fenced"
    assert directory.state.settings == b""
    directory.put(keep(2, OURS))
    grants = directory.state.leases[2].grant
    directory.put(keep(3, OTHERS))
    assert list(directory.state.leases) == [2]
    directory.put(keep(2, OURS))
    assert directory.state.leases[2].grant == grants + 1


def test_the_settings_stay_when_no_joiner_is_left_and_in_snapshots() -> None:
    directory = Directory()
    directory.put(keep(2, OURS))
    assert directory.put(EndLease(NOW_US, 2, directory.state.leases[2].grant)) is True
    copy = DirectoryState()
    copy.restore(list(directory.state.freeze()))
    for state in (directory.state, copy):
        assert state.leases == {}
        assert state.apply(encode(keep(3, OTHERS))) == Mismatched()
        assert state.apply(encode(keep(3, OURS))) is True


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([b"", OURS, OTHERS])), max_size=20),
    st.integers(0, 20),
)
def test_all_replicas_refuse_the_same_whether_they_replay_or_restore(
    asked: list[tuple[int, bytes]], restored_at: int
) -> None:
    leader, follower = Directory(), Directory()
    answers = []
    for number, (incarnation, told) in enumerate(asked):
        if number == restored_at:
            fresh = DirectoryState()
            fresh.restore(list(leader.state.freeze()))
            follower.state = fresh
        answers.append(leader.put(keep(incarnation, told)))
        assert follower.put(keep(incarnation, told)) == answers[-1]
    first = next((told for _, told in asked if told), b"")
    assert leader.state.settings == first
    assert answers == [True if told in (b"", first) else Mismatched() for _, told in asked]
    assert list(leader.state.freeze()) == list(follower.state.freeze())


# --- over gRPC


@pytest.fixture
def node(ensemble: Ensemble) -> Node:
    return ensemble.leading(request_timeout_s=2.0)


def test_the_client_is_told_that_its_settings_are_not_those_of_the_registry(
    node: Node, ensemble: Ensemble
) -> None:
    client = ensemble.client()
    client.keep_alive("j:1", 1, 2.0, OURS)
    with pytest.raises(
        SettingsMismatchError, match=r"ids\.key and all of \[foreign\] must be the same"
    ) as raised:
        client.keep_alive("j:2", 2, 2.0, OTHERS)
    assert "founded with others" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert isinstance(raised.value, SettingsError)
    assert raised.value.exit_status == 2
    assert list(node.directory.leases) == [1]
    client.keep_alive("j:1", 1, 2.0, OURS)
    client.keep_alive("j:3", 3, 2.0)  # it makes no ids


def test_a_digest_of_another_length_is_refused(node: Node) -> None:
    """Commands have a size that no caller may burst."""
    with LOOPBACK.open(node.address) as channel:
        stub = IdRegistryStub(channel)  # type: ignore[no-untyped-call]
        for told in (b"a" * 15, b"a" * 17, bytes(1 << 20)):
            with pytest.raises(grpc.RpcError) as raised:
                stub.KeepAlive(
                    pb.KeepAliveRequest(address="j:1", incarnation=8, lease_s=1.0, settings=told),
                    timeout=5.0,
                )
            assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert node.directory.settings == b""
