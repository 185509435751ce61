"""Several event stores: each can answer for all, and none wrongly, whatever becomes of the others (3.4.1)."""

import os
import random
import signal
import threading
import time
import tracemalloc
from types import SimpleNamespace

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eventstore import client as client_module
from eventstore.cache import CacheEventStore, Filling, _messages
from eventstore.client import EventStoreClient
from eventstore.peers import Feed, Membership, Peers
from eventstore.rules.ring import Ring
from photon.core.clock import ManualClock
from photon.core.columns import join_lines, split_ids
from photon.core.errors import UnavailableError
from photon.core.fates import Found
from photon.core.ids import ID_BYTES
from photon.core.settings import BATCH_IDS_MAX
from photon.rpc import eventstore_pb2 as pb
from photon.rpc import eventstore_pb2_grpc
from photon.rpc.network import LOOPBACK, Network
from tests.eventstore.kit import PACKER, append, end, line, pack, serve, start_python
from tests.ports import free_ports
from tests.waiting import wait_until

TOO_MANY = ID_BYTES * (BATCH_IDS_MAX + 1)
BOUND = {"logs": {"scan_interval_s": 0.05}, "eventstore": {"cache_bytes": 1 << 20}}


def events(count, start=0):
    idents = [f"10.0.0.{n % 5}:1:{n}" if n % 2 else f"opaque-{n}" for n in range(start, start + count)]
    return idents, [line(ident, "x" * 50) for ident in idents]


@pytest.fixture
def stores(root):
    """A function that starts so many, which know each other; all are closed in the end."""
    started = []

    def start(count):
        addresses = [f"127.0.0.1:{port}" for port in free_ports(count)]
        started.extend(
            serve(root, address, peers=addresses, number=n, document=BOUND)
            for n, address in enumerate(addresses)
        )
        return started

    yield start
    for one in started:
        one.stop(0)


def members(store):
    return store.status()["members"]


def see_each_other(stores):
    wait_until(lambda: all(len(members(one)) == len(stores) for one in stores))


def has_all(store, count):
    status = store.status()
    return status["primary_events"] == status["map_entries"] == count


def test_each_has_all_that_any_has_read_and_each_line_was_read_once(root, stores):
    three = stores(3)
    see_each_other(three)
    for n in range(30):
        append(root / "logs" / f"{n}.jsonl", *events(20, 20 * n)[1], b"no event")
    wait_until(lambda: all(has_all(one, 600) for one in three))
    # Of itself: what the others took does not count.
    read = [sum(peer["events"] for peer in one.status()["peers"].values()) for one in three]
    assert sum(read) == 2 * 600, "each has read its part, and told both others"
    assert max(read) < 600
    assert [one.status()["malformed"] for one in three] == [30] * 3
    letters = list((root / "dead-letters").glob("primary*.jsonl"))
    assert sum(path.read_bytes().count(b"\n") for path in letters) == 30
    idents, lines = events(600)
    for one in three:
        wait_until(lambda one=one: one.lookup(PACKER.pack(["nowhere"]))[0] == bytes([Found.ABSENT]))
        assert one.lookup(PACKER.pack(idents)) == (bytes(600), lines)


def test_lookups_are_split_among_those_whose_caches_hold_the_events(root, stores):
    three = stores(3)
    see_each_other(three)
    client = EventStoreClient([three[0].listen], 10.0)
    wait_until(lambda: client.lookup(pack("nobody")) and len(client.addresses) == 3)
    idents, lines = events(600)
    append(root / "logs" / "a.jsonl", *lines)
    wait_until(lambda: sum(one.status()["cache"]["events"] for one in three) == 600)
    before = [one.status()["cache"]["hits"] for one in three]
    column, found = client.lookup(PACKER.pack([*idents, "nowhere"]))
    assert (found, list(column[:600])) == ([*lines, b""], [0] * 600)
    assert column[600] in (Found.ABSENT, Found.BEHIND)
    hits = [one.status()["cache"]["hits"] - old for one, old in zip(three, before)]
    assert sum(hits) == 600
    assert min(hits) > 50
    client.close()


def test_one_that_stops_is_asked_no_more_and_its_logs_are_read_by_the_others(root, stores):
    three = stores(3)
    see_each_other(three)
    client = EventStoreClient([one.listen for one in three], 10.0)
    for n in range(20):
        append(root / "logs" / f"{n}.jsonl", *events(10, 10 * n)[1])
    wait_until(lambda: all(has_all(one, 200) for one in three))
    three.pop(1).stop(0)
    wait_until(lambda: all(len(members(one)) == 2 for one in three))
    for n in range(20):
        append(root / "logs" / f"{n}.jsonl", *events(10, 200 + 10 * n)[1])
    wait_until(lambda: all(has_all(one, 400) for one in three))
    idents, lines = events(400)
    assert client.lookup(PACKER.pack(idents)) == (bytes(400), lines)
    wait_until(lambda: client.lookup(pack("x")) and len(client.addresses) == 2)
    client.close()


def test_one_that_comes_later_reads_what_was_there_and_serves_only_then(root, stores):
    two = stores(2)
    see_each_other(two)
    for n in range(10):
        append(root / "logs" / f"{n}.jsonl", *events(10, 10 * n)[1])
    wait_until(lambda: all(has_all(one, 100) for one in two))
    [port] = free_ports(1)
    # It is named by no setting of the others.
    late = serve(root, f"127.0.0.1:{port}", peers=[two[0].listen], number=7, document=BOUND, start=False)
    step = late._reader.step
    held = threading.Event()
    late._reader.step = lambda: held.wait(60) and step()
    late.start()
    try:
        wait_until(lambda: late.listen in two[1].status()["peers"])
        assert members(two[0]) == tuple(sorted(one.listen for one in two)), "it does not serve"
        held.set()
        wait_until(lambda: has_all(late, 100))
        wait_until(lambda: all(len(members(one)) == 3 for one in (*two, late)))
        assert late.lookup(PACKER.pack(events(100)[0])) == (bytes(100), events(100)[1])
    finally:
        held.set()
        late.stop(0)


def test_what_was_missed_while_it_was_away_is_read_again_by_itself(root, stores):
    two = stores(2)
    see_each_other(two)
    append(root / "logs" / "a.jsonl", *events(50)[1])
    append(root / "logs" / "b.jsonl", *events(50, 50)[1])
    wait_until(lambda: all(has_all(one, 100) for one in two))
    address = two[1].listen
    two.pop().stop(0)
    append(root / "logs" / "a.jsonl", *events(50, 100)[1])
    append(root / "logs" / "b.jsonl", *events(50, 150)[1])
    wait_until(lambda: has_all(two[0], 200))
    two.append(serve(root, address, peers=[two[0].listen], number=1, document=BOUND))
    wait_until(lambda: has_all(two[1], 200))
    see_each_other(two)
    append(root / "logs" / "a.jsonl", *events(50, 200)[1])
    append(root / "logs" / "b.jsonl", *events(50, 250)[1])
    wait_until(lambda: all(has_all(one, 300) for one in two))


def test_a_log_of_which_nobody_tells_is_read_by_who_waits_for_it(root, stores, monkeypatch):
    monkeypatch.setattr("eventstore.reader.STANDS_S", 0.3)
    two = stores(2)
    see_each_other(two)
    owner = Membership(Ring([one.listen for one in two], 64)).reader(str(root / "logs" / "a.jsonl"))
    mute, other = sorted(two, key=lambda one: one.listen != owner)
    monkeypatch.setattr(mute._peers.feed, "tell", lambda _: None)  # as if each message was lost
    append(root / "logs" / "a.jsonl", *events(10)[1])
    wait_until(lambda: has_all(other, 10))
    wait_until(lambda: other.lookup(pack("nowhere"))[0] == bytes([Found.ABSENT]))


def test_nothing_is_absent_while_the_logs_of_another_are_unread(root, stores):
    two = stores(2)
    see_each_other(two)
    append(root / "logs" / "0.jsonl", *events(1)[1])
    wait_until(lambda: all(has_all(one, 1) for one in two))
    mine = members(two[0])
    reader = Membership(Ring(mine, 64)).reader
    theirs = next(n for n in range(1, 99) if reader(str(root / "logs" / f"{n}.jsonl")) != two[0].listen)
    # The other stands still: from the last look that it took part in on, nothing can be said.
    held = threading.Event()
    step = two[1]._reader.step
    two[1]._reader.step = lambda: held.wait(60) and step()
    time.sleep(0.1)  # of a step that may be under way
    append(root / "logs" / f"{theirs}.jsonl", line("late"))
    wait_until(lambda: two[0].status()["cache"] and not two[0]._reader.caught_up)
    outcomes = set()
    while (outcome := two[0].lookup(pack("late"))[0][0]) != Found.FOUND:
        outcomes.add(outcome)
        time.sleep(0.01)
    held.set()
    assert Found.UNREADABLE not in outcomes


def test_with_one_process_a_lookup_is_one_call_and_members_are_never_asked_for(root, home):
    calls = []

    class Counted(grpc.UnaryUnaryClientInterceptor):
        def intercept_unary_unary(self, continuation, details, request):
            calls.append(details.method.rpartition("/")[2])
            return continuation(details, request)

    class CountedNetwork(Network):
        def open(self, address, options=()):
            return grpc.intercept_channel(super().open(address, options), Counted())

    client = EventStoreClient([home.listen], 10.0, network=CountedNetwork())
    idents, lines = events(20)
    append(root / "logs" / "a.jsonl", *lines)
    wait_until(lambda: has_all(home, 20))
    for _ in range(5):
        assert client.lookup(PACKER.pack(idents))[1] == lines
    assert calls == ["Lookup"] * 5
    client.close()


def test_put_makes_events_found_before_their_log_is_read(root, stores):
    two = stores(2)
    see_each_other(two)
    client = EventStoreClient([one.listen for one in two], 10.0)
    idents, lines = events(100)
    client.put(PACKER.pack(idents), lines)
    assert client.lookup(PACKER.pack(idents)) == (bytes(100), lines)
    assert min(one.status()["cache"]["events"] for one in two) > 10
    client.put(b"", [])
    client.close()


def test_put_never_raises():
    client = EventStoreClient(["127.0.0.1:1"], 0.3)
    client.put(pack("x"), [b"{}"])
    client.close()
    client.put(pack("x"), [b"{}"])


def test_what_arrives_anywhere_is_told_of_where_it_was_asked_for(root, stores):
    two = stores(2)
    see_each_other(two)
    client = EventStoreClient([one.listen for one in two], 10.0)
    idents = [f"late-{number}" for number in range(40)]
    wanted = PACKER.pack(idents)
    assert set(client.lookup(wanted)[1]) == {b""}
    append(root / "logs" / "a.jsonl", *map(line, idents))
    told_of, positions = set(), dict.fromkeys(client.addresses, 0)
    deadline = time.monotonic() + 60
    while len(told_of) < len(idents) and time.monotonic() < deadline:
        for address, position in positions.items():
            if two[0].status()["arrivals"]["awaited"] + two[1].status()["arrivals"]["awaited"]:
                continue
            positions[address], _, found = client.arrivals(address, position, 0)
            told_of |= set(split_ids(found))
    assert told_of == set(split_ids(wanted))
    client.close()


def test_who_waits_for_arrivals_hears_at_once_of_one_that_comes(root, stores):
    addresses = [f"127.0.0.1:{port}" for port in free_ports(2)]
    first = serve(root, addresses[0], peers=addresses, number=0, document=BOUND)
    client = EventStoreClient(addresses[:1], 10.0)
    try:
        position, read_to_us, _ = client.arrivals(addresses[0], 0, 0)
        waiting = threading.Thread(target=client.arrivals, args=(addresses[0], position, read_to_us))
        waiting.start()
        second = serve(root, addresses[1], peers=addresses, number=1, document=BOUND)
        try:
            waiting.join(8.0)
            assert not waiting.is_alive()
            wait_until(lambda: client.keep_up() or len(client.addresses) == 2, 8.0)
        finally:
            second.stop(0)
    finally:
        client.close()
        first.stop(0)


def test_a_full_queue_drops_and_counts(monkeypatch):
    monkeypatch.setattr("eventstore.cache.QUEUE_BYTES_MAX", 3000)
    both = Membership(Ring(["here:1", "127.0.0.1:1"], 64))
    alone = Membership(Ring(["here:1"], 64))
    told = iter([alone])
    peers = SimpleNamespace(address="here:1", membership=lambda: next(told, both))
    filling = Filling(CacheEventStore(1 << 20), peers)
    idents, lines = events(200)
    for start in range(0, 200, 10):
        part = slice(start, start + 10)
        filling.put_many(split_ids(PACKER.pack(idents[part])), lines[part])
        assert filling.status()["waiting_bytes"] <= 3000
    kept = filling._cache.events
    assert 50 < kept < 150
    wait_until(lambda: filling.status()["dropped"] == 200 - kept)
    filling.close()


@given(st.lists(st.integers(1, 5_000_000), max_size=30))
@settings(max_examples=25, deadline=None)
def test_messages_hold_every_event_once_in_order_and_are_bounded(sizes):
    ids = b"".join(n.to_bytes(16, "big") for n in range(len(sizes)))
    lines = [b"x" * size for size in sizes]
    messages = list(_messages(ids, lines))
    assert b"".join(ids for ids, _ in messages) == ids
    assert b"".join(events for _, events in messages) == join_lines(lines)
    assert all(len(events) <= (2 << 20) + 30 or events.count(b"\n") == 1 for _, events in messages)


def stretch(number):
    return pb.Stretch(name=f"{number:02}", ids=bytes(16 * 4))


def names(stretches):
    return [int(one.name) for one in stretches]


def test_a_feed_tells_each_what_it_has_not_heard_and_keeps_no_more_than_its_bound(monkeypatch):
    feed = Feed(ManualClock())
    monkeypatch.setattr("eventstore.peers.FEED_BYTES_MAX", 5 * stretch(1).ByteSize())
    assert not feed.followed
    assert feed.after(0, 0, 0.0) == (0, [])
    assert feed.followed
    for n in range(3):
        feed.tell([stretch(n)])
    position, found = feed.after(feed.life, 0, 0.0)
    assert names(found) == [0, 1, 2]
    for n in range(3, 12):
        feed.tell([stretch(n)])
    position, found = feed.after(feed.life, position, 0.0)
    assert names(found) == [7, 8, 9, 10, 11], "what is between is read by who has missed it"
    assert feed.after(feed.life, position, 0.0) == (position, [])
    assert names(feed.after(feed.life + 1, position, 0.0)[1]) == [7, 8, 9, 10, 11], "of a life before"


def test_an_answer_of_a_feed_is_bounded_and_the_next_one_goes_on(monkeypatch):
    monkeypatch.setattr("eventstore.peers._ANSWER_BYTES", 2 * stretch(1).ByteSize())
    feed = Feed(ManualClock())
    for n in range(5):
        feed.tell([stretch(n)])
    position, heard = 0, []
    for _ in range(3):
        position, found = feed.after(feed.life, position, 0.0)
        heard.append(names(found))
    assert heard == [[0, 1], [2, 3], [4]]


def test_who_is_silent_is_no_member_and_none_serving_all_are():
    clock = ManualClock()
    serves = [False]
    peers = Peers("me:1", [], 8, clock, lambda: serves[0])
    for address, does in (("a:1", True), ("b:1", False)):
        peers._peers[address] = SimpleNamespace(address=address, serves=does, is_there=lambda now: now < 5.0)
    assert peers.membership().members == ("a:1",)
    serves[0] = True
    assert peers.membership().members == ("a:1", "me:1")
    peers._peers["a:1"].serves = serves[0] = False
    assert peers.membership().members == ("a:1", "b:1", "me:1")
    clock.advance(6.0)
    assert peers.membership().members == ("me:1",)


@pytest.mark.long
def test_one_that_hangs_costs_two_seconds_once(root, stores):
    [home] = stores(1)
    [port] = free_ports(1)
    idents, lines = events(100)
    append(root / "logs" / "a.jsonl", *lines)
    wait_until(lambda: has_all(home, 100))
    child = start_python(CHILD, root, f"127.0.0.1:{port}", home.listen, 1)
    try:
        address = child.stdout.readline().decode().strip()
        client = EventStoreClient([home.listen, address], 10.0)
        wait_until(lambda: len(members(home)) == 2)
        wait_until(lambda: client.lookup(PACKER.pack(idents)) == (bytes(100), lines))
        child.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        for _ in range(10):
            assert client.lookup(PACKER.pack(idents)) == (bytes(100), lines)
        assert time.monotonic() - began < 3 * client_module.OWNER_TIMEOUT_S
        wait_until(lambda: len(members(home)) == 1)
        child.send_signal(signal.SIGCONT)
        wait_until(lambda: len(members(home)) == 2)
        assert client.lookup(PACKER.pack(idents)) == (bytes(100), lines)
        client.close()
    finally:
        end(child)


CHILD = """
import sys, threading
from pathlib import Path
from photon.core.settings import parse_settings
from photon.core.clock import SystemClock
from photon.core.signals import on_termination
from eventstore.server import EventStoreServer
root, address, other, number = sys.argv[1:]
root = Path(root)
server = EventStoreServer(
    parse_settings({"logs": {"scan_interval_s": 0.05}}), address, root / f"eventstore-{number}",
    [str(root / "logs")], root / "dead-letters", SystemClock(), peers=[other], number=int(number),
)
ended = threading.Event()
on_termination(ended.set)
server.start()
print(server.listen, flush=True)
ended.wait()
server.stop()
"""


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.timeout(240)
def test_no_answer_is_wrong_while_processes_are_killed_wiped_added_and_removed(root, stores):
    """Several clients ask all the time, the logs grow: each answer is right, and all have all in the end."""
    [home] = stores(1)
    ports = free_ports(3)
    rng = random.Random(7)
    wrong, asked, stop = [], [0], threading.Event()
    written, safe = [0], [0]

    def look_up(seed):
        dice = random.Random(seed)
        client = EventStoreClient([home.listen, *(f"127.0.0.1:{port}" for port in ports)], 10.0)
        while not stop.is_set():
            count = safe[0]
            wanted = [dice.randrange(count + 50) for _ in range(64)]
            idents = [events(1, n)[0][0] for n in wanted]
            try:
                column, lines = client.lookup(PACKER.pack(idents))
            except UnavailableError:
                continue
            for n, byte, text in zip(wanted, column, lines):
                if byte == Found.FOUND and text != events(1, n)[1][0]:
                    wrong.append((n, text))
                if n < count and byte not in (Found.FOUND, Found.BEHIND):
                    wrong.append((n, byte))
            asked[0] += 64
        client.close()

    def write():
        """What stands in the logs for longer than a look may be old may not be called absent."""
        times = []
        while not stop.is_set():
            append(root / "logs" / f"{rng.randrange(12)}.jsonl", *events(40, written[0])[1])
            written[0] += 40
            times.append((time.monotonic(), written[0]))
            while times and time.monotonic() - times[0][0] > 4.0:
                safe[0] = times.pop(0)[1]
            time.sleep(0.01)

    threads = [threading.Thread(target=look_up, args=(seed,)) for seed in range(2)]
    threads.append(threading.Thread(target=write))
    for thread in threads:
        thread.start()
    children = {}
    sizes = set()
    try:
        deadline = time.monotonic() + 20
        while time.monotonic() < deadline:
            number = rng.randrange(3)
            if number not in children:
                if rng.random() < 0.3:
                    os.system(f"rm -rf {root}/eventstore-{number + 1}")
                children[number] = start_python(
                    CHILD, root, f"127.0.0.1:{ports[number]}", home.listen, number + 1
                )
            elif rng.random() < 0.4:
                child = children.pop(number)
                child.send_signal(rng.choice([signal.SIGKILL, signal.SIGTERM]))
                child.wait()
                child.stdout.close()
            time.sleep(0.5)
            sizes.add(len(members(home)))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for child in children.values():
            end(child)
    assert wrong == []
    assert asked[0] > 500
    assert len(sizes) > 1
    wait_until(lambda: has_all(home, written[0]))


def test_what_is_not_whole_is_refused_and_an_address_that_can_be_none_is_not_handed_on(home):
    addresses = ("", "nowhere", "a b:1", "h:", "h:99999", "x" * 300 + ":1", "h:1\n")
    puts = [{"ids": b"1" * 16, "events": events} for events in (b"", b"\n", b"{}", b"{}\n{}", b"{}\n{}\n")]
    puts += [{"ids": b"1"}, {"ids": bytes(TOO_MANY)}]
    with LOOPBACK.open(home.listen) as channel:
        stub = eventstore_pb2_grpc.EventStoreStub(channel)
        calls = [(stub.Follow, pb.FollowRequest(address=address)) for address in addresses]
        calls += [(stub.Lookup, pb.LookupRequest(ids=bytes(size))) for size in (15, TOO_MANY)]
        for call, request in [*calls, *[(stub.Put, pb.PutRequest(**put)) for put in puts]]:
            with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
                call(request, timeout=30)
        assert list(stub.Members(pb.MembersRequest(), timeout=30).members) == [home.listen]
    assert home.status()["peers"] == {}


def test_lines_that_fit_no_ids_are_refused_before_they_are_split(home):
    request = pb.PutRequest(ids=b"1" * 16, events=b"\n" * (3 << 20))
    with LOOPBACK.open(home.listen) as channel:
        stub = eventstore_pb2_grpc.EventStoreStub(channel)
        tracemalloc.start()
        try:
            with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
                stub.Put(request, timeout=30)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert peak < 16 << 20
