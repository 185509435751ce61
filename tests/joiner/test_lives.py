"""Each output root tells which lives of a joiner write to it, before they register anything."""

import os
from pathlib import Path

import pytest

from joiner.output_files import Life, complete_files, count_joined, encode_life, note_life, read_lives
from photon.core.errors import DiskFullError
from tests.joiner.fakes import FailingWrites, batch_of, lines_of, output_lines

ROOTS = ("out", "two")


@pytest.fixture
def told(tmp_path, registry):
    """Which lives the roots told of, durably, when the registry was first asked for something."""
    first = []

    def look(_call, _incarnation):
        if not first:
            first.append([set(lives(tmp_path, out)) for out in ROOTS])

    registry.before = look
    return first


def directory(root, out):
    return root / out / "joined" / "east"


def lives(root, out="out"):
    return read_lives(directory(root, out))


def own(worker):
    return worker.leases.own.incarnation


def test_every_root_tells_of_a_life_before_it_asks_for_anything(make, told, tmp_path, clock):
    worker = make("two")
    worker.join(batch_of(["a"]))
    assert told == [[{own(worker)}] * 2]
    for out in ROOTS:
        assert lives(tmp_path, out)[own(worker)] == Life(own(worker), "127.0.0.1:0", clock.now_us())


def test_a_life_is_on_disk_before_it_asks_for_anything(make, told, tmp_path, monkeypatch):
    synced, real = {}, os.fdatasync

    def fdatasync(fd):
        real(fd)
        path = Path(os.readlink(f"/proc/self/fd/{fd}"))
        synced[path] = path.read_bytes(), not told

    monkeypatch.setattr(os, "fdatasync", fdatasync)
    worker = make("two")
    line = encode_life(lives(tmp_path)[own(worker)])
    assert told
    assert [synced[directory(tmp_path, out) / "joiner.lives"] for out in ROOTS] == [(line, True)] * 2


def test_all_lives_stay_and_a_root_that_is_added_tells_of_those_since(make, tmp_path):
    workers = []
    for more in [(), ("two",), ("two",)]:
        workers.append(make(*more))
        workers[-1].close()
    assert [*lives(tmp_path)] == [own(worker) for worker in workers]
    assert [*lives(tmp_path, "two")] == [own(worker) for worker in workers[1:]]


@pytest.mark.parametrize("full", ROOTS)
def test_a_full_disk_stops_the_start_and_the_next_one_goes_on(
    make, registry, told, tmp_path, monkeypatch, full
):
    before = make("two")
    before.join(batch_of(["a"]))
    before.close()
    told.clear()
    registry.asked_leases.clear()
    path = str(directory(tmp_path, full) / "joiner.lives")
    with monkeypatch.context() as patched:
        FailingWrites(patched, path)
        with pytest.raises(DiskFullError, match=r"joiner\.lives"):
            make("two")
    assert told == registry.asked_leases == []
    assert [*lives(tmp_path, full)] == [own(before)]
    after = make("two")
    after.join(batch_of(["b"]))
    for out in ROOTS:
        assert {own(before), own(after)} <= {*lives(tmp_path, out)}
        assert output_lines(tmp_path, out) == lines_of("ab")


def test_a_torn_line_is_no_life_and_takes_none_with_it(tmp_path):
    first, second = Life(1, "a:1", 5), Life(1 << 63, "b:2", 6)
    note_life(tmp_path, "j", first)
    path = tmp_path / "j.lives"
    for size in range(len(encode_life(second))):
        path.write_bytes(encode_life(first) + encode_life(second)[:size])
        assert read_lives(tmp_path) == {1: first}
        third = Life(3, "c:3", 7)
        note_life(tmp_path, "j", third)
        assert read_lives(tmp_path).items() >= {1: first, 3: third}.items()


def test_lives_of_all_joiners_of_a_directory_are_read_and_none_where_there_is_no_directory(tmp_path):
    for number, stem in enumerate(["j", "j-1", "backfill"]):
        note_life(tmp_path, stem, Life(number, "a:1", 5))
    assert {*read_lives(tmp_path)} == {0, 1, 2}
    assert read_lives(tmp_path / "none") == {}


def test_lives_are_no_joined_lines(make, tmp_path):
    worker = make("two")
    worker.join(batch_of(["a", "b"]))
    assert worker.stop(5)
    for out in ROOTS:
        assert count_joined(directory(tmp_path, out)) == 2
        assert [*complete_files(directory(tmp_path, out))] == ["joiner-000000.jsonl"]
