"""CacheEventStore over several processes: never a wrong answer, whatever becomes of them (paper 3.4.1)."""

import random
import signal
import threading
import time

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eventstore import client as client_module
from eventstore.cache import CacheEventStore, CacheShare, Filling, Membership, _messages
from eventstore.client import EventStoreClient
from eventstore.rules.ring import HOME, Ring
from eventstore.server import SERVICE_NAME, CacheServer
from photon.core.clock import SystemClock
from photon.core.columns import join_lines, split_ids
from photon.core.errors import UnavailableError
from photon.core.fates import Found
from photon.core.settings import parse_settings
from photon.rpc import eventstore_pb2 as pb
from photon.rpc import eventstore_pb2_grpc
from photon.rpc.network import LOOPBACK, Network
from tests.eventstore.kit import PACKER, append, end, line, pack, serve, start_python
from tests.health import NOT_SERVING, SERVING, await_health
from tests.waiting import wait_until

SETTINGS = parse_settings({"logs": {"scan_interval_s": 0.05}})


def serve_cache(home):
    cache = CacheServer(SETTINGS, "127.0.0.1:0", home, SystemClock())
    cache.start()
    return cache


def events(count, start=0):
    idents = [f"10.0.0.{n % 5}:1:{n}" if n % 2 else f"opaque-{n}" for n in range(start, start + count)]
    return idents, [line(ident, "x" * 50) for ident in idents]


def logged(root, home, count):
    """Events that home has read from a log."""
    idents, lines = events(count)
    append(root / "logs" / "a.jsonl", *lines)
    wait_until(lambda: home.status()["caught_up"] and home.status()["primary_events"] == count)
    return idents, lines


def knows(client, *caches):
    """The client has heard of just these."""
    client.lookup(pack("nobody"))
    return set(client._view.caches) == {cache.listen for cache in caches}


def see(client, *caches):
    wait_until(lambda: knows(client, *caches))


def cached(cache):
    return cache.status()["cache"]


def test_lookups_are_answered_by_the_processes_that_own_the_ids(root, home, client):
    caches = [serve_cache(home.listen) for _ in range(2)]
    see(client, *caches)
    idents, lines = events(600)
    append(root / "logs" / "a.jsonl", *lines)
    shares = [cache._share.cache for cache in caches] + [home._cache]
    wait_until(lambda: sum(share.events for share in shares) == 600)
    assert min(share.events for share in shares) > 50
    column, found = client.lookup(PACKER.pack([*idents, "nowhere"]))
    assert (found, column) == ([*lines, b""], bytes(600) + bytes([Found.ABSENT]))
    assert sum(share.hits for share in shares) == 600
    assert home.status()["logs"]["hits"] == 0
    for cache in caches:
        cache.stop()


@pytest.mark.parametrize("where", ["its cache", "the logs"])
def test_what_an_owner_misses_comes_from_home_and_is_in_its_cache_then(root, home, client, where):
    idents, lines = logged(root, home, 200)
    if where == "the logs":
        home._cache.clear()
    cache = serve_cache(home.listen)
    see(client, cache)
    before = home.status()["cache"]
    assert client.lookup(PACKER.pack(idents)) == (bytes(200), lines)
    owned = cached(cache)["misses"] - 1  # of `see`, perhaps
    assert owned in range(60, 140)
    # A miss counts once, where the owner is.
    at_home = 200 - owned if where == "the logs" else 0
    assert home.status()["cache"]["misses"] - before["misses"] in (at_home - 1, at_home, at_home + 1)
    wait_until(lambda: cached(cache)["events"] >= owned)
    hits, misses = home.status()["logs"]["hits"], cached(cache)["misses"]
    assert client.lookup(PACKER.pack(idents)) == (bytes(200), lines)
    assert (home.status()["logs"]["hits"], cached(cache)["misses"]) == (hits, misses)
    cache.stop()


def test_one_that_leaves_is_asked_no_more_and_nothing_is_lost(root, home, client):
    idents, lines = logged(root, home, 200)
    first, second = serve_cache(home.listen), serve_cache(home.listen)
    see(client, first, second)
    first.stop()
    assert home.status()["members"] == (second.listen,)
    assert client.lookup(PACKER.pack(idents)) == (bytes(200), lines)
    see(client, second)
    second.stop()
    see(client)
    assert client.lookup(PACKER.pack(idents)) == (bytes(200), lines)


def test_with_one_process_a_lookup_is_one_call_and_members_are_never_asked_for(root, home):
    calls = []

    class Counted(grpc.UnaryUnaryClientInterceptor):
        def intercept_unary_unary(self, continuation, details, request):
            calls.append(details.method.rpartition("/")[2])
            return continuation(details, request)

    class CountedNetwork(Network):
        def open(self, address, options=()):
            return grpc.intercept_channel(super().open(address, options), Counted())

    client = EventStoreClient(home.listen, 10.0, network=CountedNetwork())
    idents, lines = logged(root, home, 20)
    for _ in range(5):
        assert client.lookup(PACKER.pack(idents))[1] == lines
    assert calls == ["Lookup"] * 5
    client.close()


def test_a_cache_of_another_store_answers_nothing_and_takes_nothing():
    share = CacheShare(1 << 20)
    keys = split_ids(pack("x"))
    share.put_many(b"", keys, [b"{}"])
    assert share.get_many(b"", keys) == [None]
    share.belong_to(b"ours")
    share.put_many(b"theirs", keys, [b"{}"])
    assert share.get_many(b"ours", keys) == [None]
    share.put_many(b"ours", keys, [b"{1}"])
    assert share.get_many(b"ours", keys) == [b"{1}"]
    assert share.get_many(b"theirs", keys) == [None]
    share.belong_to(b"theirs")
    assert share.get_many(b"theirs", keys) == [None]


def test_when_the_map_is_made_anew_caches_forget_what_was_before(root):
    append(root / "logs" / "a.jsonl", line("x", "old"))
    home = serve(root)
    cache = serve_cache(home.listen)
    client = EventStoreClient(home.listen, 10.0)
    try:
        see(client, cache)
        client.put(pack("x") + pack("y"), [line("x", "old"), line("y", "old")])
        address = home.listen
        home.stop()
        for file in (root / "eventstore" / "map").iterdir():
            file.unlink()
        (root / "logs" / "a.jsonl").unlink()
        append(root / "logs" / "b.jsonl", line("x", "new"), line("y", "new"))
        home = serve(root, address)
        wait_until(lambda: home.status()["primary_events"] == 2)
        # A client with the view of before may be told so for a second; then never again.
        new = [line("x", "new"), line("y", "new")]
        wait_until(lambda: client.lookup(pack("x") + pack("y"))[1] == new)
        see(client, cache)
        for _ in range(20):
            assert client.lookup(pack("x") + pack("y"))[1] == new
    finally:
        client.close()
        cache.stop()
        home.stop()


def test_a_cache_process_is_no_event_store_and_says_that_home_is_to_be_asked(home):
    cache = serve_cache(home.listen)
    client = EventStoreClient(cache.listen, 10.0)
    with pytest.raises(UnavailableError, match=f"ask the event store at {home.listen}"):
        client.lookup(pack("x"))
    wait_until(lambda: client.status()["member"])
    client.close()
    with LOOPBACK.open(cache.listen) as channel:
        stub = eventstore_pb2_grpc.EventStoreStub(channel)
        stub.Put(pb.PutRequest(ids=pack("x"), events=b"{}\n", store=home._map.store), timeout=5)
        for store, found in ((home._map.store, Found.FOUND), (b"another", Found.BEHIND)):
            answer = stub.Lookup(pb.LookupRequest(ids=pack("x") + pack("y"), store=store), timeout=5)
            assert list(answer.outcomes) == [found, Found.BEHIND]
    cache.stop()


def test_put_makes_events_found_before_their_log_is_read(root, home, client):
    idents, lines = events(100)
    client.put(PACKER.pack(idents[:50]), lines[:50])
    assert client.lookup(PACKER.pack(idents[:50])) == (bytes(50), lines[:50])
    cache = serve_cache(home.listen)
    see(client, cache)
    client.put(PACKER.pack(idents[50:]), lines[50:])
    assert client.lookup(PACKER.pack(idents[50:])) == (bytes(50), lines[50:])
    assert cached(cache)["events"] > 10
    client.put(b"", [])
    cache.stop()


def test_put_never_raises():
    client = EventStoreClient("127.0.0.1:1", 0.3)
    client.put(pack("x"), [b"{}"])
    client.close()
    client.put(pack("x"), [b"{}"])


def test_a_full_queue_drops_and_counts(monkeypatch):
    monkeypatch.setattr("eventstore.cache.QUEUE_BYTES_MAX", 3000)
    membership = Membership(1, ("127.0.0.1:1",))
    filling = Filling(CacheEventStore(1 << 20), lambda: membership, 64, b"s" * 16)
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


@pytest.mark.long
def test_a_cache_that_hangs_costs_half_a_second_once(root, home, client):
    idents, lines = logged(root, home, 100)
    child = start_python(CHILD, home.listen)
    try:
        address = child.stdout.readline().decode().strip()
        wait_until(lambda: client.lookup(pack("x")) and set(client._view.caches) == {address})
        client.lookup(PACKER.pack(idents))  # connected
        child.send_signal(signal.SIGSTOP)
        began = time.monotonic()
        for _ in range(10):
            assert client.lookup(PACKER.pack(idents)) == (bytes(100), lines)
        assert time.monotonic() - began < 3 * client_module.CACHE_TIMEOUT_S
        wait_until(lambda: home.status()["members"] == ())
        child.send_signal(signal.SIGCONT)
        wait_until(lambda: home.status()["members"] == (address,))
        assert client.lookup(PACKER.pack(idents)) == (bytes(100), lines)
    finally:
        end(child)


CHILD = """
import sys, threading
from photon.core.settings import Settings
from photon.core.clock import SystemClock
from photon.core.signals import on_termination
from eventstore.server import CacheServer
server = CacheServer(Settings(), "127.0.0.1:0", sys.argv[1], SystemClock())
ended = threading.Event()
on_termination(ended.set)
server.start()
print(server.listen, flush=True)
ended.wait()
server.stop()
"""


@pytest.mark.cluster
@pytest.mark.long
def test_no_answer_is_wrong_while_processes_are_killed_added_and_removed(root, home):
    """Several clients ask all the time, the logs grow: each answer is right."""
    path = root / "logs" / "a.jsonl"
    rng = random.Random(7)
    written, wrong, asked = [0], [], [0]
    stop = threading.Event()

    def look_up(seed):
        dice = random.Random(seed)
        client = EventStoreClient(home.listen, 10.0)
        while not stop.is_set():
            count = written[0]
            wanted = [dice.randrange(count + 50) for _ in range(64)]
            idents = [events(1, n)[0][0] for n in wanted]
            column, lines = client.lookup(PACKER.pack(idents))
            for n, byte, text in zip(wanted, column, lines):
                expected = events(1, n)[1][0]
                if byte == Found.FOUND and text != expected:
                    wrong.append((n, text))
                # What the reader had taken up before may not be called absent.
                if n < count and byte not in (Found.FOUND, Found.BEHIND):
                    wrong.append((n, byte))
            asked[0] += 64
        client.close()

    def write():
        start = 0
        while not stop.is_set():
            append(path, *events(40, start)[1])
            start += 40
            wait_until(lambda: home.status()["primary_events"] >= start)
            written[0] = start
            time.sleep(0.01)

    threads = [threading.Thread(target=look_up, args=(seed,)) for seed in range(2)]
    threads.append(threading.Thread(target=write))
    children = [start_python(CHILD, home.listen)]
    for thread in threads:
        thread.start()
    try:
        deadline = time.monotonic() + 6
        sizes = set()
        while time.monotonic() < deadline or (len(sizes) < 2 and time.monotonic() < deadline + 60):
            if len(children) < 3 and rng.random() < 0.6:
                children.append(start_python(CHILD, home.listen))
            elif home.status()["members"] and children:
                child = children.pop(rng.randrange(len(children)))
                child.send_signal(rng.choice([signal.SIGKILL, signal.SIGTERM]))
                child.wait()
                child.stdout.close()
            time.sleep(0.5)
            sizes.add(len(home.status()["members"]))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        for child in children:
            end(child)
    assert wrong == []
    assert asked[0] > 500
    assert len(sizes) > 1
    assert home.status()["fill"]["sent"] > 0


steps = st.lists(
    st.tuples(st.sampled_from(["join", "die", "anew", "view"]), st.integers(0, 4))
    | st.tuples(st.sampled_from(["fill", "look"]), st.integers(0, 30)),
    max_size=60,
)


@given(steps)
@settings(max_examples=50, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_with_any_old_view_of_the_members_a_share_never_gives_another_stores_line(script):
    """Members come, die, come back elsewhere; home is made anew with other lines; clients keep old views."""
    shares = {}
    store, view = b"store-0", ()
    seen = [(view, store)]
    for what, n in script:
        key = n.to_bytes(16, "big")
        if what == "join":
            share = shares.setdefault(f"m{n}", CacheShare(1 << 16))
            share.belong_to(store)
            view = tuple(sorted({*view, f"m{n}"}))
        elif what == "die":
            shares.pop(f"m{n}", None)
            view = tuple(m for m in view if m != f"m{n}")
        elif what == "anew":
            store, view = b"store-%d" % len(seen), ()
        elif what == "fill":
            for member in view:
                shares[member].put_many(store, [key], [store + key])
        elif what == "view":
            seen.append((view, store))
        else:
            for old_view, old_store in seen:
                [owner] = Ring([HOME, *old_view], 8).split(key)
                if owner in shares:
                    assert shares[owner].get_many(old_store, [key]) in ([None], [old_store + key])


def test_what_is_not_whole_is_refused_and_an_address_that_can_be_none_is_not_handed_on(home):
    addresses = ("", "nowhere", "a b:1", "h:", "h:99999", "x" * 300 + ":1", "h:1\n")
    puts = ({"ids": b"1" * 16}, {"ids": b"1" * 16, "events": b"\n"}, {"ids": b"1"})
    with LOOPBACK.open(home.listen) as channel:
        stub = eventstore_pb2_grpc.EventStoreStub(channel)
        calls = [(stub.Announce, pb.AnnounceRequest(address=address)) for address in addresses]
        for call, request in [*calls, *[(stub.Put, pb.PutRequest(**put)) for put in puts]]:
            with pytest.raises(grpc.RpcError, match="INVALID_ARGUMENT"):
                call(request, timeout=30)
        assert not stub.Members(pb.MembersRequest(), timeout=30).caches


def test_a_cache_serves_while_it_is_a_member(root):
    home = serve(root)
    cache = serve_cache(home.listen)
    try:
        await_health(SERVING, cache.listen, SERVICE_NAME)
        home.stop(0)
        await_health(NOT_SERVING, cache.listen, SERVICE_NAME)
        home = serve(root, home.listen)
        await_health(SERVING, cache.listen, SERVICE_NAME)
    finally:
        cache.stop()
        home.stop()
