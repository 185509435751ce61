"""What a sink gets of the joined log: each settled line once, whatever fails and whoever crashes."""

import os
import random
import re
import threading
from collections import Counter

import pytest

from photon.connect import publishing
from photon.core.errors import StorageError, UnavailableError, UsageError
from photon.logs.writer import LogPosition
from tests.connect.fake_sink import Sink, Store
from tests.joiner.fakes import Crash, batch_of, crash_at, end_all, lines_of, output_files
from tests.waiting import wait_until


@pytest.fixture
def sink(monkeypatch):
    return Store(monkeypatch)


@pytest.fixture
def publish(make, sink):
    return lambda **options: make(sinks=("kafka://h/t",), **options)


def all_there(sink, names):
    wait_until(lambda: sink.lines.total() >= len(names))
    assert sink.lines == lines_of(names)


def test_lines_are_published_when_they_are_joined(publish, sink):
    worker = publish()
    end_all(worker)
    for name in "abc":
        worker.join(batch_of([name]))
    all_there(sink, "abc")
    (status,) = worker.status()["sinks"]
    assert status == {"sink": "kafka://h/t", "published": 3, "refused": 0, "behind": False, "trouble": None}


def turn(worker):
    """As its thread does, once; the seconds until it would do it again."""
    (way,) = worker._publisher._ways
    return way._step()


@pytest.fixture
def slow(make, sink):
    """A worker whose sink lets lines wait a minute for others; no thread publishes."""
    sink.linger_s = 60.0

    def build(**options):
        worker = make(sinks=("kafka://h/t",), **options)
        worker._publisher.start = lambda: None
        end_all(worker)
        for name in "abc":
            worker.join(batch_of([name]))
        return worker

    return build


def test_lines_wait_for_others_as_long_as_the_sink_says(slow, sink, clock):
    worker = slow()
    assert turn(worker) == 60.0
    clock.advance(59.0)
    worker.leases.renew_due()
    worker.join(batch_of(["d"]))
    assert turn(worker) == pytest.approx(1.0)
    assert sink.batches == []
    clock.advance(1.0)
    turn(worker)
    assert sink.batches == [4]
    worker.leases.renew_due()
    worker.join(batch_of(["e"]))
    assert turn(worker) == 60.0


def test_lines_wait_no_longer_when_they_are_enough(slow, sink):
    worker = slow()
    sink.batch_bytes = 2 * len(next(iter(lines_of("a")))) + 2
    turn(worker)
    assert sink.batches == [2], "the third waits again"
    assert turn(worker) == 60.0


def test_lines_wait_no_longer_when_their_file_is_closed(slow, sink, tmp_path):
    worker = slow(output_file_bytes_max=200)
    *closed, _ = output_files(tmp_path)
    turn(worker)
    assert closed and sink.batches == [path.read_bytes().count(b"\n") for path in closed]


def test_lines_wait_a_moment_where_no_more_will_come_and_none_at_the_end(slow, sink, clock):
    worker = slow(drain=True)
    assert turn(worker) == publishing.DRAIN_LINGER_S
    worker._publisher._ways[0].work.start()
    assert worker.stop(5.0)
    assert sink.lines == lines_of("abc") and sink.batches == [3]


def test_nothing_is_twice_whatever_fails_before_or_after_a_write(publish, sink):
    dice = random.Random(7)

    def fails():
        if dice.random() < 0.4:
            raise UnavailableError("who knows")

    sink.fails = fails
    worker = publish(output_file_bytes_max=300)
    end_all(worker)
    names = [f"n{number}" for number in range(60)]
    for name in names:
        worker.join(batch_of([name]))
    all_there(sink, names)
    assert len(sink.places) == 1


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the crash
@pytest.mark.parametrize("where", ["output appended", "output synced", "registered", "intent synced"])
def test_what_a_crash_leaves_is_published_once_by_the_next_life(publish, sink, where):
    worker = publish()
    end_all(worker)
    worker.join(batch_of(["a"]))
    all_there(sink, "a")
    worker._settler._checkpoint = crash_at(where)
    with pytest.raises(Crash):
        worker.join(batch_of(["b"]))
    worker._publisher.wake()
    worker.close()
    assert sink.lines == lines_of("a"), "a line without the end of its intent may be taken back"
    again = publish()
    end_all(again)
    again.join(batch_of(["c"]))
    all_there(sink, "abc")


def test_a_sink_that_is_away_holds_up_neither_joining_nor_its_end(publish, sink, monkeypatch):
    monkeypatch.setattr(publishing, "STUCK_S_MAX", 0.5)

    def fails():
        raise UnavailableError("no broker")

    sink.fails = fails
    worker = publish(output_file_bytes_max=200)
    end_all(worker)
    for name in "abcd":
        worker.join(batch_of([name]))
    wait_until(lambda: worker.status()["sinks"][0]["trouble"])
    assert worker.status()["sinks"][0] == {
        "sink": "kafka://h/t", "published": 0, "refused": 0, "behind": True, "trouble": "no broker",
    }  # fmt: skip
    assert worker.stop(5.0)
    told = worker.status()["notices"]
    wanted = r"lines from byte 0 of /.*\.jsonl on are not published: no broker"
    assert re.fullmatch(wanted, told[0])
    assert told[-1] == "kafka://h/t has not all lines (no broker); the next start goes on"
    sink.fails = lambda: None
    again = publish(output_file_bytes_max=200)
    end_all(again)
    all_there(sink, "abcd")


def test_what_a_sink_refuses_for_good_is_counted_and_told_once_for_each_reason(publish, sink, monkeypatch):
    refused = Counter({"too old": 0})
    monkeypatch.setattr(Sink, "refused", refused, raising=False)
    sink.fails = lambda: refused.update({"too old": 1})
    worker = publish()
    end_all(worker)
    for name in "ab":
        worker.join(batch_of([name]))
        all_there(sink, "ab"[: "ab".index(name) + 1])
    wait_until(lambda: worker.status()["sinks"][0]["refused"] == 4)
    assert worker.stop(5.0)
    assert (
        len([one for one in worker.status()["notices"] if "refused for good by kafka://h/t: too old" in one])
        == 1
    )


def test_a_sink_that_never_answers_is_in_trouble(publish, sink, clock, monkeypatch):
    monkeypatch.setattr(publishing, "STUCK_S_MAX", 0.5)
    asked, answers = threading.Event(), threading.Event()

    def hangs():
        asked.set()
        answers.wait()

    sink.fails = hangs
    worker = publish()
    end_all(worker)
    worker.join(batch_of(["a"]))
    asked.wait()
    assert worker.status()["sinks"][0]["trouble"] is None
    clock.advance(publishing.SILENT_S_MAX + 1)
    assert worker.status()["sinks"][0]["trouble"] == "kafka://h/t: no answer for over 60 s"
    worker._publisher.finish()
    answers.set()
    assert "(kafka://h/t: no answer for over 60 s); the next start" in worker.status()["notices"][-1]
    all_there(sink, "a")
    wait_until(lambda: not worker.status()["sinks"][0]["trouble"])


def test_files_become_parquet_only_when_the_sink_has_them(publish, sink, tmp_path):
    def fails():
        raise UnavailableError("no broker")

    sink.fails = fails
    worker = publish(output_file_bytes_max=200, output_format="parquet")
    end_all(worker)
    for name in "abcd":
        worker.join(batch_of([name]))
    worker._completer.step()
    assert output_files(tmp_path, kind="parquet") == []
    sink.fails = lambda: None
    assert worker.stop(5.0)
    all_there(sink, "abcd")
    assert output_files(tmp_path) == [] != output_files(tmp_path, kind="parquet")
    again = publish(output_file_bytes_max=200, output_format="parquet")
    end_all(again)
    again.join(batch_of(["e"]))
    all_there(sink, "abcde")


def test_what_became_parquet_while_the_sink_was_not_named_is_not_skipped(make, publish, sink):
    def run(start, *names, **options):
        worker = start(output_file_bytes_max=200, output_format="parquet", **options)
        end_all(worker)
        for name in names:
            worker.join(batch_of([name]))
        return worker

    assert run(publish, "a").stop(5.0)
    all_there(sink, "a")
    assert run(make, "b").stop(5.0)
    again = run(publish)
    wait_until(lambda: again.status()["sinks"][0]["trouble"])
    said = again.status()["sinks"][0]["trouble"]
    assert "-000001.parquet became Parquet, in a run without this sink, before kafka://h/t had all" in said
    again.stop(5.0)
    sink.places.clear()  # as of another sink
    run(publish, "c")
    all_there(sink, "ac")


def test_a_file_that_is_taken_away_too_early_is_named(publish, sink, tmp_path):
    worker = publish()
    end_all(worker)
    worker.join(batch_of(["a"]))
    all_there(sink, "a")
    worker.stop(5.0)
    sink.places.clear()
    sink.lines.clear()
    again = publish(output_file_bytes_max=200)
    sink.places["t " + (tmp_path / "out/joined/east/joiner.publisher").read_text()] = LogPosition(0, 0)
    sink.places = {"t joiner." + key.rpartition(" ")[2]: place for key, place in sink.places.items()}
    (first, *_) = output_files(tmp_path)
    first.rename(tmp_path / "away")
    end_all(again)
    wait_until(lambda: again.status()["sinks"][0]["trouble"])
    assert "was taken away before kafka://h/t had all of it" in again.status()["sinks"][0]["trouble"]
    (tmp_path / "away").rename(first)
    all_there(sink, "a")


@pytest.mark.parametrize("keeps", [None, 0, 5], ids=["taken away", "emptied", "cut within a line"])
def test_a_growing_file_that_is_taken_away_or_cut_is_told(slow, sink, clock, tmp_path, keeps):
    worker = slow()
    turn(worker)
    clock.advance(60.0)
    (path,) = output_files(tmp_path)
    whole = path.read_bytes()
    path.unlink() if keeps is None else os.truncate(path, keeps)
    wanted = "was taken away while it grows" if keeps is None else "has been cut"
    with pytest.raises(StorageError, match=f"{path} {wanted}; bring it back"):
        turn(worker)
    path.write_bytes(whole)
    turn(worker)
    assert sink.lines == lines_of("abc")


def test_a_sink_that_has_more_than_the_log_is_told(publish, sink, tmp_path):
    worker = publish()
    end_all(worker)
    worker.join(batch_of(["a"]))
    all_there(sink, "a")
    worker.stop(5.0)
    sink.places = dict.fromkeys(sink.places, LogPosition(1_000_000, 5))
    again = publish()
    end_all(again)
    wait_until(lambda: again.status()["sinks"][0]["trouble"])
    assert "was it put back from a copy?" in again.status()["sinks"][0]["trouble"]


def test_a_sink_that_can_not_be_keeps_the_joiner_from_starting(make):
    with pytest.raises(UsageError, match=r"no sink is known by 's4://'"):
        make(sinks=("s4://h/t",))
