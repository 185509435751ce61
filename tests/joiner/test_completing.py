"""Which files of the joined log are complete, and what becomes of them (joiner/completion.py)."""

import json
import os
import zlib

import pyarrow.parquet
import pytest

from joiner import completion as completing
from joiner.output_files import complete_files, count_joined
from photon.core.clock import SystemClock
from photon.core.errors import CorruptStateError
from tests.joiner.fakes import (
    Crash,
    FailingWrites,
    batch_of,
    crash_at,
    fail_one_sync,
    joined_line,
    lines_of,
    note_syncs,
    output_files,
    output_lines,
)
from tests.waiting import wait_until

HOUR_S = 3600


@pytest.fixture
def east(tmp_path):
    return tmp_path / "out" / "joined" / "east"


def listed(directory):
    """What a reader reads of the manifest, and checks."""
    entries = [json.loads(line) for line in (directory / "joiner.manifest").read_bytes().splitlines()]
    for entry in entries:
        data = (directory / entry["file"]).read_bytes()
        assert (entry["bytes"], entry["crc32"]) == (len(data), f"{zlib.crc32(data):08x}")
        if entry["file"].endswith(".jsonl"):
            assert entry["lines"] == data.count(b"\n")
    return [entry["file"] for entry in entries]


def age(worker, clock, seconds=HOUR_S):
    clock.advance(seconds)
    worker.leases.renew_due()
    worker._completer.step()


def test_a_file_is_listed_when_it_is_full_and_all_of_it_is_ended(make, east):
    worker = make(output_file_bytes_max=200)
    for name in "abcde":
        worker.join(batch_of([name]))
    worker._completer.step()
    names = listed(east)
    assert names == [path.name for path in output_files(east.parent.parent.parent)][: len(names)]
    assert len(names) == worker.status()["output"]["file"] > 1


def test_an_idle_file_is_closed_and_listed_when_it_is_old(make, east, clock, tmp_path):
    worker = make(output_file_s=HOUR_S)
    opened_us = clock.now_us()
    worker.join(batch_of(["a"]))
    age(worker, clock, HOUR_S - 1)
    assert listed(east) == []
    age(worker, clock, 1)
    assert listed(east) == ["joiner-000000.jsonl"]
    (entry,) = complete_files(east).values()
    assert (entry.opened_us, entry.closed_us - opened_us) == (opened_us, HOUR_S * 1_000_000)
    age(worker, clock, 9 * HOUR_S)
    assert listed(east) == ["joiner-000000.jsonl"], "empty files are not left"
    worker.join(batch_of(["b"]))
    assert output_lines(tmp_path) == lines_of("ab")


def test_the_thread_closes_an_idle_file_by_itself(make, east):
    worker = make(output_file_s=0.01, clock=SystemClock())
    worker.start()
    worker.join(batch_of(["a"]))
    wait_until(lambda: listed(east) == ["joiner-000000.jsonl"])


def test_by_size_alone_no_file_is_too_old(make, east, clock):
    worker = make(output_file_s=0.0)
    worker.join(batch_of(["a"]))
    age(worker, clock, 1e9)
    assert listed(east) == []


def test_a_file_is_listed_when_no_batch_without_an_end_stands_in_it(make, registry, east, clock, monkeypatch):
    """One that is not written anywhere yet holds up none."""
    worker = make(output_file_s=HOUR_S, fsync=True)
    worker.join(batch_of(["a"]))
    registry.failures = ["after"]
    worker.join(batch_of(["b"]))
    fail_one_sync(monkeypatch)
    worker.join(batch_of(["c"]))  # written, and not durable
    age(worker, clock)
    assert listed(east) == []
    assert worker.status()["output"]["waiting"] == 1
    worker.leases.renew_due()
    assert worker.can_work(), "the disk is well again"
    worker.join(batch_of(["d"]))  # its sync is that of c, too
    age(worker, clock)
    assert listed(east) == ["joiner-000000.jsonl", "joiner-000001.jsonl"]
    worker.start()
    assert worker.stop(20)
    assert listed(east) == [f"joiner-00000{n}.jsonl" for n in range(3)]


def test_no_file_is_listed_before_the_ends_of_its_batches_are_durable(make, east, clock, monkeypatch):
    """Else a power cut opens their intents again, and the next start cuts a file that was complete."""
    worker = make(output_file_s=HOUR_S)
    worker.join(batch_of(["a"]))
    synced = note_syncs(monkeypatch)
    age(worker, clock)
    assert synced[-2:] == ["intents-000000000001.log", "joiner.manifest"]


def test_a_file_is_not_listed_while_the_end_of_its_batch_could_not_be_written(make, east, clock, monkeypatch):
    full = FailingWrites(monkeypatch, "/intents-")
    full.full = False
    steps = {"output synced": lambda: setattr(full, "full", True)}
    worker = make(output_file_s=HOUR_S, checkpoint=lambda step: steps.get(step, int)())
    worker.join(batch_of(["a"]))
    age(worker, clock)
    assert listed(east) == []
    steps.clear()
    full.full = False
    worker.join(batch_of(["b"]))
    worker._completer.step()
    assert listed(east) == ["joiner-000000.jsonl"]


def test_a_clean_stop_lists_every_file_and_the_next_life_neither_touches_nor_names_one_again(
    make, east, tmp_path
):
    for names in ("ab", "cd"):
        worker = make()
        worker.start()
        worker.join(batch_of(names))
        assert worker.stop(5)
    assert listed(east) == [path.name for path in output_files(tmp_path)]
    assert len(listed(east)) == 2
    assert output_lines(tmp_path) == lines_of("abcd")
    for path in output_files(tmp_path):  # the reader takes all away
        path.unlink()
    worker = make()
    worker.join(batch_of(["e"]))
    worker.stop(1)
    assert [*complete_files(east)] == [f"joiner-00000{n}.jsonl" for n in range(3)]


def test_what_a_killed_life_closed_and_did_not_list_is_listed_by_the_next(make, east, tmp_path):
    worker = make(output_file_bytes_max=100)
    for name in "abc":
        worker.join(batch_of([name]))
    worker.close()
    assert listed(east) == []
    worker = make()
    worker._completer.step()
    assert listed(east) == [path.name for path in output_files(tmp_path)][:-1]
    assert complete_files(east)["joiner-000000.jsonl"].opened_us is None


def test_a_torn_line_of_the_manifest_is_cut_and_its_file_listed_again_and_damage_stops_the_start(make, east):
    worker = make()
    worker.join(batch_of(["a"]))
    worker.stop(1)
    manifest = east / "joiner.manifest"
    os.truncate(manifest, manifest.stat().st_size - 5)
    worker = make()
    worker._completer.step()
    assert listed(east) == ["joiner-000000.jsonl"]
    worker.close()
    manifest.write_text("no entry\n")
    with pytest.raises(CorruptStateError, match="no entry of a manifest"):
        make()


def test_each_root_has_its_own_manifest_and_a_full_one_holds_no_other_back(
    make, tmp_path, monkeypatch, clock
):
    worker = make("two", output_file_s=HOUR_S)
    first, second = (tmp_path / out / "joined" / "east" for out in ("out", "two"))
    worker.join(batch_of(["a"]))
    with monkeypatch.context() as full:
        FailingWrites(full, str(first / "joiner.manifest"))
        age(worker, clock)
    assert (listed(first), listed(second)) == ([], ["joiner-000000.jsonl"])
    assert "no space left" in worker.status()["output"]["trouble"]
    worker._completer.step()
    assert listed(first) == ["joiner-000000.jsonl"]
    assert worker.status()["output"]["trouble"] is None


def test_complete_files_become_parquet_with_the_same_events(make, east, tmp_path):
    names = [f"e{n}" for n in range(50)]
    worker = make(output_format="parquet", output_file_bytes_max=1_000)
    for name in names:
        worker.join(batch_of([name]))
    worker._completer.step()
    growing = output_files(tmp_path)
    assert len(growing) == 1
    assert count_joined(tmp_path) == 50
    assert worker.stop(5)
    files = output_files(tmp_path, kind="parquet")
    assert listed(east) == [path.name for path in files]
    assert {path.suffix for path in east.iterdir()} == {".parquet", ".manifest", ".lives"}
    rows = [row for path in files for row in pyarrow.parquet.read_table(path).to_pylist()]
    assert rows == [json.loads(joined_line(name, f"q-{name}")) for name in names]
    assert count_joined(tmp_path / "out" / "joined") == 50


def test_rows_take_their_name_when_they_are_durable_and_as_many_as_the_lines(make, east, monkeypatch):
    real_replace, real_convert = completing.replace, completing.parquet.convert

    def replace(temporary, final):
        steps.append("renamed")
        real_replace(temporary, final)

    worker = make(output_format="parquet", output_file_bytes_max=1)
    worker.join(batch_of(["a"]))
    worker.join(batch_of(["b"]))
    with monkeypatch.context() as fewer:
        fewer.setattr(completing.parquet, "convert", lambda *given: real_convert(*given) - 1)
        worker._completer.step()
    assert listed(east) == []
    assert "0 rows made of 1 lines" in worker.status()["output"]["trouble"]
    steps = note_syncs(monkeypatch, "fsync")
    monkeypatch.setattr(completing, "replace", replace)
    worker._completer.step()
    assert steps[:2] == ["joiner-000000.parquet.tmp", "renamed"]
    assert listed(east) == ["joiner-000000.parquet"]


def test_what_waits_is_counted_in_every_root_and_progress_is_seen_within_a_file(make, tmp_path):
    worker = make("two", output_file_bytes_max=100)
    for name in "abc":
        worker.join(batch_of([name]))
    before = worker.status()["output"]
    worker._completer.step()
    after = worker.status()["output"]
    assert (before["waiting"], after["waiting"]) == (4, 0)
    assert after["progress"] > before["progress"]


def test_the_thread_rests_while_it_keeps_up_and_not_while_files_pile_up(make, monkeypatch):
    """Else what waits to be converted would have no bound at load."""
    worker = make(output_format="parquet", output_file_bytes_max=100)
    completer, waited = worker._completer, []

    def rest(seconds):
        waited.append(worker.status()["output"]["waiting"])
        return False

    monkeypatch.setattr(completer._work, "rest", rest)
    for name in "abcdef":
        worker.join(batch_of([name]))
    completer.step()
    assert set(waited) == {1}


def test_files_that_an_end_has_no_time_for_are_made_parquet_by_the_next_start(
    make, east, tmp_path, monkeypatch
):
    worker = make(output_format="parquet", output_file_bytes_max=100)
    for name in "abc":
        worker.join(batch_of([name]))
    monkeypatch.setattr(worker._completer._work, "_step", lambda: 60.0)  # it comes to nothing before the end
    worker.start()
    with monkeypatch.context() as hasty:
        hasty.setattr(completing, "FINISH_S_MAX", -1.0)
        assert worker.stop(5)
    assert "left for the next start" in worker.status()["notices"][-1]
    assert output_lines(tmp_path) == lines_of("abc")
    assert count_joined(tmp_path) == 3
    worker = make(output_format="parquet")
    worker._completer.step()
    assert listed(east) == [f"joiner-00000{n}.parquet" for n in range(3)]
    assert (count_joined(tmp_path), output_lines(tmp_path)) == (3, lines_of(""))


@pytest.mark.parametrize("step", ["converted", "renamed", "listed", "lines removed"])
def test_a_conversion_that_is_cut_off_anywhere_is_ended_by_the_next_start_and_counts_once(
    make, east, tmp_path, step
):
    worker = make(output_format="parquet", checkpoint=crash_at(step))
    worker.join(batch_of(["a", "b"]))
    with pytest.raises(Crash):
        worker.stop(1)
    worker.close()
    assert count_joined(tmp_path) == 2
    worker = make(output_format="parquet")
    worker.join(batch_of(["c"]))
    assert count_joined(tmp_path) == 3
    worker.stop(1)
    assert count_joined(tmp_path) == 3
    assert listed(east) == ["joiner-000000.parquet", *sorted(complete_files(east))[1:]]
    assert {path.suffix for path in east.iterdir()} == {".parquet", ".manifest", ".lives"}


def test_files_that_are_listed_as_lines_stay_lines(make, east, tmp_path):
    worker = make()
    worker.join(batch_of(["a"]))
    worker.stop(1)
    worker = make(output_format="parquet")
    worker.join(batch_of(["b"]))
    worker.stop(1)
    assert listed(east) == ["joiner-000000.jsonl", "joiner-000001.parquet"]
    assert count_joined(tmp_path) == 2
