"""State in PostgreSQL through what breaks: connections at each statement, servers, a failover under load."""

import itertools
import os
import random
import shutil
import signal
import threading
import time
import uuid

import pytest

from millwheel import postgresql as module
from millwheel.engine import logged
from millwheel.engine.records import SLOTS
from millwheel.errors import ZombieError
from photon.core.errors import FencedError, StorageError, UsageError
from tests.millwheel.running import HELD, LOSES
from tests.millwheel.topologies import clicks
from tests.waiting import wait_until

psycopg = pytest.importorskip("psycopg", reason="the postgresql extra is not installed")
ALL = range(SLOTS)


@pytest.fixture
def opened(server):
    """Opens stores of one run."""
    made, schema = [], f"s{uuid.uuid4().hex}"

    def store(uri=None, again_s=20.0):
        made.append(module.PostgresqlStore(uri or f"{server.uri}?schema={schema}&{LOSES}", again_s))
        return made[-1]

    yield store
    for one in made:
        one.close()


class Cut:
    """The connection of the `at`th statement from now on is cut, `before` it or when it was done."""

    def __init__(self, monkeypatch, server):
        self.left = None
        original = psycopg.Connection.execute
        admin = psycopg.connect(server.uri, autocommit=True)

        def execute(connection, *given, **named):
            if connection is admin or self.left is None:
                return original(connection, *given, **named)
            self.left -= 1
            if self.left != 0:
                return original(connection, *given, **named)
            if self.before:
                original(admin, "SELECT pg_terminate_backend(%s)", (connection.info.backend_pid,))
                return original(connection, *given, **named)
            done = original(connection, *given, **named)
            if connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
                return done  # it is known to have come to nothing
            original(admin, "SELECT pg_terminate_backend(%s)", (connection.info.backend_pid,))
            raise psycopg.OperationalError("cut, and nobody knows whether it was done")

        monkeypatch.setattr(psycopg.Connection, "execute", execute)
        self.close = admin.close

    def at(self, statement, before):
        self.left, self.before = statement, before

    @property
    def was_cut(self):
        return self.left is not None and self.left <= 0


@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize("folds", [False, True])
def test_whatever_statement_a_connection_is_cut_at_each_commit_is_done_once(
    server, opened, monkeypatch, before, folds
):
    if folds:
        monkeypatch.setattr(logged, "LOG_ROWS_MAX", 0)
    cut = Cut(monkeypatch, server)
    store = opened()
    for statement in itertools.count(1):
        store.claim(ALL, 0, 1)
        cut.at(statement, before)
        name = b"%d" % statement
        store.commit({b"a" + name: b"1", b"b": name})
        store.commit({b"a" + name: None, b"c" + name: b""})
        if not cut.was_cut:
            break
        cut.left = None
        assert store.read([b"a" + name, b"b", b"c" + name]) == [None, name, b""]
    cut.left = None
    cut.close()
    assert statement > (4 if folds else 2)
    again = opened()
    again.claim(ALL, 0, 1)
    assert [row for row, _ in again.scan(b"c")] == sorted(b"c%d" % n for n in range(1, statement + 1))
    assert list(again.scan(b"a")) == []


@pytest.mark.parametrize("before", [True, False])
def test_a_claim_that_is_cut_off_is_made_again_and_ends_the_former_one(server, opened, monkeypatch, before):
    cut = Cut(monkeypatch, server)
    for statement in itertools.count(1):
        old, new = opened(), opened()
        old.claim(ALL, 0, 1)
        old.commit({b"a": b"%d" % statement})
        cut.at(statement, before)
        new.claim(ALL, 0, 1)
        done = not cut.was_cut
        cut.left = None
        with pytest.raises(ZombieError):
            old.commit({b"a": b"zombie"})
        assert new.read([b"a"]) == [b"%d" % statement]
        if done:
            break
    cut.close()
    assert statement > 5


@pytest.mark.parametrize("before", [True, False])
def test_a_ledger_of_copies_has_what_was_put_whatever_statement_is_cut(server, opened, monkeypatch, before):
    cut = Cut(monkeypatch, server)
    former, rows = opened().ledger("source", 1), {}
    for statement in itertools.count(1):
        ledger = opened().ledger("source", 1)
        cut.at(statement, before)
        number, found = ledger.claim()
        assert found == rows
        ledger.put({b"a": b"%d" % statement, b"b%d" % statement: b""})
        ledger.put({b"b%d" % statement: None})
        rows = {b"a": b"%d" % statement}
        done = not cut.was_cut
        cut.left = None
        with pytest.raises(FencedError):
            former.put({b"a": b"zombie"})
        former = ledger
        if done:
            break
    cut.close()
    assert statement > 5 and number >= statement


def test_a_ledger_is_of_one_source_and_of_the_last_reign(opened):
    one, other, old = (opened().ledger(*given) for given in (("source", 7), ("source 2", 3), ("source", 6)))
    assert (one.claim(), other.claim()) == ((1, {}), (1, {}))
    one.put({b"a": b"1"})
    other.put({b"a": b"2"})
    with pytest.raises(FencedError, match="another machine copies source by now"):
        old.claim()
    one.put({b"b": b""})
    assert opened().ledger("source", 8).claim() == (2, {b"a": b"1", b"b": b""})


def test_a_put_under_way_is_over_before_a_claim_and_in_it(server, opened):
    opened().ledger("source", 1).claim()
    blocker = psycopg.connect(server.uri)
    new = opened()
    blocker.execute(f"SET search_path TO {new._schema}")
    blocker.execute("SELECT 1 FROM copiers FOR NO KEY UPDATE")
    blocker.execute("INSERT INTO copied VALUES ('source', 'a', 'under way')")
    found = []
    thread = threading.Thread(target=lambda: found.append(new.ledger("source", 1).claim()))
    thread.start()
    thread.join(0.3)
    assert found == []
    blocker.commit()
    blocker.close()
    thread.join(20)
    assert found == [(2, {b"a": b"under way"})]


def test_a_commit_under_way_is_over_before_a_claim_and_in_it(server, opened):
    """The claim waits for the lock of the commit, and reads what it has put."""
    old, new = opened(), opened()
    sequencer = old.claim(ALL, 0, 1)
    blocker = psycopg.connect(server.uri)
    blocker.execute(f"SET search_path TO {old._schema}")
    blocker.execute("SELECT 1 FROM claims WHERE sequencer = %s FOR NO KEY UPDATE", (sequencer,))
    blob = logged._encode({b"a": b"under way"})
    blocker.execute("INSERT INTO log VALUES (0, %s, 0, %s)", (sequencer, blob))
    claimed = threading.Event()
    thread = threading.Thread(target=lambda: (new.claim(ALL, 0, 1), claimed.set()))
    thread.start()
    assert not claimed.wait(0.3)
    blocker.commit()
    blocker.close()
    thread.join(20)
    assert claimed.is_set() and new.read([b"a"]) == [b"under way"]


def test_a_server_that_no_standby_confirms_is_refused_and_what_is_no_server_told(server):
    with pytest.raises(UsageError, match="synchronous_standby_names"):
        module.PostgresqlStore(server.uri)
    with pytest.raises(UsageError, match="nonsense"):
        module.PostgresqlStore(f"{server.uri}?nonsense=1")
    with pytest.raises(StorageError, match='"nobody" does not exist'):
        module.PostgresqlStore(f"{server.uri.replace('photon@', 'nobody@')}?{LOSES}", again_s=0.2)
    with pytest.raises(StorageError, match=r"tried for 0\.2 s"):
        module.PostgresqlStore(f"postgresql://photon@127.0.0.1:1/postgres?{LOSES}", again_s=0.2)


@pytest.mark.long
def test_what_was_acknowledged_is_on_the_standby_that_takes_over_under_load(pair, opened):
    store = opened(pair.uri.format(""), 60.0)
    store.claim(ALL, 0, 1)
    acknowledged, over = [], threading.Event()

    def work():
        for number in itertools.count():
            store.commit({b"row %06d" % number: b"%d" % number})
            acknowledged.append(number)
            if over.is_set():
                return

    thread = threading.Thread(target=work)
    thread.start()
    wait_until(lambda: len(acknowledged) > 200)
    pair.first.kill()
    pair.second.promote()
    before = len(acknowledged)
    wait_until(lambda: len(acknowledged) > before + 200)
    over.set()
    thread.join(60)
    again = opened(pair.uri.format(LOSES))
    again.claim(ALL, 0, 1)
    rows = [(row, value) for row, value in again.scan(b"row ")]
    assert rows == [(b"row %06d" % number, b"%d" % number) for number in acknowledged]


@pytest.mark.long
def test_a_commit_that_the_standby_has_not_is_not_acknowledged(pair, opened, monkeypatch):
    monkeypatch.setattr(module, "ASK_S", 1)
    store = opened(pair.uri.format(""), 3.0)
    store.claim(ALL, 0, 1)
    pair.second.signal(signal.SIGSTOP)
    with pytest.raises(StorageError, match="standby has not confirmed"):
        store.commit({b"a": b"1"})
    pair.second.signal(signal.SIGCONT)
    again = opened(pair.uri.format(""))
    again.claim(ALL, 0, 1)
    again.commit({b"b": b"2"})
    assert again.read([b"b"]) == [b"2"]


@pytest.mark.long
def test_a_commit_to_a_server_that_stands_still_is_given_up(server, opened, monkeypatch):
    store = opened(again_s=0.5)
    store.claim(ALL, 0, 1)
    monkeypatch.setattr(module, "ASK_S", 0.3)
    server.signal(signal.SIGSTOP)
    try:
        with pytest.raises(StorageError, match=r"tried for 0\.5 s"):
            store.commit({b"a": b"1"})
    finally:
        server.signal(signal.SIGCONT)
    monkeypatch.undo()
    again = opened()
    again.claim(ALL, 0, 1)
    again.commit({b"a": b"2"})
    assert again.read([b"a"]) == [b"2"]


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_run_goes_on_through_killed_workers_and_a_failover_and_then_on_another_machine(pair, system):
    """The other machine: another work directory, over the same logs, sinks and store."""
    lines = sorted(clicks(random.Random(3), 40_000, users=200, seconds=60), key=lambda line: line["ts"])
    store = ["--store", pair.uri.format("schema=run")]
    running = system.start(*store, "--workers", "2", "--follow", name=HELD)
    wait_until(lambda: running.poll() is None and system.is_up() and len(system.workers()) == 2)
    for part in range(40):
        for file in (0, 1):
            system.write(f"{file}.jsonl", lines[part * 1000 + file : (part + 1) * 1000 : 2], "a")
        if part in (5, 10, 30):
            os.kill(system.workers()[0], signal.SIGKILL)
            wait_until(lambda: len(system.workers()) == 2)
        elif part == 20:
            wait_until(lambda: len(system.sink("counts")) > 1_000)
            pair.first.kill()
            pair.second.promote()
        time.sleep(0.02)
    wait_until(lambda: system.status()["counts"]["clicks"]["records"] >= 40_000)
    system.stop()
    refused = system.refused("run", HELD, "--work", "work")
    assert "has its state in" in refused and "--store" in refused
    shutil.rmtree(system.directory / "work")
    summary = system.run("--store", f"{pair.second.uri}?schema=run&{LOSES}", "--work", "elsewhere", name=HELD)
    assert summary["ended"] and summary["dead_letters"] == 0
    system.check(lines)
