"""Whom recovery fences and whose events it takes, and what it holds meanwhile: over a registry that is told."""

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from joiner.output_files import Life as Start
from joiner.output_files import Manifest, note_life, read_recovered
from photon.core.clock import ManualClock
from photon.core.columns import pack_times, split_ids
from photon.core.disk import DirectoryLock
from photon.core.errors import LockedError, UnavailableError
from photon.core.fates import Released
from photon.core.ids import Token
from photon.recovery.recover import Job, recover
from photon.recovery.rules import as_text
from spark.losses import Loss, LostEvents, Survey


@dataclass
class Registry:
    """Leases end when they are told to: incarnation -> seconds."""

    leases: dict[int, float] = field(default_factory=dict)
    clock: ManualClock = field(default_factory=ManualClock)
    fenced: list[int] = field(default_factory=list)
    released: list[bytes] = field(default_factory=list)
    dismissed: set[int] = field(default_factory=set)

    def left_s(self, incarnation):
        return max(0.0, self.leases.get(incarnation, 0.0) - self.clock.monotonic())

    def incarnations(self, wanted):
        return [SimpleNamespace(fenced=False, expires_in_s=self.left_s(one)) for one in wanted]

    def fence(self, incarnation):
        self.fenced.append(incarnation)
        left_s = self.left_s(incarnation)
        return SimpleNamespace(fenced=not left_s, expires_in_s=left_s)

    def dismiss(self, incarnations):
        self.dismissed.update(incarnations)

    def release(self, ids, times, tokens, counts):
        """An id that was released before is absent."""
        found = bytearray()
        for one in split_ids(ids):
            found.append(Released.ABSENT if one in self.released else Released.RELEASED)
            self.released.append(one)
        return bytes(found)


class Kill(BaseException):
    pass


class Reading:
    """Losses, and for each of their events a line. `look` is called while the logs are read again."""

    untold = untold_before = 0

    def __init__(self, *losses, look=lambda: None, lines=1):
        self.losses, self.look, self.lines = losses, look, lines
        self.asked, self.missing = [], {}

    def survey(self, young_us, doubtful_us):
        return Survey(1_000, self.untold_before, 0, self.losses)

    def lost(self, incarnations):
        self.asked = [*incarnations]
        self.look()
        return self

    def events(self):
        for loss in self.losses:
            if loss.incarnation in self.asked:
                rows = [(n, line) for n in range(loss.lost + loss.young) for line in range(self.lines)]
                yield LostEvents(
                    b"".join(b"%08d%08d" % (loss.incarnation, n) for n, _ in rows),
                    pack_times([line for _, line in rows]),
                    [Token(loss.address, loss.incarnation, 1).pack()],
                    [len(rows)],
                    b'{"id":1}\n' * len(rows),
                )


@pytest.fixture
def job(tmp_path):
    """Its output tells of lives 1 and 2."""
    directory = tmp_path / "out" / "joined" / "east"
    directory.mkdir(parents=True)
    for incarnation in (1, 2):
        note_life(directory, "joiner-east", Start(incarnation, "10.0.0.1:70", 5))

    def make(**more):
        work = tmp_path / "work"
        return Job(
            [tmp_path / "out"], work, tmp_path / "inbox", tmp_path / "plans", **{"apply": True, **more}
        )

    return make


def run(job, registry, reading):
    return recover(job, registry, reading, registry.clock, sleep=registry.clock.advance)


def states(report):
    return {one.loss.incarnation: str(one.life) for one in report.held}


def test_a_joiner_that_lost_nothing_is_not_fenced_though_its_lease_lapses_for_a_moment(job):
    registry = Registry({1: 0.1})
    report = run(job(), registry, Reading(Loss("10.0.0.1:70", 1, 0, 7, 0, 1)))
    assert (registry.fenced, registry.clock.monotonic()) == ([], 0.0)
    assert (report.in_flight, report.status) == (7, 0)


@pytest.mark.parametrize("ended", [True, False])
def test_of_a_run_that_has_ended_nothing_is_in_flight_whoever_registered_it(job, ended):
    """Its lives can't be told from its outputs any more."""
    registry = Registry()

    class Young(Reading):
        def survey(self, young_us, doubtful_us):
            young = young_us < registry.clock.now_us()
            return Survey(1_000, 0, 0, [Loss("10.0.0.1:70", 9, 0 if young else 7, 7 if young else 0, 0, 1)])

    report = run(job(ended=ended), registry, Young())
    assert (report.lost, report.in_flight, report.status) == ((7, 0, 1) if ended else (0, 7, 0))
    assert registry.fenced == registry.released == []
    assert ("its output is not named" in as_text(report)) == ended


def test_only_those_that_lost_something_are_fenced_or_waited_for(job):
    registry = Registry({1: 0.1, 2: 3.0})
    young, old = Loss("10.0.0.1:70", 1, 0, 7, 0, 1), Loss("10.0.0.1:71", 2, 4, 1, 0, 1)
    report = run(job(), registry, Reading(young, old))
    assert {*registry.fenced} == {2}
    assert states(report) == {1: "alive", 2: "fenced"}
    assert (report.recovered, report.in_flight, report.status) == (5, 7, 0)


def test_lives_that_had_ended_and_lost_nothing_that_is_not_recovered_are_noted_and_missed_no_more(
    job, tmp_path
):
    """Not one that lives, nor one that has ended while recovery read, nor what a dry run finds."""
    directory = tmp_path / "out" / "joined" / "east"
    for incarnation in (3, 4, 5):
        note_life(directory, "joiner-east", Start(incarnation, "10.0.0.1:70", 5))
    losses = [Loss("10.0.0.1:70", 1, 4, 0, 0, 1), Loss("10.0.0.1:70", 2, 4, 0, 0, 1)]
    registry = Registry({3: 1000.0, 5: 0.1})
    reading = Reading(*losses, look=lambda: registry.clock.advance(1.0))
    reading.missing = {2: 4}  # which no input has
    run(job(apply=False), registry, reading)
    assert read_recovered(directory) == registry.dismissed == set()
    run(job(), registry, reading)
    assert read_recovered(directory) == registry.dismissed == {1, 4}
    run(job(), registry, reading)
    assert (directory / "recovered").read_text() == f"{1:016x}\n{4:016x}\n{5:016x}\n"


def test_of_a_run_that_has_ended_no_joiner_is_alive_and_their_leases_are_waited_for(job):
    registry, reading = Registry({1: 90.0}), Reading(Loss("10.0.0.1:70", 1, 4, 1, 0, 1))
    dry = run(job(apply=False, ended=True), registry, reading)
    assert (states(dry), dry.recoverable, dry.in_flight) == ({1: "over"}, 5, 0)
    assert "stop or restart" not in as_text(dry)
    report = run(job(ended=True), registry, reading)
    assert (states(report), report.recovered, report.status) == ({1: "fenced"}, 5, 0)
    assert registry.clock.monotonic() >= 90.0


def test_what_no_named_output_tells_of_is_left_and_told_and_the_rest_is_recovered(job):
    ours, other = Loss("10.0.0.1:70", 1, 3, 0, 0, 1), Loss("10.1.1.1:99", 99, 4, 0, 0, 1)
    registry, reading = Registry(), Reading(ours, other)
    report = run(job(), registry, reading)
    assert (registry.fenced, reading.asked) == ([1], [1])
    assert states(report) == {1: "fenced", 99: "unnamed"}
    assert (report.recovered, report.remaining, report.status) == (3, 4, 1)
    dry = run(job(apply=False), registry, reading)
    assert (states(dry)[99], dry.recoverable, dry.status) == ("unnamed", 3, 1)


def test_an_output_that_tells_of_no_lives_counts_as_one_that_is_not_named(job, tmp_path):
    (tmp_path / "out" / "joined" / "east" / "joiner-east.lives").unlink()
    report = run(job(), registry := Registry(), Reading(Loss("10.0.0.1:70", 1, 3, 0, 0, 1)))
    assert (registry.fenced, states(report), report.status) == ([], {1: "unnamed"}, 1)


def test_what_is_gone_for_good_is_recovered_though_no_output_tells_of_it(job):
    report = run(job(gone=True), Registry(), Reading(Loss("10.1.1.1:99", 99, 4, 0, 0, 1)))
    assert (states(report), report.recovered, report.status) == ({99: "fenced"}, 4, 0)


def test_what_a_backfill_lost_is_taken_from_it_only_when_the_user_says_so(job, tmp_path):
    note_life(tmp_path / "out" / "joined" / "east", "backfill", Start(9, "backfill/east", 5))
    registry, reading = Registry(), Reading(Loss("backfill/east", 9, 4, 0, 0, 1))
    report = run(job(), registry, reading)
    assert (registry.fenced, states(report), report.status) == ([], {9: "backfill"}, 1)
    report = run(job(gone=True), registry, reading)
    assert (registry.fenced, states(report)) == ([9], {9: "fenced"})
    assert (report.recovered, report.remaining, report.status) == (4, 0, 0)


def test_a_backfill_whose_lease_runs_is_left_alone_whatever_the_user_says(job):
    registry = Registry({9: 1000.0})
    report = run(job(gone=True), registry, Reading(Loss("backfill/east", 9, 4, 0, 0, 1)))
    assert (states(report), report.recovered, report.status) == ({9: "alive"}, 0, 1)


def test_an_id_in_several_rows_of_a_plan_counts_once(job):
    report = run(job(), Registry(), Reading(Loss("10.0.0.1:70", 1, 3, 0, 0, 1), lines=2))
    assert (report.recovered, report.taken, report.remaining, report.lost) == (3, 0, 0, 3)


def test_the_locks_of_ended_joiners_are_held_while_the_logs_are_read_again_and_no_longer(job, tmp_path):
    home = tmp_path / "work" / "east" / "joiner"
    home.mkdir(parents=True)
    Manifest(tmp_path / "out" / "joined" / "east", "joiner-east").close()
    held = []

    def locked():
        try:
            DirectoryLock(home).release()
        except LockedError:
            return True
        return False

    class Watched(Registry):
        def release(self, *columns):
            held.append(locked())
            return super().release(*columns)

    reading = Reading(Loss("10.0.0.1:70", 1, 3, 0, 0, 1), look=lambda: held.append(locked()))
    assert run(job(), Watched(), reading).recovered == 3
    assert held == [True, False]


def injected(tmp_path):
    return b"".join(path.read_bytes() for path in (tmp_path / "inbox").glob("*.jsonl")).count(b"\n")


def test_all_that_is_released_goes_to_the_inbox_in_however_many_requests(job, tmp_path):
    registry = Registry()
    run(job(), registry, Reading(Loss("10.0.0.1:70", 1, 1_500, 0, 0, 1)))
    assert (len(registry.released), len({*registry.released}), injected(tmp_path)) == (1_500, 1_500, 1_500)


@pytest.mark.parametrize("step", ["planned", "released", "injected"])
def test_what_a_killed_run_left_is_finished_by_the_next(job, tmp_path, step):
    def kill(at):
        if at == step:
            raise Kill

    registry = Registry()
    with pytest.raises(Kill):
        recover(job(), registry, Reading(Loss("10.0.0.1:70", 1, 3, 0, 0, 1)), registry.clock, checkpoint=kill)
    dry = run(job(apply=False), registry, Reading())  # what was released no scan shows
    assert (dry.plans_left, dry.status) == (1, 1)
    report = run(job(), registry, Reading())
    assert (report.plans_finished, len({*registry.released}), injected(tmp_path)) == (1, 3, 3)
    assert run(job(), registry, Reading()).plans_finished == 0


def test_nothing_is_injected_before_every_shard_knows_of_the_fence(job, tmp_path, monkeypatch):
    registry = Registry()
    with monkeypatch.context() as patch:
        patch.setattr(registry, "release", lambda *_: bytes([Released.RELEASED, Released.NOT_FENCED]))
        with pytest.raises(UnavailableError, match="The plan is kept"):
            run(job(), registry, Reading(Loss("10.0.0.1:70", 1, 2, 0, 0, 1)))
    assert injected(tmp_path) == 0
    report = run(job(), registry, Reading())
    assert (report.plans_finished, report.recovered, injected(tmp_path)) == (1, 2, 2)


@pytest.mark.parametrize("found", ["before the fence", "after it"])
def test_lines_that_do_not_tell_their_event_stop_what_the_fence_would_allow(job, tmp_path, found):
    reading = Reading(Loss("10.0.0.1:70", 1, 3, 0, 0, 1))
    setattr(reading, "untold_before" if found == "before the fence" else "untold", 5)
    registry = Registry({1: 0.1})  # alive until it is asked
    report = run(job(), registry, reading)
    assert "do not tell" in report.refused
    assert (registry.fenced != [], registry.released, injected(tmp_path)) == (True, [], 0)
