"""Workers that share logs which are renamed, compressed, or copied and truncated: each line is read once."""

import gzip
import os
import random
from collections import Counter

import pytest

from dispatcher.assignment import owners
from dispatcher.claims import FileClaims
from dispatcher.counts import of_workers
from dispatcher.ledger import Entry, Group, Ledger
from dispatcher.membership import Membership
from dispatcher.rows import LedgerFile
from photon.core.clock import ManualClock
from photon.core.settings import Logs
from photon.logs.files import SeenFile
from photon.logs.follow import LogFollower
from photon.logs.inventory import Content
from tests.dispatcher.test_sharing import totals
from tests.logs.following import append
from tests.seeds import seeds

FILES = 16
LEASE_S = 1e6


class World:
    """Real files, a real ledger, and the lines that were read by anybody."""

    def __init__(self, root) -> None:
        self.root, self.logs = root, root / "logs"
        self.logs.mkdir()
        self.clock = ManualClock()
        self.file = LedgerFile(root / "state", 1 << 26)
        self.written = 0
        self.read: Counter[bytes] = Counter()
        self.workers: list[Sharer] = []

    def write(self, path, count=30) -> None:
        append(
            path, b"".join(b'{"line":%d,"pad":"%s"}\n' % (self.written + n, b"x" * 60) for n in range(count))
        )
        self.written += count

    def start(self, name) -> "Sharer":
        self.workers.append(Sharer(self, name))
        return self.workers[-1]

    def turn(self, workers=None, turns=1) -> None:
        for _ in range(turns):
            for worker in self.workers if workers is None else workers:
                worker.turn()

    def records(self):
        with self.file.read() as rows:
            return [state for state in rows.files() if not state.gone]

    def knows(self, path) -> bool:
        """Something of what stands there now is recorded."""
        status = path.stat()
        name, source = str(path), (status.st_dev, status.st_ino)
        content = Content(SeenFile(name, name, *source, status.st_size))
        return any(state.source == source and content.holds(state) for state in self.records())

    def counted(self) -> int:
        with self.file.read() as rows:
            return rows.known_state().totals.foreign_events

    def settled(self) -> None:
        """All is read, by whomever, and nothing twice."""
        self.turn(turns=12)
        assert len(self.read) == self.written
        assert [line for line, times in self.read.items() if times > 1] == []
        assert self.counted() == self.written


class Sharer:
    """A worker: a real follower over real claims; what it read is recorded in one go."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        group = Group(4, LEASE_S, world.clock, name)
        self.ledger = Ledger(world.root / "state", world.root / "dead", 1 << 26, group, world.file)
        self.claims = FileClaims(self.ledger)
        self.membership = Membership(self.ledger, group, lambda _: None)
        self.follower = LogFollower(
            [str(world.logs)],
            world.root / "spool",
            Logs(watch=False),
            world.clock,
            self.ledger.files(),
            claims=self.claims,
            keep_copies=False,
        )
        self.offsets: dict[int, int] = {}
        self.unrecorded: Counter[bytes] = Counter()

    def scan(self) -> None:
        self.world.clock.advance(3.0)
        self.membership.tick()
        self.offsets |= {state.number: state.offset for state in self.follower.scan_if_due()} | self.offsets
        self.follower.poll()

    def read(self) -> None:
        while (found := self.follower.next_chunk()) is not None:
            state, chunk = found
            self.offsets[state.number] = chunk.end
            self.unrecorded.update(chunk.data.splitlines())

    def record(self) -> None:
        states = [self.follower.advanced(number, offset) for number, offset in sorted(self.offsets.items())]
        count = self.unrecorded.total()
        self.ledger.record(Entry(states, totals(count, joined=count)))
        self.world.read += self.unrecorded
        self.unrecorded.clear()
        self.offsets.clear()
        leaving = sorted(self.follower.leaving)
        if leaving:
            self.claims.release(leaving)
            for number in leaving:
                self.follower.release(number)

    def turn(self) -> None:
        self.scan()
        self.read()
        self.record()

    def close(self) -> None:
        self.world.workers.remove(self)
        self.follower.close()
        self.ledger.close()


@pytest.fixture
def world(tmp_path):
    world = World(tmp_path)
    yield world
    for worker in list(world.workers):
        worker.close()
    world.file.close()


@pytest.fixture
def two(world):
    """Two workers that have read all of some files."""
    for number in range(FILES):
        world.write(world.logs / f"{number}.jsonl")
    world.start("d0")
    world.start("d1")
    world.settled()
    with world.file.read() as rows:
        assert min(row["files"] for row in of_workers(rows)) > 0
    return world


def compressed(path):
    packed = path.with_name(f"{path.name}.gz")
    packed.write_bytes(gzip.compress(path.read_bytes()))
    return packed


def files(world):
    return sorted(path for path in world.logs.iterdir() if not path.name.endswith(".gz"))


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("looks_between", [True, False])
def test_a_log_that_is_renamed_and_compressed_is_read_on_by_whoever_knows_it(two, first, looks_between):
    """Whoever looks first, and whether the archive is seen beside the plain file or not."""
    workers = two.workers[first:] + two.workers[:first]
    for path in files(two):
        two.write(path, 3)
        path.rename(f"{path}.1")
    two.turn(workers)
    for path in files(two):
        two.write(path, 2)
        compressed(path)
        if looks_between:
            two.turn(workers, 2)
        path.unlink()
        two.write(two.logs / path.stem, 4)
        two.turn(workers)
    two.settled()
    assert len(two.records()) == 2 * FILES


@pytest.mark.parametrize("first", [0, 1])
def test_a_log_that_is_copied_and_truncated_is_not_read_again_under_its_copys_name(two, first):
    workers = two.workers[first:] + two.workers[:first]
    for path in files(two):
        two.write(path, 3)
        (two.logs / f"{path.name}.1").write_bytes(path.read_bytes())
        path.write_bytes(b"")
        two.write(path, 2)
        two.turn(workers)
    two.settled()


def test_an_archive_of_a_log_of_which_nothing_is_recorded_yet_is_left_to_its_reader(world):
    first = world.start("d0")
    for number in range(FILES):
        world.write(world.logs / f"{number}.jsonl")
    first.scan()
    first.record()  # that the files are there; then they are read, and it stays under way
    first.read()
    second = world.start("d1")
    for path in files(world):
        compressed(path)
    world.turn([second], 3)
    for path in files(world):
        path.unlink()
    world.turn([second], 3)
    assert world.counted() == 0
    world.settled()


def test_what_a_dead_one_had_read_is_known_to_those_who_take_its_place(two):
    dead = two.workers[0]
    for path in files(two):
        compressed(path)
        path.unlink()
    dead.close()
    two.start("d2")
    two.start("d3")
    two.settled()


def test_an_archive_that_is_handed_over_goes_back_to_whose_it_is_by_the_rules(two):
    for path in files(two):
        compressed(path)
        path.unlink()
    two.settled()
    with two.file.read() as rows:
        held, there = rows.claims(), [state.source for state in rows.files() if not state.gone]
        assert sum(row["files"] for row in of_workers(rows)) == FILES
    assert [held[source] for source in there] == owners(there, [0, 1])


def inode_of(path) -> tuple[int, int]:
    return path.stat().st_dev, path.stat().st_ino


def test_a_copy_at_an_inode_that_was_another_logs_leaves_that_ones_record_findable(two):
    one, other = two.workers
    ours, theirs = (next(p for p in files(two) if inode_of(p) in w.ledger.held) for w in (one, other))
    old, new = ours.read_bytes(), theirs.read_bytes()
    for number in range(64):  # a copy that is the other worker's by its inode
        copy = two.root / f"copy-{number}"
        copy.write_bytes(old)
        if owners([inode_of(copy)], [0, 1]) == [other.ledger.slot]:
            break
    copy.rename(two.logs / "copy")
    theirs.unlink()
    ours.write_bytes(new)  # at its inode stands what the other worker has read
    one.scan()
    other.scan()
    two.settled()


def test_other_lines_after_the_same_head_are_read(two):
    for path in files(two):
        text = path.read_bytes()
        other = text[:2000] + b'{"line":"other %s"}\n' % path.name.encode() * 40
        (two.logs / f"{path.name}.other").write_bytes(other)
    two.turn(turns=6)
    assert len(two.read) == two.written + FILES + FILES  # one line is cut at 2,000 bytes


@seeds(4, 24, 60)
def test_however_logs_rotate_each_line_is_read_once(world, seed):
    rng = random.Random(seed)
    for name in ("d0", "d1", "d2")[: rng.choice((2, 3))]:
        world.start(name)
    for number in range(4):
        world.write(world.logs / f"{number}.jsonl")
    world.turn(turns=3)
    beside: dict = {}
    for step in range(80):
        dice = rng.random()
        path = rng.choice(files(world))
        known = world.knows(path)
        if dice < 0.15:
            world.write(world.logs / f"{rng.randrange(4)}.jsonl", rng.randint(1, 30))
        elif path in beside:
            if dice < 0.3:
                path.unlink()
                beside.pop(path)
        elif dice < 0.3 and known and not path.name.endswith(".old"):
            path.rename(f"{path}.{step}.old")
        elif dice < 0.4 and known and path.name.endswith(".old"):
            beside[path] = compressed(path)
        elif dice < 0.45 and known and not path.name.endswith(".old"):
            path.with_name(f"{path.name}.{step}.old").write_bytes(path.read_bytes())
            os.truncate(path, 0)
        if not files(world):
            world.write(world.logs / "0.jsonl")
        worker = rng.choice(world.workers)
        rng.choice([worker.scan, worker.scan, worker.read, worker.record, worker.turn])()
    world.settled()
