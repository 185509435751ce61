"""Ranges of growing logs: every whole line is in one of them, whatever the looks and the kills between."""

import json
import os
import shutil

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from photon.core.errors import CorruptStateError, StorageError, UsageError
from photon.core.settings import Logs
from photon.logs.files import SeenFile
from spark.backfill import growth as module
from spark.backfill.growth import FOREIGN, PRIMARY, TICK, Growth

pytest.importorskip("pyarrow")


class Clock:
    def __init__(self):
        self.us = 1_700_000_000_000_000

    def now_us(self):
        return self.us


@pytest.fixture
def logs(tmp_path):
    for side in ("queries", "clicks"):
        (tmp_path / side).mkdir()
    return tmp_path


def new(logs, clock, **given):
    return Growth(logs / "home", ([str(logs / "queries")], [str(logs / "clicks")]), clock, **given)


def ranges(logs):
    """By the number of the file."""
    return {
        int(path.stem): [json.loads(line) for line in path.read_text().splitlines()]
        for path in sorted((logs / "home/ranges").iterdir())
    }


def read(logs):
    """log name -> what the ranges are of it, each byte once and in whole lines."""
    found = {}
    for number in sorted(ranges(logs)):
        for one in ranges(logs)[number]:
            if one["side"] == TICK:
                continue
            before = found.setdefault(one["name"], b"")
            assert one["start"] == len(before)
            with open(one["name"], "rb") as file:
                data = file.read()[one["start"] : one["end"]]
            assert data.endswith(b"\n")
            found[one["name"]] = before + data
    return found


@given(st.lists(st.tuples(st.sampled_from("ab"), st.binary(max_size=40), st.booleans()), max_size=12))
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_whole_line_is_given_out_once_whatever_the_starts(tmp_path, steps):
    shutil.rmtree(tmp_path / "one", ignore_errors=True)
    logs, clock = tmp_path / "one", Clock()
    (logs / "queries").mkdir(parents=True)
    (logs / "clicks").mkdir()
    written = {}
    growth = new(logs, clock)
    for name, data, again in steps:
        path = logs / "clicks" / name
        with path.open("ab") as file:
            file.write(data)
        written[str(path)] = written.get(str(path), b"") + data
        if again:
            growth = new(logs, clock)
        growth.look()
    growth.look()
    whole = {name: data[: data.rfind(b"\n") + 1] for name, data in written.items()}
    assert read(logs) == {name: data for name, data in whole.items() if data}


def test_a_kill_before_the_file_of_ranges_is_there_leaves_none_out(logs, monkeypatch):
    (logs / "clicks/a").write_bytes(b"one\n")
    growth = new(logs, Clock())
    monkeypatch.setattr(Growth, "_write", lambda _: None)
    assert growth.look()
    monkeypatch.undo()
    assert ranges(logs) == {}
    new(logs, Clock())
    assert read(logs) == {str(logs / "clicks/a"): b"one\n"}
    [one] = ranges(logs)[0]
    assert (one["side"], one["number"]) == (FOREIGN, 0)


def test_large_growth_is_given_out_in_pieces_of_whole_lines_and_in_turn(logs, monkeypatch):
    monkeypatch.setattr(module, "PIECE_BYTES", 100)
    for name in ("clicks/a", "clicks/b", "queries/q"):
        (logs / name).write_bytes(b"".join(b"line %04d\n" % n for n in range(100)))
    growth, looks = new(logs, Clock(), bytes_max=500), 0
    while growth.look():
        looks += 1
    assert looks == len(ranges(logs)) >= 6
    for given_out in list(ranges(logs).values())[:-1]:
        assert sum(one["end"] - one["start"] for one in given_out) < 500 + 110
        assert len({one["name"] for one in given_out}) > 1, "all advance"
    assert {one["side"] for one in ranges(logs)[0]} == {PRIMARY, FOREIGN}
    assert {len(data) for data in read(logs).values()} == {1000}


def test_an_archive_is_given_out_whole_once_nobody_writes_to_it(logs):
    clock = Clock()
    path = logs / "clicks/a.gz"
    path.write_bytes(b"packed")
    os.utime(path, (clock.us / 1e6 - 1, clock.us / 1e6 - 1))
    growth = new(logs, clock)
    assert growth.look()
    assert [one["side"] for one in ranges(logs)[0]] == [TICK]
    clock.us += 20_000_000
    assert growth.look()
    assert [one["end"] for one in ranges(logs)[max(ranges(logs))]] == [6]
    clock.us += 20_000_000
    assert not growth.look()


def test_where_nothing_grows_time_goes_on_and_never_back(logs):
    clock = Clock()
    growth = new(logs, clock)
    assert growth.look(), "the first tells the time"
    assert not growth.look()
    clock.us += 61_000_000
    assert growth.look()
    clock.us -= 300_000_000  # a clock that is set back
    (logs / "clicks/a").write_bytes(b"one\n")
    assert growth.look()
    told = [given_out[0]["at_us"] for given_out in ranges(logs).values()]
    assert told == sorted(set(told)) and len(told) == 3


def test_a_log_that_was_cut_is_told(logs):
    (logs / "clicks/a").write_bytes(b"one\ntwo\n")
    growth = new(logs, Clock())
    growth.look()
    (logs / "clicks/a").write_bytes(b"one\n")
    with pytest.raises(UsageError, match="was cut, or is another log"):
        growth.look()


def rows(logs):
    return [row for number in sorted(ranges(logs)) for row in ranges(logs)[number] if row["side"] != TICK]


def lines(logs):
    """All that was given out, as an executor reads it now."""
    from spark.backfill.growth import range_of
    from spark.reading.lines import chunks_of

    return b"".join(chunk.data for row in rows(logs) for _, chunk in chunks_of(range_of(row), Logs(), False))


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("aside", ["clicks/a.1", "clicks/.a", "queries-of-old"])
def test_a_log_that_takes_the_name_of_another_is_read_from_its_start(logs, aside, again):
    log = logs / "clicks/a"
    log.write_bytes(b"one\n")
    growth = new(logs, Clock())
    growth.look()
    log.rename(logs / aside)
    log.write_bytes(b"another log, which is longer\n")
    if again:
        growth = new(logs, Clock())
    assert growth.look() and not growth.look()
    assert [(row["number"], row["start"], row["end"]) for row in rows(logs)] == [(0, 0, 4), (1, 0, 29)]


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("pattern", ["clicks", "clicks/a"])
def test_logs_that_are_rotated_are_read_on_and_each_line_once(logs, pattern, again):
    clock, log, written = Clock(), logs / "clicks/a", b""

    def started():
        return Growth(logs / "home", [[str(logs / pattern)]], clock)

    growth = started()
    for turn in range(4):
        for number in range(turn, 0, -1):  # a.1 -> a.2, a -> a.1
            older = logs / f"clicks/a.{number - 1}" if number > 1 else log
            older.rename(logs / f"clicks/a.{number}")
        if turn:
            with (logs / "clicks/a.1").open("ab") as file:  # its writer has yet to open the new one
                file.write(b"late in turn %d\n" % turn)
            written += b"late in turn %d\n" % turn
        log.write_bytes(b"turn %d\n" % turn)
        written += b"turn %d\n" % turn
        if again:
            growth = started()
        assert growth.look() and not growth.look()
    assert {row["number"] for row in rows(logs)} == {0, 1, 2, 3}
    assert sorted(lines(logs).splitlines()) == sorted(written.splitlines())


def test_a_log_that_moves_to_another_directory_of_its_kind_is_not_read_again(logs):
    (logs / "clicks/old").mkdir()
    growth = Growth(logs / "home", [[str(logs / "clicks/**")]], Clock())
    (logs / "clicks/a").write_bytes(b"one\n")
    growth.look()
    (logs / "clicks/a").rename(logs / "clicks/old/a")
    with (logs / "clicks/old/a").open("ab") as file:
        file.write(b"two\n")
    assert growth.look()
    assert [(row["number"], row["start"], row["end"]) for row in rows(logs)] == [(0, 0, 4), (0, 4, 8)]


def test_a_log_that_is_rotated_away_before_its_turn_is_given_out_and_no_other_file_with_its_inode(logs):
    growth = Growth(logs / "home", [[str(logs / "clicks/*.log")]], Clock())
    for name in ("a.log", "b.log"):
        (logs / "clicks" / name).write_bytes(b"no whole line")
    growth.look()
    for name, by_now in (("a.log", "a.log.1"), ("b.log", "notes")):
        (logs / "clicks" / name).rename(logs / "clicks" / by_now)
        (logs / "clicks" / by_now).write_bytes(b"one\n")
    assert growth.look()
    assert [(row["name"], row["end"]) for row in rows(logs)] == [(str(logs / "clicks/a.log"), 4)]


def test_a_log_that_was_replaced_by_a_copy_that_goes_on_is_read_on(logs):
    growth = new(logs, Clock())
    (logs / "clicks/a").write_bytes(b"one\n")
    growth.look()
    (logs / "clicks/.a.tmp").write_bytes(b"one\ntwo\n")
    (logs / "clicks/.a.tmp").replace(logs / "clicks/a")
    assert growth.look()
    assert read(logs) == {str(logs / "clicks/a"): b"one\ntwo\n"}


def test_a_log_that_begins_as_the_one_whose_name_it_took_is_another(logs):
    growth = new(logs, Clock())
    (logs / "clicks/a").write_bytes(b"head\n")
    growth.look()
    (logs / "clicks/a").rename(logs / "clicks/a.1")
    (logs / "clicks/a").write_bytes(b"head\ntwo\n")
    assert growth.look()
    assert [(row["number"], row["start"], row["end"]) for row in rows(logs)] == [(0, 0, 5), (1, 0, 9)]


def test_a_log_that_was_cut_and_has_grown_again_is_told(logs):
    growth = new(logs, Clock())
    (logs / "clicks/a").write_bytes(b"one\n")
    growth.look()
    (logs / "clicks/a").write_bytes(b"it was cut, and is longer now\n")
    with pytest.raises(UsageError, match="was cut, or is another log"):
        growth.look()


def test_what_was_given_out_is_read_wherever_it_is_by_then_and_else_the_mend_is_told(logs):
    log = logs / "clicks/a"
    log.write_bytes(b"one\n")
    new(logs, Clock()).look()
    log.rename(logs / "clicks/a.1")
    log.write_bytes(b"another\n")
    assert lines(logs) == b"one\n"
    (logs / "clicks/a.1").unlink()
    with pytest.raises(StorageError, match=r"put it back into .*/clicks as it was, under any name"):
        lines(logs)
    (logs / "clicks/back").write_bytes(b"one\n")
    assert lines(logs) == b"one\n"


def test_what_was_looked_at_and_can_not_be_read_is_told(logs):
    new(logs, Clock()).look()
    (logs / "home/looked.json").write_bytes(b"{")
    with pytest.raises(CorruptStateError, match=r"looked\.json"):
        new(logs, Clock())


def test_a_tick_says_whether_all_that_there_is_was_given_out(logs):
    clock = Clock()
    (logs / "clicks/a").write_bytes(b"line\n" * 100)
    growth = new(logs, clock, ticks=True, bytes_max=1)
    (logs / "clicks/b").write_bytes(b"line\n" * 100)
    path = logs / "clicks/c.gz"
    path.write_bytes(b"packed")

    def packed(age_s):
        os.utime(path, (clock.us / 1e6 - age_s, clock.us / 1e6 - age_s))

    packed(1)
    assert growth.look() and growth.look()
    clock.us += 2_000_000
    packed(1)
    assert growth.look()
    packed(20)
    assert growth.look()
    (logs / "clicks/later").write_bytes(b"line\n")  # this side's files are read once they are listed
    unread = new(logs, clock, ticks=True, reads=lambda side, name: not name.endswith("later"))
    assert unread.look()
    ticks = [[one["end"] for one in of if one["side"] == TICK] for of in ranges(logs).values()]
    assert ticks == [[0], [0], [0], [1], [1]]


def test_a_log_of_two_sides_is_refused_and_one_that_is_gone_by_then_is_passed_over(logs, monkeypatch):
    (logs / "clicks/a").write_bytes(b"line\n")
    twice = Growth(logs / "home", ([str(logs / "clicks")], [str(logs / "clicks/a")]), Clock())
    with pytest.raises(UsageError, match="is named twice"):
        twice.look()
    found, gone = module.named_files, SeenFile("", str(logs / "clicks/gone"), 0, 0, size=4)
    monkeypatch.setattr(module, "named_files", lambda patterns: [*found(patterns), gone])
    one = Growth(logs / "other", [[str(logs / "clicks")]], Clock())
    assert one.look() and [log.name for log in one.logs if log.size] == [str(logs / "clicks/a")]


def test_a_log_of_two_injectors_is_given_out_for_each_through_its_rotation(logs):
    for turn in range(2):
        if turn:
            (logs / "clicks/a").rename(logs / "clicks/a.1")
        (logs / "clicks/a").write_bytes(b"turn %d\n" % turn)
        patterns = [[str(logs / "clicks")], [str(logs / "clicks/a")]]
        growth = Growth(logs / "home", patterns, Clock(), shared=True)
        assert growth.look() and not growth.look()
    given_out = [(row["side"], os.path.basename(row["name"]), row["end"]) for row in rows(logs)]
    assert given_out == [(side, "a", 7) for side in (0, 1, 0, 1)]


@pytest.mark.spark
def test_ranges_are_read_and_deleted_in_a_directory_with_any_name(session, tmp_path):
    from spark.backfill.growth import ranges_of

    clicks, home = tmp_path / "clicks", tmp_path / "home[1] {a,b}*?\\"
    clicks.mkdir()
    growth = Growth(home, [[str(clicks)]], Clock())
    read = []
    for number in range(2):
        (clicks / f"{number}").write_bytes(b"line\n")
        growth.look()
        query = (
            ranges_of(session, growth.ranges)
            .writeStream.foreachBatch(lambda rows, _: read.extend(row.name for row in rows.collect()))
            .option("checkpointLocation", str(tmp_path / "checkpoints"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
    assert read == [str(clicks / "0"), str(clicks / "1")]
    assert not (growth.ranges / "0000000000.json").exists()
