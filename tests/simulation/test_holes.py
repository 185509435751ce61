"""Each hole of the library, opened again, is noticed. A checker that can't fail proves nothing."""

import inspect
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.raft.kit import Lone
from tests.simulation import whole
from tests.simulation.caught import CASES, ELSEWHERE, NO_SEED, QUIET, SWEPT, UNITS, Case, table
from tests.simulation.cluster import Plan, Run, play
from tests.simulation.crash_points import sweep
from tests.simulation.holes import HOLES, weak_machine
from tests.simulation.registry_holes import small_chunks


def _played_by(case: Case) -> Any:
    """Those of a whole registry take long."""
    return pytest.param(case, marks=[pytest.mark.soak] if isinstance(case.plan, whole.Whole) else [])


@pytest.mark.parametrize("case", [_played_by(case) for case in CASES], ids=lambda case: case.hole)
@pytest.mark.long
@pytest.mark.timeout(600)  # twenty seeds of some seconds each, at most
def test_a_seed_notices_the_hole_and_passes_without_it(case: Case) -> None:
    for seed in range(case.plan.seed, case.plan.seed + case.tries):
        plan = replace(case.plan, seed=seed)
        with HOLES[case.hole]():
            broken = _played(plan).broken
        if case.rules & set(broken):
            assert not _played(plan).broken, plan
            return
    pytest.fail(f"{case.hole}: none of {case.tries} seeds from {case.plan.seed} on breaks {case.rules}")


def _played(plan: Plan | whole.Whole) -> Run | whole.WholeRun:
    return play(plan) if isinstance(plan, Plan) else whole.play(plan)


@pytest.mark.long
def test_no_point_to_end_at_loses_what_was_acknowledged() -> None:
    assert list(sweep()) == []


@pytest.mark.parametrize("hole", SWEPT)
@pytest.mark.long
def test_ending_at_every_point_notices_the_hole(hole: str) -> None:
    with HOLES[hole]():
        assert next(sweep(range(8)), None) is not None


@pytest.mark.parametrize("hole", UNITS)
def test_the_guards_own_test_fails_while_the_hole_is_open(hole: str, tmp_path: Path) -> None:
    test = UNITS[hole]
    _run(test, tmp_path / "closed")
    with HOLES[hole](), pytest.raises((AssertionError, IndexError)):
        _run(test, tmp_path / "open")


def _run(test: Any, directory: Path) -> None:
    """A test of tests/raft, with its fixtures made here."""
    made: list[Lone] = []

    def make(*arguments: Any, **named: Any) -> Lone:
        made.append(Lone(directory / str(len(made)), *arguments, **named))
        return made[-1]

    def path() -> Path:
        (directory / "path").mkdir(parents=True)
        return directory / "path"

    fixtures: dict[str, Callable[[], Any]] = {"make": lambda: make, "lone": make, "tmp_path": path}
    try:
        wanted = inspect.signature(test).parameters.keys() & fixtures.keys()
        test(**{name: fixtures[name]() for name in sorted(wanted)})
    finally:
        for lone in made:
            with suppress(Exception):
                lone.crash()


@pytest.mark.long
def test_l4_one_cut_link_disturbs_nobody_unless_replicas_stand_without_asking() -> None:
    """A follower that its leader can't reach, and others can, must not depose it again and again."""
    disturbed = 0
    for seed in range(4):  # whether it is a link of the leader's is the seed's choice
        plan = Plan(seed, 3, profile=QUIET)
        calm = play(plan)
        assert not calm.broken
        assert calm.stats["elections"] <= 2
        with HOLES["l4_stands_without_asking_first"]():
            disturbed += play(plan).stats["elections"] > 5
    assert disturbed


@pytest.mark.long
def test_a_state_whose_chunks_are_small_costs_nothing() -> None:
    """The same as for R4, with the guards in place."""
    with small_chunks():
        run = whole.play(whole.Whole(0))
    assert not run.broken


@pytest.mark.long
def test_a_machine_that_raises_now_and_then_costs_nothing_but_restarts() -> None:
    """The same as for S8, with the guard in place."""
    with weak_machine():
        run = play(Plan(0, 3))
    assert not run.broken


def test_the_page_says_which_hole_is_noticed_by_what() -> None:
    page = (Path(__file__).parent / "README.md").read_text("utf-8")
    assert page.endswith("\n" + table())
    assert set(NO_SEED) == set(UNITS) - {case.hole for case in CASES} - set(SWEPT)


def test_every_hole_is_noticed_somewhere() -> None:
    noticed = {case.hole for case in CASES} | set(SWEPT) | set(UNITS) | {"l4_stands_without_asking_first"}
    assert noticed == set(HOLES)
    numbers = {name.partition("_")[0] for name in noticed} | set(ELSEWHERE)
    wanted = {f"s{number}" for number in range(1, 15)} | {f"l{number}" for number in range(1, 5)}
    wanted |= {f"r{number}" for number in range(1, 9)}
    assert wanted <= numbers
