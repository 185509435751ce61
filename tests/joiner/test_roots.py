"""Several output roots: the same lines in each, through changes of the settings and disks that are away."""

import re
import shutil

import pytest

from photon.core.errors import CorruptStateError, LockedError, SettingsError, StorageError
from tests.fake_registry import FakeRegistry
from tests.joiner.fakes import batch_of, lines_of, make_worker, output_files, output_lines


def leave_a_batch_under_way(worker, registry):
    """`a` is joined, `b` registered and not written."""
    worker.join(batch_of(["a"]))
    registry.failures = ["after"]
    worker.join(batch_of(["b"]))
    worker.close()


def test_a_root_that_is_added_gets_what_is_written_from_then_on(make, registry, tmp_path):
    leave_a_batch_under_way(make(), registry)
    second = make("two")
    second.start()
    second.join(batch_of(["c"]))
    assert second.stop(20)
    assert output_lines(tmp_path) == lines_of("abc")
    assert output_lines(tmp_path, "two") == lines_of("bc")
    assert output_files(tmp_path, "two")[-1].name == output_files(tmp_path)[-1].name


def test_a_batch_may_be_under_way_since_before_a_root_was_added(make, registry, tmp_path):
    leave_a_batch_under_way(make(), registry)
    registry.down = True
    make("two").close()
    registry.down = False
    third = make("two")
    third.join(batch_of(["c"]))
    third.close()
    fourth = make("two")
    fourth.start()
    assert fourth.stop(20)
    assert output_lines(tmp_path) == lines_of("abc")
    assert output_lines(tmp_path, "two") == lines_of("bc")


def test_a_root_can_be_taken_out_while_a_batch_is_under_way(make, registry, tmp_path):
    """Its disk is dead, so the batch could never end with it."""
    leave_a_batch_under_way(make("two"), registry)
    shutil.rmtree(tmp_path / "two")
    second = make()
    second.start()
    assert second.stop(20)
    assert output_lines(tmp_path) == lines_of("ab")


def test_a_root_whose_disk_is_not_mounted_stops_the_start(make, tmp_path):
    worker = make("two")
    worker.join(batch_of(["a"]))
    worker.stop(1)
    (tmp_path / "two").rename(tmp_path / "away")
    (tmp_path / "two" / "joined" / "east").mkdir(parents=True)
    (tmp_path / "two" / "joined" / "east" / "joiner-1-000000.jsonl").touch()  # another's
    with pytest.raises(CorruptStateError, match="nothing of it is there; mount the disk"):
        make("two")
    shutil.rmtree(tmp_path / "two")
    (tmp_path / "away").rename(tmp_path / "two")
    make("two").join(batch_of(["b"]))
    assert output_lines(tmp_path, "two") == lines_of("ab")


def test_a_root_that_was_moved_while_a_batch_was_under_way_is_not_taken_for_a_new_one(
    make, registry, tmp_path
):
    leave_a_batch_under_way(make("two"), registry)
    (tmp_path / "two").rename(tmp_path / "moved")
    with pytest.raises(SettingsError, match="name it as before for one start"):
        make("moved")


def test_a_root_that_comes_back_goes_on_where_the_others_are(make, tmp_path):
    for number, more in enumerate([("two",), (), (), ("two",)]):
        worker = make(*more)
        worker.join(batch_of([f"e{number}"]))
        assert worker.stop(1)
    assert output_lines(tmp_path) == lines_of(["e0", "e1", "e2", "e3"])
    assert output_lines(tmp_path, "two") == lines_of(["e0", "e3"])
    assert output_files(tmp_path, "two")[-1].name == output_files(tmp_path)[-1].name


def test_two_names_of_one_directory_are_refused_and_a_root_that_cannot_be_made_is_told(make, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "out")
    same = f"{tmp_path}/link and {tmp_path}/out are the same directory"
    with pytest.raises(SettingsError, match=re.escape(same)):
        make("link")
    (tmp_path / "two").write_text("a file")
    with pytest.raises(StorageError, match="two"):
        make("two")


def test_another_joiner_of_the_same_name_is_kept_out_of_a_root(make, tmp_path):
    make("two")
    with pytest.raises(LockedError, match="another joiner of this name writes here"):
        make_worker(
            tmp_path,
            FakeRegistry(),
            directory=tmp_path / "other state",
            output_root=tmp_path / "other out",
            output_roots=(str(tmp_path / "two"),),
        )
