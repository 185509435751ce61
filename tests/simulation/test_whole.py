"""What must hold of a registry whole, sharded anew again and again while its hosts fail."""

import os
from collections import Counter
from dataclasses import replace

import pytest

from tests.simulation.caught import AHEAD, HELD, MOVING, PUT_BACK
from tests.simulation.whole import SPREAD_S, Whole, WholeRun, play

SEEDS = int(os.environ.get("PHOTON_SIM_SEEDS", "0")) or 3


def played(plans: list[Whole]) -> Counter[str]:
    runs: list[WholeRun] = []
    for plan in plans:
        runs.append(play(plan))
        assert not runs[-1].broken, (plan.command(), runs[-1].broken)
    return sum((Counter(run.stats) for run in runs), Counter())


def test_a_registry_is_sharded_anew_through_a_blackout_and_keeps_every_promise() -> None:
    total = played([Whole(0, seconds=12.0)])
    assert total["acknowledged"] > 50
    assert total["deaths"] > 0
    assert total["groups"] > 3, "the directory says of no new shard"


@pytest.mark.parametrize("spread_s", [pytest.param(0.0, marks=pytest.mark.soak), SPREAD_S])
@pytest.mark.long
def test_shards_come_go_and_come_again_while_hosts_fail(spread_s: float) -> None:
    total = played([Whole(seed, spread_s) for seed in range(SEEDS)])
    assert total["acknowledged"] > 100 * SEEDS
    assert total["deaths"] > 3 * SEEDS
    assert total["resharded"] > SEEDS
    assert total["trimmed"] > SEEDS
    assert total["released"] > SEEDS


@pytest.mark.long
def test_shares_move_between_members_and_have_one_owner_at_a_time() -> None:
    """MillWheel 6.2. A sequencer has one owner; what was kept under those before it is read by the next."""
    total = played([replace(MOVING, seed=seed) for seed in range(SEEDS)])
    assert total["moves"] > 12 * SEEDS
    assert total["kept"] > 50 * SEEDS


@pytest.mark.long
@pytest.mark.soak
def test_what_was_won_by_half_is_not_won_when_the_boundary_has_passed_its_guard() -> None:
    """Seeds that noticed it."""
    played([Whole(seed, SPREAD_S) for seed in (24, 54, 57)])


@pytest.mark.long
@pytest.mark.soak
def test_what_a_fenced_life_has_left_in_one_shard_of_two_is_given_back_or_released() -> None:
    """Seeds in which some was left."""
    played([Whole(seed, SPREAD_S) for seed in (14, 66, 123, 164)])


@pytest.mark.long
@pytest.mark.soak
def test_no_boundary_passes_what_dispatchers_hold_while_shards_and_hosts_come_and_go() -> None:
    """2.3. They are silent for longer than ids are kept."""
    total = played([replace(HELD, seed=seed) for seed in range(SEEDS)])
    assert total["held"] > 5 * SEEDS
    assert total["trimmed"] > SEEDS, "it moves on, too"


@pytest.mark.long
@pytest.mark.soak
def test_clocks_and_events_that_are_a_year_ahead_let_no_shard_forget_a_year() -> None:
    """2.3. Nor one that comes meanwhile."""
    total = played([replace(AHEAD, seed=seed) for seed in range(SEEDS)])
    assert total["acknowledged"] > 100 * SEEDS


@pytest.mark.long
def test_a_host_whose_disk_was_put_back_stops_before_it_harms_anybody() -> None:
    total = played([replace(PUT_BACK, seed=seed) for seed in range(6)])
    assert total["lost"] == 6


@pytest.mark.long
def test_a_seed_is_played_the_same_again() -> None:
    one, other = play(Whole(3)), play(Whole(3))
    assert one.history == other.history
    assert one.history != play(Whole(4)).history
