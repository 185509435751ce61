"""What lookups asked for in vain is remembered, and told of when it arrives (paper 3.2.1)."""

import threading
import time

import pytest

from eventstore.arrivals import ARRIVED_MAX, Arrivals
from eventstore.client import EventStoreClient
from photon.core.columns import split_ids
from photon.core.errors import OverloadedError, UnavailableError
from photon.core.fates import Found
from photon.logs.text import ALL_READ
from tests.eventstore.kit import append, line, pack, serve
from tests.waiting import wait_until


def ids(low, high):
    return [number.to_bytes(16, "big") for number in range(low, high)]


def told(arrivals, position=0):
    """What is known of since `position`; it does not wait."""
    ended = threading.Event()
    ended.set()
    position, _, found = arrivals.after(position, 0, ended, 0.0)
    return position, set(split_ids(found))


def heard(client, position):
    """The next answer that has other arrivals, without what it says of how far the logs are read."""
    while True:
        now, _, found = client.arrivals(client.addresses[0], position, ALL_READ)
        if now != position:
            return now, found


def test_only_what_was_asked_for_in_vain_is_told_of_once():
    arrivals = Arrivals()
    arrivals.expect(ids(0, 10))
    arrivals.forget(ids(0, 5))
    position, nothing = told(arrivals)
    arrivals.arrive(b"".join(ids(3, 8)))
    arrivals.arrive(b"".join(ids(3, 8)))
    position, found = told(arrivals, position)
    assert (nothing, found) == (set(), set(ids(5, 8)))
    assert told(arrivals, position) == (position, set())
    assert (arrivals.awaited, arrivals.count) == (2, 3)


def test_beyond_the_bound_the_ids_asked_for_longest_ago_are_forgotten():
    arrivals = Arrivals(awaited_max=20)
    for low in range(0, 60, 5):
        arrivals.expect(ids(low, low + 5))
        assert arrivals.awaited <= 20
    arrivals.expect(ids(60, 160))  # more at once than there is room for
    assert arrivals.awaited <= 20
    arrivals.arrive(b"".join(ids(0, 70)))
    assert told(arrivals)[1] == set(ids(50, 70))


def test_arrivals_that_nobody_fetched_are_bounded_and_an_unknown_position_gets_what_is_kept():
    arrivals = Arrivals(awaited_max=4 * ARRIVED_MAX)
    position, _ = told(arrivals)
    for low in (0, ARRIVED_MAX):
        arrivals.expect(ids(low, low + ARRIVED_MAX))
        arrivals.arrive(b"".join(ids(low, low + ARRIVED_MAX)))
    after, found = told(arrivals, position)
    assert (after - position, found) == (2 * ARRIVED_MAX, set(ids(ARRIVED_MAX, 2 * ARRIVED_MAX)))
    assert told(arrivals, after + 7)[1] == found  # of the event store's life before


def test_those_who_wait_are_bounded_and_all_end_when_it_closes():
    arrivals = Arrivals(listeners_max=2)
    position, _ = told(arrivals)
    answers = []

    def listen():
        try:
            arrivals.after(position, 0, threading.Event(), 60.0)
        except UnavailableError as error:
            answers.append(str(error))

    threads = [threading.Thread(target=listen) for _ in range(2)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(arrivals._listeners) == 2)
    with pytest.raises(OverloadedError, match="2 wait for arrivals already"):
        told(arrivals, position)
    arrivals.close()
    for thread in threads:
        thread.join(30)
    assert answers == ["the event store stops; ask again later"] * 2


def test_who_waits_is_told_how_far_the_logs_are_read():
    arrivals = Arrivals()
    position, _ = told(arrivals)
    answers = []

    def listen():
        answers.append(arrivals.after(position, 0, threading.Event(), 60.0))

    thread = threading.Thread(target=listen)
    thread.start()
    wait_until(lambda: arrivals._listeners)
    arrivals.read_to(0)  # as it was
    assert not answers
    arrivals.read_to(5)
    thread.join(30)
    assert answers == [(position, 5, b"")]
    ended = threading.Event()
    assert arrivals.after(position, 0, ended, 60.0) == (position, 5, b""), "at once: it did not know that"


def listening(client, position):
    """A call under way; its answer is put into the list."""
    answers = []

    def listen():
        try:
            answers.append(heard(client, position))
        except UnavailableError as error:
            answers.append(error)

    thread = threading.Thread(target=listen)
    thread.start()
    return thread, answers


def test_a_call_waits_for_a_line_that_was_looked_for_before_it_was_logged(root, home, client):
    position, nothing = heard(client, 0)
    assert (list(client.lookup(pack("late"))[0]), nothing) == ([Found.ABSENT], b"")
    thread, answers = listening(client, position)
    wait_until(lambda: home._arrivals._listeners)
    append(root / "logs" / "a.jsonl", line("other"), line("late"))
    thread.join(30)
    assert answers == [(position + 1, pack("late"))]
    assert client.lookup(pack("late"))[1] == [line("late")]
    assert home.status()["arrivals"] == {"awaited": 0, "arrived": 1}


def test_a_line_that_comes_while_it_is_looked_for_is_told_of(root, home, client):
    position, _ = heard(client, 0)
    search = home._logs.get_many

    def slow_search(keys):
        found = search(keys)
        append(root / "logs" / "a.jsonl", line("late"))
        wait_until(lambda: home.status()["cache"]["events"])
        return found

    home._logs.get_many = slow_search
    assert client.lookup(pack("late"))[1] == [b""]
    assert heard(client, position) == (position + 1, pack("late"))


def test_what_is_sent_past_the_logs_is_told_of(root, home, client):
    client.lookup(pack("put"))
    client.put(pack("put"), [line("put")])
    assert heard(client, 0)[1] == pack("put")


def test_open_calls_keep_no_lookup_waiting_and_a_stop_ends_them_at_once(root):
    server = serve(root)
    clients = [EventStoreClient([server.listen], 10.0) for _ in range(2)]
    position, _ = heard(clients[0], 0)
    calls = [listening(client, position) for client in clients]
    wait_until(lambda: len(server._arrivals._listeners) == 2)
    with pytest.raises(OverloadedError):
        heard(clients[0], position)
    assert clients[0].lookup(pack("x"))[1] == [b""]
    clients[1].close()  # that end of it, too
    wait_until(lambda: len(server._arrivals._listeners) == 1)
    began = time.monotonic()
    server.stop(grace_s=60.0)
    assert time.monotonic() - began < 10.0  # neither the grace, nor what a call waits
    for thread, answers in calls:
        thread.join(30)
        assert isinstance(answers[0], UnavailableError)
    with pytest.raises(UnavailableError, match="closed"):
        heard(clients[1], position)
    clients[0].close()


def test_a_client_goes_on_after_the_event_store_was_started_anew(root):
    server = serve(root)
    client = EventStoreClient([server.listen], 10.0)
    position, _ = heard(client, 0)
    server.stop()
    with pytest.raises(UnavailableError):
        heard(client, position)
    again = serve(root, listen=server.listen)
    wait_until(lambda: _looked_up(client, pack("late")))
    append(root / "logs" / "a.jsonl", line("late"))
    found = b""
    while not found:
        position, found = heard(client, position)
    assert found == pack("late")
    client.close()
    again.stop()


def _looked_up(client, ids):
    try:
        return client.lookup(ids)
    except UnavailableError:
        return None


def test_as_many_calls_wait_as_there_may_be_of_all_dispatchers(root):
    server = serve(root, dispatchers=3)
    clients = [EventStoreClient([server.listen], 10.0) for _ in range(6)]
    position, _ = heard(clients[0], 0)
    calls = [listening(client, position) for client in clients]
    wait_until(lambda: len(server._arrivals._listeners) == 6)
    server.stop(grace_s=60.0)
    for thread, _ in calls:
        thread.join(30)
