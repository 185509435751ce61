"""What a sink's files go on to: each line once, and none that may be taken back, whatever fails."""

import contextlib
import os
import random
import re
import signal
import threading
import time
from collections import Counter
from dataclasses import replace

import pytest

from millwheel import Logs, LogSink, TopologyError
from millwheel.engine.wheel import Lines
from millwheel.sinks import end_publishing, published
from photon.cluster.preflight import check_published
from photon.connect.publishing import Publisher
from photon.core.clock import SystemClock
from photon.core.columns import split_lines
from photon.core.errors import PhotonError, UnavailableError, UsageError
from tests.connect.fake_sink import Store as FakeSink
from tests.millwheel.test_sinks import Store, lines_of
from tests.millwheel.topologies import SECOND, clicks, expected, two_stages
from tests.seeds import seeds
from tests.waiting import wait_until


@pytest.fixture
def sink(monkeypatch):
    return FakeSink(monkeypatch)


@pytest.fixture
def by_hand(monkeypatch):
    monkeypatch.setattr(Publisher, "start", lambda _: None)


class Published(Store):
    """Whose files go on to one sink; `publish` does what its thread would."""

    def __init__(self, directory):
        self.told = []
        super().__init__(directory, publish="kafka://h/t")

    def opened(self):
        files = super().opened()
        files.publish(SystemClock(), False, self.told.append)
        return files

    def publish(self):
        self.files.publisher._ways[0]._step()

    def taken_away(self, number):
        """What brings it back."""
        path = self.paths()[number]
        lines = path.read_bytes()
        path.unlink()
        return lambda: path.write_bytes(lines)


@seeds(8, 60, 2_000)
def test_each_line_is_published_once_by_whoever_has_the_files(tmp_path, by_hand, sink, seed):
    dice, store, owners = random.Random(seed), Published(tmp_path), []

    def fails():
        if dice.random() < 0.3:
            raise UnavailableError("who knows")

    sink.fails = fails
    sink.batch_bytes = dice.choice([30, 1 << 20])
    for _ in range(8):
        for _ in range(dice.randrange(12)):
            store.append(lines_of(dice))
            if dice.random() < 0.5:
                store.sync(end=dice.random() < 0.3)
            with contextlib.suppress(PhotonError):
                store.publish()
            settled = store.all[: len(store.all) - sum(map(len, store.left.values()))]
            assert not sink.lines - Counter(split_lines(settled))
        owners.append(store.files)
        store.files = store.opened()
        with contextlib.suppress(PhotonError):  # a former one, which does not know yet
            dice.choice(owners).publisher._ways[0]._step()
    store.sync()
    sink.fails = lambda: None
    store.publish()
    assert sink.lines == Counter(split_lines(store.all))
    assert len(sink.places) <= 1 and store.files.end() == store.files.publisher._ways[0].at


def test_a_line_whose_commit_never_was_is_not_published(tmp_path, by_hand, sink):
    store = Published(tmp_path)
    store.append(b"1\n")
    store.files.append(Lines("x", 99, b"2\n"))
    store.publish()
    assert not sink.lines
    store.files = store.opened()
    store.sync()
    store.publish()
    assert sink.lines == {b"1": 1}


def test_a_file_that_was_taken_away_too_early_is_named_also_by_the_next_owner(tmp_path, by_hand, sink):
    store = Published(tmp_path)

    def write(*numbers):
        for n in numbers:
            store.append(b"%070d\n" % n)
            store.sync()

    write(0)
    store.publish()
    write(1, 2, 3)
    store.taken_away(0)  # all of it is published
    back = store.taken_away(0)
    for _ in range(3):
        with pytest.raises(PhotonError, match=r"x-0-000001.jsonl was taken away, and kafka://h/t is not"):
            store.publish()
        write(len(store.all) // 71)
        store.files = store.opened()
    assert sink.lines.total() == 1
    back()
    store.publish()
    write(len(store.all) // 71)
    assert sink.lines.total() == len(store.all) // 71 - 1
    names = (tmp_path / "x-0.manifest").read_text().splitlines()
    assert "x-0-000000" not in names[0], "once all of it is published nobody needs to know of it"


def test_a_sink_that_comes_later_gets_what_is_there(tmp_path, by_hand, sink):
    before = Store(tmp_path)
    for n in range(3):
        before.append(b"%070d\n" % n)
        before.sync()
    before.paths()[0].unlink()
    store = Published.__new__(Published)
    store.__dict__ = {**before.__dict__, "told": []}
    store._sink = replace(before._sink, publish=("kafka://h/t",))
    store.files = store.opened()
    store.publish()
    assert sink.lines == {b"%070d" % n: 1 for n in (1, 2)}


def test_another_directory_is_another_writer(tmp_path, by_hand, sink):
    for name in ("one", "two"):
        store = Published(tmp_path / name)
        store.append(b"1\n")
        store.sync()
        store.publish()
    assert sink.lines == {b"1": 2} and len(sink.places) == 2


def test_a_sink_that_hangs_holds_up_neither_files_nor_their_end(tmp_path, sink, monkeypatch):
    monkeypatch.setattr("millwheel.sinks._CLOSE_S", 0.1)
    asked, answers = threading.Event(), threading.Event()

    def hangs():
        asked.set()
        answers.wait()

    sink.fails = hangs
    store = Published(tmp_path)
    for n in range(3):
        store.append(b"%d\n" % n)
        store.sync()
        asked.wait()
    opened = {("x", 0): store.files}
    wanted = {"stream": "x", "sink": "kafka://h/t", "published": 0, "refused": 0, "trouble": None}
    assert published(opened) == [{**wanted, "behind": True}]
    end_publishing(opened, SystemClock())
    answers.set()
    store.files.publisher.close()
    store.files = store.opened()
    wait_until(lambda: sink.lines.total() == 3)
    wait_until(lambda: not published({("x", 0): store.files})[0]["behind"])
    end_publishing({("x", 0): store.files}, SystemClock())


@pytest.mark.parametrize(
    ("uris", "message"),
    [
        (("file:///tmp/a", "file:///tmp/a/"), "named twice as a sink"),
        (
            ("otlp://h:4317?place=/tmp/a",),
            "otlp://h:4317/: makes spans of joined events; publish a topology's",
        ),
        (("s4://b/p",), "no sink is known by 's4://'"),
        (("nowhere",), "nowhere: no URI"),
        (("postgresql://h/d?nothing=1",), "known are key, table and libpq's"),
        (("file:///tmp/a?key=b..",), "unknown option 'key'"),
    ],
)
def test_where_nothing_can_be_published_is_told_before_anything_begins(uris, message, monkeypatch, tmp_path):
    monkeypatch.setattr("pathlib.Path.mkdir", lambda *_, **__: None)
    with pytest.raises(UsageError, match=re.escape(message)):
        check_published(two_stages(totals=LogSink("out/counts", publish=uris)))


def test_two_sinks_of_a_topology_may_not_publish_to_one_place():
    one = {name: LogSink(f"out/{name}", publish="postgresql://h/d") for name in ("counts", "totals")}
    with pytest.raises(UsageError, match="named twice"):
        check_published(replace(two_stages(), sinks=one))
    other = replace(one["totals"], publish="postgresql://h/d?table=totals&key=second")
    check_published(replace(two_stages(), sinks={**one, "totals": other}))


def test_what_is_published_is_not_read_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "logs").mkdir()
    with pytest.raises(UsageError, match=r"matches what file:///.* writes"):
        to = LogSink("out", publish=f"file://{tmp_path}/logs")
        check_published(two_stages(Logs("logs/**", "ts"), totals=to))


@pytest.mark.parametrize(
    ("source", "to"),
    [
        ("kafka://h:9092/clicks?group=g", "kafka://h:9092/clicks"),
        ("s3://b/in/**/*.jsonl?region=r", "s3://b/in/out?region=r"),
        ("s3://b/in?region=r", "s3://b/in/out?region=r"),
    ],
)
def test_a_source_is_no_place_to_publish_to(source, to):
    other = to.replace("clicks", "counts").replace("b/in", "b/counts")
    check_published(two_stages(Logs(source, "ts"), totals=LogSink("out", publish=other)))
    with pytest.raises(UsageError, match="is read here as"):
        check_published(two_stages(Logs(source, "ts"), totals=LogSink("out", publish=to)))


@pytest.mark.parametrize("wrong", [5, None, (5,), {"a": 1}])
def test_what_is_no_uri_is_refused_by_the_topology(wrong):
    with pytest.raises(TopologyError, match="publish is a URI, or a tuple of some"):
        two_stages(totals=LogSink("out", publish=wrong))


MINE = """import os
from dataclasses import replace
from millwheel import LogSink
from tests.millwheel.topologies import HELD
sinks = {
    "counts": LogSink(os.environ["INTO"], file_bytes_max=20_000, publish=os.environ["COUNTS"]),
    "totals": LogSink("out/totals", publish=(f"file://{os.getcwd()}/published?every_s=1",)),
}
TOPOLOGY = replace(HELD, sinks={**HELD.sinks, **sinks})
"""


def lines_in(directory, pattern):
    return sorted(line for path in directory.glob(pattern) for line in path.read_text().splitlines())


@pytest.mark.long
def test_workers_and_whole_runs_are_killed_and_each_line_is_published_once(system, server):
    psycopg = pytest.importorskip("psycopg")
    dice, at = random.Random(11), system.directory
    system.environment |= {"COUNTS": f"{server.uri}?table=counts&key=key,second", "INTO": "out/counts"}
    (at / "mine.py").write_text(MINE)
    lines = sorted(clicks(dice, 30_000, users=200, seconds=60), key=lambda line: line["ts"])

    def there():
        with contextlib.suppress(psycopg.errors.UndefinedTable):
            return sorted(text for _, text in server.rows("counts"))
        return []

    for turn, workers in enumerate((3, 2, 4)):
        known = len(there())
        system.start("--follow", "--workers", str(workers), name="mine:TOPOLOGY")
        for part in range(10 * turn, 10 * turn + 10):
            for file in (0, 1):
                system.write(f"{file}.jsonl", lines[part * 1000 + file : (part + 1) * 1000 : 2], "a")
            wait_until(lambda: len(system.workers()) == workers)
            if part % 3 == 2:
                wait_until(lambda known=known: len(there()) > known)
                known = len(there())
                with contextlib.suppress(ProcessLookupError):
                    os.kill(dice.choice(system.workers()), signal.SIGKILL)
        system.signal("work", signal.SIGKILL)
        system.kill()
        assert not Counter(there()) - Counter(lines_in(at / "out/counts", "*.jsonl"))
    told = system.run("--workers", "2", name="mine:TOPOLOGY")
    system.check(lines)
    assert [(one["stream"], one["behind"], one["refused"]) for one in told["sinks"]] == [
        ("counts", False, 0),
        ("totals", False, 0),
    ]
    assert there() == lines_in(at / "out/counts", "*.jsonl")
    assert lines_in(at / "published", "*/*.jsonl") == lines_in(at / "out/totals", "*.jsonl")
    system.environment["INTO"] = "out/elsewhere"
    said = system.run("--workers", "2", name="mine:TOPOLOGY", status=2)
    assert (
        "sink 'counts': out/elsewhere is not where its files are, of which not all may be published" in said
    )


@pytest.mark.long
@pytest.mark.soak
def test_a_sink_that_is_away_is_told_and_catches_up_when_it_is_back(system, server):
    now = time.time_ns() // 1_000
    lines = [{"user": f"user{n % 50}", "ts": now - 60 * SECOND + n * 1_000} for n in range(4_000)]
    system.write("a.jsonl", lines)
    system.environment |= {"COUNTS": f"{server.uri}?table=late&key=key,second", "INTO": "out/counts"}
    (system.directory / "mine.py").write_text(MINE.replace("import HELD", "import TOPOLOGY as HELD"))
    server.kill()
    system.start("--follow", "--workers", "2", name="mine:TOPOLOGY")
    wait_until(lambda: len(system.sinks()["totals"]) == len(expected(lines)["totals"]))
    wait_until(lambda: all(system.status()["sinks"][0][what] for what in ("trouble", "behind")))
    assert "0 published, behind: postgresql://127.0.0.1" in system.ask("status", "--work", "work")
    assert system.stop()["sinks"][0]["behind"]
    server.start()
    assert not system.run("--workers", "1", name="mine:TOPOLOGY")["sinks"][0]["behind"]
    assert sorted(text for _, text in server.rows("late")) == lines_in(
        system.directory / "out/counts", "*.jsonl"
    )
