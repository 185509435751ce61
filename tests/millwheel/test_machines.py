"""Several machines compute one run: whoever is there has a part, and no two ever have the same one."""

import contextlib
import signal
import socket
import threading
import time
import uuid

import msgspec
import pytest

from millwheel import links
from millwheel import machines as module
from millwheel.engine.records import SLOTS
from millwheel.engine.shares import Shares, even, fitting
from millwheel.engine.store import keeper
from millwheel.errors import ZombieError
from millwheel.machines import (
    LEASE_S,
    SKEW_S,
    Machine,
    Machines,
    Member,
    Round,
    View,
    next_round,
    stopping,
    unlike,
)
from photon.core.clock import SystemClock
from photon.core.errors import StorageError, UsageError
from tests.connect.postgresql import Postgresql, need_server
from tests.millwheel.running import HELD, LOSES, NAME, Several, System
from tests.waiting import wait_until

psycopg = pytest.importorskip("psycopg", reason="the postgresql extra is not installed")
postgresql = pytest.importorskip("millwheel.postgresql", reason="the postgresql extra is not installed")


def machine(name, workers=1, address="host:1"):
    return Machine(name, name.upper(), address, workers)


A, B, C = map(machine, "abc")


# Who computes what


def led_by(lead, stage, *there, number=7):
    found = Round(number, lead.holder, stage, there)
    return msgspec.structs.replace(found, shares=fitting(Shares(), len(found.workers)) if there else Shares())


def seen(round_, **at):
    return View(True, round_, [Member(machine(name), number) for name, number in at.items()])


def test_who_leads_first_has_all_workers_stop_and_gives_each_machine_its_part_then():
    ended = Round(6, "z", "ended", (C,))
    assert next_round(A, 6, 0, seen(ended, a=6, b=6)) == Round(7, "a", "stopping")
    stops = led_by(A, "stopping")
    assert next_round(A, 6, 0, seen(stops, a=6, b=7)) is None
    assert next_round(A, 7, 0, seen(stops, a=6, b=6)) is None
    assert next_round(A, 7, 0, seen(stops, a=6, b=7)) == led_by(A, "running", A, B)
    assert next_round(A, 7, 0, seen(stops, a=6)) == led_by(A, "running", A)


def test_the_next_round_begins_when_a_machine_has_come_or_gone_or_has_other_workers():
    running = led_by(A, "running", A, B)
    assert next_round(A, 7, 7, seen(running, a=7, b=7)) is None
    following = stopping(running, A)
    assert following == Round(8, "a", "stopping", shares=Shares(even(2)))
    assert next_round(A, 7, 7, seen(running, a=7)) == following
    assert next_round(A, 7, 7, seen(running, a=7, b=7, c=0)) == following
    other = View(True, running, [Member(A, 7), Member(machine("b", workers=2), 7)])
    assert next_round(A, 7, 7, other) == following


def test_rounds_go_on_counting_deploys():
    stops = msgspec.structs.replace(led_by(A, "stopping"), deploys=3)
    running = next_round(A, 7, 0, seen(stops, a=7))
    assert (running.deploys, stopping(running, B).deploys) == (3, 3)


def test_who_takes_over_and_who_started_again_knows_no_workers_so_another_round_begins():
    running = led_by(A, "running", A, B)
    assert next_round(B, 7, 0, seen(running, a=7, b=7)) == stopping(running, B)
    assert next_round(A, 7, 0, seen(running, a=7, b=7)) == stopping(running, A)
    assert next_round(B, 7, 0, seen(led_by(A, "stopping"), a=7, b=7)) == Round(8, "b", "stopping")


def shaped(one, *names):
    return msgspec.structs.replace(one, shape=names)


def test_a_machine_with_another_topology_gets_no_part_and_no_other_round_begins_for_it():
    mine, other = shaped(A, "computation e"), shaped(B, "computation e", "computation f")
    stops = View(True, led_by(A, "stopping"), [Member(mine, 7), Member(other, 7)])
    assert next_round(mine, 7, 0, stops) == led_by(mine, "running", mine)
    not_yet = View(True, led_by(A, "stopping"), [Member(mine, 7), Member(other, 6)])
    assert next_round(mine, 7, 0, not_yet) is None  # its workers may run
    running = View(True, led_by(mine, "running", mine), [Member(mine, 7), Member(other, 7)])
    assert next_round(mine, 7, 7, running) is None


def test_a_machine_says_what_its_topology_lacks_beside_that_of_who_leads():
    lead, me = (
        shaped(A, "computation e", "computation f", "input f 0 i", "sink x"),
        shaped(B, "computation e"),
    )
    running = led_by(lead, "running", lead)
    assert unlike(me, View(False, running, lead=lead)) == "without computation f, sink x"
    assert unlike(lead, View(False, led_by(me, "running", me), lead=me)) == "with computation f, sink x"
    inputs = shaped(A, "computation e", "input e 0 i")
    assert unlike(me, View(False, led_by(inputs, "running", inputs), lead=inputs)) == "without input e 0 i"


def test_a_round_of_before_a_start_or_a_lease_of_before_a_deploy_says_nothing_of_a_topology():
    old, new = shaped(A, "computation e"), shaped(A, "computation f")
    me = shaped(B, "computation f")
    for view in (
        View(False, led_by(old, "running", old), lead=new),
        View(False, led_by(new, "running", new), lead=old),
        View(False, led_by(old, "running", old)),
        View(False, led_by(old, "running", old), lead=C),
        View(False, led_by(old, "stopping"), lead=old),
    ):
        assert unlike(me, view) == ""


def test_a_machine_without_an_address_is_the_only_one():
    me = machine("a", address="")
    assert next_round(me, 7, 0, seen(led_by(me, "stopping"), a=7, b=3)) is None
    assert next_round(me, 7, 0, seen(led_by(me, "stopping"), a=7, b=7)) == led_by(me, "running", me)
    assert led_by(me, "running", me).addresses == ()


def test_workers_are_numbered_by_machine_and_have_the_ports_behind_its_own():
    round_ = led_by(A, "running", machine("a", 2, "one:7000"), machine("b", 1, "[::1]:80"))
    assert [one.holder for one in round_.workers] == ["a", "a", "b"]
    assert round_.addresses == ("one:7001", "one:7002", "[::1]:81")
    many = led_by(A, "running", machine("a", SLOTS), machine("b", SLOTS))
    assert len(many.workers) == len(many.addresses) == SLOTS


@pytest.mark.parametrize(
    ("asked", "stores", "workers"),
    [(1, 2, 2), (3, 2, 4), (4, 2, 4), (2, 3, 3), (SLOTS, 3, SLOTS // 3 * 3), (SLOTS, 1, SLOTS)],
)
def test_each_store_has_as_many_workers_and_so_a_slot_never_changes_its_store(asked, stores, workers):
    round_ = Round(1, "a", "running", (machine("a", asked, "one:7000"),), stores=stores)
    assert len(round_.workers) == len({*round_.addresses}) == workers
    assert all(owner % stores == slot % stores for slot, owner in enumerate(even(workers)))
    assert all(keeper(lane, workers) % stores == lane % stores for lane in range(SLOTS))


# A machine and the store


class Store:
    """A server whose clock is that of the test."""

    shown = "the store"

    def __init__(self):
        self.now, self.lead, self.members, self.round = 0.0, None, {}, Round()
        self.answers, self.asked = True, 0

    def hold(self, machine, seconds):
        self._ask()
        if self.lead is not None and self.lead[0].holder != machine.holder and self.lead[1] >= self.now:
            return self.lead
        self.lead = machine, self.now + seconds
        return None

    def renew(self, machine, at, seconds):
        leads = self.hold(machine, seconds) is None
        self.members[machine.holder] = Member(machine, at)
        return View(leads, self.round, list(self.members.values()) if leads else [])

    def publish(self, holder, former, following):
        self._ask()
        if self.lead[0].holder != holder or self.round not in (former, following):
            raise ZombieError
        self.round = following

    def leave(self, holder):
        if self.lead[0].holder == holder:
            self.lead = None
        self.members.pop(holder, None)

    def close(self):
        pass

    def _ask(self):
        self.asked += 1
        if not self.answers:
            raise StorageError("no answer")


class Clock(SystemClock):
    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    monkeypatch.setattr(module, "RENEW_S", 0.01)
    return Clock()


def test_workers_go_on_shorter_than_the_row_and_from_before_it_was_renewed(clock):
    store = Store()
    renew = store.renew

    def slow(*given):
        clock.now += 2
        return renew(*given)

    store.renew = slow
    one = Machines(store, A, clock)
    one.enter()
    began = clock.now - 2
    assert 100 < one.until <= began + LEASE_S - SKEW_S
    one.end()
    assert store.lead is None and not store.members


def test_while_the_server_does_not_answer_workers_go_on_no_longer_and_nothing_is_lost(clock):
    store = Store()
    one = Machines(store, A, clock)
    one.enter()
    store.answers = False
    asked = store.asked
    wait_until(lambda: store.asked > asked)
    before = one.until
    clock.now += 60
    asked = store.asked
    wait_until(lambda: store.asked > asked + 3)
    assert (one.until, one.view.leads) == (before, True)
    assert one.wrong == "no answer"
    store.answers = True
    wait_until(lambda: one.until > clock.now and not one.wrong)
    one.end()


def test_after_a_silence_of_the_store_nobody_is_taken_for_gone_before_all_can_be_back(clock):
    store = Store()
    one = Machines(store, A, clock)
    one.enter()
    assert not one.view.awaited
    store.answers = False
    asked = store.asked
    wait_until(lambda: store.asked > asked)
    clock.now += LEASE_S + 1
    store.answers = True
    wait_until(lambda: one.view.awaited)
    running = led_by(A, "running", A, B)
    alone = View(True, running, [Member(A, 7)], awaited=True)
    assert next_round(A, 7, 7, alone) is None
    assert next_round(A, 7, 0, alone) is None
    assert next_round(A, 7, 7, alone._replace(awaited=False)) == stopping(running, A)
    clock.now += module.BACK_S
    wait_until(lambda: not one.view.awaited)
    one.end()


def test_a_machine_whose_process_stands_still_is_not_renewed(clock):
    store = Store()
    one = Machines(store, A, clock)
    one.enter()
    one.turned = clock.now
    clock.now += module.STANDS_STILL_S + 1
    wait_until(lambda: "stands still" in one.wrong)
    asked, before = store.asked, one.until
    time.sleep(0.1)
    assert store.asked <= asked + 1 and one.until == before
    one.turned = None  # what it does may take long
    wait_until(lambda: one.until > clock.now)
    one.end()


def test_who_leads_sees_at_once_who_came_back_before_it_published(clock):
    store = Store()
    one = Machines(store, A, clock)
    one.enter()
    store.members["b"] = Member(B, 6)  # of a machine that did not know of the round then
    one.publish(Round(), Round(7, "a", "stopping"))
    one.stopped(7, ())
    assert next_round(A, 7, 0, one.view) is None
    store.members["b"] = Member(B, 7)
    wait_until(lambda: next_round(A, 7, 0, one.view) == led_by(A, "running", A, B))
    one.end()


def test_workers_of_a_former_round_may_not_go_on(clock):
    store = Store()
    store.lead = B, 1e9
    one = Machines(store, A, clock)
    one.enter()
    store.round = led_by(B, "stopping")
    wait_until(lambda: one.view.round.number == 7)
    before = one.until
    clock.now += 1
    asked = store.asked
    wait_until(lambda: store.asked > asked + 3)
    assert (one.until, store.members["a"].at) == (before, 0)
    one.stopped(7, ())
    wait_until(lambda: one.until > clock.now and store.members["a"].at == 7)
    one.end()
    assert store.lead[0] == B


def test_one_that_is_to_be_the_only_one_waits_for_the_end_of_another_or_is_refused(clock):
    store = Store()
    first = Machines(store, machine("a", address=""), clock)
    first.enter()
    ticking = threading.Event()

    def tick():
        while not ticking.wait(0.005):
            store.now += 0.005

    thread = threading.Thread(target=tick)
    thread.start()
    for address in ("", "host:1"):
        with pytest.raises(UsageError, match="A runs what is in the store: stop it, or give both --machine"):
            Machines(store, machine("b", address=address), clock).enter()
    ticking.set()
    thread.join()
    first._renewing.stop()  # as if it had been killed
    store.now += LEASE_S + 1
    second = Machines(store, B, clock)
    second.enter()
    assert second.view.leads and "b" in store.members
    second.end()


# In PostgreSQL


@pytest.fixture
def uri(server):
    return f"{server.uri}?schema=s{uuid.uuid4().hex}&{LOSES}"


@pytest.fixture
def store(uri):
    with contextlib.ExitStack() as held:

        def make(number=0):
            made = postgresql.PostgresqlStore(uri, 5.0, number)
            held.callback(made.close)
            return made

        yield make


def test_in_postgresql_one_leads_until_it_ends_or_leaves(store):
    one, two = store(), store()
    assert one.hold(A, 0.4) is None
    who, until = two.hold(B, 5.0)
    assert who == A and time.time() - 1 < until < time.time() + 1
    assert one.hold(A, 0.4) is None
    wait_until(lambda: two.hold(B, 5.0) is None)
    assert one.hold(A, 5.0)[0] == B
    one.leave("a")
    assert one.hold(A, 5.0)[0] == B
    two.leave("b")
    assert one.hold(A, 5.0) is None


def test_in_postgresql_who_leads_sees_who_is_there_and_only_that_one_publishes(store):
    one, two, three = store(), store(), store()
    assert one.renew(A, 0, 5.0) == View(True, Round(), [Member(A, 0)])
    assert two.renew(B, 3, 5.0) == View(False, Round(), [], lead=A)
    assert three.renew(C, 0, 0.2) == View(False, Round(), [], lead=A)
    assert {*one.renew(A, 1, 5.0).members} == {Member(A, 1), Member(B, 3), Member(C, 0)}
    wait_until(lambda: len(one.renew(A, 1, 5.0).members) == 2)
    round_ = led_by(A, "running", A, B)
    one.publish("a", Round(), round_)
    one.publish("a", Round(), round_)  # again, as its outcome was not known
    assert two.renew(B, 7, 5.0) == View(False, round_, [], lead=A)
    with pytest.raises(ZombieError):
        two.publish("b", round_, led_by(B, "stopping"))
    one.leave("a")
    assert two.renew(B, 7, 5.0) == View(True, round_, [Member(B, 7)])


def test_in_postgresql_who_led_before_and_leads_again_publishes_nothing_old(store):
    one, two = store(), store()
    stopping = Round(1, "a", "stopping")
    one.hold(A, 0.1)
    one.publish("a", Round(), stopping)
    wait_until(lambda: two.hold(B, 0.1) is None)
    two.publish("b", stopping, Round(2, "b", "stopping"))
    wait_until(lambda: one.hold(A, 5.0) is None)
    with pytest.raises(ZombieError, match="leads"):
        one.publish("a", stopping, led_by(A, "running", A, number=1))
    assert two.renew(B, 0, 5.0).round.number == 2


def test_in_postgresql_a_machine_that_freezes_while_it_is_renewed_holds_up_no_other(store):
    one, two = store(), store()
    one.hold(A, 0.1)
    frozen = two._connected("machines")
    frozen.execute("BEGIN")
    frozen.execute("SELECT 1 FROM lease FOR UPDATE")
    began = time.monotonic()
    assert one.renew(A, 0, 5.0).leads
    assert time.monotonic() - began < 4


def test_in_postgresql_claims_and_numbers_count_in_the_round_that_stands_there(store):
    lead = store()
    with pytest.raises(ZombieError, match="others by now"):
        store(1).claim(range(4), 0, 1)
    lead.hold(A, 5.0)
    first, second = (Round(number, "a", "stopping") for number in (1, 2))
    lead.publish("a", Round(), first)
    old = store(1)
    old.claim(range(4), 0, 1)
    old.commit({b"x": b"1"})
    old.numbers(b"n", b"1")
    lead.publish("a", first, second)
    old.commit({b"x": b"2"})  # until somebody claims in the next one
    with pytest.raises(ZombieError, match="others by now"):
        store(1).claim(range(4), 0, 1)
    with pytest.raises(ZombieError, match="others by now"):
        old.numbers(b"n", b"2")
    new = store(2)
    new.claim(range(4), 0, 1)
    with pytest.raises(ZombieError):
        old.commit({b"x": b"3"})
    with pytest.raises(ZombieError):
        old.claim(range(4), 0, 1)
    assert new.read([b"x"]) == [b"2"] and new.numbers(b"n") == b"1"


def test_in_postgresql_a_further_store_never_goes_back_to_a_former_round(store):
    store()  # makes the tables
    old, new = store(1), store(2)
    old.reach()
    old.claim(range(4), 0, 1)
    new.reach()
    old.reach()
    with pytest.raises(ZombieError, match="others by now"):
        old.claim(range(4), 0, 1)
    new.claim(range(4), 0, 1)


# Processes


@pytest.fixture
def system(tmp_path):
    one = System(tmp_path)
    yield one
    for name in ("one", "two", "three"):
        one.signal(name, signal.SIGKILL)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_machines_come_are_killed_freeze_and_leave_and_each_line_is_there_once(uri, system, tmp_path):
    several = Several(system, uri, tmp_path, 5)
    system.environment["PUBLISH"] = f"file://{tmp_path}/published?every_s=1"
    one = several.start("one", "--follow")
    several.computes("one")
    several.start("two", "--follow")
    several.computes("one", "two")
    several.feed(0, 8)
    assert "two" in system.ask("status", "--work", "two")
    system.signal("one", signal.SIGKILL)  # it leads
    killed = time.monotonic()
    several.computes("two")
    assert time.monotonic() - killed < 20
    several.feed(8, 14)
    several.start("three", "--follow")
    several.start("one", "--follow")
    several.computes("one", "two", "three")
    several.feed(14, 20)
    system.signal("two", signal.SIGSTOP)  # this one leads
    several.computes("one", "three")
    several.feed(20, 26)
    system.signal("two", signal.SIGCONT)
    several.computes("one", "two", "three")
    one = next(pid for pid, words in system.processes("one") if b"worker" not in words)
    system.signal("one", signal.SIGTERM)
    wait_until(lambda: one not in [pid for pid, _ in system.processes("one")])
    several.computes("two", "three")
    several.feed(26, 30)
    for name in ("two", "three"):
        system.signal(name, signal.SIGTERM)
    wait_until(lambda: not [*system.processes("two"), *system.processes("three")])
    several.finish("two", "three")
    published = [path.read_bytes() for path in tmp_path.glob("published/*/*.jsonl")]
    written = [path.read_bytes() for path in tmp_path.glob("out/totals/*.jsonl")]
    assert sorted(b"".join(published).split()) == sorted(b"".join(written).split())


OF_MACHINE = """import os
from dataclasses import replace
from pathlib import Path
from millwheel import Input, Stream, node
from tests.millwheel.topologies import HELD, Totals

class Silent(Totals):
    def process_timer(self, timer, ctx):
        ctx.forget()

TOPOLOGY = HELD
if Path(os.environ["MACHINE"] + ".code").read_text() == "more":
    more = node(Silent(), Input("counts", key=lambda value: str(value["second"])), Stream("more"))
    TOPOLOGY = replace(HELD, computations={**HELD.computations, "more": more})
"""


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.soak
def test_a_machine_that_has_other_code_has_no_part_until_it_has_the_same(uri, system, tmp_path):
    (tmp_path / "mine.py").write_text(OF_MACHINE)

    def start(name):
        system.environment["MACHINE"] = name
        return several.start(name, "--follow", topology="mine:TOPOLOGY")

    def bring(code, *names):
        for name in names:
            (tmp_path / f"{name}.code").write_text(code)

    def ends(run, differs):
        run.communicate(timeout=60)
        assert run.returncode == 2
        said = (tmp_path / "two.told").read_text()
        assert f"runs another topology (here {differs} computation more): bring the same code to all" in said

    several = Several(system, uri, tmp_path, 5)
    bring("more", "one")
    bring("", "two")
    start("one")
    several.computes("one")
    ends(start("two"), "without")
    several.feed(0, 8)
    several.computes("one")
    bring("more", "two")
    two = start("two")
    several.computes("one", "two")
    (tmp_path / "mine.py").write_text("half edited, and not deployed")
    system.signal("two", signal.SIGKILL)
    several.computes("one")
    several.feed(8, 10)
    (tmp_path / "mine.py").write_text(OF_MACHINE)
    two.communicate()
    two = start("two")
    several.computes("one", "two")
    bring("", "one", "two")
    system.ask("deploy", "--work", "two")
    wait_until(lambda: "more" not in system.status("one")["graph"])
    several.computes("one", "two")
    several.feed(10, 16)
    bring("more", "one")
    system.ask("deploy", "--work", "one")
    ends(two, "without")
    several.computes("one")
    several.feed(16, 30)
    assert "two runs another topology, and has no part" in (tmp_path / "one.told").read_text()


GARBAGE = (
    b"GET / HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00" + bytes(600),
    *[(3).to_bytes(4, "little") + bytes((kind,)) + b"abc" for kind in range(20)],
    *[(1).to_bytes(4, "little") + bytes((kind,)) + b"\x80" for kind in range(20)],
    (1 << 29).to_bytes(4, "little") + b"\x01" + bytes(4 << 20),
    (1 << 31).to_bytes(4, "little") + b"\x01",
    (5).to_bytes(4, "little") + bytes((links.HELLO,)) + links.pack([9, 9]) + b"\0\0",
    (3).to_bytes(4, "little") + bytes((links.HELLO,)) + links.pack([9, 9]),
    (5).to_bytes(4, "little") + bytes((links.BEGINS,)) + links.pack([9, 9, 9, {}]),
)


@pytest.mark.long
@pytest.mark.parametrize("tls", [pytest.param(False, marks=pytest.mark.soak), True])
def test_strangers_bytes_on_any_port_end_nothing_but_their_connection(uri, system, tmp_path, tls):
    several = Several(system, uri, tmp_path, 9)
    if not tls:
        several.config.write_text("")
    several.start("one", "--follow")
    several.computes("one")
    port = int(several.addresses["one"].rpartition(":")[2])
    silent = [socket.create_connection(("127.0.0.1", port + at)) for at in range(3)]
    for at in range(3):
        for garbage in GARBAGE:
            with socket.create_connection(("127.0.0.1", port + at)) as stranger:
                stranger.settimeout(20)
                with contextlib.suppress(ConnectionError):
                    stranger.sendall(garbage)
                    with contextlib.suppress(OSError):  # it was closed meanwhile
                        stranger.shutdown(socket.SHUT_WR)
                    while stranger.recv(1 << 16):
                        pass
    several.feed(0, 2)
    assert system.status("one")["restarts"] == 0
    for stranger in silent:
        with stranger:
            stranger.settimeout(30)
            assert stranger.recv(1) == b""


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_failover_of_the_database_later_than_all_leases_ends_no_machine(pair, system, tmp_path):
    """Nor is anybody refused who was there before, though no standby confirms any more."""
    several = Several(system, pair.uri.format("schema=run"), tmp_path, 6)
    runs = [several.start(name, "--follow") for name in ("one", "two")]
    several.computes("one", "two")
    several.feed(0, 10)
    pair.first.kill()
    time.sleep(LEASE_S + 2)
    pair.second.promote()
    several.feed(10, 20)
    system.signal("two", signal.SIGKILL)
    several.computes("one")
    several.feed(20, 30)
    assert runs[0].poll() is None
    runs[0].send_signal(signal.SIGTERM)
    assert runs[0].wait(30) == 0
    several.uris = [f"{pair.second.uri}?schema=run&{LOSES}"]
    several.finish("one", "two")


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_state_is_in_several_servers_one_of_which_is_gone_for_a_while(server, system, tmp_path):
    several = Several(system, "", tmp_path, 7)
    with contextlib.closing(Postgresql(need_server())) as second:
        schema = f"s{uuid.uuid4().hex}"
        stores = several.uris = [f"{one.uri}?schema={schema}&{LOSES}" for one in (server, second)]
        several.start("one", "--follow", workers=1)
        several.start("two", "--follow", workers=2)
        several.computes("one", "two", workers=4)  # as many of each store
        several.feed(0, 10)
        second.kill()
        several.write(10, 20)
        time.sleep(3)
        second.start()
        several.feed(20, 20)
        system.signal("one", signal.SIGKILL)
        several.computes("two", workers=2)
        several.feed(20, 30)
        system.signal("two", signal.SIGTERM)
        wait_until(lambda: not [*system.processes("two")])
        for one in (server, second):
            with psycopg.connect(one.uri) as connection:
                (rows,) = connection.execute(f"SELECT count(*) FROM {schema}.rows").fetchone()
                assert rows > 100
        where = [word for uri in reversed(stores) for word in ("--store", uri)]
        assert "is store 2 of 2: give the same ones" in system.refused("run", HELD, "--work", "one", *where)
        assert "is store 1 of 2" in system.refused("run", HELD, "--work", "one", "--store", stores[0])
        several.finish("two")


@pytest.mark.long
def test_what_can_not_be_on_several_machines_is_refused(uri, system, tmp_path):
    where = ("--work", "one", "--machine", "127.0.0.1:7400")
    assert "name it by --store" in system.refused("run", HELD, *where)
    assert 'sinks "dead-letters": LogSink' in system.refused("run", NAME, *where, "--store", uri)
    pushed = "tests.millwheel.topologies:PUSHED"
    assert "leave --machine out" in system.refused("run", pushed, *where, "--store", uri)
    where = ("--work", "one", "--store", uri, "--machine")
    assert "the next 2 ports" in system.refused("run", HELD, *where, "127.0.0.1:65534", "--workers", "2")
    assert "without TLS" in system.refused("run", HELD, *where, "0.0.0.0:7400")
    assert "--machine: 'x' is no address" in system.refused("run", HELD, *where, "x")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        assert "can't be listened on (Address already in use" in system.refused("run", HELD, *where, address)
