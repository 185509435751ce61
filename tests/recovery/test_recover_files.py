"""Plans of recovery on disk, and what is taken off the ends of joined logs."""

import pytest

from joiner.output_files import CompleteFile, Manifest
from photon.core.disk import DirectoryLock
from photon.core.errors import CorruptStateError, LockedError
from photon.recovery.files import Plans, ended_joiners, missing_files
from spark.losses import LostEvents

EVENTS = LostEvents(b"i" * 32, b"t" * 16, [b"token"], [2], b'{"id":1}\n{"id":2}\n')


def ignore(_step):
    pass


class Kill(BaseException):
    pass


def kill_at(step):
    def checkpoint(name):
        if name == step:
            raise Kill

    return checkpoint


def test_a_plan_stays_until_it_is_forgotten_and_its_lines_go_to_the_inbox_whole(tmp_path):
    with Plans(tmp_path / "plans") as plans:
        plans.write(EVENTS, tmp_path / "inbox", ignore)
        (plan,) = plans.left()
        assert (plan.ids, plan.times, plan.tokens, plan.counts) == (b"i" * 32, b"t" * 16, [b"token"], [2])
        with pytest.raises(Kill):
            plans.inject(plan, kill_at("lines copied"))
        assert not list((tmp_path / "inbox").glob("*.jsonl"))
        plans.inject(plan, ignore)
        (fed,) = (tmp_path / "inbox").glob("*.jsonl")
        assert fed.read_bytes() == EVENTS.lines
        assert [one.name for one in plans.left()] == [plan.name]
        plans.forget(plan)
        assert not list(plans.left())


def test_lines_without_a_plan_are_removed_and_lines_with_one_are_not(tmp_path):
    with Plans(tmp_path) as plans:
        plan = plans.write(EVENTS, tmp_path / "inbox", ignore)
        with pytest.raises(Kill):
            plans.write(EVENTS, tmp_path / "inbox", kill_at("lines kept"))
        (tmp_path / "notes.txt").write_text("somebody's")
        assert len(list(tmp_path.glob("*.jsonl"))) == 2
        plans.tidy()
        assert [path.stem for path in tmp_path.glob("*.jsonl")] == [plan.name]
        assert (tmp_path / "notes.txt").exists()


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_a_plan_that_was_changed_releases_nothing(tmp_path, suffix):
    with Plans(tmp_path) as plans:
        plan = plans.write(EVENTS, tmp_path / "inbox", ignore)
        (tmp_path / f"{plan.name}{suffix}").write_bytes(b"{}\n")
        with pytest.raises(CorruptStateError, match=plan.name):
            list(plans.left())


def test_two_recoveries_at_a_time_are_refused(tmp_path):
    with Plans(tmp_path), pytest.raises(LockedError, match="another `photon recover` runs"), Plans(tmp_path):
        pass


# --- ends of joined logs


class Roots:
    """joined/east of a joiner in some roots."""

    def __init__(self, tmp_path, *names):
        self.outs = [tmp_path / name for name in names]
        self.work = tmp_path / "work"
        self.home = self.work / "east" / "joiner"
        self.home.mkdir(parents=True)
        for out in self.outs:
            Manifest(self.directory(out), "joiner-east").close()

    def directory(self, out):
        return out / "joined" / "east"

    def write(self, root, number, data):
        (self.directory(self.outs[root]) / f"joiner-east-{number:06d}.jsonl").write_bytes(data)

    def read(self, root, number):
        return (self.directory(self.outs[root]) / f"joiner-east-{number:06d}.jsonl").read_bytes()

    def complete(self, root, number, data):
        manifest = Manifest(self.directory(self.outs[root]), "joiner-east")
        lines = data.count(b"\n")
        manifest.add(CompleteFile(f"joiner-east-{number:06d}.jsonl", len(data), lines, "00000000", 1, 2))
        manifest.close()

    def mend(self):
        """How many bytes were cut off."""
        with ended_joiners(self.work, self.outs) as torn_bytes:
            return torn_bytes


LINES = b'{"id":1}\n{"id":2}\n{"id":3}\n'


def test_a_torn_line_of_a_joiner_that_has_ended_is_cut_off_and_whole_ones_stay_in_whatever_root(tmp_path):
    roots = Roots(tmp_path, "one", "two")
    roots.write(0, 0, LINES + b'{"id":4')
    roots.write(1, 0, LINES[:18])
    assert roots.mend() == 7
    assert (roots.read(0, 0), roots.read(1, 0)) == (LINES, LINES[:18])


def test_the_log_of_a_joiner_that_runs_or_stands_still_is_left_alone(tmp_path):
    roots = Roots(tmp_path, "one")
    roots.write(0, 0, LINES + b"{")
    with DirectoryLock(roots.home):
        assert roots.mend() == 0
    held = Manifest(roots.directory(roots.outs[0]), "joiner-east")
    (roots.home / "lock").unlink()  # its directory was deleted under it
    assert roots.mend() == 0
    held.close()
    assert roots.read(0, 0) == LINES + b"{"
    assert roots.mend() == 1


def test_a_joiner_whose_directory_is_not_here_may_run_on_another_machine_and_is_left_alone(tmp_path):
    roots = Roots(tmp_path, "one")
    roots.write(0, 0, LINES + b"{")
    roots.home.rmdir()
    assert roots.mend() == 0
    assert roots.read(0, 0) == LINES + b"{"


def test_while_recovery_holds_the_locks_no_joiner_starts(tmp_path):
    roots = Roots(tmp_path, "one")
    with ended_joiners(roots.work, roots.outs):
        with pytest.raises(LockedError):
            DirectoryLock(roots.home)
        with pytest.raises(LockedError):
            Manifest(roots.directory(roots.outs[0]), "joiner-east")
    DirectoryLock(roots.home).release()


def test_complete_files_that_are_in_no_output_are_missing_unless_they_are_found_elsewhere(tmp_path):
    roots = Roots(tmp_path, "one", "moved")
    roots.complete(0, 0, LINES)
    roots.complete(0, 1, LINES)
    roots.complete(0, 2, b"")
    roots.write(1, 1, LINES)
    assert [file.file for file in missing_files(roots.outs)] == ["joiner-east-000000.jsonl"]
