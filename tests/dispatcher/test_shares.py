"""Shares of the foreign logs move between dispatchers: nothing is lost, doubled or counted twice."""

import json
import random
import shutil
import threading

import pytest

from dispatcher.server import DispatcherServer
from dispatcher.shares import Place, Shares, Want
from dispatcher.worker import Site
from dispatcher.workers import worker_of
from photon.core.clock import SteadyClock, SystemClock
from photon.core.errors import CorruptStateError, LockedError, UnavailableError
from photon.core.fates import Joined
from photon.raft.rules.placement import MEMBER_LEASE_S
from tests.dispatcher.fakes import adds_up, click_number, clicks, fast_settings
from tests.dispatcher.placing import GROUP, PlacingRegistry
from tests.waiting import wait_until

SHARES = 4


class Machines:
    """Dispatchers of one datacenter, each with a disk of its own, over the same logs."""

    def __init__(self, site):
        self.site = site
        self.registry = site.joiner.registry = PlacingRegistry()
        self.running = {}
        self.lives = 0
        self.apart = False
        """Whether each has a disk of its own for dead letters, too."""

    def start(self, name, settings=None):
        self.lives += 1
        number = ord(name) - ord("a")
        site = Site(
            settings=settings or fast_settings(),
            datacenter="dc0",
            directory=self.disk(name),
            number=number,
            patterns=[str(self.site.logs / "*.jsonl"), str(self.site.logs / "*.gz")],
            dead_letters=self.letters_at(name),
            registry=self.registry,
            joiner=self.site.joiner,
            clock=SteadyClock(SystemClock()),
            rng=random.Random(self.lives),
        )
        place = Place(GROUP, name, self.lives, f"{name}:1", SHARES)
        server = DispatcherServer(site, name, "127.0.0.1:0", place=place)
        server.start()
        self.running[name] = server
        return server

    def disk(self, name):
        return self.site.root / f"disk-{name}"

    def letters_at(self, name):
        return self.disk(name) / "letters" if self.apart else self.site.dead_letters

    def letters(self, name):
        """The dead letters on its disk: by file and offset, ascending."""
        lines = b"".join(path.read_bytes() for path in self.letters_at(name).iterdir()).splitlines()
        return sorted((letter["file"], letter["offset"]) for letter in map(json.loads, lines))

    def stop(self, name):
        self.running.pop(name).stop()

    def own(self, *names):
        """Each of these has some of the shares, and runs them; nobody else has any."""
        owners = self.registry.owners()
        runs = sum(len(server._shares.status()) for server in self.running.values())
        running = all(
            one["runs"] for server in self.running.values() for one in server._shares.status().values()
        )
        return set(owners) == set(names) and runs == SHARES and running

    def counted(self):
        """Sums over all that run."""
        statuses = [server.status() for server in self.running.values()]
        assert all(map(adds_up, statuses))
        fates = {fate: sum(one["fates"][fate] for one in statuses) for fate in statuses[0]["fates"]}
        return {
            "events": sum(one["foreign_events"] for one in statuses),
            "pending": sum(one["pending"] for one in statuses),
            **{fate: count for fate, count in fates.items() if count},
        }

    def files(self, name):
        """Logs that are not forgotten."""
        return [log for worker in self.running[name]._shares.workers for log in worker.ledger.files()]

    def kept(self):
        """Whether all that is decided is kept in the registry, too."""
        return all(
            not keeper.worker or keeper.worker.book.rows()[0] == keeper._kept
            for server in self.running.values()
            for keeper in server._shares._keepers.values()
        )


@pytest.fixture
def machines(site, monkeypatch):
    monkeypatch.setattr("dispatcher.shares.BEAT_EVERY_S", 0.05)
    monkeypatch.setattr("dispatcher.shares.CHECKPOINT_EVERY_S", 0.05)
    # Before others get what it has, as with the real lease.
    monkeypatch.setattr("dispatcher.shares.MEMBER_LEASE_S", 0.7)
    made = Machines(site)
    yield made
    made.registry.unheard.clear()
    for name in list(made.running):
        made.stop(name)


def log(site, share, low, high, name=None):
    """Events in a log of that share; its path."""
    for n in range(1000):
        path = site.logs / (name or f"{share}-{n}.jsonl")
        if name or worker_of(str(path), SHARES) == share:
            break
    with path.open("ab") as file:
        file.write(clicks(low, high))
    return path


def late_primaries(site):
    """Each tenth event waits until its number is put into the set."""
    there = set()

    def answer(line, _tries):
        number = click_number(line)
        return (Joined.JOINED if number % 10 or number in there else Joined.RETRY_ABSENT), None

    site.joiner.answer = answer
    return there


def test_each_share_is_read_by_one_and_a_second_dispatcher_gets_its_part(machines, site):
    for share in range(SHARES):
        log(site, share, 100 * share, 100 * share + 100)
    machines.start("a")
    wait_until(lambda: machines.own("a"))
    wait_until(lambda: machines.counted() == {"events": 400, "pending": 0, "joined": 400})
    machines.start("b")
    wait_until(lambda: sorted(map(machines.registry.owners().count, "ab")) == [2, 2])
    wait_until(lambda: machines.own("a", "b"))
    for share in range(SHARES):
        log(site, share, 1000 + 100 * share, 1000 + 100 * share + 100)
    wait_until(lambda: machines.counted() == {"events": 800, "pending": 0, "joined": 800})
    assert max(site.joiner.handed.values()) == 1, "nothing was read twice"


def test_one_that_stops_hands_over_just_what_it_had(machines, site):
    there = late_primaries(site)
    machines.start("a")
    machines.start("b")
    wait_until(lambda: machines.own("a", "b"))
    for share in range(SHARES):
        log(site, share, 100 * share, 100 * share + 100)
    wait_until(lambda: machines.counted() == {"events": 400, "pending": 40, "joined": 360})
    machines.stop("a")
    wait_until(lambda: machines.own("b"))
    assert machines.counted() == {"events": 400, "pending": 40, "joined": 360}
    there.update(range(400))
    wait_until(lambda: machines.counted() == {"events": 400, "pending": 0, "joined": 400})
    assert max(site.joiner.joined.values()) == 1


def test_a_machine_that_is_lost_with_its_disk_costs_no_event_and_no_count(machines, site):
    there = late_primaries(site)
    machines.start("a")
    wait_until(lambda: machines.own("a"))
    for share in range(SHARES):
        path = log(site, share, 100 * share, 100 * share + 100)
        with path.open("ab") as file:
            file.write(b"no event\n")
    expected = {"events": 404, "pending": 40, "joined": 360, "malformed": 4}
    wait_until(lambda: machines.counted() == expected)
    wait_until(machines.kept)
    # Cut off, it goes on with what it has for a moment; nobody hears of it.
    machines.registry.unheard.add("a")
    lost = machines.running.pop("a")
    machines.start("b")
    wait_until(lambda: machines.own("b"))
    assert machines.counted() == expected
    there.update(range(400))
    wait_until(lambda: machines.counted() == expected | {"pending": 0, "joined": 400})
    assert max(site.joiner.joined.values()) == 1
    lost.stop()
    shutil.rmtree(machines.disk("a"))
    machines.registry.unheard.clear()
    machines.start("a")
    wait_until(lambda: machines.own("a", "b"))
    assert machines.counted() == expected | {"pending": 0, "joined": 400}


def test_shares_that_come_before_the_start_is_over_are_worked_on_once(machines, monkeypatch):
    start = Shares.start

    def start_and_see(shares):
        start(shares)
        wait_until(lambda: shares.workers)

    monkeypatch.setattr(Shares, "start", start_and_see)
    machines.start("a")
    wait_until(lambda: machines.own("a"))


@pytest.mark.parametrize("apart", [False, True], ids=["one disk", "disks of their own"])
def test_dead_letters_are_told_once_by_who_has_the_share(machines, site, apart):
    machines.apart = apart
    machines.start("a")
    wait_until(lambda: machines.own("a"))
    expected = []
    for share in range(SHARES):
        path = log(site, share, 100 * share, 100 * share + 10)
        expected += [(str(path), path.stat().st_size + 9 * n) for n in range(3)]
        with path.open("ab") as file:
            file.write(b"no event\n" * 3)
    wait_until(lambda: machines.counted() == {"events": 52, "pending": 0, "joined": 40, "malformed": 12})
    wait_until(machines.kept)
    machines.registry.unheard.add("a")
    lost = machines.running.pop("a")
    machines.start("b")
    wait_until(lambda: machines.own("b"))
    assert machines.letters("b") == sorted(expected)
    lost.stop()
    machines.registry.unheard.clear()
    machines.start("a")  # with what was on its disk
    wait_until(lambda: machines.own("a", "b"))
    assert machines.letters("a") == sorted(expected)
    machines.stop("b")
    wait_until(lambda: machines.own("a"))
    assert machines.letters("a") == sorted(expected)
    shutil.rmtree(machines.disk("b"))
    machines.start("b")
    wait_until(lambda: machines.own("a", "b"))
    of_b = {str(share) for share, keeper in machines.running["b"]._shares._keepers.items()}
    moved = [place for place in expected if str(worker_of(place[0], SHARES)) in of_b]
    assert machines.letters("b") == sorted(moved if apart else expected)


def test_a_share_that_is_to_go_before_it_was_taken_up_goes(machines, site, monkeypatch):
    registry, write = machines.registry, machines.registry.write_share
    gate, waiting = threading.Event(), set()

    def slow(group, share, *more, read=False, **named):
        if read and not gate.is_set():
            waiting.add(share)
            gate.wait(30)
        return write(group, share, *more, read=read, **named)

    monkeypatch.setattr(registry, "write_share", slow)
    machines.start("a")
    wait_until(lambda: len(waiting) == SHARES)
    machines.start("b")
    keepers = list(machines.running["a"]._shares._keepers.values())
    wait_until(lambda: [keeper._wanted for keeper in keepers].count(Want.RELEASE) == 2)
    gate.set()
    wait_until(lambda: machines.own("a", "b"))


def test_what_was_decided_since_the_last_checkpoint_is_read_again_and_counted_once(
    machines, site, monkeypatch
):
    machines.start("a")
    wait_until(lambda: machines.own("a"))
    log(site, 0, 0, 100)
    wait_until(lambda: machines.counted()["events"] == 100)
    wait_until(machines.kept)
    monkeypatch.setattr(machines.registry, "write_share", _unheard_writes(machines.registry, "a"))
    path = log(site, 0, 100, 150, name=next(site.logs.iterdir()).name)
    with path.open("ab") as file:
        file.write(b"no event\n")
    wait_until(lambda: machines.counted()["events"] == 151)
    machines.registry.unheard.add("a")
    lost = machines.running.pop("a")
    machines.start("b")
    wait_until(lambda: machines.own("b"))
    expected = {"events": 151, "pending": 0, "joined": 100, "duplicate": 50, "malformed": 1}
    wait_until(lambda: machines.counted() == expected)
    assert max(site.joiner.joined.values()) == 1
    lost.stop()
    assert len(machines.letters("b")) == 1


def _unheard_writes(registry, name):
    write = registry.write_share

    def call(group, share, *more, **named):
        if registry.state.groups[group].shares[share].owner == name:
            raise UnavailableError("lost")
        return write(group, share, *more, **named)

    return call


def test_one_that_comes_back_forgets_what_others_have_gone_on_with(machines, site):
    machines.start("a")
    wait_until(lambda: machines.own("a"))
    log(site, 0, 0, 100)
    wait_until(lambda: machines.counted()["events"] == 100)
    wait_until(machines.kept)
    machines.registry.unheard.add("a")
    machines.start("b")
    b_owns = lambda: set(machines.registry.owners()) == {"b"}  # noqa: E731
    wait_until(b_owns)
    machines.registry.unheard.clear()
    wait_until(lambda: machines.own("a", "b"))
    wait_until(lambda: machines.counted() == {"events": 100, "pending": 0, "joined": 100})
    log(site, 0, 100, 200, name=next(site.logs.iterdir()).name)
    wait_until(lambda: machines.counted()["events"] == 200)
    assert max(site.joiner.joined.values()) == 1


def missed(machines, name):
    """It stands still for longer than its lease; then it is heard again."""
    machines.registry.unheard.add(name)

    def is_missed():
        machines.registry.settle(GROUP)
        return name not in machines.registry.owners()

    wait_until(is_missed)
    machines.registry.unheard.clear()


@pytest.mark.parametrize("restarts", [False, pytest.param(True, marks=pytest.mark.soak)])
@pytest.mark.long
def test_one_that_stood_still_keeps_the_events_that_wait_though_their_log_is_gone(machines, site, restarts):
    there = late_primaries(site)
    machines.start("a")
    wait_until(lambda: machines.own("a"))
    path = log(site, 0, 0, 100)
    with path.open("ab") as file:
        file.write(b"no event\n")
    expected = {"events": 101, "pending": 10, "joined": 90, "malformed": 1}
    wait_until(lambda: machines.counted() == expected)
    path.unlink()
    wait_until(lambda: machines.files("a") == [])
    wait_until(machines.kept)
    if restarts:
        machines.stop("a")
        machines.start("a")
        wait_until(lambda: machines.own("a"))
    for _ in range(2):
        missed(machines, "a")
        wait_until(lambda: machines.own("a"))
        assert machines.counted() == expected
    assert len(machines.letters("a")) == 1
    there.update(range(100))
    wait_until(lambda: machines.counted() == expected | {"pending": 0, "joined": 100})
    assert max(site.joiner.joined.values()) == 1


@pytest.mark.long
def test_a_write_whose_answer_was_lost_is_known_as_its_own(machines, site, monkeypatch):
    there = late_primaries(site)
    machines.start("a")
    wait_until(lambda: machines.own("a"))
    first = log(site, 0, 0, 100)
    wait_until(lambda: machines.counted() == {"events": 100, "pending": 10, "joined": 90})
    wait_until(machines.kept)
    machines.stop("a")
    machines.start("a")
    wait_until(lambda: machines.own("a"))
    write, lost = machines.registry.write_share, set()

    def unanswered(group, share, sequencer, rows, *more, **named):
        done = write(group, share, sequencer, rows, *more, **named)
        if rows:
            lost.add(share)
            raise UnavailableError("the answer is lost")
        return done

    with monkeypatch.context() as patched:
        patched.setattr(machines.registry, "write_share", unanswered)
        second = log(site, 0, 100, 200, name="0-again.jsonl")
        while worker_of(str(second), SHARES):
            second = second.rename(second.with_name(f"x{second.name}"))
        wait_until(lambda: machines.counted() == {"events": 200, "pending": 20, "joined": 180} and lost)
        first.unlink()
        second.unlink()
        wait_until(lambda: machines.files("a") == [])
        missed(machines, "a")
    wait_until(lambda: machines.own("a"))
    assert machines.counted() == {"events": 200, "pending": 20, "joined": 180}
    there.update(range(200))
    wait_until(lambda: machines.counted() == {"events": 200, "pending": 0, "joined": 200})


@pytest.mark.long
def test_events_that_wait_of_a_log_that_is_gone_are_not_taken_for_those_of_the_next_one(machines, site):
    there = late_primaries(site)
    machines.start("a")
    wait_until(lambda: machines.own("a"))
    path = log(site, 0, 100, 200)
    wait_until(lambda: machines.counted() == {"events": 100, "pending": 10, "joined": 90})
    path.unlink()
    wait_until(lambda: machines.files("a") == [])
    machines.stop("a")
    machines.start("a")
    wait_until(lambda: machines.own("a"))
    log(site, 0, 200, 300, name=path.name)
    wait_until(lambda: machines.counted() == {"events": 200, "pending": 20, "joined": 180})
    wait_until(machines.kept)
    machines.stop("a")
    shutil.rmtree(machines.disk("a"))
    machines.start("b")
    wait_until(lambda: machines.own("b"))
    assert machines.counted() == {"events": 190, "pending": 10, "joined": 180}
    there.update(range(300))
    wait_until(lambda: machines.counted() == {"events": 190, "pending": 0, "joined": 190})
    assert max(site.joiner.joined.values()) == 1


def test_a_restart_goes_on_with_what_is_on_its_disk(machines, site):
    machines.start("a")
    wait_until(lambda: machines.own("a"))
    for share in range(SHARES):
        log(site, share, 100 * share, 100 * share + 100)
    wait_until(lambda: machines.counted()["events"] == 400)
    wait_until(machines.kept)
    before = {share: (machines.disk("a") / f"worker-{share}" / "ledger").stat().st_ino for share in range(4)}
    machines.stop("a")
    machines.start("a")
    wait_until(lambda: machines.own("a"))
    assert machines.counted() == {"events": 400, "pending": 0, "joined": 400}
    after = {share: (machines.disk("a") / f"worker-{share}" / "ledger").stat().st_ino for share in range(4)}
    assert before == after
    assert max(site.joiner.handed.values()) == 1


def test_too_much_to_be_kept_is_told_and_keeps_nobody_from_working(machines, site):
    machines.registry.refuse_rows = True
    server = machines.start("a")
    wait_until(lambda: machines.own("a"))
    log(site, 0, 0, 100)
    wait_until(lambda: machines.counted()["events"] == 100)
    wait_until(lambda: all(one["trouble"] for one in server.status()["shares"].values()))
    machines.registry.refuse_rows = False
    wait_until(lambda: not any(one["trouble"] for one in server.status()["shares"].values()))


def test_who_cannot_reach_the_registry_rests_until_it_can(machines, site, monkeypatch):
    monkeypatch.setattr("dispatcher.shares.MEMBER_LEASE_S", 0.5)
    machines.registry.lease_s = MEMBER_LEASE_S * 100
    server = machines.start("a")
    wait_until(lambda: machines.own("a"))
    machines.registry.unheard.add("a")
    wait_until(lambda: not [worker for worker in server._workers if worker.number < SHARES])
    log(site, 0, 0, 100)
    machines.registry.unheard.clear()
    wait_until(lambda: machines.own("a"))
    wait_until(lambda: machines.counted()["events"] == 100)


def test_a_worker_that_fails_ends_the_dispatcher_also_while_nobody_hears_it(machines, site):
    server = machines.start("a")
    wait_until(lambda: machines.own("a"))
    machines.registry.unheard.add("a")
    [inbox] = [worker for worker in server._workers if worker.number == SHARES]
    inbox.driver.failure = CorruptStateError("its ledger is damaged")
    with pytest.raises(CorruptStateError, match="damaged"):
        wait_until(lambda: server.wait(0.1))
    machines.registry.unheard.clear()


def test_one_whose_inbox_is_damaged_ends_and_keeps_no_share_from_the_others(machines, site):
    """It would own shares, and none of them would be read."""
    machines.start("a")
    wait_until(lambda: machines.own("a"))
    machines.stop("a")
    (inbox,) = machines.disk("a").glob(f"worker-{SHARES}")
    (inbox / "ledger" / "data.mdb").write_bytes(b"U" * 65536)
    server = machines.start("a")
    with pytest.raises(CorruptStateError, match="ledger"):
        wait_until(lambda: server.wait(0))
    machines.stop("a")
    log(site, 0, 0, 100)
    machines.start("b")
    wait_until(lambda: machines.own("b"))


def test_one_that_is_started_twice_in_one_directory_is_refused_and_the_first_goes_on(machines, site):
    machines.start("a")
    wait_until(lambda: machines.own("a"))
    first = machines.running["a"]
    with pytest.raises(LockedError, match="another process works in this directory"):
        machines.start("a")
    log(site, 0, 0, 100)
    wait_until(lambda: first.status()["foreign_events"] == 100)


def test_a_second_life_of_one_name_ends_the_first(machines, site):
    first = machines.start("a")
    wait_until(lambda: machines.own("a"))
    machines.registry.beat(GROUP, "a", 99, "a:1", SHARES)
    with pytest.raises(Exception, match="life"):
        wait_until(lambda: first.wait(0.1))
    machines.registry.drain(GROUP, "a", 99)
