"""Joiners of several channels take turns, and one that was away is found again (joiner/client.py)."""

import itertools
import threading
import time

import pytest

import joiner.client
import photon.rpc.network
from joiner.client import JoinerClient
from joiner.server import SERVICE_NAME
from photon.core.errors import OverloadedError, UnavailableError
from photon.rpc import joiner_pb2, joiner_pb2_grpc
from photon.rpc.network import LOOPBACK, NamedChannel, Network
from photon.rpc.servers import Server
from tests.joiner.fakes import batch_of
from tests.waiting import wait_until

NOWHERE = "127.0.0.1:1"


class Joiner(joiner_pb2_grpc.JoinerServicer):
    """Counts batches; while `let_go` is not set it keeps them."""

    def __init__(self):
        self.begun, self.let_go = 0, threading.Event()
        self.let_go.set()
        self._server = Server("127.0.0.1:0", 8, 8)
        self._server.add(joiner_pb2_grpc.add_JoinerServicer_to_server, self, SERVICE_NAME)
        self._server.start()
        self.address = self._server.listen

    def Join(self, request, context):
        self.begun += 1
        self.let_go.wait(60)
        return joiner_pb2.JoinResponse(outcomes=b"\0")

    def Status(self, request, context):
        return joiner_pb2.StatusResponse(json=b"{}")

    def stop(self, grace_s=0.0):
        self._server.stop(grace_s)


class Names(Network):
    """Where `somewhere` is to be found, of each channel that is opened to it the next; the last for ever."""

    places: list

    def open(self, address, options=(), advertised=""):
        if "somewhere" not in address:
            return LOOPBACK.open(address, options)
        return NamedChannel(
            lambda: LOOPBACK.open(self.places.pop(0) if len(self.places) > 1 else self.places[0], options)
        )


@pytest.fixture
def start():
    started = []

    def start_one():
        started.append(Joiner())
        return started[-1]

    yield start_one
    for one in started:
        one.let_go.set()
        one.stop()


@pytest.fixture
def connect(monkeypatch):
    monkeypatch.setattr(photon.rpc.network, "RENEW_S", 0.0)
    monkeypatch.setattr(joiner.client, "TRY_AWAY_S", 0.05)
    clients = []

    def open_client(*addresses, places=(NOWHERE,)):
        network = type("TheseNames", (Names,), {"places": list(places)})()
        clients.append(JoinerClient(addresses, 20.0, network))
        return clients[-1]

    yield open_client
    for client in clients:
        client.close()


def test_a_name_that_was_unknown_is_found_while_another_joiner_is_up(start, connect):
    one, two = start(), start()
    client = connect("somewhere:1", one.address, places=[NOWHERE, NOWHERE, NOWHERE, two.address])
    numbers = itertools.count()

    def found():
        client.join(batch_of([f"e{next(numbers)}"]))
        return two.begun

    wait_until(found)


def test_a_batch_that_was_never_sent_goes_to_the_next_joiner_at_once(start, connect):
    one = start()
    client = connect("somewhere:1", one.address)
    for number in range(20):
        client.join(batch_of([f"e{number}"]))
    assert one.begun == 20


def test_a_joiner_that_drains_finishes_its_batch_while_others_find_no_connection(start, connect):
    one = start()
    client = connect("somewhere:1", places=[one.address])
    client.join(batch_of(["a"]))
    one.let_go.clear()
    answers = []
    sender = threading.Thread(target=lambda: answers.append(client.join(batch_of(["b"]))))
    sender.start()
    wait_until(lambda: one.begun == 2)
    drain = threading.Thread(target=one.stop, args=(60.0,))
    drain.start()
    refusals = []

    def renewed_often():  # each refusal but the first follows a try on a channel of its own
        with pytest.raises(UnavailableError) as refused:  # one may have come in before the drain began
            client.join(batch_of(["c"]), timeout_s=1)
        refusals.append(isinstance(refused.value, OverloadedError))
        time.sleep(0.1)
        return sum(refusals) >= 5

    wait_until(renewed_often)
    one.let_go.set()
    sender.join(60)
    drain.join(60)
    assert [answer.outcomes for answer in answers] == [b"\0"]


def test_where_all_are_away_the_cause_is_said_of_each_from_the_first_refusal_on(connect):
    client = connect("somewhere:1", NOWHERE)
    for _ in range(5):
        with pytest.raises(OverloadedError, match="nothing was sent, for no joiner is there") as refused:
            client.join(batch_of(["a"]))
        for who in (r"joiner somewhere:1: ", f"joiner {NOWHERE}: "):
            assert who in str(refused.value)
        assert str(refused.value).count("unavailable") == 2


def test_joiners_that_are_back_are_sent_each_batch_again(start, connect):
    one = start()
    client = connect("somewhere:1", NOWHERE, places=[NOWHERE, one.address])
    with pytest.raises(OverloadedError, match="somewhere:1: unavailable"):
        client.join(batch_of(["a"]))
    wait_until(lambda: sent(client))
    begun = one.begun
    for _ in range(5):
        client.join(batch_of(["a"]))
    assert one.begun == begun + 5


def sent(client):
    try:
        client.join(batch_of(["a"]))
    except OverloadedError:
        return False
    return True


def test_turns_go_by_joiner_and_not_by_channel(start, connect):
    literals, named = [start() for _ in range(3)], start()
    port = named.address.rpartition(":")[2]
    client = connect(f"localhost:{port}", *(one.address for one in literals))
    for number in range(40):
        client.join(batch_of([f"e{number}"]))
    assert named.begun == 10
    assert sum(one.begun for one in literals) == 30
