"""The joiner behind gRPC, as the dispatcher and the operator meet it."""

import itertools
import socket
import threading
import time
from functools import partial

import pytest

from joiner.client import ForeignColumns, JoinerClient
from photon.core.clock import ManualClock
from photon.core.errors import AddressInUseError, OverloadedError, StorageError, UnavailableError, UsageError
from photon.core.fates import Found, Joined
from tests.health import status_of
from tests.joiner.fakes import batch_of, lines_of, output_lines, packed_id, running
from tests.waiting import wait_until


def share_calls(client, servers):
    """Until the client is connected to all: the first calls go to whoever is connected first."""
    deadline = time.monotonic() + 60
    for number in itertools.count():
        client.join(batch_of([f"s{number}"]))
        if all(server.status()["joined"] for server in servers):
            return
        assert time.monotonic() < deadline


def test_a_batch_goes_there_and_each_event_has_its_own_outcome(serve, connect, store, tmp_path):
    store.lacks = {"q-b": Found.ABSENT}
    client = connect(serve(clock=ManualClock(), drain=True))
    answer = client.join(batch_of(["a", "b", "c", "a"]))
    assert list(answer.outcomes) == [Joined.JOINED, Joined.UNJOINABLE, Joined.JOINED, Joined.DUPLICATE]
    assert answer.reasons == {1: "no primary event in the logs"}
    assert output_lines(tmp_path) == lines_of("ac")


def test_the_status_tells_what_the_supervisor_asks(serve, connect, tmp_path):
    server = serve()
    connect(server).join(batch_of(["a", "b"]))
    status = status_of("joiner", server.listen)
    lease = status.pop("lease")
    assert 0 < lease.pop("seconds_left") <= 10
    assert len(lease.pop("incarnation")) == 16
    assert lease == {"fenced": False, "trouble": None}
    output = status.pop("output")
    assert output.pop("roots") == [str(tmp_path / "out" / "joined" / "east")]
    assert output == {"file": 0, "listed": 0, "waiting": 0, "progress": 0, "trouble": None}
    assert status.pop("reading")
    account = {"unwritten": 0, "gone": 0, "missing_file": None, "unknown": 0, "trouble": None}
    assert status.pop("account") == account
    assert status.pop("sinks") == []
    assert status == {
        "joined": 2,
        "in_flight": 0,
        "commits_in_flight": 0,
        "unresolved": 0,
        "storage_error": None,
        "notices": [],
    }


def test_batches_go_to_the_joiners_in_turn_and_past_one_that_is_gone_but_no_batch_leaves_one_out(
    serve, connect
):
    servers = [serve(name="one"), serve(name="two")]
    client = connect(*servers)
    share_calls(client, servers)
    batch = batch_of(["a"])
    broken = ForeignColumns(batch.ids, b"", batch.times, batch.events, batch.tries, batch.ages)
    for _ in range(4):  # no joiner takes it
        with pytest.raises(UnavailableError, match="invalid_argument: columns of 1 events: primary_ids"):
            client.join(broken)
    before = [server.status()["joined"] for server in servers]
    for number in range(4):
        client.join(batch_of([f"e{number}"]))
    assert [server.status()["joined"] for server in servers] == [before[0] + 2, before[1] + 2]
    servers[0].stop(1)
    failures = 0
    for number in range(20):
        try:
            client.join(batch_of([f"f{number}"]))
        except UnavailableError:
            failures += 1
    assert failures <= 1
    statuses = client.statuses()
    assert statuses[servers[1].listen]["joined"] == before[1] + 22 - failures
    assert isinstance(statuses[servers[0].listen], UnavailableError)


def test_a_joiner_with_too_much_in_flight_says_that_nothing_was_done(serve, connect, store, registry):
    server = serve(requests_in_flight_max=2)
    client = connect(server)
    store.hold = threading.Event()
    with running(*(partial(client.join, batch_of([name])) for name in "ab")):
        wait_until(lambda: server.status()["in_flight"] == 2)
        with pytest.raises(OverloadedError, match="2 requests are in flight; send again later"):
            client.join(batch_of(["c"]))
        store.hold.set()
    assert server.status()["in_flight"] == 0
    assert set(registry.tokens) == {packed_id("a"), packed_id("b")}
    assert client.join(batch_of(["c"])).outcomes == bytes([Joined.JOINED])


def test_a_joiner_that_is_not_there_is_unavailable(connect):
    client = JoinerClient(["127.0.0.1:1"], timeout_s=5)
    for call in (partial(client.join, batch_of(["a"])), partial(status_of, "joiner", "127.0.0.1:1")):
        with pytest.raises(UnavailableError, match=r"joiner 127\.0\.0\.1:1: unavailable"):
            call()
    with pytest.raises(OverloadedError, match="nothing was sent"):
        client.join(batch_of(["a"]))
    client.close()
    with pytest.raises(UsageError):
        JoinerClient([], timeout_s=5)


def test_a_restarted_joiner_ends_what_was_unresolved_and_serves_on_the_same_address(
    serve, connect, registry, tmp_path
):
    first = serve()
    registry.down = True
    client = connect(first)
    assert client.join(batch_of(["a"])).outcomes == bytes([Joined.RETRY_UNAVAILABLE])
    assert first.status()["unresolved"] == 1
    assert not first.stop(0.1)
    with pytest.raises(StorageError):
        first._worker.join(batch_of(["c"]))
    registry.down = False
    second = serve(address=first.listen)
    assert connect(second).join(batch_of(["b"])).outcomes == bytes([Joined.JOINED])
    assert second.stop(20)
    assert output_lines(tmp_path) == lines_of("ab")


def test_a_taken_port_is_told_and_the_directory_is_free_again(serve):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(AddressInUseError, match="cannot listen on"):
            serve(address=f"127.0.0.1:{taken.getsockname()[1]}")
    serve()


def test_events_that_are_no_lines_of_objects_are_the_callers_mistake_and_a_large_batch_is_joined_whole(
    serve, connect, tmp_path
):
    client = connect(serve())
    with pytest.raises(UnavailableError, match=r"invalid_argument: events: .* JSON object"):
        client.join(batch_of(["a", "b"], events=[b'{"id":"a"}', b"x"]))
    assert not output_lines(tmp_path)
    names = [f"n{number}" for number in range(20_000)]
    assert client.join(batch_of(names)).outcomes == bytes(20_000)
    assert output_lines(tmp_path) == lines_of(names)


def test_tries_without_end_are_counted_without_a_warning(serve, connect, store, recwarn):
    store.lacks = {"q-a": Found.ABSENT}
    answer = connect(serve()).join(batch_of(["a"], tries=(1 << 32) - 1, age_us=1 << 62))
    assert answer.reasons[0].startswith("no primary event after 4294967296 tries")
    assert not [warning for warning in recwarn if "overflow" in str(warning.message)]
