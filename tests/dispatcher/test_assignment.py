"""Whose a file is: by its name, whatever rotation makes of it; and the number of workers, which stands."""

from collections import Counter

import pytest

from dispatcher.workers import check_workers, fix_workers, mine_of, worker_directories, worker_of
from photon.core.errors import SettingsError
from photon.logs.shares import SLOTS, slot_of, unrotated


@pytest.mark.parametrize(
    ("name", "base"),
    [
        ("a.log", "a.log"),
        ("a.log.1", "a.log"),
        ("a.log.12", "a.log"),
        ("a.log.1.gz", "a.log"),
        ("a.log.2.zst", "a.log"),
        ("a.log.gz", "a.log"),
        ("a.log-20260101", "a.log"),
        ("a.log-2026010112.gz", "a.log"),
        ("a.log-1767225600", "a.log"),
        ("a.log.20260101", "a.log"),
        ("a.log.2026-01-01", "a.log"),
        ("a.log-2026-01-01.zst", "a.log"),
        ("a.log.2026-01-01_12", "a.log"),
        ("a.log.2026-01-01_12-30-59.gz", "a.log"),
        ("a.log-20260101.1.gz", "a.log"),
        ("a.log.2026-01-01T10:11:12Z", "a.log"),
        ("a.log.20260101-101112.gz", "a.log"),
        ("a.log-20260101T1011Z", "a.log"),
        ("a.log.old", "a.log"),
        ("a.log.1.bak", "a.log"),
        ("a.log~", "a.log"),
        # Names of logs of their own.
        ("a-2026-01-01.log", "a-2026-01-01.log"),
        ("old", "old"),
        ("~", "~"),
        ("clicks-0.jsonl", "clicks-0.jsonl"),
        ("clicks-20260101.jsonl", "clicks-20260101.jsonl"),
        ("clicks-1", "clicks-1"),
        ("host-12.jsonl.3", "host-12.jsonl"),
        ("1", "1"),
        (".1", ".1"),
        (".gz", ".gz"),
        ("recovered-0123456789abcdef.jsonl", "recovered-0123456789abcdef.jsonl"),
        ("a\udcff.log.1", "a\udcff.log"),
    ],
)
def test_what_rotation_makes_of_a_log_belongs_to_its_worker(name, base):
    assert unrotated(f"/logs.1/{name}") == f"/logs.1/{base}"
    for workers in (1, 2, 3, 64):
        assert worker_of(f"/logs.1/{name}", workers) == worker_of(f"/logs.1/{base}", workers)


def test_slots_are_the_same_in_every_process_and_version():
    assert [slot_of(f"/logs/{n}.jsonl") for n in range(5)] == [15, 16, 36, 15, 61]


def test_each_file_has_one_worker_and_workers_have_about_the_same_number():
    names = [f"/logs/{n}.jsonl" for n in range(3_000)]
    counts = Counter(worker_of(name, 4) for name in names)
    assert sorted(counts) == [0, 1, 2, 3]
    assert all(600 < count < 900 for count in counts.values())
    own = [mine_of(worker, 4) for worker in range(4)]
    assert all(sum(mine(name) for mine in own) == 1 for name in names)
    assert {slot_of(name) for name in names} == set(range(SLOTS))
    assert mine_of(0, 1) is None


def test_the_number_of_workers_stands_from_the_first_start_on(tmp_path):
    place = tmp_path / "dispatcher"
    check_workers(place, 5)
    fix_workers(place, 3)
    fix_workers(place, 3)
    for act in (check_workers, fix_workers):
        with pytest.raises(
            SettingsError, match=r"begun with 3 dispatcher workers, not 2; set .* to 3 again"
        ) as told:
            act(place, 2)
        assert "\n" not in str(told.value) and told.value.exit_status == 2
    assert [path.name for path in place.iterdir()] == ["workers"]
    (place / "worker-10").mkdir()
    (place / "worker-2").mkdir()
    assert list(worker_directories(place)) == [2, 10]
    (place / "workers").write_text("")
    with pytest.raises(SettingsError, match="no number"):
        check_workers(place, 3)
