"""What incarnations hold, in numbers: what they ever won, less what was released or expired."""

import pytest

from idregistry.rules.commands import Boundary, Commit, Release, encode
from idregistry.rules.packing import BUCKET_US
from idregistry.rules.sharding import HORIZON, Route
from idregistry.rules.state import ShardState
from idregistry.rules.surveys import GONE_JOINERS_MAX, gone_joiners
from photon.core.accounts import HOURS_A_DAY, WINDOW_US, WINDOWS, Sum, plus, sums_by_day
from photon.core.columns import hash_ids, pack_times, split_ids
from photon.core.ids import Token
from tests.idregistry.kit import LATEST, NOW_US, OWN, event_ids, new_state
from tests.idregistry.nodes import Ensemble

NOW = NOW_US // WINDOW_US
DAY = NOW_US // (HOURS_A_DAY * BUCKET_US)


def commit(numbers: range, token: Token, time_us: int = NOW_US, route: Route = OWN) -> Commit:
    ids = event_ids(*numbers)
    return Commit(NOW_US, [token.pack()], [len(numbers)], ids, pack_times([time_us] * len(numbers)), [route])


def sum_of(numbers: range) -> Sum:
    return len(numbers), int(hash_ids(event_ids(*numbers)).sum())


def test_what_late_tokens_won_is_told_apart_also_after_a_restart() -> None:
    state = new_state()
    for number, age in enumerate([10, 2, 1, 0]):
        token = Token("a:1", 7, (NOW - age) * WINDOW_US)
        state.apply(encode(commit(range(10 * number, 10 * number + 5), token)))
    restored = ShardState(0)
    restored.prepare(list(state.freeze()))()
    for one in (state, restored):
        accounts = one.accounts()
        assert accounts({7}, "", NOW - 1).days == {(7, DAY): plus(sum_of(range(5)), sum_of(range(10, 15)))}
        assert accounts({7}, "", NOW + 1).days[7, DAY][0] == 20
        assert accounts({7}, "", LATEST).since == NOW - WINDOWS


def test_what_a_late_token_won_and_gave_back_is_in_no_account() -> None:
    state, token = new_state(), Token("a:1", 7, NOW_US)
    taken = commit(range(6), token)
    state.apply(encode(taken))
    back = Release(NOW_US, taken.tokens, [4], event_ids(*range(4)), pack_times([NOW_US] * 4), [OWN], True)
    state.apply(encode(back))
    assert state.accounts()({7}, "", LATEST).days == {(7, DAY): sum_of(range(4, 6))}
    assert state.accounts()({7}, "", NOW).days == {}


def test_an_account_is_of_the_incarnations_asked_for_and_of_all_of_an_address() -> None:
    state = new_state()
    state.apply(encode(commit(range(3), Token("a:1", 7, 1))))
    state.apply(encode(commit(range(3, 5), Token("b:2", 8, 1))))
    accounts = state.accounts()
    assert {place[0] for place in accounts({7}, "", LATEST).days} == {7}
    assert {place[0] for place in accounts(set(), "b:2", LATEST).days} == {8}
    assert {place[0] for place in accounts({7}, "b:2", LATEST).days} == {7, 8}


def test_days_that_are_forgotten_in_part_are_named() -> None:
    state = new_state()
    state.apply(encode(commit(range(3), Token("a:1", 7, 1))))
    state.apply(encode(Boundary(NOW_US, (DAY * HOURS_A_DAY + 1) * BUCKET_US)))
    assert state.accounts()({7}, "", LATEST).first_day == DAY + 1


@pytest.mark.parametrize("count", [1, 13, 300])
def test_a_joiner_sums_its_lines_up_as_the_registry_sums_its_ids(count: int) -> None:
    """Times of two days, one of them before 1970."""
    ids = event_ids(*range(count))
    times = pack_times([(-1) ** row * NOW_US for row in range(count)])
    state = new_state()
    state.apply(encode(Commit(NOW_US, [Token("a:1", 7, 1).pack()], [count], ids, times, [OWN])))
    days = state.accounts()({7}, "", LATEST).days
    assert days == {(7, day): sum_ for day, sum_ in sums_by_day(ids, times).items()}


def test_a_client_adds_the_accounts_of_all_shards_up(ensemble: Ensemble) -> None:
    ensemble.leading(shards=3)
    client = ensemble.client()
    token = Token("a:1", 7, 5 * WINDOW_US).pack()
    ids, times = event_ids(*range(60)), pack_times([NOW_US] * 60)
    assert client.commit(ids, times, token) == bytes(60)
    assert len(split_ids(ids)) == 60
    account = client.account([7], "", LATEST)
    assert account.days == {(7, DAY): sum_of(range(60))}
    assert client.account([], "a:1", LATEST).days == account.days
    assert client.account([8], "b:2", LATEST).days == {}


def test_what_each_incarnation_holds_is_told_without_what_is_guarded_for_another_shard() -> None:
    state = new_state()
    state.apply(encode(commit(range(3), Token("a:1", 7, 1))))
    state.apply(encode(commit(range(3, 5), Token("b:2", 7, 1), NOW_US + BUCKET_US)))
    state.apply(encode(commit(range(5, 9), Token("a:1", 8, 1))))
    state.apply(encode(commit(range(9, 19), Token("a:1", 7, 1), route=Route(HORIZON, True))))
    assert state.held_by({7, 9}) == {7: 5}


def test_gone_are_the_addresses_without_a_lease_whose_lives_hold_events() -> None:
    """The one with the most first, and a bounded number."""
    vanished = {1: "a:1", 2: "a:1", 3: "b:2", 4: "c:3", 5: "unmatched", 6: "d:4"}
    held = {1: 3, 2: 4, 3: 20, 4: 9, 5: 1_000}
    assert gone_joiners(vanished, {"c:3", "z:9"}, held) == [
        {"address": "b:2", "events": 20},
        {"address": "a:1", "events": 7},
    ]
    many = {number: f"j:{number}" for number in range(1, 100)}
    told = gone_joiners(many, set(), {number: number for number in many})
    assert [row["events"] for row in told] == [*range(99, 99 - GONE_JOINERS_MAX, -1)]
