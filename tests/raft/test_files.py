"""Files beside a snapshot: kept while they are needed, served to who asks, fetched where they are missing."""

import zlib
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from photon.core.errors import CorruptStateError, DiskFullError
from photon.raft.files import ASK_AGAIN_S, ASKED_MAX, Fetch, FileShelf, delete
from photon.raft.port import FileId
from photon.raft.rules.codec import Message
from photon.raft.snapshot import Head, SnapshotId, write_snapshot
from tests.raft.kit import SMALL, Lone, Make, Register, VirtualClock, command
from tests.raft.kit import head as head_of

PIECE = SMALL.snapshot_piece_bytes


def file_id(name: str, data: bytes) -> FileId:
    return FileId(name, len(data), zlib.crc32(data))


class FilingRegister(Register):
    """Has the files that it is told; `state` of what `work` was done."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path()
        self.used: list[FileId] | None = []
        self.due: deque[Callable[[], None]] = deque()
        self.told: list[str] = []
        self.presses = 1.0

    def open_in(self, directory: Path) -> None:
        self.directory = directory

    def work(self) -> Callable[[], None] | None:
        return self.due[0] if self.due else None

    def pressure(self) -> float:
        return self.presses

    def worked(self) -> None:
        self.due.popleft()
        self.told.append("worked")

    def gave_up(self) -> None:
        self.told.append("gave up")

    def files(self) -> Sequence[FileId] | None:
        return self.used

    def verify(self, path: Path, file: FileId) -> bool:
        return file_id(file.name, path.read_bytes()) == file


@pytest.fixture
def shelf(tmp_path: Path) -> FileShelf:
    return FileShelf(tmp_path, FilingRegister())


class Asked:
    """Whom a fetch asked for what."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, Message]] = []

    def __call__(self, peer: str, message: Message) -> None:
        self.sent.append((peer, message))

    def take(self) -> list[tuple[str, int, int]]:
        sent, self.sent = self.sent, []
        return [(peer, message["offset"], message["length"]) for peer, message in sent]


def piece(name: str, data: bytes, offset: int, length: int = PIECE) -> Message:
    found = data[offset : offset + length]
    return {"type": "file_piece", "name": name, "offset": offset, "total": len(data), "data": found}


DATA = bytes(range(256)) * 3
FILE = file_id("one.ids", DATA)


@pytest.fixture
def asked() -> Asked:
    return Asked()


@pytest.fixture
def fetch(shelf: FileShelf, asked: Asked) -> Fetch:
    return Fetch(shelf, [FILE], asked, SMALL)


def test_a_file_comes_in_by_pieces_of_which_a_few_are_under_way(
    shelf: FileShelf, fetch: Fetch, asked: Asked
) -> None:
    assert fetch.tick(0.0, ["b", "c"])
    assert asked.take() == [("b", at * PIECE, PIECE) for at in range(ASKED_MAX)]
    for offset in range(0, len(DATA), PIECE):
        fetch.take(0.0, "b", piece(FILE.name, DATA, offset))
        assert all(length > 0 for _, _, length in asked.take())
    assert fetch.done and fetch.put()
    assert shelf.path(FILE.name).read_bytes() == DATA
    assert not shelf.lacks([FILE])


def test_what_does_not_come_is_asked_for_again_of_another(fetch: Fetch, asked: Asked) -> None:
    fetch.tick(0.0, ["b", "c"])
    fetch.take(0.0, "b", piece(FILE.name, DATA, 0))
    asked.take()
    assert fetch.tick(ASK_AGAIN_S / 2, ["b", "c"])
    assert asked.take() == []
    assert fetch.tick(ASK_AGAIN_S, ["b", "c"])
    assert asked.take()[0] == ("c", PIECE, PIECE), "it goes on where it was"
    fetch.take(ASK_AGAIN_S, "b", piece(FILE.name, DATA, PIECE))
    assert fetch.tick(2 * ASK_AGAIN_S, ["b", "c"])
    assert asked.take()[0] == ("b", PIECE, PIECE), "what comes late from who is not asked is dropped"


def test_pieces_out_of_order_and_of_other_files_are_dropped(
    shelf: FileShelf, fetch: Fetch, asked: Asked
) -> None:
    fetch.tick(0.0, ["b"])
    fetch.take(0.0, "b", piece(FILE.name, DATA, PIECE))
    fetch.take(0.0, "b", piece("two.ids", DATA, 0))
    fetch.take(0.0, "b", piece(FILE.name, DATA, 0) | {"data": b""})
    for offset in range(0, len(DATA), PIECE):
        fetch.take(0.0, "b", piece(FILE.name, DATA, offset))
        fetch.take(0.0, "b", piece(FILE.name, DATA, offset))
    assert fetch.put()
    assert shelf.path(FILE.name).read_bytes() == DATA


def test_who_has_no_such_file_is_passed_over_until_nobody_has_it(fetch: Fetch, asked: Asked) -> None:
    fetch.tick(0.0, ["b", "c"])
    fetch.take(0.0, "b", piece(FILE.name, b"", 0))
    asked.take()
    assert fetch.tick(0.0, ["b", "c"])
    assert {peer for peer, _, _ in asked.take()} == {"c"}
    fetch.take(0.0, "c", piece(FILE.name, b"", 0))
    assert not fetch.tick(0.0, ["b", "c"])
    assert fetch.tick(0.0, []), "while nobody is there nothing is known"


def test_what_is_damaged_on_its_way_is_not_put_in_place(shelf: FileShelf, fetch: Fetch) -> None:
    fetch.tick(0.0, ["b"])
    for offset in range(0, len(DATA), PIECE):
        fetch.take(0.0, "b", piece(FILE.name, DATA[:-1] + b"x", offset))
    assert fetch.done and not fetch.put()
    assert shelf.lacks([FILE]) == [FILE]


def test_files_go_once_nothing_needs_them(shelf: FileShelf) -> None:
    machine = shelf.machine
    assert isinstance(machine, FilingRegister)
    for name in ("named.ids", "used.ids", "pinned.ids", "old.ids", "new.ids.tmp"):
        shelf.path(name).write_bytes(DATA)
    shelf.pinned = (file_id("pinned.ids", DATA),)
    machine.used = None
    assert not shelf.needless([file_id("named.ids", DATA)]), "it can't say what it uses"
    machine.used = [file_id("used.ids", DATA)]
    delete(shelf.needless([file_id("named.ids", DATA)]))
    left = sorted(path.name for path in shelf.directory.iterdir())
    assert left == ["named.ids", "new.ids.tmp", "pinned.ids", "used.ids"]
    FileShelf(shelf.directory.parent, machine)
    assert not shelf.path("new.ids.tmp").exists(), "a crash left it"


# -- a replica ------------------------------------------------------------------------------------------


@pytest.fixture
def filing(make: Make, monkeypatch: pytest.MonkeyPatch) -> Lone:
    monkeypatch.setattr("tests.raft.kit.Register", FilingRegister)
    return make()


def snapshot(directory: Path, index: int, files: tuple[FileId, ...]) -> bytes:
    machine = Register()
    machine.apply(command(b"snap%d" % index, index))
    plain = head_of(index, 1)
    write_snapshot(directory / "made", Head(plain.covers, plain.members, files), machine.freeze())
    return (directory / "made").read_bytes()


def send_file(lone: Lone, peer: str, data: bytes, name: str = FILE.name) -> None:
    for offset in range(0, len(data), PIECE):
        lone.hear(peer, **piece(name, data, offset), term=1)
    lone.turn()


def test_a_follower_fetches_what_a_snapshot_names_before_it_takes_it_in(filing: Lone, tmp_path: Path) -> None:
    filing.hear_snapshot(snapshot(tmp_path, 50, (FILE,)), 50)
    filing.take_in()
    filing.turn()
    assert {peer for peer, _ in filing.wire.take("ask_file")} == {"b"}
    assert filing.replica.installs == 0
    send_file(filing, "b", DATA[:-1] + b"x")
    filing.take_in()
    assert filing.replica.installs == 0, "it was damaged on its way"
    filing.turn()
    send_file(filing, "b", DATA)
    filing.take_in()
    assert filing.replica.installs == 1
    assert filing.machine.tokens == {b"snap50": 50}
    filing.wire.take()
    filing.hear_snapshot(snapshot(tmp_path, 60, (FILE,)), 60)
    filing.take_in()
    assert filing.replica.installs == 2, "what is there is not fetched again"
    assert not filing.wire.take("ask_file")


def test_a_snapshot_whose_files_nobody_has_any_more_is_given_up_for_a_newer_one(
    filing: Lone, tmp_path: Path
) -> None:
    filing.hear_snapshot(snapshot(tmp_path, 50, (FILE,)), 50)
    filing.take_in()
    filing.turn()
    for peer in ("b", "c"):
        filing.hear(peer, **piece(FILE.name, b"", 0), term=1)
        filing.turn()
    filing.hear_snapshot(snapshot(tmp_path, 60, ()), 60)
    filing.take_in()
    assert filing.replica.store.snapshots.current == SnapshotId(60, 1)


def test_who_asks_is_sent_a_piece_where_there_is_room(filing: Lone) -> None:
    assert isinstance(filing.machine, FilingRegister)
    (filing.machine.directory / FILE.name).write_bytes(DATA)
    ask = {"type": "ask_file", "term": 1, "name": FILE.name, "offset": 700, "length": 1 << 40}
    filing.hear("b", **ask)
    ((peer, message),) = filing.wire.take("file_piece")
    assert (peer, message["data"], message["total"]) == ("b", DATA[700:][:PIECE], len(DATA))
    for odd in ({"name": "no.ids"}, {"offset": 1 << 40}):
        filing.hear("b", **(ask | odd))
        ((_, message),) = filing.wire.take("file_piece")
        assert (message["data"], message["total"]) == (b"", 0)
    filing.wire.free = 0
    filing.hear("b", **ask)
    assert not filing.wire.take("file_piece")


def test_a_replica_whose_snapshot_lacks_a_file_does_not_start(
    make: Make, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("tests.raft.kit.Register", FilingRegister)
    lone = make(peers=())
    assert isinstance(lone.machine, FilingRegister)
    path = lone.machine.directory / FILE.name
    path.write_bytes(DATA)
    lone.machine.used = [FILE]
    lone.grow(40)
    head = lone.replica.store.snapshots.head
    assert head is not None and head.files == (FILE,)
    lone.crash()
    path.write_bytes(DATA[:-1])
    with pytest.raises(CorruptStateError, match="a file of the snapshot is missing or cut"):
        Lone(tmp_path / "0", ())


def test_no_snapshot_is_taken_before_all_files_are_written(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.raft.kit.Register", FilingRegister)
    lone = make(peers=())
    assert isinstance(lone.machine, FilingRegister)
    lone.machine.used = None
    lone.grow(40)
    assert lone.replica.store.snapshots.current is None
    lone.machine.used = []
    lone.grow(2)
    assert lone.replica.store.snapshots.current is not None


def test_a_full_disk_costs_memory_until_there_is_room(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.raft.kit.Register", FilingRegister)
    monkeypatch.setattr("photon.raft.snapshot._FULL_DISK_S", 0.0)
    lone = make(peers=())
    machine, left = lone.machine, [2]
    assert isinstance(machine, FilingRegister)

    def work() -> None:
        if left[0]:
            left[0] -= 1
            raise DiskFullError("no space left")

    machine.due.append(work)
    for _ in range(8):
        lone.take_in()
    assert machine.told == ["gave up", "gave up", "worked"]


@pytest.mark.parametrize(("pressure", "rests_s"), [(0.0, 19 * 0.1), (0.5, 9.5 * 0.1), (1.0, 0.0)])
def test_a_piece_of_work_is_followed_by_a_rest_the_shorter_the_more_there_is_to_do(
    make: Make, monkeypatch: pytest.MonkeyPatch, clock: VirtualClock, pressure: float, rests_s: float
) -> None:
    monkeypatch.setattr("tests.raft.kit.Register", FilingRegister)
    lone = make(peers=())
    machine = lone.machine
    assert isinstance(machine, FilingRegister)
    machine.presses = pressure
    machine.due += [lambda: None] * 3
    lone.take_in()  # starts the first
    clock.at += 0.1
    lone.take_in()
    assert machine.told == ["worked"]
    assert lone.jobs.busy() is (pressure == 1.0)
    clock.at += rests_s * 0.99
    lone.turn()
    assert lone.jobs.busy() is (pressure == 1.0), "it rests for so long"
    clock.at += rests_s * 0.02
    lone.turn()
    assert lone.jobs.busy()
