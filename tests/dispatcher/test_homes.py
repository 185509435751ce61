"""Which datacenter joins an event at once, and how long the others wait (paper 4.4: wasted joins)."""

import heapq
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dispatcher.rules.homes import (
    HEDGE_S_MIN,
    HEDGE_S_START,
    KNOWN_EVENTS,
    PROBE_EVERY,
    ROUNDS,
    TURN_S_MIN,
    Homes,
    key_of,
    ranks_of,
)
from photon.core.fates import Joined, Verdict

NAMES = ("east", "west", "central", "north")
JOINERS = {f"10.0.0.{number}:7": name for number, name in enumerate(NAMES)}
ADDRESSES = {name: address for address, name in JOINERS.items()}


def some_ids(count: int, seed: int = 1) -> bytes:
    """As one server makes them: they differ in the last bytes."""
    rng = random.Random(seed)
    start = rng.getrandbits(128)
    return b"".join(((start + step) % (1 << 128)).to_bytes(16, "big") for step in range(count))


def homes(own: str, live=NAMES, hedge_s_max: float = 1.0) -> Homes:
    made = Homes(own, JOINERS, hedge_s_max)
    made.seen([ADDRESSES[name] for name in live])
    return made


def owned(own: str, ids: bytes, live) -> np.ndarray:
    seen = homes(own, live)
    return seen.of(ids) == 0


@settings(max_examples=40, deadline=None)
@given(st.sets(st.sampled_from(NAMES), min_size=1), st.binary(min_size=16, max_size=320))
def test_every_event_has_one_home_and_all_datacenters_agree(live, data):
    ids = data[: len(data) // 16 * 16]
    homes_claimed = sum(owned(own, ids, live).astype(int) for own in live)
    assert homes_claimed.tolist() == [1] * (len(ids) // 16)


@settings(max_examples=25, deadline=None)
@given(st.sampled_from(NAMES), st.integers(0, 1 << 32))
def test_the_events_of_one_that_lost_its_leases_go_to_the_others_and_no_other_event_moves(dead, seed):
    ids = some_ids(400, seed)
    left = [name for name in NAMES if name != dead]
    before = {name: owned(name, ids, NAMES) for name in NAMES}
    after = {name: owned(name, ids, left) for name in left}
    assert sum(after.values()).tolist() == [1] * 400
    for name in left:
        assert (after[name] & ~before[name] <= before[dead]).all() and (before[name] <= after[name]).all()


@settings(max_examples=25, deadline=None)
@given(st.integers(2, len(NAMES)), st.integers(0, 1 << 32))
def test_who_inherits_an_event_is_its_home_when_its_home_is_gone(count, seed):
    live, ids = NAMES[:count], some_ids(200, seed)
    for name in live:
        heir = homes(name, live).inherits(ids)
        for gone in set(live) - {name}:
            theirs = owned(gone, ids, live)
            left = [other for other in live if other != gone]
            assert (heir[theirs] == owned(name, ids, left)[theirs]).all()
    assert not homes("east", live=("east",)).inherits(ids).any()


def test_all_datacenters_have_about_as_many_events():
    counts = np.bincount(ranks_of(some_ids(40_000), np.array([key_of(name) for name in NAMES]))[:, 0])
    assert len(counts) == 4 and counts.min() > 9_500 and counts.max() < 10_500


def test_a_datacenter_alone_or_without_a_hedge_waits_for_nobody():
    assert not Homes("east", {"10.0.0.1:7": "east", "10.0.0.2:7": "east"}, 1.0).are_several
    assert not Homes("east", JOINERS, 0.0).are_several
    alone = homes("east", live=("east",))
    assert alone.are_several and alone.is_alone
    assert alone.at_once(alone.of(some_ids(50))).all()


def test_one_whose_own_lease_is_not_seen_counts_itself():
    assert owned("east", some_ids(100), ["west"]).any()
    assert homes("east", live=()).is_alone


def told(of: Homes, name: str, verdicts: dict[int, int], late_s: float | None = 0.0) -> None:
    column = np.repeat(np.array([*verdicts], np.uint8), [*verdicts.values()])
    number = of._names.index(name)
    of.learn(np.full(len(column), number), column, late_s)


def waits(of: Homes, name: str) -> bool:
    return not of.at_once(np.array([of._names.index(name)])).any()


def visible_after(seconds: np.ndarray, of: Homes, batch: int = 20) -> None:
    """Batches of events whose homes' commits are visible after these times, hedged as the rules say."""
    for start in range(0, len(seconds), batch):
        late = int((seconds[start : start + batch] > of.hedge_s).sum())
        told(of, "west", {Verdict.REGISTERED: batch - late, Joined.JOINED: late})


@pytest.mark.parametrize("scale_s", [0.01, 0.05, 0.15])
def test_the_hedge_comes_to_rest_about_the_99th_percentile_of_the_time_until_a_commit_is_visible(scale_s):
    of = homes("east")
    seconds = np.random.default_rng(5).exponential(scale_s, 40_000)
    visible_after(seconds, of)
    low, high = np.quantile(seconds, [0.96, 0.999])
    assert low < of.hedge_s < high


def test_the_hedge_is_never_longer_than_the_setting_nor_nothing():
    of = homes("east", hedge_s_max=0.7)
    visible_after(np.random.default_rng(5).exponential(0.3, 40_000), of)
    assert of.hedge_s == 0.7
    visible_after(np.zeros(120_000), of, 400)
    assert of.hedge_s == HEDGE_S_MIN
    assert homes("east", hedge_s_max=0.1).hedge_s == 0.1


def test_events_that_a_backlog_kept_waiting_say_nothing_of_the_hedge():
    of = homes("east")
    told(of, "west", {Verdict.REGISTERED: 10_000}, late_s=5.0)
    assert of.hedge_s == HEDGE_S_START


def test_batches_that_are_hedged_soon_after_each_other_fall_due_together():
    of = homes("east")
    dues = {of.due(10.0 + of.hedge_s * step / 100) for step in range(100)}
    assert len(dues) <= ROUNDS + 1
    assert all(10.0 + of.hedge_s <= due for due in dues)
    assert max(dues) <= 10.0 + of.hedge_s * (2 + 1 / ROUNDS)


def test_a_home_that_mostly_registers_nothing_is_passed_over_but_for_a_probe_now_and_then():
    of = homes("east")
    told(of, "west", {Verdict.REGISTERED: 10, Joined.JOINED: 5})
    assert waits(of, "west")
    told(of, "west", {Joined.JOINED: KNOWN_EVENTS})
    assert of.status()["passed_over"] == ["west"]
    assert [waits(of, "west") for _ in range(2 * PROBE_EVERY)].count(True) == 2
    assert waits(of, "central"), "it says nothing of others"
    hedge_s = of.hedge_s
    told(of, "west", {Joined.JOINED: 1000})
    assert of.hedge_s == hedge_s, "nobody waits longer for who is not there"


@pytest.mark.parametrize(("registered", "missed"), [(10, 10), (10, 200), (36, 43), (500, 600)])
def test_a_home_that_stood_still_for_a_moment_is_not_passed_over_and_one_that_stays_away_soon_is(
    registered, missed
):
    of = homes("east")
    for _ in range(100):
        told(of, "west", {Verdict.REGISTERED: registered})
    told(of, "west", {Joined.JOINED: missed})
    assert waits(of, "west")
    for _ in range(2):
        told(of, "west", {Joined.JOINED: missed})
    assert not waits(of, "west")


@pytest.mark.parametrize(
    ("verdict", "late_s"), [(Verdict.REGISTERED, 0.0), (Verdict.REGISTERED, None), (Joined.DUPLICATE, None)]
)
def test_a_home_that_was_passed_over_is_waited_for_again_once_it_registers_much(verdict, late_s):
    of = homes("east")
    for _ in range(100):
        told(of, "west", {Joined.JOINED: 100})
    told(of, "west", {Joined.JOINED: 100}, late_s=None)
    assert of.status()["passed_over"] == ["west"]
    for _ in range(5):
        told(of, "west", {verdict: 15, Joined.JOINED: 5}, late_s)
    assert waits(of, "west") and not of.status()["passed_over"]


def test_some_lines_that_stand_twice_are_no_sign_that_a_home_is_at_work():
    of = homes("east")
    for _ in range(3):
        told(of, "west", {Joined.JOINED: 100})
    for _ in range(50):
        told(of, "west", {Verdict.REGISTERED: 1, Joined.DUPLICATE: 2, Joined.JOINED: 30}, late_s=None)
        told(of, "west", {Verdict.REGISTERED: 3, Joined.JOINED: 30})
        assert of.status()["passed_over"] == ["west"]


def test_events_whose_primaries_are_not_there_say_nothing_of_their_home():
    of = homes("east")
    told(of, "west", {Joined.RETRY_ABSENT: 1000, Joined.FILTERED: 1000, Joined.RETRY_UNAVAILABLE: 1000})
    assert waits(of, "west") and of.hedge_s == HEDGE_S_START


def test_a_datacenter_wastes_next_to_nothing_while_its_peer_is_as_fast_and_does_all_when_it_dies():
    """Both read at once; a commit is visible in the other after 30 to 80 ms; the peer dies in the middle."""
    of, rng = homes("east", live=("east", "west")), np.random.default_rng(7)
    lost = joined = waited = 0
    for turn in range(4000):
        alive = turn < 2000
        events = of.of(some_ids(10, turn))
        mask = of.at_once(events)
        theirs = int((events != 0).sum())
        if not theirs:
            continue
        if not mask[events != 0].any():
            waited += theirs * (not alive)
            late = int((rng.uniform(0.03, 0.08, theirs) > of.hedge_s).sum()) if alive else theirs
            lost += late * alive
            told(of, "west", {Verdict.REGISTERED: theirs - late, Joined.JOINED: late})
        else:
            lost += theirs * alive
            told(of, "west", {Joined.JOINED: theirs}, late_s=None)
        joined += theirs * alive
    assert lost < 0.02 * joined
    assert waited < 0.1 * joined


def far_apart(names: tuple[str, ...], low_s: float, high_s: float, seed: int) -> tuple[float, float]:
    """The share of wasted joins, and how old events are on average when they are joined, where each
    datacenter reads each event so late, in a time of its own, and sees what others have begun to join 20 to
    150 ms before."""
    rng = np.random.default_rng(seed)
    all_of = {name: homes(name, live=names) for name in names}
    wasted, ages = 0, []
    for turn in range(3000):
        ids, began = some_ids(1, turn), list[tuple[float, float]]()
        todo = sorted((rng.uniform(low_s, high_s), name, None) for name in names)
        while todo:
            age_s, name, read_at = heapq.heappop(todo)
            of, age = all_of[name], np.array([age_s])
            is_seen = any(at + visible <= age_s for at, visible in began)
            waits = read_at is None or (of.is_far and not is_seen)
            if waits and not of.at_once(of.now(ids, age))[0]:
                heapq.heappush(todo, (of.due(age_s, ids, age), name, read_at or age_s))
                continue
            verdict = Joined.DUPLICATE if began else Joined.JOINED
            if not is_seen:
                began.append((age_s, rng.uniform(0.02, 0.15)))
            column = np.array([Verdict.REGISTERED if is_seen else verdict], np.uint8)
            waited_for = of.of(ids) if read_at is None else of.now(ids, np.array([read_at]))
            of.learn(waited_for, column, None if read_at is None else 0.0)
        if turn >= 1000:
            wasted += len(began) - 1
            ages.append(began[0][0])
    return wasted / len(ages), float(np.mean(ages))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("behind_s", [2.0, 10.0])
@pytest.mark.parametrize("count", [2, 3])
def test_next_to_no_join_is_wasted_where_copies_of_the_logs_are_far_apart(count, behind_s, seed):
    wasted, age_s = far_apart(NAMES[:count], 0.01, behind_s, seed)
    assert wasted < 0.01
    assert age_s < 0.55 * behind_s, "little later than by one copy alone"


@pytest.mark.parametrize("old_s", [-3.1, 0.0, 0.5, 1.1, 1.6, 7.9])
def test_where_copies_are_alike_events_are_joined_at_once_however_old_they_are_when_they_are_logged(old_s):
    wasted, age_s = far_apart(NAMES[:2], old_s + 0.01, old_s + 0.04, 1)
    assert wasted < 0.02
    assert age_s < old_s + 0.07


def test_turns_pass_on_only_where_copies_are_far_apart_and_hedges_are_long_enough_for_turns():
    ids, ages_s = some_ids(400), np.linspace(-3.0, 50.0, 400)
    of = homes("east")
    assert (of.now(ids, ages_s) == of.of(ids)).all()
    of.hedge_s = 1.0
    assert (of.now(ids, ages_s) != of.of(ids)).any()
    short = homes("east", hedge_s_max=TURN_S_MIN / 2)
    short.hedge_s = TURN_S_MIN / 2
    assert (short.now(ids, ages_s) == short.of(ids)).all()
    assert short.due(10.0, ids, ages_s) < 10.0 + TURN_S_MIN


def test_events_whose_turns_come_soon_after_each_other_fall_due_together():
    of = homes("east", live=("east", "west"))
    of.hedge_s = 1.0
    ids, ages_s = some_ids(200), np.linspace(0.0, 0.2, 200)
    theirs = np.flatnonzero(of.of(ids))
    ids = b"".join(ids[16 * row : 16 * row + 16] for row in theirs)
    ages_s = ages_s[theirs]
    due = of.due(10.0, ids, ages_s)
    assert (of.now(ids, ages_s + due - 10.0) == 0).all()
