"""Injectors whose records come through copies: the low watermark follows what their importer promises."""

import json
import re

import pytest

from millwheel import Computation, Input, Logs, Topology, TopologyError, node
from millwheel.computation import BEFORE, NEVER
from millwheel.engine.store import POSITION
from millwheel.sources import LogSource
from photon.connect.copies import Copies, drop_copy, forget_known, known_to
from photon.connect.ports import Batch
from photon.connect.shared_copies import SharedCopies
from photon.core.clock import ManualClock
from photon.core.errors import FencedError
from photon.logs.shares import slot_of
from tests.connect.test_shared_copies import Held, Rows

URI = "kafka://broker:9092/clicks"
FILE_BYTES = 400
REIGN = 3


class Copied:
    """The copies of one source, as an importer makes them, and a worker that reads them."""

    def __init__(self, received, mine=lambda _: True, lateness_s=0.0, shared=None):
        """`shared`: the ledger, where several machines share them."""
        injector = Logs(URI, time="ts", unit="s", lateness_s=lateness_s)
        (self.directory,) = injector.copied_to(received)
        self._shared = shared
        self.copy_next()
        self.told, self.clock, self._next = [], ManualClock(), {}
        self._injector, self._spool, self.rows = injector.within(received), received / "spool", {}
        self.open(mine)

    def copy_next(self):
        """Of shared ones another machine copies from now on."""
        if self._shared is None:
            self.copies = Copies(self.directory, FILE_BYTES, URI)
        else:
            self.copies = SharedCopies(self.directory, FILE_BYTES, URI, Held(self._shared, REIGN))

    def open(self, mine):
        rows = [(row, packed) for row, packed in self.rows.items() if packed and row.startswith(POSITION)]
        self.source = LogSource(
            "clicks", 0, self._injector, {0: Input("clicks", key="k", value=None)}, rows, mine, 1, True,
            self._spool, self.clock, lambda: None, self.told.append, None, True, REIGN if self._shared else 0,
        )  # fmt: skip

    def copy(self, partition, *seconds):
        lines = b"".join(json.dumps({"k": "k", "ts": second}).encode() + b"\n" for second in seconds)
        first = self._next.get(partition, 0)
        self._next[partition] = first + len(seconds)
        self.copies.append([Batch(partition, lines, ((first, len(seconds)),))])

    def promise(self, seconds, finished=False, trouble="", notices=()):
        self.copies.tell(seconds * 1_000_000, finished, trouble, notices)

    def look(self):
        self.clock.advance(1.0)
        self.rows |= self.source.look()

    def read(self, most=100):
        found = 0
        while found < most and (injection := self.source.read(1e-6)) is not None:
            found += sum(map(len, injection.records.values()))
            self.rows |= injection.positions
        return found

    @property
    def bound(self):
        bound = self.source.bound()
        return bound if bound in (BEFORE, NEVER) else bound / 1_000_000


@pytest.fixture
def copied(tmp_path):
    return Copied(tmp_path)


def test_what_was_read_to_its_end_is_as_far_as_was_promised(copied):
    copied.copy("a", 5, 9)
    copied.look()
    assert copied.read() == 2
    copied.look()
    assert copied.bound == BEFORE  # nothing was promised, whatever the lines say
    copied.promise(7)
    copied.look()
    assert copied.bound == 7


def test_a_promise_counts_once_all_that_it_is_about_was_read(tmp_path):
    copied = Copied(tmp_path, lateness_s=2)
    copied.copy("a", 5, 9)
    copied.copy("b", 1, 2, 3)
    copied.promise(10)
    copied.look()
    assert copied.bound == BEFORE
    while copied.read(1):
        copied.look()
        unread = sum(size - copied_to(copied, path) for path, size in sizes(copied))
        assert copied.bound == (BEFORE if unread else 8)
    assert copied.bound == 8


def copied_to(copied, path):
    return next((state.offset for state in copied.source._known.values() if state.name == path), 0)


def sizes(copied):
    return [(str(path), path.stat().st_size) for path in copied.directory.glob("*.jsonl")]


def test_an_earlier_promise_is_kept_though_later_ones_never_are(copied):
    """Under load the copies are always a little ahead."""
    copied.copy("a", 1)
    copied.promise(1)
    copied.look()
    for second in range(2, 40):
        copied.copy("a", second)
        copied.promise(second)
        copied.look()
        copied.read(1)
    copied.look()
    assert copied.bound >= 1


def test_a_partition_that_lags_is_not_late_though_its_log_has_newer_lines(copied):
    copied.copy("a", 1_000)
    for partition in "bcd":  # the other logs
        copied.copy(partition, 1_000)
    copied.copy("e", 10)
    copied.promise(10)
    copied.look()
    copied.read()
    copied.look()
    assert copied.bound == 10


def test_copies_that_are_finished_are_the_end(copied):
    copied.copy("a", 1)
    copied.promise(3, finished=True)
    copied.look()
    assert copied.bound == BEFORE
    copied.read()
    copied.look()
    assert copied.bound == NEVER


def test_what_a_former_run_had_finished_is_forgotten(copied):
    copied.promise(3, finished=True)
    forget_known(copied.directory)
    copied.look()
    assert copied.bound == BEFORE
    forget_known(copied.directory)


def test_a_promise_that_was_half_written_is_none(copied):
    (copied.directory / "known.json").write_bytes(b'[3,[["0-')
    assert known_to(copied.directory).ends == ()


def test_workers_share_the_copies_by_log_and_each_is_held_by_its_own(tmp_path):
    copied = Copied(tmp_path)
    for partition in "abcd":
        copied.copy(partition, *range(30))  # several files
        copied.copy(partition, *range(30))
    copied.promise(30)
    logs = {slot_of(str(copied.directory / str(stripe)), 1024) for stripe in range(4)}
    own = min(logs)
    copied.open(lambda slot: slot == own)
    copied.look()
    assert copied.read() == 60
    copied.look()
    assert copied.bound == 30
    copied.open(lambda slot: slot not in logs)  # it reads none of them
    copied.look()
    assert (copied.read(), copied.bound) == (0, 30)


def test_files_that_were_read_and_grow_no_more_are_deleted_and_nothing_is_copied_or_read_again(copied):
    for second in range(60):
        copied.copy("a", second)
    copied.promise(60)
    copied.look()
    assert copied.read() == 60
    spent = copied.source.spent()
    assert {path.name for path in spent} == {f"0-{number:06d}.jsonl" for number in range(len(spent))}
    for path in spent:
        drop_copy(path)
    copied.look()
    assert copied.bound == 60
    copied.copies.close()
    copied.copies = Copies(copied.directory, FILE_BYTES, URI)
    assert copied.copies.after == {"a": 59}
    copied.open(lambda _: True)
    copied.copy("a", 60)
    copied.promise(61)
    copied.look()
    assert copied.read() == 1
    copied.look()
    assert copied.bound == 61


def test_an_empty_file_is_no_end_before_it_is_found_for_the_one_before_it_may_have_grown(copied):
    copied.copy("a", 1)
    copied.look()
    assert copied.read() == 1
    (copies,) = copied.source._copies.values()
    read = {state.name: state.offset for state in copied.source._known.values()}
    copied.copy("a", 2)
    copied.copies.end_files()
    copied.promise(9)
    copies.look(read, set(), lambda _: True)  # as a look that began before that
    assert copies.upto == BEFORE
    copied.look()
    assert (copied.bound, copied.read()) == (BEFORE, 1)
    copied.look()
    assert copied.bound == 9


def test_a_promise_about_a_file_of_which_half_is_read_is_not_kept_by_the_next_one(copied):
    copied.copy("a", 1, 2, 3)
    copied.promise(9)
    copied.look()
    assert copied.read(1) == 1
    copied.copies.end_files()
    copied.copy("a", 9)
    copied.look()
    assert copied.bound == BEFORE
    copied.read()
    copied.look()
    assert copied.bound == 9


def test_of_shared_copies_no_more_is_read_than_was_told(tmp_path):
    copied = Copied(tmp_path, shared=Rows())
    copied.copy("a", 5, 6)
    copied.look()
    assert (copied.read(), copied.bound) == (0, BEFORE)
    copied.promise(7)
    copied.copy("a", 8)  # durable, and in the ledger
    copied.look()
    assert copied.read() == 2
    copied.look()
    assert (copied.read(), copied.bound) == (0, 7)
    former = copied.copies
    copied.copy_next()
    assert copied.copies.after == {"a": 2}
    with pytest.raises(FencedError):
        former.append([Batch("a", b'{"k": "k", "ts": 9}\n', ((3, 1),))])
    copied.copy("a", 9, 10)
    copied.promise(11)
    copied.look()
    assert copied.read() == 3, "one of before, two of now, and none that was not told in time"
    copied.look()
    assert (copied.read(), copied.bound) == (0, 11)
    assert sum(size for _, size in sizes(copied)) > sum(
        end for _, end in known_to(copied.directory, REIGN).ends
    )


def test_a_file_that_is_read_and_deleted_is_not_copied_again_though_nothing_stands_in_the_next(copied):
    copied.copy("a", 1, 2)
    copied.copies._logs[0].rotate()  # and killed before it noted what it was to append
    for _ in range(2):
        copied.copies.close()
        copied.copies = Copies(copied.directory, FILE_BYTES, URI)
        assert copied.copies.after == {"a": 1}
        copied.promise(2)
        copied.look()
        copied.read()
        copied.look()
        copied.clock.advance(1.0)
        for path in copied.source.spent():
            drop_copy(path)
    assert [path.name for path in copied.directory.glob("0-*.jsonl")] == ["0-000001.jsonl"]


def test_copies_that_are_alike_are_all_read_and_what_is_deleted_here_is_not_told(copied):
    read = 0
    for _ in range(10):
        copied.copy("a", *[5] * 40)
        copied.promise(5)
        copied.look()
        read += copied.read()
        for path in copied.source.spent():
            drop_copy(path)
        copied.look()
    assert (read, copied.told) == (400, [])


def test_what_the_importer_tells_is_told_and_why_it_has_no_more(copied):
    copied.copy("a", 1)
    copied.promise(1, trouble="no broker", notices=["a has records 3 to 5 no more"])
    copied.look()
    assert copied.told == ["a has records 3 to 5 no more"]
    (why,) = copied.source.why()["copies"]
    assert (why["copies"], why["upto_us"], why["trouble"]) == (str(copied.directory), 1_000_000, "no broker")


class Seen(Computation[int]):
    def process_record(self, record, ctx):
        pass


@pytest.mark.parametrize(
    ("paths", "more", "told"),
    [
        ((URI, "logs/*.jsonl"), {}, "some of its paths are log files: make them an injector of their own"),
        (URI, {"silent": "hold"}, 'silent="hold" goes by the last line of each log'),
        (URI, {"expected": ("a*",)}, "expected files are those of logs"),
        ("exports/*.csv", {"listed": True}, "listed files are those of sinks and joined logs"),
        ("pulsar://h/t", {}, "nothing is known by 'pulsar://'; known are kafka://"),
        ("postgresql://h/d", {}, "postgresql://h/d can be a sink only"),
        ((URI, f"{URI}?group=g"), {}, "names a source twice"),
    ],
)
def test_an_injector_that_can_not_be_imported_is_refused(paths, more, told):
    with pytest.raises(TopologyError, match=f"^injector 'clicks': .*{re.escape(told)}"):
        Topology({"clicks": Logs(paths, "ts", **more)}, {"seen": node(Seen(), Input("clicks", key="k"))})
