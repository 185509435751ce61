"""Several workers over one ledger, in a simulated world of files, deaths, sleeps and the clock."""

import dataclasses
import random

import numpy as np
import pytest

from dispatcher.adoption import adopt
from dispatcher.claims import FileClaims
from dispatcher.counts import all_read
from dispatcher.ledger import Entry, Group, Ledger
from dispatcher.membership import Membership
from dispatcher.retries import RetryQueue
from dispatcher.retry_entries import pack_keys, pack_values
from dispatcher.rows import LedgerFile
from dispatcher.totals import Totals
from photon.core.clock import ManualClock
from photon.core.errors import FencedError, LockedError
from photon.core.fates import Fate
from photon.core.histogram import BUCKETS
from photon.logs.files import FileState, SeenFile
from tests.dispatcher.fakes import some_events
from tests.seeds import seeds

LEASE_S = 6.0
WORKERS = 4


def totals(events: int, **fates: int) -> Totals:
    return Totals(events, {Fate(name): count for name, count in fates.items()}, 0, [0] * BUCKETS)


class World:
    """Files that grow by events (an event is a byte), and a directory that workers share."""

    def __init__(self, root) -> None:
        self.root = root
        self.clock = ManualClock()
        self.file = LedgerFile(root / "state", 1 << 26)
        self.sizes: dict[tuple[int, int], int] = {}
        self.hidden: set[tuple[int, int]] = set()

    def add_file(self, inode: int, size: int = 0) -> tuple[int, int]:
        self.sizes[1, inode] = size
        return 1, inode

    def seen(self) -> list[SeenFile]:
        return [
            SeenFile(f"/logs/{inode}", f"/logs/{inode}", device, inode, size, source=(device, inode))
            for (device, inode), size in sorted(self.sizes.items())
            if (device, inode) not in self.hidden
        ]

    def states(self) -> list[FileState]:
        with self.file.read() as rows:
            return rows.files()

    def counted(self) -> int:
        with self.file.read() as rows:
            return rows.known_state().totals.foreign_events

    def waiting(self) -> int:
        with self.file.read() as rows:
            return rows.waiting()


class Worker:
    """A worker's threads as steps; its follower and reader as a dict."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.group = Group(WORKERS, LEASE_S, world.clock, name)
        self.ledger = Ledger(world.root / "state", world.root / "dead", 1 << 26, self.group, world.file)
        self.claims = FileClaims(self.ledger)
        self.notices: list[str] = []
        self.membership = Membership(self.ledger, self.group, self.notices.append)
        self.files = {state.source: state for state in self.ledger.files()}
        self.leaving: frozenset[int] = frozenset()
        self.unrecorded: dict[tuple[int, int], int] = {}
        self.keys: list[bytes] = []

    def scan(self) -> None:
        share = self.claims.share(self.world.seen())
        for state in share.taken:
            self.files[state.source] = state
        self.leaving = share.leave
        for file in self.world.seen():
            if file.source in share.mine and file.source not in self.files:
                self.files[file.source] = FileState(
                    self.claims.number(), file.path, file.name, file.device, file.inode, source=file.source
                )
                self.unrecorded.setdefault(file.source, 0)

    def read(self, rng: random.Random) -> None:
        for source, state in self.files.items():
            if state.number not in self.leaving:
                start = state.offset + self.unrecorded.get(source, 0)
                left = self.world.sizes[source] - start
                if left > 0:
                    more = rng.randint(1, left)
                    self.unrecorded[source] = self.unrecorded.get(source, 0) + more

    def record(self, waits: int = 0) -> None:
        """All that was read: `waits` of the events wait for a retry, the others are joined."""
        states = [
            dataclasses.replace(self.files[source], offset=self.files[source].offset + count)
            for source, count in self.unrecorded.items()
        ]
        count = sum(self.unrecorded.values())
        waits = min(waits, count)
        entry = Entry(
            states,
            totals(count, joined=count - waits),
            retries_due=lambda sequence: pack_keys(np.full(waits, 5), sequence, self.ledger.slot),
            retries=pack_values(some_events(waits)),
        )
        self.keys += self.ledger.record(entry)
        self.files |= {state.source: state for state in states}
        self.unrecorded.clear()
        self.release()

    def retried(self) -> None:
        keys, self.keys = self.keys, []
        self.ledger.record(Entry([], totals(0, joined=len(keys)), retries_removed=keys))

    def release(self) -> None:
        idle = [n for n in self.leaving if not any(self.files[s].number == n for s in self.unrecorded)]
        if idle:
            self.claims.release(idle)
            self.files = {s: state for s, state in self.files.items() if state.number not in idle}
            self.leaving -= set(idle)

    def tick(self) -> None:
        while keys := self.membership.tick():
            self.keys += keys

    def die(self) -> None:
        """As a kill does: only the locks go."""
        self.ledger._let_go()


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    yield world
    world.file.close()


def round_of(workers, rng) -> None:
    for worker in workers:
        worker.tick()
        worker.scan()
        worker.read(rng)
        worker.record()


def holders(workers) -> dict:
    held = {}
    for worker in workers:
        for source in worker.files:
            assert source not in held, "two workers hold a file"
            held[source] = worker.ledger.slot
    return held


def test_files_are_shared_out_and_read_once(world):
    for inode in range(40):
        world.add_file(inode, 10)
    rng = random.Random(1)
    workers = [Worker(world, f"d{n}") for n in range(3)]
    for _ in range(4):
        round_of(workers, rng)
    held = holders(workers)
    assert len(held) == 40 and set(held.values()) == {0, 1, 2}
    for _ in range(10):
        round_of(workers, rng)
    assert world.counted() == 400


def test_a_worker_that_comes_gets_its_share_and_one_that_goes_leaves_it(world):
    for inode in range(40):
        world.add_file(inode, 5)
    rng = random.Random(2)
    first = Worker(world, "d0")
    for _ in range(3):
        round_of([first], rng)
    assert len(holders([first])) == 40
    second = Worker(world, "d1")
    for _ in range(3):
        round_of([first, second], rng)
    held = holders([first, second])
    assert len(held) == 40 and 10 < len(second.files) < 30
    second.ledger.close()
    for _ in range(3):
        round_of([first], rng)
    assert len(first.files) == 40
    for _ in range(10):
        round_of([first], rng)
    assert world.counted() == 200


def test_nothing_of_a_file_is_handed_over_before_what_was_read_of_it_is_recorded(world):
    for inode in range(10):
        world.add_file(inode, 100)
    rng = random.Random(3)
    first = Worker(world, "d0")
    first.scan()
    first.record()
    first.read(rng)  # under way
    second = Worker(world, "d1")
    for _ in range(3):
        first.scan()
        first.release()
        second.scan()
    assert second.files == {}
    first.record()
    second.scan()
    assert second.files and all(state.offset > 0 for state in second.files.values())
    holders([first, second])


def test_a_dead_workers_files_go_on_where_it_had_recorded_within_a_scan(world):
    for inode in range(20):
        world.add_file(inode, 50)
    rng = random.Random(4)
    first, second = Worker(world, "d0"), Worker(world, "d1")
    for _ in range(3):
        round_of([first, second], rng)
    offsets = {state.source: state.offset for state in world.states()}
    lost = set(first.files)
    first.read(rng)  # and never recorded
    first.die()
    second.tick()
    second.scan()
    assert lost <= second.files.keys()
    assert all(second.files[source].offset == offsets[source] for source in lost)
    assert any("d0" in notice for notice in second.notices)


def test_one_that_stood_still_longer_than_its_lease_records_nothing_and_leaves_no_dead_letters(world):
    for inode in range(20):
        world.add_file(inode, 50)
    rng = random.Random(5)
    zombie, second = Worker(world, "d0"), Worker(world, "d1")
    for _ in range(3):
        round_of([zombie, second], rng)
    zombie.read(rng)
    before = world.counted()
    for _ in range(8):
        world.clock.advance(LEASE_S / 4)
        second.tick()
    assert world.counted() == before
    second.scan()
    assert len(second.files) == 20
    for act in (
        zombie.record,
        zombie.scan,
        zombie.tick,
        zombie.retried,
        lambda: zombie.claims.release([0]),
        lambda: zombie.ledger.record(Entry([], totals(1, filtered=1), b"letter\n")),
    ):
        with pytest.raises(FencedError, match="taken over its slot 0"):
            act()
    assert world.counted() == before
    assert (world.root / "dead" / "foreign-000000.jsonl").read_bytes() == b""
    while world.counted() < 1000:
        round_of([second], rng)
    assert world.counted() == 1000


def test_one_that_was_only_kept_waiting_is_not_taken_for_dead(world):
    first, second = Worker(world, "d0"), Worker(world, "d1")
    world.clock.advance(LEASE_S + 1)  # a stopped writer, say, held both up
    second.tick()
    first.tick()
    for _ in range(20):
        world.clock.advance(LEASE_S / 5)
        second.tick()
        first.tick()
    assert first.notices == second.notices == []


def test_retries_of_the_dead_are_adopted_by_one_worker_and_the_counts_add_up(world):
    world.add_file(1, 30), world.add_file(2, 30)
    rng = random.Random(6)
    first = Worker(world, "d0")
    first.scan()
    first.read(rng)
    first.record(waits=20)
    waiting = world.waiting()
    first.die()
    second, third = Worker(world, "d0 again"), Worker(world, "d1")
    assert second.ledger.slot == 0, "the slot is free: a new worker goes on with its queue"
    assert second.ledger.retries_from(b"", lambda _: True, 1 << 30)
    second.die()
    third.tick()
    assert len(third.keys) == waiting == world.waiting()
    assert {key[:2] for key in third.keys} == {b"\0\1"}
    third.retried()
    assert world.waiting() == 0


def test_dead_letters_of_each_slot_are_cut_to_what_was_counted(world):
    first, second = Worker(world, "d0"), Worker(world, "d1")
    first.ledger.record(Entry([], totals(1, filtered=1), b"a\n"))
    second.ledger.record(Entry([], totals(1, filtered=1), b"b\n"))
    dead = world.root / "dead"
    assert sorted(p.name for p in dead.iterdir()) == ["foreign-000000.jsonl", "foreign-w1-000000.jsonl"]
    with (dead / "foreign-w1-000000.jsonl").open("ab") as file:
        file.write(b"not counted\n")
    second.die()
    first.tick()
    assert (dead / "foreign-w1-000000.jsonl").read_bytes() == b"b\n"
    with (dead / "foreign-000000.jsonl").open("ab") as file:
        file.write(b"not counted\n")
    first.die()
    again = Worker(world, "d0")
    again.ledger.record(Entry([], totals(1, filtered=1), b"c\n"))
    assert (dead / "foreign-000000.jsonl").read_bytes() == b"a\nc\n"


def test_no_more_workers_than_the_settings_say_and_none_beside_one_alone(world):
    workers = [Worker(world, f"d{n}") for n in range(WORKERS)]
    assert [worker.ledger.slot for worker in workers] == list(range(WORKERS))
    with pytest.raises(LockedError, match=r"dispatcher\.workers"):
        Worker(world, "one too many")
    with pytest.raises(LockedError):
        Ledger(world.root / "state", world.root / "dead", 1 << 26, None, world.file)


def test_one_alone_takes_everything_that_several_have_left(world):
    for inode in range(10):
        world.add_file(inode, 10)
    rng = random.Random(7)
    workers = [Worker(world, f"d{n}") for n in range(3)]
    round_of(workers, rng)
    for worker in workers:
        worker.scan()
        worker.read(rng)
        worker.record(waits=3)
    waiting = world.waiting()
    workers[0].ledger.close()
    workers[1].die()
    workers[2].die()
    alone = Ledger(world.root / "state", world.root / "dead", 1 << 26, None, world.file)
    keys = []
    while more := adopt(alone):
        keys += more
    assert len(alone.files()) == len({state.source for state in world.states()})
    assert len(keys) + len(alone.retries_from(b"", lambda key: key not in set(keys), 1 << 30)) == waiting
    alone.close()


def test_a_renamed_file_stays_with_its_holder_and_goes_to_another_when_that_dies(world):
    sources = [world.add_file(inode, 50) for inode in range(20)]
    rng = random.Random(8)
    first = Worker(world, "d0")
    round_of([first], rng)
    world.hidden.add(sources[3])
    second = Worker(world, "d1")
    for _ in range(3):
        round_of([first, second], rng)
    assert sources[3] in first.files and second.files
    offset = first.files[sources[3]].offset
    first.die()
    second.tick()
    second.scan()
    assert second.files[sources[3]].offset == offset


def all_is_read(world) -> bool:
    with world.file.read() as rows:
        return all_read(rows)


def test_all_is_read_only_when_each_worker_has_rested_since_the_last_one_came_or_went(world):
    for inode in range(20):
        world.add_file(inode, 1)
    rng = random.Random(10)
    first = Worker(world, "d0")
    first.scan()
    second = Worker(world, "d1")
    first.claims.rest()
    assert first.ledger.worker.rested == -1, "it has not looked since the second came"
    for worker in (first, second):
        worker.scan()
        worker.record()
    for _ in range(3):
        round_of([first], rng)
    first.claims.rest()
    assert not all_is_read(world), "the second has not read its files, and nothing waits for a retry"
    for _ in range(3):
        round_of([second], rng)
    for worker in (first, second):
        worker.scan()
        worker.claims.rest()
    assert all_is_read(world) and world.counted() == 20
    world.add_file(100, 1), world.add_file(101, 1), world.add_file(102, 1)
    second.die()
    first.tick()
    assert not all_is_read(world), "what was the second's is to be looked through again"
    first.claims.rest()
    assert not all_is_read(world), "it has not looked yet"
    first.scan()
    first.claims.rest()
    assert all_is_read(world), "(its reader says that it has read all)"
    first.scan()
    first.read(rng)
    first.record()
    assert not all_is_read(world), "it has read something since"


def test_a_worker_retries_what_is_in_its_own_queue_alone(world):
    world.add_file(1, 9), world.add_file(2, 9)
    rng = random.Random(11)
    first = Worker(world, "d0")
    first.scan()
    first.read(rng)
    first.record(waits=3)
    second = Worker(world, "d1")
    second.ledger.record(
        Entry(
            [],
            totals(2),
            retries_due=lambda sequence: pack_keys(np.full(2, 5), sequence, second.ledger.slot),
            retries=pack_values(some_events(2)),
        )
    )
    mine, others = (RetryQueue(worker.ledger, 10, 1 << 20) for worker in (first, second))
    assert len(mine.take(10, 100).keys) == 3 and mine.take(10, 100) is None
    assert mine.next_due_us() is None
    assert len(others.take(10, 100).keys) == 2 and others.take(10, 100) is None


def test_files_on_a_device_that_has_another_number_after_a_reboot_are_read_on_by_who_starts(world):
    for inode in range(10):
        world.add_file(inode, 20)
    rng = random.Random(9)
    first = Worker(world, "d0")
    for _ in range(2):
        round_of([first], rng)
    offsets = {state.inode: state.offset for state in world.states()}
    assert any(offsets.values())
    first.ledger.close()
    world.sizes = {(2, inode): size for (_, inode), size in world.sizes.items()}
    second = Worker(world, "d0")
    share = second.claims.share(world.seen())
    assert share.mine == world.sizes.keys()
    assert {state.inode: state.offset for state in share.taken} == offsets


@seeds(10, 60, 200)
def test_whoever_comes_dies_or_sleeps_each_event_is_counted_once(world, seed):
    rng = random.Random(seed)
    for inode in range(12):
        world.add_file(1000 * seed + inode, rng.randint(0, 30))
    awake = [Worker(world, "first")]
    asleep: list[Worker] = []
    fenced = 0
    for step in range(150):
        dice = rng.random()
        if dice < 0.06 and len(awake) + len(asleep) < WORKERS:
            awake.append(Worker(world, "w"))
        elif dice < 0.09 and awake:
            awake.pop(rng.randrange(len(awake))).die()
        elif dice < 0.11 and awake:
            awake.pop(rng.randrange(len(awake))).ledger.close()
        elif dice < 0.14 and awake:
            asleep.append(awake.pop(rng.randrange(len(awake))))
        elif dice < 0.20 and asleep:
            awake.append(asleep.pop(rng.randrange(len(asleep))))
        elif dice < 0.25:
            world.sizes[rng.choice(sorted(world.sizes))] += rng.randint(1, 20)
        elif dice < 0.27:
            world.add_file(1000 * seed + 100 + step, rng.randint(0, 20))
        elif dice < 0.45:
            world.clock.advance(rng.random() * LEASE_S / 2)
        elif awake:
            worker = rng.choice(awake)
            act = rng.choice(
                [
                    worker.tick,
                    worker.tick,
                    worker.scan,
                    worker.scan,
                    lambda w=worker: w.read(rng),
                    lambda w=worker: w.record(rng.randint(0, 5)),
                    worker.release,
                    worker.retried,
                ]
            )
            try:
                act()
            except FencedError:
                fenced += 1
                worker.die()
                awake.remove(worker)
        assert world.counted() == sum(state.offset for state in world.states())
    for worker in asleep:
        worker.die()
    awake = [worker for worker in awake if _alive(worker)]
    if not awake:
        awake = [Worker(world, "last")]
    for _ in range(80):
        for worker in awake:
            worker.tick()
        world.clock.advance(LEASE_S / 10)
        round_of(awake, rng)
        for worker in awake:
            worker.retried()
    assert world.counted() == sum(world.sizes.values())
    for worker in awake:
        worker.keys = worker.keys + [
            key for key, _ in worker.ledger.retries_from(b"", lambda k, w=worker: k[:2] == w_slot(w), 1 << 30)
        ]
        worker.retried()
    assert world.waiting() == 0
    holders(awake)
    assert set(holders(awake)) == set(world.sizes)
    for worker in awake:
        worker.scan()
        worker.claims.rest()
    with world.file.read() as rows:
        assert all_read(rows)


def w_slot(worker: Worker) -> bytes:
    return worker.ledger.slot.to_bytes(2, "big")


def _alive(worker: Worker) -> bool:
    try:
        worker.tick()
    except FencedError:
        worker.die()
        return False
    return True
