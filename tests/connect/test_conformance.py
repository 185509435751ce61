"""Who does not keep what ports say is found out, whatever the lie (photon/connect/conformance.py)."""

import json
import os
import random
import re
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import ClassVar

import pytest

from photon.connect import conformance, uris
from photon.connect.conformance import check_sink, check_source
from photon.connect.ports import Batch, Fields, Guarantee, State
from photon.core.errors import UnavailableError
from photon.logs.writer import LogPosition

FIELDS = Fields(("id",), "ts_us", "us")


class Numbers:
    """An honest source: two partitions, a gap in the numbers of one."""

    partitions: ClassVar = {"a": [*range(10, 60)], "b": [*range(20), *range(30, 45)]}

    def __init__(self):
        self._left = []

    def open(self, after, drain):
        self._left = [
            (partition, [n for n in numbers if n > after.get(partition, -1)])
            for partition, numbers in self.partitions.items()
        ]

    def read(self, wait_s):
        while self._left and not self._left[0][1]:
            self._left.pop(0)
        if not self._left:
            return []
        partition, numbers = self._left[0]
        taken, numbers[:] = numbers[:6], numbers[6:]
        return [self.batch(partition, taken)]

    def batch(self, partition, numbers):
        lines = b"".join(b'{"id":"%s%d"}\n' % (partition.encode(), n) for n in numbers)
        return Batch(partition, lines, tuple((n, 1) for n in numbers))

    def state(self):
        return State.FINISHED if not any(numbers for _, numbers in self._left) else State.ACTIVE

    def losses(self):
        return []

    def behind(self):
        return None

    def known_to(self):
        return 0

    def kept(self, upto):
        pass

    def close(self):
        pass


class InMilliseconds(Numbers):
    def known_to(self):
        return 1 << 60


class OneMore(Numbers):
    """Goes on at the record that it was told, not behind it."""

    def open(self, after, drain):
        super().open({partition: number - 1 for partition, number in after.items()}, drain)


class Repeats(Numbers):
    def batch(self, partition, numbers):
        return super().batch(partition, [*numbers, numbers[-1]])


class Torn(Numbers):
    def batch(self, partition, numbers):
        one = super().batch(partition, numbers)
        return Batch(partition, one.lines[:-1], one.runs)


class Miscounts(Numbers):
    def batch(self, partition, numbers):
        one = super().batch(partition, numbers)
        return Batch(partition, one.lines, one.runs[:-1])


class Changes(Numbers):
    """A record is another one when it is read again."""

    reads = 0

    def batch(self, partition, numbers):
        Changes.reads += 1
        lines = b"".join(b'{"read":%d}\n' % Changes.reads for _ in numbers)
        return Batch(partition, lines, tuple((n, 1) for n in numbers))


class Remembers(Numbers):
    """Goes on where it was told to have been kept."""

    upto: ClassVar = {}

    def open(self, after, drain):
        super().open({**Remembers.upto, **after}, drain)

    def kept(self, upto):
        Remembers.upto = upto


class OpensOnce(Numbers):
    def open(self, after, drain):
        if not self._left:
            super().open(after, drain)


class NeverEnds(Numbers):
    def state(self):
        return State.IDLE


class ClosesOnce(Numbers):
    closed = False

    def close(self):
        if self.closed:
            raise UnavailableError("closed already")
        self.closed = True


class Skips(Numbers):
    """Loses what it has read ahead when it is opened within a batch."""

    def open(self, after, drain):
        super().open(after, drain)
        for partition, numbers in self._left:
            if after.get(partition, -1) % 6 not in (5, 3):
                numbers[:] = numbers[1:]


@pytest.fixture
def source(monkeypatch):
    def of(kind):
        monkeypatch.setattr(uris, "_maker", lambda *_: lambda uri, fields: kind())
        return list(check_source("kafka://h/t", FIELDS))

    monkeypatch.setattr(conformance, "STILL_S_MAX", 0.05)
    return of


def test_an_honest_source_passes(source):
    found = source(Numbers)
    assert len(found) == 5
    assert not [check for check in found if check.failed or check.skipped]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (InMilliseconds, "it is known to 1152921504606846976 us, which is to come"),
        (OneMore, "a: opened behind 10, it does not bring 11 as it did"),
        (Skips, "a: opened behind 10, it does not bring 11 as it did"),
        (Repeats, "a: record 15 comes behind 15"),
        (Torn, "a: the last line of a batch has no end"),
        (Miscounts, "a: 6 lines with the numbers of 5"),
        (Changes, "it does not bring"),
        (Remembers, "opened behind None, it does not bring 10 as it did"),
        (OpensOnce, "it does not bring"),
        (NeverEnds, "it is idle for 0.05 s and brings nothing"),
        (ClosesOnce, "it failed: closed already"),
    ],
)
def test_a_source_that_lies_is_found_out(source, kind, says):
    failed = [check.failed for check in source(kind) if check.failed]
    assert failed and says in failed[0]


def test_an_empty_source_is_told_as_unchecked(source):
    class Empty(Numbers):
        partitions: ClassVar = {}

    assert [check.skipped for check in source(Empty)] == [None, "it has no records now"]


class Table:
    """Where honest sinks write, and those that lie; in memory, so nobody is killed."""

    def __init__(self):
        self.lines, self.places = [], {}
        self.owner = defaultdict(object)


class Rows:
    guarantee = Guarantee.ATOMIC
    batch_bytes, linger_s = 1 << 20, 0.0

    def __init__(self, table, writer):
        self.table, self.writer = table, writer

    def open(self):
        self.table.owner[self.writer] = self
        return self.table.places.get(self.writer)

    def write(self, lines, start, end):
        if self.table.owner[self.writer] is not self:
            raise UnavailableError("taken over")
        self.table.lines += lines.splitlines()
        self.table.places[self.writer] = end

    def close(self):
        pass


class Forgets(Rows):
    def open(self):
        super().open()


class Shares(Rows):
    """One place for all."""

    def __init__(self, table, writer):
        super().__init__(table, "all")


class LetsAnybody(Rows):
    def write(self, lines, start, end):
        self.table.owner[self.writer] = self
        super().write(lines, start, end)


class Doubles(Rows):
    def write(self, lines, start, end):
        super().write(lines + lines.splitlines(keepends=True)[0], start, end)


class Loses(Rows):
    def write(self, lines, start, end):
        super().write(b"".join(lines.splitlines(keepends=True)[1:]), start, end)


class Refuses(Rows):
    """Takes nothing behind its first batch."""

    def write(self, lines, start, end):
        if start.offset:
            raise UnavailableError("no")
        super().write(lines, start, end)


class Fails(Rows):
    def write(self, lines, start, end):
        raise KeyError("of its own")


class Mangles(Rows):
    def write(self, lines, start, end):
        super().write(lines.replace(b"of ", b"OF "), start, end)


class Within(Rows):
    """Tells a place in the middle of a line."""

    def open(self):
        at = super().open()
        return at and LogPosition(at.file, at.offset - 3)


class AtLeastOnce(Doubles):
    guarantee = Guarantee.NONE


@pytest.fixture
def sink(monkeypatch):
    def of(kind):
        table = Table()
        monkeypatch.setattr(uris, "_maker", lambda *_: lambda uri, writer: kind(table, writer))
        return list(check_sink("kafka://h/t", lambda: table.lines, random.Random(1)))

    monkeypatch.setattr(conformance, "_write_and_be_killed", lambda *_: None)
    monkeypatch.setattr(conformance, "_PAUSE_S", 0.0)
    return of


@pytest.mark.parametrize("kind", [Rows, AtLeastOnce])
def test_a_sink_that_does_as_it_says_passes(sink, kind):
    found = sink(kind)
    assert len(found) == 4
    assert not [check for check in found if check.failed or check.skipped]


@pytest.mark.parametrize(
    ("kind", "says"),
    [
        (Forgets, "it was given lines up to"),
        (Shares, "to another writer, which wrote nothing"),
        (LetsAnybody, "two that write by one name both succeeded"),
        (Doubles, "lines are there more than once"),
        (Loses, "lines are not there"),
        (Mangles, "came back as"),
        (Refuses, "it takes no more lines of"),
        (Fails, "it failed: KeyError: 'of its own'"),
        (Within, "and tells LogPosition(file=0, offset=690)"),
    ],
)
def test_a_sink_that_lies_is_found_out(sink, kind, says):
    (failed,) = [check.failed for check in sink(kind) if check.failed]
    assert says in failed


def test_lines_that_are_no_events_and_others_lines_are_passed_over(sink):
    class Busy(Rows):
        def write(self, lines, start, end):
            super().write(lines + b'not json\n[1]\n"x"\n{"id":"other"}\n', start, end)

    assert not [check for check in sink(Busy) if check.failed]


DOCS = Path(__file__).parents[2] / "docs/connectors.md"


@pytest.mark.cluster
def test_the_sink_that_the_docs_show_as_a_package_of_its_own(tmp_path):
    """Its processes are killed, for real; then it is made to lie."""
    (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text("utf-8"), re.S)
    info = tmp_path / "photon_directory-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: photon-directory\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[photon.sinks]\ndirectory = photon_directory:Directory\n")
    (tmp_path / "out").mkdir()
    uri, read = f"directory://{tmp_path}/out", f"cat {tmp_path}/out/*.jsonl"

    def tested(code, *options):
        (tmp_path / "photon_directory.py").write_text(code)
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(DOCS.parents[1])])}
        command = [sys.executable, "-m", "photon.cli.main", "connect", "test", uri, *options]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=100, check=False
        )

    done = tested(code, "--read", read)
    assert (done.returncode, [one.split()[0] for one in done.stdout.splitlines()]) == (0, ["ok"] * 4), done
    unread = tested(code)
    assert unread.returncode == 0 and "not checked" in unread.stdout
    lies = tested(code.replace("Guarantee.NONE", "Guarantee.ATOMIC"), "--json")
    assert lies.returncode == 1
    assert [json.loads(one)["failed"] for one in lies.stdout.splitlines()][-1] == (
        "two that write by one name both succeeded"
    )
