"""Service and client over real gRPC, with fake logs behind: routing, retries, refusals."""

import contextlib
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import grpc
import pytest

from idregistry.client import RegistryClient
from idregistry.rules import commands
from idregistry.rules.commands import (
    IDENTITY_BYTES,
    Adopt,
    Commit,
    Propose,
    Release,
    encode,
)
from idregistry.rules.directory import View
from idregistry.service import (
    COMMITS_SHARE,
    COMMITS_WAITING_MAX,
    LOOKUP_LAG_MAX,
    LOOKUPS_MAX,
)
from idregistry.wire import LOOKUP_PART
from photon.core.addresses import split
from photon.core.clock import SystemClock
from photon.core.columns import hash_ids
from photon.core.errors import (
    CorruptStateError,
    NoQuorumError,
    OverloadedError,
    SettingsMismatchError,
    UnavailableError,
    UsageError,
)
from photon.core.fates import Registered
from photon.rpc import idregistry_pb2 as pb
from tests.health import status_of
from tests.idregistry.kit import DUPLICATE, NOW_US, OWN, WON, event_id, event_ids, same_times, token
from tests.idregistry.nodes import Ensemble
from tests.waiting import wait_until

ABSENT, PRESENT, _, PENDING = bytes(Registered)
COMMITS_OF_A_SHARD_MAX = COMMITS_WAITING_MAX * COMMITS_SHARE // (COMMITS_SHARE + 1)
"""Where it is the only one."""


def test_the_client_finds_the_leader_though_it_asks_another_first(ensemble: Ensemble) -> None:
    nodes = ensemble.add(3)
    ensemble.lead("r2")
    client = ensemble.client()
    assert client.commit(event_ids(1, 2, 1), same_times(3), token("a")) == bytes([WON, WON, DUPLICATE])
    assert client.commit(event_ids(1, 3), same_times(2), token("b")) == bytes([DUPLICATE, WON])
    assert nodes[2].shards[0].state.ids == 3
    assert nodes[0].shards[0].state.ids == nodes[1].shards[0].state.ids == 0


def test_a_batch_is_split_over_the_shards_and_its_outcomes_are_in_order(ensemble: Ensemble) -> None:
    nodes = ensemble.add(2, shards=5)
    for shard in range(5):
        ensemble.lead(f"r{shard % 2}", shard)
    client = ensemble.client()
    assert client.commit(event_ids(*range(0, 200, 2)), same_times(100), token("a")) == bytes(100)
    expected = bytes([DUPLICATE, WON] * 100)
    assert client.commit(event_ids(*range(200)), same_times(200), token("b")) == expected
    assert sum(shard.state.ids for node in nodes for shard in node.shards) == 200


def test_lookups_are_answered_by_the_nearest_replica_whoever_leads(ensemble: Ensemble) -> None:
    nodes = ensemble.add(2)
    ensemble.lead("r1")
    client = ensemble.client()
    client.commit(event_ids(1), same_times(1), token("a"))
    assert client.lookup(event_ids(1, 2), same_times(2)) == bytes([ABSENT, ABSENT]), "stale, as it may be"
    for command in nodes[1].logs[0].proposed:
        nodes[0].logs[0].machine.apply(command)
    assert client.lookup(event_ids(1, 2), same_times(2)) == bytes([PRESENT, ABSENT])


def test_a_lookup_that_asks_for_it_is_told_of_commits_that_are_under_way(ensemble: Ensemble) -> None:
    node = ensemble.leading()
    client = ensemble.client()
    client.commit(event_ids(1), same_times(1), token("a"))
    log = node.logs[0]
    log.under_way = {
        7: commands.encode(Commit(1, [token("b")], [2], event_ids(1, 2), same_times(2), [OWN])),
        8: commands.encode(Release(1, [token("b")], [1], event_ids(3), same_times(1), [OWN], False)),
        9: b"no command of this version",
        10: commands.encode(Commit(1, [token("c")], [1], event_ids(4), same_times(1), [OWN])),
    }
    ids, times = event_ids(1, 2, 3, 4), same_times(4)
    assert client.lookup(ids, times, tell_pending=True) == bytes([PRESENT, PENDING, ABSENT, PENDING])
    assert client.lookup(ids, times) == bytes([PRESENT, ABSENT, ABSENT, ABSENT])
    del log.under_way[7]  # a leader that is gone had not got it to a majority
    assert client.lookup(ids, times, tell_pending=True) == bytes([PRESENT, ABSENT, ABSENT, PENDING])


def test_lookups_go_to_the_next_replica_when_the_nearest_is_down(ensemble: Ensemble) -> None:
    nodes = ensemble.add(3)
    ensemble.lead("r1")
    client = ensemble.client()
    client.commit(event_ids(1), same_times(1), token("a"))
    nodes[0].rpc.stop(0.0)
    assert client.lookup(event_ids(1), same_times(1)) == bytes([PRESENT])


def test_a_replica_that_is_far_behind_sends_lookups_to_the_next(ensemble: Ensemble) -> None:
    nearest, _ = ensemble.add(2)
    ensemble.lead("r1")
    client = ensemble.client()
    client.commit(event_ids(1), same_times(1), token("a"))
    nearest.logs[0].entries_behind = LOOKUP_LAG_MAX
    assert client.lookup(event_ids(1), same_times(1)) == bytes([ABSENT]), "a little behind is near enough"
    nearest.logs[0].entries_behind = LOOKUP_LAG_MAX + 1
    assert client.lookup(event_ids(1), same_times(1)) == bytes([PRESENT])


def test_a_commit_whose_outcome_is_unknown_is_retried_with_the_same_token(ensemble: Ensemble) -> None:
    log = ensemble.leading().logs[0]
    log.held = True
    client = ensemble.client()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(client.commit, event_ids(1), same_times(1), token("a"))
        wait_until(lambda: log.in_flight == 1)
        log.held = False
        log.forget_held(applied=True)
        assert future.result() == bytes([WON])


def test_a_commit_follows_the_leadership_while_it_waits(ensemble: Ensemble) -> None:
    nodes = ensemble.add(3)
    client = ensemble.client()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(client.commit, event_ids(1), same_times(1), token("a"))
        nodes[0].rpc.stop(0.0)
        ensemble.lead("r1")
        assert future.result() == bytes([WON])


def test_without_a_leader_the_client_says_no_quorum(ensemble: Ensemble) -> None:
    ensemble.add(3)
    client = ensemble.client(timeout_s=0.4)
    with pytest.raises(NoQuorumError, match="shard 0"):
        client.commit(event_ids(1), same_times(1), token("a"))


def test_when_no_server_is_there_the_client_says_unavailable(ensemble: Ensemble) -> None:
    with contextlib.ExitStack() as held:
        for node in ensemble.add(2):
            node.rpc.stop(0.0)
            # Or another test's server may get the port, and answer.
            taken = held.enter_context(socket.socket())
            taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            taken.bind(split(node.address))
        client = ensemble.client(timeout_s=0.4)
        for call in (
            lambda: client.commit(event_ids(1), same_times(1), token("a")),
            lambda: client.lookup(event_ids(1), same_times(1)),
        ):
            with pytest.raises(UnavailableError) as raised:
                call()
            assert type(raised.value) is UnavailableError


def is_told(why: str, client: RegistryClient, ids: bytes, times: bytes) -> bool:
    """Whether the client says that nothing was done. The last try of a call may run out of time instead."""
    with pytest.raises(UnavailableError) as raised:
        client.commit(ids, times, token("c"))
    return isinstance(raised.value, OverloadedError) and why in str(raised.value)


def test_overload_is_refused_and_the_client_says_that_nothing_was_done(ensemble: Ensemble) -> None:
    node = ensemble.leading(queue_ids_max=10, batches_in_flight_max=1, request_timeout_s=3.0)
    node.logs[0].held = True
    client, hasty = ensemble.client(), ensemble.client(timeout_s=0.3)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(client.commit, event_ids(1), same_times(1), token("a"))
        wait_until(lambda: node.logs[0].in_flight == 1)
        second = pool.submit(client.commit, event_ids(*range(2, 12)), same_times(10), token("b"))
        wait_until(lambda: node.shards[0].queue.weight == 10)
        wait_until(lambda: is_told("queue_ids_max", hasty, event_ids(20), same_times(1)))
        node.logs[0].held = False
        node.logs[0].apply_held()
        node.turner.wake()
        assert first.result() == bytes([WON])
        assert second.result() == bytes([WON] * 10)
    assert node.shards[0].state.ids == 11


def test_commits_that_wait_for_one_shard_leave_room_for_the_others_and_for_lookups(
    ensemble: Ensemble,
) -> None:
    """Shard 0 has lost its majority; clients ask for it again and again."""
    node = ensemble.leading(shards=2, request_timeout_s=20.0)
    node.logs[0].held = True

    ids, times = ids_of_shard(0, 1)[0], same_times(1)
    calls = [
        node.stub.Commit.future(pb.CommitRequest(ids=ids, times=times, token=token("a")), timeout=20)
        for n in range(COMMITS_WAITING_MAX)
    ]
    refused = COMMITS_WAITING_MAX - COMMITS_OF_A_SHARD_MAX
    wait_until(lambda: sum(call.done() for call in calls) == refused)
    asked = pb.CommitRequest(shard=1, ids=ids_of_shard(1, 1)[0], times=times, token=token("a"))
    assert node.stub.Commit(asked, timeout=20).outcomes == bytes([WON])
    client = ensemble.client(timeout_s=3.0)
    assert client.lookup(ids, times) == bytes([ABSENT])
    assert status_of("registry", node.address)["shards"][0]["is_leader"]
    node.logs[0].held = False
    wait_until(lambda: node.logs[0].apply_held() or all(call.done() for call in calls))
    said = Counter(call.code() for call in calls)
    assert said == {grpc.StatusCode.OK: len(calls) - refused, grpc.StatusCode.RESOURCE_EXHAUSTED: refused}


def test_a_strangers_malformed_requests_are_refused(ensemble: Ensemble) -> None:
    node = ensemble.leading()
    good = token("a")
    for commit, mistake in (
        (pb.CommitRequest(ids=bytes(15), times=bytes(8), token=good), "no multiple of 16"),
        (pb.CommitRequest(ids=bytes(16), times=bytes(7), token=good), "expected 1 x 8"),
        (pb.CommitRequest(ids=bytes(16), times=bytes(16), token=good), "expected 1 x 8"),
        (pb.CommitRequest(ids=bytes(16), times=bytes(8)), "not a joiner's token"),
        (pb.CommitRequest(ids=bytes(16), times=bytes(8), token=bytes(5000)), "not a joiner's token"),
        (pb.CommitRequest(ids=bytes(16 * 65537), times=bytes(8 * 65537), token=good), "at most 65536"),
    ):
        assert_refused(lambda commit=commit: node.stub.Commit(commit, timeout=5), mistake)  # type: ignore[misc]
    assert_refused(
        lambda: node.stub.Lookup(pb.LookupRequest(ids=bytes(15), times=bytes(8)), timeout=5), "of 16"
    )
    assert_refused(
        lambda: node.stub.Lookup(pb.LookupRequest(ids=bytes(16), times=b""), timeout=5), "expected 1"
    )
    assert node.shards[0].state.ids == 0


def test_a_digest_of_settings_of_another_length_is_refused(ensemble: Ensemble) -> None:
    """Commands have a size that no caller may burst."""
    node = ensemble.leading()
    for told in (b"a" * 15, b"a" * 17, bytes(1 << 20)):
        request = pb.KeepAliveRequest(address="j:1", incarnation=8, lease_s=1.0, settings=told)
        assert_refused(lambda request=request: node.stub.KeepAlive(request, timeout=5), "a digest")  # type: ignore[misc]
    assert node.directory.settings == b""


def test_the_client_is_told_that_its_settings_are_not_those_of_the_registry(ensemble: Ensemble) -> None:
    node, client = ensemble.leading(), ensemble.client()
    client.keep_alive("j:1", 1, 2.0, b"a" * 16)
    with pytest.raises(SettingsMismatchError, match=r"ids\.key and all .* founded with others") as raised:
        client.keep_alive("j:2", 2, 2.0, b"b" * 16)
    assert "\n" not in str(raised.value)
    assert raised.value.exit_status == 2
    assert list(node.directory.leases) == [1]
    client.keep_alive("j:1", 1, 2.0, b"a" * 16)
    client.keep_alive("j:3", 3, 2.0)  # it makes no ids


def test_a_registry_founded_anew_takes_no_commit_that_is_meant_for_the_one_before(
    ensemble: Ensemble, tmp_path: Path
) -> None:
    """It knows nothing of what is joined: until the joiner hears of it, all would be joined again."""
    node = ensemble.leading()
    client = ensemble.client(0.5)
    client.recognise(tmp_path)
    assert client.commit(event_ids(1), same_times(1), token("a")) == bytes([WON])
    client.keep_alive("j:1", 1, 2.0)
    node.directory.view = replace(node.directory.view, identity=b"j" * IDENTITY_BYTES)
    with pytest.raises(UnavailableError, match="another registry"):
        client.commit(event_ids(2), same_times(1), token("b"))
    assert node.shards[0].state.ids == 1
    with pytest.raises(CorruptStateError, match="founded anew"):
        client.keep_alive("j:1", 1, 2.0)
    with pytest.raises(CorruptStateError, match="founded anew"):
        ensemble.client().recognise(tmp_path)
    assert ensemble.client().commit(event_ids(2), same_times(1), token("c")) == bytes([WON])


def assert_refused(call: Callable[[], object], mistake: str) -> None:
    with pytest.raises(grpc.RpcError) as raised:
        call()
    assert raised.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert mistake in raised.value.details()


def test_the_client_checks_its_callers_columns(ensemble: Ensemble) -> None:
    ensemble.add(1)
    client = ensemble.client()
    for ids, times, packed in (
        (bytes(3), bytes(8), token("a")),
        (bytes(16), bytes(9), token("a")),
        (bytes(16), bytes(8), b""),
    ):
        with pytest.raises(ValueError, match="bytes"):
            client.commit(ids, times, packed)
    assert client.commit(b"", b"", token("a")) == b""
    assert client.lookup(b"", b"") == b""


def test_a_replica_that_nobody_has_named_can_be_asked_by_its_address(ensemble: Ensemble) -> None:
    nodes = ensemble.add(2)
    ensemble.lead("r1")
    ensemble.rows.pop("r1")
    client = RegistryClient([nodes[0].address], 5.0, SystemClock(), random.Random(1))
    ensemble.clients.append(client)
    assert status_of("registry", nodes[1].address)["shards"][0]["is_leader"] is True
    assert [piece.ids for piece in client.scan(0, nodes[1].address)] == [b""]
    client.close()
    with pytest.raises(UnavailableError, match="closed"):
        list(client.scan(0, "127.0.0.1:1"))


def test_closing_the_client_ends_its_calls(ensemble: Ensemble) -> None:
    ensemble.add(1)
    client = ensemble.client(timeout_s=30.0)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(client.commit, event_ids(1), same_times(1), token("a"))
        time.sleep(0.05)  # so that it is under way; whenever the close comes, the end is the same
        client.close()
        with pytest.raises(UnavailableError, match="closed"):
            future.result(timeout=5.0)


def test_many_threads_with_one_client_win_every_id_once(ensemble: Ensemble) -> None:
    nodes = ensemble.add(2, shards=3)
    for shard in range(3):
        ensemble.lead("r1", shard)
    client = ensemble.client()
    won: list[int] = []
    lock = threading.Lock()

    def work(worker: int) -> None:
        rng = random.Random(worker)
        for batch in range(15):
            numbers = rng.sample(range(600), 60)
            outcomes = client.commit(event_ids(*numbers), same_times(60), token(f"{worker}-{batch}"))
            with lock:
                won.extend(n for n, o in zip(numbers, outcomes, strict=True) if o == WON)

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(work, range(6)))
    assert len(won) == len(set(won)) == sum(shard.state.ids for shard in nodes[1].shards)


# --- another sharding configuration (2.2.2)

START_US = NOW_US + 1_000_000


def propose(ensemble: Ensemble, shards: int, adopt: bool) -> None:
    """On every node; the shards' leaders follow."""
    for node in ensemble.nodes:
        node.directory.apply(encode(Propose(1, shards, START_US, 1)))
        if adopt:
            node.directory.apply(encode(Adopt(1, node.directory.view.version + 1)))
        node.turner.wake()


def test_a_client_with_an_older_configuration_finds_the_new_shards(ensemble: Ensemble) -> None:
    (node,) = ensemble.add(1, shards=5, founded=2)
    for shard in range(2):
        ensemble.lead("r0", shard)
    client = ensemble.client()
    before = event_ids(*range(50))
    assert client.commit(before, same_times(50), token("a")) == bytes([WON] * 50)
    propose(ensemble, 5, adopt=True)
    for shard in range(5):
        ensemble.lead("r0", shard)
    wait_until(lambda: all(s.state.configuration.version == 2 for s in node.shards))  # type: ignore[union-attr]
    # Old and new events in one batch, and a client that knows of two shards only.
    ids = event_ids(*range(100))
    times = same_times(50) + same_times(50, START_US)
    assert client.commit(ids, times, token("b")) == bytes([DUPLICATE] * 50 + [WON] * 50)
    assert client.configuration().version == 2
    assert client.lookup(ids, times) == bytes([PRESENT] * 100)
    of = client.configuration().shard_of(ids, times)
    assert [shard.state.ids for shard in node.shards] == [int((of == n).sum()) for n in range(5)]
    assert node.shards[4].state.ids > 0


def test_an_event_that_no_shard_may_take_yet_is_waited_for_and_then_the_reason_is_told(
    ensemble: Ensemble,
) -> None:
    (node,) = ensemble.add(1, shards=2)
    for shard in range(2):
        ensemble.lead("r0", shard)
    shards = node.shards
    propose(ensemble, 1, adopt=False)
    wait_until(lambda: all(shard.state.prepared is not None for shard in shards))
    client = ensemble.client(timeout_s=0.6)

    late = event_ids(1, 2, 3), same_times(3, START_US)
    wait_until(lambda: is_told("resharding is under way", client, *late))
    send, rounds = client._rounds._send, []
    client._rounds._send = lambda *what: rounds.append(what) or send(*what)  # type: ignore[func-returns-value, method-assign]
    with pytest.raises(UnavailableError):
        client.commit(*late, token("a"))
    assert len(rounds) < 12, "the shard is asked again after growing waits"
    assert client.commit(event_ids(1, 2, 3), same_times(3), token("a")) == bytes([WON] * 3)
    with ThreadPoolExecutor(1) as pool:
        patient = ensemble.client()
        future = pool.submit(patient.commit, event_ids(4, 5, 6), same_times(3, START_US), token("a"))
        time.sleep(0.1)  # so that it has been refused; whenever it is adopted, the end is the same
        ensemble.nodes[0].directory.apply(encode(Adopt(1, 2)))
        ensemble.nodes[0].turner.wake()
        assert future.result() == bytes([WON] * 3)
    assert shards[1].state.ids + shards[0].state.ids == 6


def test_a_shard_that_is_not_there_is_not_waited_for_in_vain(ensemble: Ensemble) -> None:
    ensemble.add(1, shards=1, founded=2)
    ensemble.lead("r0")
    client = ensemble.client(timeout_s=0.5)
    ids = b"".join(ids_of_shard(1, 8))
    wait_until(lambda: is_told("there is no shard 1 here", client, ids, same_times(8)))


def ids_of_shard(shard: int, count: int) -> list[bytes]:
    """Of two shards."""
    return [key for key in map(event_id, range(1000)) if int(hash_ids(key)[0]) % 2 == shard][:count]


def test_a_resharding_whose_answer_was_lost_is_told_as_adopted(ensemble: Ensemble) -> None:
    """The retry is refused, for there are so many shards by then: by the first try."""
    node = ensemble.leading()
    client = ensemble.client()
    node.directory_log.held = True
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(client.reshard, 2)
        wait_until(lambda: node.directory_log.in_flight == 1)
        node.directory_log.held = False
        node.directory_log.forget_held(applied=True)
        resharded = future.result()
    assert (resharded.adopted, resharded.version) == (True, 2)
    assert resharded.start_us == client.configuration().intervals[-1].start_us
    with pytest.raises(UsageError, match="2 shards already"):
        client.reshard(2)
    now_us = SystemClock().now_us()
    for at_us in (1, now_us - 10**6, now_us):
        with pytest.raises(UsageError, match="in the future"):
            client.reshard(3, at_us)


@pytest.mark.parametrize(
    ("name", "raft", "grpc_address"),
    [
        ("r 3", "h:1", "h:1"),
        ("..", "h:1", "h:1"),
        ("r" * 65, "h:1", "h:1"),
        ("r3", "no such host.invalid:1", "h:1"),
        ("r3", "h:1", "garbage:garbage"),
        ("r3", "h:65536", "h:1"),
        ("r3", "::1:7", "h:1"),
    ],
)
def test_what_can_be_no_replica_is_refused_by_client_and_server(
    ensemble: Ensemble, name: str, raft: str, grpc_address: str
) -> None:
    node = ensemble.leading()
    client = ensemble.client()
    with pytest.raises(UsageError, match=r"is no (name|address)"):
        client.replace("r0", name, raft, grpc_address)
    host, _, port = raft.rpartition(":")
    if host == "::1":
        return  # brackets are for texts only
    replica = pb.Replica(name=name, raft_host=host, raft_port=int(port), grpc=grpc_address)
    with pytest.raises(UsageError, match=r"is no (name|address)"):
        client._rounds.ask_directory("Replace", pb.ReplaceRequest(old="r0", replica=replica))
    assert node.directory.view.leaving is None


@pytest.mark.parametrize("field", ["old", "cancel"])
def test_a_name_too_long_for_a_command_is_refused_before_it_stops_the_replica(
    ensemble: Ensemble, field: str
) -> None:
    ensemble.leading()
    replica = pb.Replica(name="r3", raft_host="h", raft_port=1, grpc="h:1")
    request = pb.ReplaceRequest(**{"old": "r0", "replica": replica, field: "x" * (3 << 20)})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="is no name") as caught:
        ensemble.client()._rounds.ask_directory("Replace", request)
    assert len(str(caught.value)) < 1000


def test_lookups_beyond_the_bound_wait_for_their_turn_and_no_longer_than_their_caller(
    ensemble: Ensemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They keep the interpreter busy, which the raft thread needs."""
    (node,) = ensemble.add(1)
    ensemble.lead("r0")
    state = node.shards[0].state
    going_on, busy, most = threading.Event(), threading.Semaphore(0), [0, 0]

    def lookup(ids: bytes, _times: bytes) -> bytes:
        most[0] += 1
        most[1] = max(most)
        busy.release()
        assert going_on.wait(60)
        most[0] -= 1
        return bytes(len(ids) // 16)

    monkeypatch.setattr(state, "lookup", lookup)
    request = pb.LookupRequest(ids=event_ids(1), times=same_times(1))
    with ThreadPoolExecutor(LOOKUPS_MAX + 2) as callers:
        calls = [callers.submit(node.stub.Lookup, request, timeout=30) for _ in range(LOOKUPS_MAX + 1)]
        for _ in range(LOOKUPS_MAX):
            assert busy.acquire(timeout=60)
        with pytest.raises(grpc.RpcError):
            node.stub.Lookup(request, timeout=0.2)
        going_on.set()
        assert {bytes(call.result().outcomes) for call in calls} == {b"\0"}
    assert most[1] == LOOKUPS_MAX


def test_a_lookup_of_many_ids_is_answered_in_their_order_whatever_its_parts(ensemble: Ensemble) -> None:
    ensemble.add(1)
    ensemble.lead("r0")
    client = ensemble.client()
    count = 2 * LOOKUP_PART + 7
    assert client.commit(event_ids(*range(0, count, 3)), same_times(len(range(0, count, 3))), token("a"))
    expected = bytes(ABSENT if n % 3 else PRESENT for n in range(count))
    assert client.lookup(event_ids(*range(count)), same_times(count)) == expected


def test_a_registry_that_has_no_configuration_yet_is_waited_for(
    ensemble: Ensemble, monkeypatch: pytest.MonkeyPatch
) -> None:
    (node,) = ensemble.add(1, shards=2)
    founded, node.directory.view = node.directory.view, View()
    client = ensemble.client()
    ask, asked = client._rounds.routes.ask, []

    def asks(*words: object) -> object:
        answer = ask(*words)  # type: ignore[arg-type]
        asked.append(answer)
        if len(asked) == 2:
            node.directory.view = founded
        return answer

    monkeypatch.setattr(client._rounds.routes, "ask", asks)
    assert client.configuration().shards == (0, 1)
    assert len(asked) == 3


def test_one_that_never_has_any_is_told(ensemble: Ensemble) -> None:
    (node,) = ensemble.add(1)
    node.directory.view = View()
    with pytest.raises(NoQuorumError, match=r"no sharding configuration of the registry within 1 s"):
        ensemble.client(1.0).configuration()
