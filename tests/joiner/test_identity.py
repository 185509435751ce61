"""Who makes other ids of the same events than the joiner is refused, and nothing is done."""

import grpc
import pytest

from photon.core.errors import OverloadedError, SettingsMismatchError
from photon.core.fates import Joined
from photon.core.settings import identity_digest, parse_settings
from photon.rpc import joiner_pb2, joiner_pb2_grpc
from photon.rpc.network import LOOPBACK
from tests.joiner.fakes import IDENTITY, batch_of, lines_of, output_lines

OTHERS = {
    "another key": identity_digest(parse_settings({"ids": {"key": "west"}})),
    "other fields": identity_digest(parse_settings({"foreign": {"id": "event"}})),
    "none": b"",
    "a part of it": IDENTITY[:-1],
}


@pytest.mark.parametrize("theirs", OTHERS.values(), ids=OTHERS)
def test_who_makes_other_ids_is_told_so_and_nothing_is_done(
    serve, connect, registry, store, tmp_path, theirs
):
    server = serve()
    stranger = connect(server, identity=theirs)
    for call in (stranger.agree, lambda: stranger.join(batch_of(["a", "b"]))):
        with pytest.raises(SettingsMismatchError, match=r"ids\.key and all of \[foreign\]") as told:
            call()
        assert server.listen in str(told.value) and "photon.toml" in str(told.value)
        assert "\n" not in str(told.value)
    assert registry.commits == 0 and not registry.tokens and not store.timeouts_s
    assert not output_lines(tmp_path)
    with LOOPBACK.open(server.listen) as channel, pytest.raises(grpc.RpcError) as refused:
        joiner_pb2_grpc.JoinerStub(channel).Join(joiner_pb2.JoinRequest(identity=theirs), timeout=20)
    assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    own = connect(server)
    own.agree()  # which joins nothing and asks no event store
    assert not store.timeouts_s and registry.commits == server.status()["joined"] == 0
    assert own.join(batch_of(["a"])).outcomes == bytes([Joined.JOINED])
    assert output_lines(tmp_path) == lines_of("a")


def test_a_joiner_without_a_lease_tells_nobody_to_end_for_its_own_settings_may_be_the_wrong_ones(
    serve, connect, registry
):
    registry.silent_to_leases = True
    server = serve()
    batch = joiner_pb2.JoinRequest(identity=OTHERS["another key"])
    with LOOPBACK.open(server.listen) as channel:  # a JoinerClient would leave out one that is not healthy
        for request in (batch, joiner_pb2.JoinRequest(identity=IDENTITY)):
            with pytest.raises(grpc.RpcError) as refused:
                joiner_pb2_grpc.JoinerStub(channel).Join(request, timeout=20)
            assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            assert "no lease" in refused.value.details()
    with pytest.raises(OverloadedError):
        connect(server, identity=OTHERS["another key"]).agree()
