"""A joiner killed between any two IO steps: each event it won is in the joined log exactly once."""

import errno
import os
import signal
from collections import Counter

import pytest

from photon.core import disk
from photon.core.columns import split_lines
from tests.fake_registry import FakeRegistry
from tests.forked import Child
from tests.joiner import crash_child
from tests.joiner.fakes import (
    Crash,
    batch_of,
    crash_at,
    lines_of,
    make_worker,
    output_bytes,
    output_lines,
    packed_id,
    path_of,
)

STEPS = [
    "looked up",
    "intent appended",
    "intent synced",
    "registered",
    "output appended",
    "output synced",
    "done",
]
EVERYTHING = lines_of({name for batch in crash_child.BATCHES for name in batch})


def run(root, die_at="never", passes=0):
    """The exit status of one that is to die there."""
    return Child(crash_child.main, root, die_at, passes).wait()


def check_no_event_is_there_twice_or_unregistered(root):
    tokens = FakeRegistry(root / "registry").tokens
    written = split_lines(output_bytes(root).rpartition(b"\n")[0] + b"\n")
    written = [line for line in written if line]
    assert len(written) == len(set(written))
    for line in written:
        assert packed_id(line.split(b'"')[3].decode()) in tokens


@pytest.mark.parametrize("step", [*STEPS, crash_child.TORN])
def test_a_joiner_killed_between_two_steps_and_again_in_its_recovery_loses_and_doubles_nothing(
    tmp_path, step
):
    again = "output appended" if step == crash_child.TORN else step
    for die_at, passes in ((step, 2), (again, 0)):
        assert run(tmp_path, die_at, passes) == -signal.SIGKILL
        check_no_event_is_there_twice_or_unregistered(tmp_path)
    assert run(tmp_path) == 0
    assert output_lines(tmp_path) == EVERYTHING


def test_lines_that_are_alike_are_counted_by_the_batches_they_belong_to(tmp_path, monkeypatch):
    """An adapter may leave out the id: then only their place tells whose lines stand in the log already."""
    (tmp_path / "alike_adapters.py").write_text(
        "from joiner.adapter import Adapter\n"
        "class Alike(Adapter):\n"
        "    def join(self, primary, foreign):\n"
        "        return {'same': 'line'}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    registry = FakeRegistry()
    alike = {"adapter": "alike_adapters:Alike", "output_file_bytes_max": 40}
    first = make_worker(tmp_path, registry, **alike)
    registry.failures = ["after"]
    first.join(batch_of(["a", "b"]))  # registered, not written
    first.join(batch_of(["c", "d", "e"]))  # done, after the place from which a's may stand
    first._settler._checkpoint = crash_at("output appended")
    with pytest.raises(Crash):
        first.join(batch_of(["f"]))  # written, not done
    first.close()
    assert output_lines(tmp_path).total() == 4
    second = make_worker(tmp_path, registry, **alike)
    second.start()
    assert second.stop(20)
    assert output_lines(tmp_path).total() == 6


def test_lines_whose_sync_failed_are_written_again_whatever_the_page_cache_says(tmp_path, monkeypatch):
    """The kernel has dropped what it could not write, and shows it as long as it keeps the pages."""
    registry, fatal, real, written = FakeRegistry(), [], os.fdatasync, []

    def fdatasync(fd):
        if path_of(fd).endswith(".jsonl"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        real(fd)

    worker = make_worker(tmp_path, registry, fsync=True, on_fatal=fatal.append)
    with monkeypatch.context() as failing:
        failing.setattr(os, "fdatasync", fdatasync)
        worker.join(batch_of(["a"]))
    worker.close()
    assert fatal
    assert output_lines(tmp_path) == lines_of("a"), "the page cache has it"
    write_all = disk.write_all

    def spy(fd, data):
        if path_of(fd).endswith(".jsonl"):
            written.append(bytes(data))
        write_all(fd, data)

    monkeypatch.setattr("photon.logs.writer.write_all", spy)
    second = make_worker(tmp_path, registry, fsync=True)
    second.start()
    assert second.stop(20)
    assert Counter(split_lines(b"".join(written))) == output_lines(tmp_path) == lines_of("a")


def test_lines_that_a_power_cut_took_are_written_again_and_found_by_the_next_start(tmp_path):
    """What was appended but not synced is lost; another crash follows in the midst of the repair."""
    registry = FakeRegistry()
    first = make_worker(tmp_path, registry)
    first.join(batch_of(["a"]))
    registry.failures = ["after"] * 2
    first.join(batch_of(["b", "c"]))
    first.join(batch_of(["d"]))
    first.close()
    log = tmp_path / "out" / "joined" / "east" / "joiner-000000.jsonl"
    os.truncate(log, 0)  # intents b, c and d remember a place behind the end of the log now
    registry.failures = []

    def crash_when_written(step):
        if step == "output synced":
            worker.close()

    worker = make_worker(tmp_path, registry, checkpoint=crash_when_written)
    worker.start()
    assert not worker.stop(0.5)
    assert output_lines(tmp_path) == lines_of(["b", "c"])
    third = make_worker(tmp_path, registry)
    third.start()
    assert third.stop(20)
    assert output_lines(tmp_path) == lines_of(["b", "c", "d"])
