"""The copies of a source: each record once, in whole lines, whatever a crash leaves of the last append."""

import itertools
import json
import shutil

import pytest

from photon.connect import importer
from photon.connect import server as importer_server
from photon.connect.copies import Copies, copies_of, drop_copy, known_to
from photon.connect.importer import Import
from photon.connect.ports import Batch, Fields, Loss, State
from photon.connect.rows import place_of
from photon.connect.server import ImporterServer
from photon.core.errors import CorruptStateError, DiskFullError, UnavailableError, UsageError
from photon.core.settings import Imports, Settings
from tests.full import full_after
from tests.waiting import wait_until

FIELDS = Fields(("id",), "ts", "us")
FILE_BYTES = 200


def batch(partition, *runs):
    numbers = [number for first, count in runs for number in range(first, first + count)]
    lines = b"".join(b'{"p":"%s","n":%d}\n' % (partition.encode(), number) for number in numbers)
    return Batch(partition, lines, runs)


def copied(directory):
    lines = [line for path in directory.glob("*.jsonl") for line in path.read_bytes().splitlines()]
    return sorted(lines)


def lines_of(*batches):
    return sorted(line for one in batches for line in one.lines.splitlines())


TURNS = [
    [batch("a", (0, 3)), batch("b", (5, 1), (9, 2))],
    [batch("a", (3, 1), (7, 2)), batch("c", (0, 4))],
    [batch("b", (11, 2)), batch("a", (9, 5)), batch("d", (2, 1)), batch("e", (0, 2))],
]


@pytest.fixture
def copies(tmp_path):
    def open_them(source="kafka://host/topic"):
        return Copies(tmp_path / "copies", FILE_BYTES, source)

    return open_them


def test_each_record_is_copied_once(copies, tmp_path):
    one = copies()
    for turn in TURNS:
        one.append(turn)
    after = {"a": 13, "b": 12, "c": 3, "d": 2, "e": 1}
    assert one.after == after
    one.close()
    again = copies()
    assert again.after == after
    again.close()
    assert copied(tmp_path / "copies") == lines_of(*itertools.chain(*TURNS))
    assert max(path.stat().st_size for path in (tmp_path / "copies").glob("*.jsonl")) <= FILE_BYTES


def each_place(directory):
    """Of each line of the copies: where `place_of` says that it comes from, and where it does."""
    for path in directory.glob("*.jsonl"):
        offset = 0
        for line in path.read_bytes().splitlines(keepends=True):
            event = json.loads(line)
            for at in (offset, offset + len(line) - 1):
                yield place_of(str(path), at), f"{event['p']}, row {event['n'] + 2}", f"{path} at {at}"
            offset += len(line)


@pytest.mark.parametrize("keep", range(0, 260, 20))
def test_a_line_of_a_table_is_known_by_its_row_whatever_a_kill_leaves(copies, tmp_path, keep):
    tables = [[batch(p, (first, n)) for p, first, n in turn] for turn in (
        [("a", 0, 3), ("b", 0, 2), ("e", 0, 1), ("f", 0, 1), ("g", 0, 2)],
        [("a", 3, 2), ("g", 2, 1), ("b", 2, 1), ("a", 5, 2)],
    )]  # fmt: skip
    one, directory = copies("logs/*.csv"), tmp_path / "copies"
    one.append(tables[0])
    before = {path: path.stat().st_size for path in directory.glob("*.jsonl")}
    one.append(tables[1])
    one.close()
    last_append_cut(directory, before, keep)
    again = copies("logs/*.csv")
    ends = {"a": 7, "b": 4, "g": 4}
    for name in ("b", "g", "a"):
        first = again.after.get(name, -1) + 1
        again.append([batch(name, (first, ends[name] - first))])
    again.close()
    assert len([*each_place(directory)]) == 2 * (7 + 4 + 1 + 1 + 4)
    assert all(found == wanted for found, wanted, _ in each_place(directory))
    for path in directory.glob("*.rows"):
        path.unlink()
    assert all(found == copy for found, _, copy in each_place(directory))


def last_append_cut(directory, lengths_before, keep):
    """What a kill leaves that lets only `keep` bytes of the last append to each log through."""
    for path in directory.glob("*.jsonl"):
        before, size = lengths_before.get(path, 0), path.stat().st_size
        with path.open("r+b") as file:
            file.truncate(min(size, before + keep))


@pytest.mark.parametrize("keep", range(0, 130, 3))
def test_what_a_kill_leaves_of_an_append_is_gone_on_from(copies, tmp_path, keep):
    one, directory = copies(), tmp_path / "copies"
    for turn in TURNS[:-1]:
        one.append(turn)
    before = {path: path.stat().st_size for path in directory.glob("*.jsonl")}
    one.append(TURNS[-1])
    one.close()
    last_append_cut(directory, before, keep)
    again = copies()
    rest = []
    for part in TURNS[-1]:
        after = again.after.get(part.partition, -1)
        wanted = [n for first, count in part.runs for n in range(first, first + count) if n > after]
        if wanted:
            rest.append(batch(part.partition, *((n, 1) for n in wanted)))
    if rest:
        again.append(rest)
    again.close()
    assert copied(directory) == lines_of(*itertools.chain(*TURNS))


@pytest.mark.parametrize("keep", [0, 30, 1000])
def test_a_kill_while_what_was_made_anew_comes_leaves_out_none_of_it(copies, tmp_path, keep):
    one = copies()
    one.append([batch("a\0x", (0, 50))])
    before = {path: path.stat().st_size for path in (tmp_path / "copies").glob("*.jsonl")}
    one.append([batch("a\0y", (0, 3))])
    one.close()
    last_append_cut(tmp_path / "copies", before, keep)
    again = copies()
    assert again.after == {0: {}, 30: {"a\0y": 0}, 1000: {"a\0y": 2}}[keep]
    again.close()


def test_what_a_kill_left_of_an_append_does_not_count_again_later(copies, tmp_path):
    one = copies()
    one.append([batch("a", (0, 1)), batch("b", (0, 1))])
    before = {path: path.stat().st_size for path in (tmp_path / "copies").glob("*.jsonl")}
    one.append([batch("b", (1, 2))])
    one.close()
    last_append_cut(tmp_path / "copies", before, 0)
    again = copies()
    again.append([batch("b", (1, 5))])  # in another log than before
    again.close()
    last = copies()
    assert last.after == {"a": 0, "b": 5}
    last.close()


@pytest.mark.parametrize("size", [509, 510, 511, 4000])
def test_a_partition_may_have_a_long_name(copies, size):
    one = copies()
    one.append([batch("a" * size, (0, 2)), batch("b", (0, 1)), batch("a" * (size - 1) + "b", (0, 1))])
    after = one.after
    one.close()
    again = copies()
    assert again.after == after == {"a" * size: 1, "b": 0, "a" * (size - 1) + "b": 0}
    again.close()


def test_a_copy_that_was_cut_is_told_as_corrupt(copies, tmp_path):
    one = copies()
    for turn in TURNS[:2]:
        one.append(turn)
    one.close()
    for path in (tmp_path / "copies").glob("*.jsonl"):
        path.write_bytes(path.read_bytes()[:10])
    with pytest.raises(CorruptStateError, match=r"shorter than it was.*copied anew"):
        copies()


def test_files_without_their_places_are_told_as_corrupt(copies, tmp_path):
    one = copies()
    one.append(TURNS[0])
    one.close()
    shutil.rmtree(tmp_path / "copies/positions")
    with pytest.raises(CorruptStateError, match="does not know of"):
        copies()


def test_old_files_are_swept_but_not_the_one_that_grows(copies, tmp_path):
    one = copies()
    for first in range(0, 100, 10):
        one.append([batch("a", (first, 10))])
    files = sorted((tmp_path / "copies").glob("0-*.jsonl"))
    assert len(files) > 2
    assert one.sweep(0, 1e12) == sum(path.stat().st_size for path in files), "0 keeps all"
    assert one.sweep(60, files[0].stat().st_mtime) > files[-1].stat().st_size
    assert one.sweep(60, files[-1].stat().st_mtime + 100) == files[-1].stat().st_size
    one.close()
    again = copies()
    assert again.after == {"a": 99}
    again.close()


def test_options_of_a_uri_do_not_make_it_another_source(tmp_path):
    one = copies_of(tmp_path, "primary", "kafka://h:9092/t")
    assert copies_of(tmp_path, "primary", "kafka://h:9092/t?group=g") == one
    assert copies_of(tmp_path, "primary", "kafka://g:9092/t") != one
    assert copies_of(tmp_path, "foreign", "kafka://h:9092/t") != one


class Scripted:
    """A source that hands out, or raises, what it is told to."""

    def __init__(self, *script):
        self.script, self.opened, self.told, self.lost = list(script), [], [], []

    def open(self, after, drain):
        self.opened.append(dict(after))

    def read(self, wait_s):
        step = self.script.pop(0) if self.script else []
        if isinstance(step, BaseException):
            raise step
        if isinstance(step, Loss):
            self.lost.append(step)
            return []
        return step

    def state(self):
        return State.ACTIVE if self.script else State.FINISHED

    def losses(self):
        found, self.lost = self.lost, []
        return found

    def behind(self):
        return len(self.script)

    def known_to(self):
        return 0

    def kept(self, upto):
        self.told.append(dict(upto))

    def close(self):
        pass


@pytest.fixture
def imported(tmp_path, monkeypatch):
    made = []

    def run(source, until, drain=True, tells=None, **settings):
        notices, failures = [], []
        monkeypatch.setattr(importer, "make_source", lambda *_: source)
        arguments = ("kafka://h/t", "primary", tmp_path, FIELDS, Imports(**settings), drain)
        one = Import(*arguments, notices.append, failures.append, notices=tells)
        made.append(one)
        one.start()
        wait_until(lambda: until(one, failures))
        return one.status(), notices, failures

    yield run
    for one in made:
        one.stop()


def finished(one, _):
    return one.finished


def test_a_source_is_told_what_is_kept_and_no_sooner(imported, tmp_path):
    source = Scripted(*TURNS)
    status, notices, _ = imported(source, finished)
    assert (status["records"], status["trouble"], notices) == (23, None, [])
    assert source.told == [{"a": 2, "b": 10}, {"a": 8, "c": 3}, {"b": 12, "a": 13, "d": 2, "e": 1}]
    assert copied(copies_of(tmp_path, "primary", "kafka://h/t")) == lines_of(*itertools.chain(*TURNS))


def test_a_source_that_does_not_answer_is_read_on(imported):
    source = Scripted(TURNS[0], UnavailableError("no broker"), UnavailableError("no broker"), TURNS[1])
    status, notices, _ = imported(source, finished)
    assert (status["records"], notices) == (13, ["no broker"])
    assert source.opened == [{}]


def test_after_any_other_error_the_source_is_opened_behind_what_is_kept(imported):
    source = Scripted(TURNS[0], RuntimeError("a bug"), TURNS[1])
    status, notices, _ = imported(source, finished)
    assert (status["records"], notices) == (13, ["RuntimeError: a bug"])
    assert source.opened == [{}, {"a": 2, "b": 10}]


def test_a_full_disk_loses_nothing(imported, monkeypatch, tmp_path):
    append, failures = Copies.append, [DiskFullError("full")]

    def failing(self, batches):
        if self.after and failures:
            raise failures.pop()
        return append(self, batches)

    monkeypatch.setattr(Copies, "append", failing)
    # What was read and not written is read again.
    status, notices, _ = imported(Scripted(TURNS[0], TURNS[1], TURNS[1], TURNS[2]), finished)
    assert (status["records"], notices) == (23, ["full"])
    assert copied(copies_of(tmp_path, "primary", "kafka://h/t")) == lines_of(*itertools.chain(*TURNS))


@pytest.mark.parametrize("room", range(0, 45, 4))
def test_what_a_reader_saw_of_an_append_that_failed_stays_and_comes_once(copies, monkeypatch, room):
    one = copies()
    one.append([batch("a", (0, 1))])
    (log,) = [path for path in one.directory.glob("*.jsonl") if path.stat().st_size]
    following = [batch("a", (1, 2)), batch("b", (5, 1))]
    seen = []
    with monkeypatch.context() as full:
        full_after(full, room, lambda: seen.append(log.read_bytes()))
        with pytest.raises(DiskFullError):
            one.append(following)
    stayed = log.read_bytes()
    one.close()
    again = copies()
    rest = [batch("a", (number, 1)) for number in (1, 2) if number > again.after["a"]]
    again.append([*rest, *([] if "b" in again.after else [batch("b", (5, 1))])])
    assert stayed.startswith(seen[0][: seen[0].rfind(b"\n") + 1])
    assert log.read_bytes().startswith(seen[0][: seen[0].rfind(b"\n") + 1])
    assert copied(again.directory) == lines_of(batch("a", (0, 1)), *following)


@pytest.mark.parametrize(("tells", "reader"), [(None, "join"), (list, "run")])
def test_what_the_source_has_no_more_is_told_by_number(imported, tells, reader):
    status, notices, _ = imported(Scripted(Loss("a", 10, 5), Loss("b", 0, 2)), finished, tells=tells)
    assert status["lost"] == 7
    assert notices[0] == (
        "kafka://h/t: a has records 10 to 14 no more (5): they were deleted before they were read, and are "
        f"lost to the {reader}"
    )


def test_what_was_lost_is_known_after_a_crash_and_counts_once(copies):
    """A source tells again of what is lost behind the last record that was copied."""
    one = copies()
    one.append([batch("a", (0, 10)), batch("b\0first", (0, 10))])
    one.note(Loss("a", 10, 5))
    one.note(Loss("b\0first", 10, 4))
    one.close()
    again = copies()
    assert (again.lost, again.after) == (9, one.after)
    again.note(Loss("a", 10, 5))
    again.note(Loss("a", 10, 7))
    assert again.lost == 11
    again.note(Loss("a", 30, 1))
    again.note(Loss("b\0second", 0, 3))
    assert again.lost == 15
    again.close()
    last = copies()
    assert last.lost == 15
    last.close()


def test_what_was_lost_counts_once_though_the_source_is_opened_again(imported):
    lost = Loss("a\0id", 10, 5)
    status, notices, _ = imported(Scripted(lost, RuntimeError("a bug"), lost, TURNS[0]), finished)
    assert (status["lost"], status["records"]) == (5, 6)
    assert "a has records 10 to 14 no more (5)" in notices[0]


@pytest.mark.parametrize(
    ("tells", "what"),
    [(None, "what has joined does not join twice"), (list, "what was read of the former counts beside it")],
)
def test_what_was_made_anew_is_told_and_has_the_place_of_the_former(imported, tells, what):
    anew = [batch("b\0second", (0, 2)), batch("c\0first", (0, 1))]
    source = Scripted([batch("a", (0, 1)), batch("b\0first", (0, 9))], anew, [batch("b\0second", (2, 1))])
    status, notices, _ = imported(source, finished, tells=tells)
    assert (status["records"], status["partitions"]) == (14, 3)
    (told,) = notices
    assert told.startswith(f"kafka://h/t: made anew, so read from the start: b; {what}")
    assert source.told == [{"a": 0, "b\0first": 8}, {"b\0second": 1, "c\0first": 0}, {"b\0second": 2}]


def test_what_no_other_try_mends_ends_the_process(imported):
    status, _, failures = imported(Scripted(UsageError("not a table")), lambda _, failures: failures)
    assert (str(failures[0]), status["trouble"]) == ("not a table", "not a table")


def test_copies_are_bounded(imported):
    source = Scripted(*([batch("a", (n * 9_000, 9_000))] for n in range(20)))
    troubled = lambda one, _: one.status()["trouble"]  # noqa: E731
    status, notices, _ = imported(source, troubled, drain=False, bytes_max=1 << 20)
    assert "raise imports.bytes_max, or lower imports.keep_days" in notices[0]
    assert 1 << 20 <= status["kept_bytes"] < 2 << 20


def test_a_run_that_can_never_copy_all_ends_for_none_of_its_copies_is_deleted(imported):
    source = Scripted(*([batch("a", (n * 9_000, 9_000))] for n in range(20)))
    _, _, failures = imported(source, lambda _, failures: failures, bytes_max=1 << 20)
    assert isinstance(failures[0], UsageError)
    assert str(failures[0]).endswith(" bytes; raise imports.bytes_max")


def test_copies_that_are_read_make_room_for_more_though_their_files_might_grow_on(imported, tmp_path):
    source = Scripted(*([batch("a", (n * 9_000, 9_000))] for n in range(20)))

    def read_and_deleted(one, _):
        for path in sorted(copies_of(tmp_path, "primary", "kafka://h/t").glob("0-*.jsonl"))[:-1]:
            drop_copy(path)
        return one.finished

    status, _, failures = imported(source, read_and_deleted, tells=list, bytes_max=1 << 20)
    assert (status["records"], failures) == (180_000, [])


def test_that_all_is_copied_is_told_though_the_disk_was_full_just_then(tmp_path, monkeypatch):
    monkeypatch.setattr(importer, "make_source", lambda *_: Scripted(*TURNS))
    tell, full = Copies.tell, [DiskFullError("full")] * 2

    def told(copies, upto_us, finished, *more):
        if finished and full:
            raise full.pop()
        tell(copies, upto_us, finished, *more)

    monkeypatch.setattr(Copies, "tell", told)
    one = Import("kafka://h/t", "", tmp_path, FIELDS, Imports(), True, [].append, [].append, notices=list)
    one.start()
    wait_until(lambda: known_to(copies_of(tmp_path, "", "kafka://h/t")).finished)
    one.stop()


def test_copies_that_can_not_be_opened_again_at_once_say_why(imported, monkeypatch):
    source, full = Scripted(TURNS[0], RuntimeError("a bug"), TURNS[1]), [DiskFullError("full")] * 2

    def opened(*given):
        if source.opened and full:
            raise full.pop()
        return Copies(*given)

    monkeypatch.setattr(importer, "Copies", opened)
    status, notices, _ = imported(source, finished)
    assert (status["records"], notices) == (13, ["RuntimeError: a bug", "full"])


class Endless(Scripted):
    """Its `left` records are there at once, as far as anybody asks; one a read."""

    def __init__(self, left=0):
        super().__init__()
        self.left, self.reads = left, 0

    def read(self, wait_s):
        self.reads += 1
        return [batch("a", (self.reads, 1))]

    def state(self):
        return State.ACTIVE

    def behind(self):
        return self.left


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """An importer of a primary and a foreign source."""
    servers = []

    def start(primary, foreign):
        made = {"kafka://h/p": primary, "kafka://h/f": foreign}
        monkeypatch.setattr(importer, "make_source", lambda text, fields: made[text])
        sources = {"foreign": ["kafka://h/f"], "primary": ["kafka://h/p"]}
        arguments = ("importer-east", "east", "127.0.0.1:0", tmp_path, sources, False)
        server = ImporterServer(Settings(), *arguments, pytest.fail)
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.stop()


def test_in_a_backlog_foreign_records_come_behind_the_primary_ones(serve):
    primary, foreign = Endless(left=100_000), Endless()
    serve(primary, foreign)
    wait_until(lambda: primary.reads > 20)
    assert foreign.opened == []
    primary.left = 100
    wait_until(lambda: foreign.reads)
    primary.left = 100_000
    reads = foreign.reads
    wait_until(lambda: foreign.reads > reads, what="it waits once only")


def test_foreign_records_wait_for_the_primary_ones_a_while_only(serve, monkeypatch):
    monkeypatch.setattr(importer_server, "FIRST_S_MAX", 0.3)
    foreign = Endless()
    serve(Endless(left=100_000), foreign)
    wait_until(lambda: foreign.reads)
