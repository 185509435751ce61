"""One batch, through servers that fail."""

import dataclasses
import random
from collections.abc import Mapping

import numpy as np
import pytest

from dispatcher.rules.events import Events
from dispatcher.rules.homes import HEDGE_S_START, Homes
from dispatcher.rules.pacing import Pacing
from dispatcher.sender import (
    CUT_AFTER_FAILURES,
    LOOK_WHO_S,
    LOOKUP_PAUSE_S,
    STARTING_S,
    UNDER_WAY_S,
    Gate,
    Sender,
)
from photon.core.clock import ManualClock, SteadyClock
from photon.core.columns import pack_times, split_ids, unpack_times
from photon.core.errors import NoQuorumError, OverloadedError, UnavailableError
from photon.core.fates import Joined, Verdict
from tests.dispatcher.fakes import FakeJoiner, FakeRegistry, some_events

RECOVERED = {"logs/recovered.jsonl"}
DUE = 0.0
JOINERS = {"10.0.0.1:7": "east", "10.0.0.2:7": "west", "10.0.0.3:7": "west"}


class Bench:
    """A sender on a manual clock; waits are only noted. It is also what says that it is time to stop."""

    def __init__(
        self,
        joiner: FakeJoiner,
        registry: FakeRegistry | None = None,
        waits_max: int = 10**6,
        own: str = "east",
        joiners: Mapping[str, str] | None = None,
    ) -> None:
        self.joiner = joiner
        self.clock = ManualClock()
        self.waits: list[float] = []
        self.notices: list[str] = []
        self.waits_max = waits_max
        pacing = Pacing(16, 4096, 1 << 20)
        gate = Gate(pacing, SteadyClock(self.clock), random.Random(3), self, self.notices.append)
        self.homes = Homes(own, joiners or {}, 1.0)
        self.sender = Sender(registry, joiner, gate, RECOVERED.__contains__, lambda: None, self.homes)

    def is_set(self) -> bool:
        return len(self.waits) >= self.waits_max

    def wait(self, seconds: float) -> bool:
        self.waits.append(seconds)
        self.clock.advance(seconds)
        return self.is_set()


class Failing:
    """Raises `error` the first `times` times, and whenever the poison is in the batch."""

    def __init__(
        self, error: Exception | None = None, times: int = 0, poison: set[bytes] = frozenset()
    ) -> None:
        self.error, self.left, self.poison = error, times, poison

    def __call__(self, events: list[bytes]) -> None:
        if self.left > 0:
            self.left -= 1
            raise self.error
        if self.poison.intersection(events):
            raise UnavailableError("the joiner died")


def test_only_what_the_registry_does_not_have_is_sent_and_the_columns_stay_in_step():
    registry, joiner = FakeRegistry(), FakeJoiner(lambda line, _: (Joined.FILTERED, line.decode()))
    events = some_events(6)
    keys = split_ids(events.ids)
    registry.present, registry.expired = {keys[0], keys[3]}, {keys[4]}
    answer = Bench(joiner, registry).sender.send(events)
    assert answer.verdicts.tolist() == [Verdict.REGISTERED, 2, 2, Verdict.REGISTERED, Verdict.TOO_OLD, 2]
    assert answer.reasons == {row: events.lines[row].decode() for row in (1, 2, 5)}
    assert joiner.batches == [3]


def test_what_another_joiner_is_registering_is_looked_up_again_and_sent_only_if_that_came_to_nothing():
    registry, joiner = FakeRegistry(), FakeJoiner()
    events = some_events(6)
    keys = split_ids(events.ids)
    registry.pending = {keys[1]: 2, keys[4]: 3}
    registry.present = {keys[1]}
    bench = Bench(joiner, registry)
    answer = bench.sender.send(events)
    assert answer.verdicts.tolist() == [0, Verdict.REGISTERED, 0, 0, 0, 0]
    assert joiner.batches == [4, 1], "the others did not wait for it"
    assert registry.calls == 4
    assert len(bench.waits) == 3 and max(bench.waits) < UNDER_WAY_S


def test_what_is_for_ever_being_registered_is_sent_after_a_while():
    registry, joiner = FakeRegistry(), FakeJoiner()
    events = some_events(3)
    registry.pending = {split_ids(events.ids)[2]: 10**9}
    bench = Bench(joiner, registry)
    assert set(bench.sender.send(events).verdicts) == {Joined.JOINED}
    assert joiner.batches == [2, 1]
    assert UNDER_WAY_S <= sum(bench.waits) < 2 * UNDER_WAY_S


def test_where_the_registry_fails_meanwhile_what_it_was_registering_is_sent():
    registry = FakeRegistry()
    events = some_events(3)
    registry.pending = {split_ids(events.ids)[2]: 10**9}

    def fail(_events):
        registry.fails = NoQuorumError("nobody leads")

    joiner = FakeJoiner(before=fail)
    assert set(Bench(joiner, registry).sender.send(events).verdicts) == {Joined.JOINED}
    assert joiner.batches == [2, 1]


def test_a_stop_while_others_register_keeps_what_is_known_of_the_rest():
    registry = FakeRegistry()
    events = some_events(3)
    keys = split_ids(events.ids)
    registry.pending, registry.present = {keys[2]: 10**9}, {keys[0]}
    answer = Bench(joiner := FakeJoiner(), registry, waits_max=2).sender.send(events)
    assert answer.verdicts.tolist() == [Verdict.REGISTERED, Joined.JOINED, Joined.RETRY_UNAVAILABLE]
    assert joiner.batches == [1]
    registry.pending = dict.fromkeys(keys, 10**9)
    answer = Bench(joiner, registry, waits_max=2).sender.send(events)
    assert set(answer.verdicts) == {Joined.RETRY_UNAVAILABLE}, "later batches must not wait for this one"


def test_each_verdict_has_the_time_at_which_it_came():
    registry, joiner = FakeRegistry(), FakeJoiner()
    events = some_events(3)
    keys = split_ids(events.ids)
    registry.pending, registry.present = {keys[2]: 10**9}, {keys[0]}
    bench = Bench(joiner, registry)
    began_us = bench.clock.now_us()
    waited_us = bench.sender.send(events).at_us - began_us
    assert waited_us[:2].tolist() == [0, 0]
    assert waited_us[2] >= UNDER_WAY_S * 1e6


def test_a_stop_in_the_middle_of_a_cut_batch_keeps_what_is_known_of_the_rest():
    events = some_events(1000)
    bench = Bench(FakeJoiner(before=Failing(poison={events.lines[999]})), waits_max=CUT_AFTER_FAILURES + 1)
    verdicts = bench.sender.send(events).verdicts.tolist()
    assert verdicts[0] == Joined.JOINED
    assert verdicts[999] == Joined.RETRY_UNAVAILABLE


def test_when_the_lookup_fails_the_batch_goes_without_and_the_registry_is_left_alone_for_a_while():
    registry, joiner = FakeRegistry(), FakeJoiner()
    registry.fails = NoQuorumError("nobody leads")
    bench = Bench(joiner, registry)
    for _ in range(3):
        assert set(bench.sender.send(some_events(4)).verdicts) == {Joined.JOINED}
    assert registry.calls == 1
    assert "nobody leads" in bench.notices[0]
    bench.clock.advance(LOOKUP_PAUSE_S)
    bench.sender.send(some_events(4))
    assert registry.calls == 2


@pytest.mark.parametrize(
    ("error", "times"), [(OverloadedError("too much"), 5), (UnavailableError("gone"), CUT_AFTER_FAILURES - 1)]
)
def test_a_batch_that_a_joiner_refused_is_kept_and_sent_again_whole_after_growing_waits(error, times):
    bench = Bench(joiner := FakeJoiner(before=Failing(error, times)))
    answer = bench.sender.send(some_events(100))
    assert set(answer.verdicts) == {Joined.JOINED}
    assert joiner.batches == [100]
    assert len(bench.waits) == times
    assert bench.waits[0] <= 0.02 and bench.waits[-1] > bench.waits[0]


def test_an_overloaded_joiner_is_never_given_less_than_the_batch():
    bench = Bench(joiner := FakeJoiner(before=Failing(OverloadedError("too much"), 50)))
    bench.sender.send(some_events(100))
    assert joiner.batches == [100]


def test_events_that_make_the_joiner_fail_are_set_apart_and_the_others_join():
    events = some_events(1000)
    poison = {events.lines[row] for row in (0, 417, 418, 999)}
    bench = Bench(joiner := FakeJoiner(before=Failing(poison=poison)))
    answer = bench.sender.send(events)
    failed = [row for row, v in enumerate(answer.verdicts) if v == Joined.RETRY_UNAVAILABLE]
    assert failed == [0, 417, 418, 999]
    assert set(joiner.handed.values()) == {1} and len(joiner.handed) == 996
    assert len(bench.waits) < 100


def test_a_joiner_that_was_long_away_soon_gets_whole_batches_again():
    events = some_events(1000)
    bench = Bench(joiner := FakeJoiner(before=Failing(UnavailableError("gone"), CUT_AFTER_FAILURES + 6)))
    answer = bench.sender.send(events)
    lost = sum(v == Joined.RETRY_UNAVAILABLE for v in answer.verdicts)
    assert lost < 5  # parts of one, which may be what the joiner fails of
    assert sum(joiner.batches) == 1000 - lost
    assert len(joiner.batches) < 15


def test_few_deaths_of_joiners_are_enough_to_find_the_event_that_kills_them():
    events = some_events(4096)
    bench = Bench(FakeJoiner(before=Failing(poison={events.lines[1234]})))
    answer = bench.sender.send(events)
    assert [row for row, v in enumerate(answer.verdicts) if v == Joined.RETRY_UNAVAILABLE] == [1234]
    assert len(bench.waits) <= 20


def test_it_stops_in_the_middle_of_waiting():
    bench = Bench(FakeJoiner(before=Failing(UnavailableError("gone"), 10**9)), waits_max=3)
    assert bench.sender.send(some_events(3)) is None
    assert len(bench.waits) == 3


def test_ages_are_told_by_this_clock_alone_and_never_below_zero():
    """A joiner's clock may be another; this one may have been set back since the event was read."""
    told = []

    class Listening(FakeJoiner):
        def join(self, batch):
            told.extend(unpack_times(batch.ages).tolist())
            return super().join(batch)

    bench, events = Bench(Listening()), some_events(2)
    events.first_seen[:] = bench.clock.now_us() - 5_000_000, bench.clock.now_us() + 5_000_000
    bench.sender.send(events)
    assert told == [5_000_000, 0]


def two_datacenters(registry: FakeRegistry) -> tuple[Bench, Bench]:
    """East's and west's, each with a joiner of its own, over one registry; west's clock is a day on."""
    registry.holders = list(JOINERS)
    east = Bench(FakeJoiner(registry=registry), registry, own="east", joiners=JOINERS)
    west = Bench(FakeJoiner(registry=registry), registry, own="west", joiners=JOINERS)
    west.clock.advance(86_400.0)
    assert east.sender.agree() and west.sender.agree()
    return east, west


def test_each_datacenter_sends_the_events_whose_home_it_is_and_the_registry_knows_the_rest_by_then():
    east, west = two_datacenters(FakeRegistry())
    events = some_events(1000)
    answers = {bench: bench.sender.send(events) for bench in (east, west)}
    sent = {bench: set(bench.joiner.handed) for bench in (east, west)}
    assert not sent[east] & sent[west] and len(sent[east] | sent[west]) == 1000
    assert min(map(len, sent.values())) > 400
    for bench, answer in answers.items():
        hedged = answer.hedged
        assert {events.lines[row] for row in hedged} == set(events.lines) - sent[bench]
        bench.sender.send_hedged([(events, answer)], bench.sender.due(events, answer))
        assert set(answer.verdicts[hedged]) == {Verdict.REGISTERED}
        assert len(bench.joiner.handed) == len(sent[bench])


def test_what_is_left_of_a_backlog_is_looked_for_and_stays_hedged_until_it_is_to_be_joined():
    registry = FakeRegistry()
    east, _ = two_datacenters(registry)
    batches = [some_events(20, first=20 * number) for number in range(7)]
    parts = [(events, east.sender.send(events)) for events in batches]
    rows = [answer.hedged for _, answer in parts]
    registry.present = {*registry.present, *(split_ids(batches[0].ids)[row] for row in rows[0][::2])}
    sent = len(east.joiner.handed)
    found = east.sender.look(parts, (), False)
    assert [one.registered.sum() for one in found] == [len(rows[0][::2]), 0, 0, 0, 0, 0, 0]
    assert [one.left.sum() for one in found] == [len(rows[0][1::2]), *map(len, rows[1:])]
    assert [answer.hedged.tolist() for _, answer in parts[1:]] == [these.tolist() for these in rows[1:]]
    assert len(east.joiner.handed) == sent, "nothing is joined"
    (told,) = east.sender.look(parts[1:2], {2}, True)
    assert told.left.tolist() == [0, len(rows[1])], "these have another home"
    east.sender.look(parts[1:4], {1}, False)
    assert east.sender.homes()["passed_over"] == [], "what was stolen nobody has missed"
    for part in parts[4:]:
        east.sender.look([part], {1}, True)
    assert east.sender.homes()["passed_over"] == ["west"]
    assert {verdict for _, answer in parts[1:] for verdict in answer.verdicts} == {Joined.JOINED}


def test_what_its_home_has_not_registered_is_joined_after_the_hedge_and_many_batches_ask_once():
    registry = FakeRegistry()
    east, _ = two_datacenters(registry)
    batches = [some_events(20, first=20 * number) for number in range(5)]
    answers = [east.sender.send(events) for events in batches]
    rows = [answer.hedged for answer in answers]
    hedged = [
        split_ids(events.ids)[row] for events, these in zip(batches, rows, strict=True) for row in these
    ]
    registry.present = {*registry.present, *hedged[::2]}
    calls, requests = registry.calls, len(east.joiner.batches)
    east.sender.send_hedged(list(zip(batches, answers, strict=True)), DUE)
    verdicts = np.concatenate([answer.verdicts[these] for answer, these in zip(answers, rows, strict=True)])
    assert verdicts.tolist() == [
        Joined.JOINED if place % 2 else Verdict.REGISTERED for place in range(len(hedged))
    ]
    assert registry.calls == calls + 1 and len(east.joiner.batches) == requests + 1
    assert all(len(answer.hedged) == 0 for answer in answers)
    assert set(np.concatenate([answer.verdicts for answer in answers])) == {Joined.JOINED, Verdict.REGISTERED}


def test_reasons_of_hedged_events_stay_with_their_rows():
    registry = FakeRegistry()
    registry.holders = list(JOINERS)
    joiner = FakeJoiner(lambda line, _: (Joined.FILTERED, line.decode()))
    east = Bench(joiner, registry, own="east", joiners=JOINERS)
    batches = [some_events(20, first=20 * number) for number in range(3)]
    assert east.sender.agree()
    answers = [east.sender.send(events) for events in batches]
    east.sender.send_hedged(list(zip(batches, answers, strict=True)), DUE)
    for events, answer in zip(batches, answers, strict=True):
        assert answer.reasons == {row: line.decode() for row, line in enumerate(events.lines)}


def test_while_another_datacenter_has_no_lease_nothing_waits_for_it_but_at_the_start_when_it_may_be_near():
    registry = FakeRegistry()
    registry.holders = ["10.0.0.1:7", "10.9.9.9:7"]
    east = Bench(FakeJoiner(), registry, own="east", joiners=JOINERS)
    assert east.sender.agree()
    assert len(east.sender.send(some_events(100)).hedged) > 20
    east.clock.advance(STARTING_S)
    assert set(east.sender.send(some_events(100)).verdicts) == {Joined.JOINED}
    registry.holders = list(JOINERS)
    assert set(east.sender.send(some_events(100)).verdicts) == {Joined.JOINED}, "it is not asked each time"
    east.clock.advance(LOOK_WHO_S)
    assert len(east.sender.send(some_events(100)).hedged) > 20


def test_hedged_events_are_sent_where_the_registry_fails_meanwhile():
    registry = FakeRegistry()
    east, _ = two_datacenters(registry)
    events = some_events(50)
    answer = east.sender.send(events)
    registry.fails = NoQuorumError("nobody leads")
    east.sender.send_hedged([(events, answer)], DUE)
    assert set(answer.verdicts) == {Joined.JOINED}
    assert east.sender.homes()["passed_over"] == [], "what nobody was asked says nothing of a home"


def test_what_recovery_released_waits_for_no_home():
    east, _ = two_datacenters(FakeRegistry())
    events = dataclasses.replace(some_events(100, names=1), names=[*RECOVERED])
    assert set(east.sender.send(events).verdicts) == {Joined.JOINED}


def test_what_has_waited_longer_than_a_hedge_is_looked_up_for_others_may_have_joined_it():
    registry = FakeRegistry()
    east, _ = two_datacenters(registry)
    now_us = east.clock.now_us()
    events = some_events(100)
    events.first_seen[:] = now_us
    for _ in range(40):  # long enough to find that no lookup pays
        east.sender.send(events)
        registry.tokens.clear()
    registry.present = set(split_ids(events.ids))
    handed = sum(east.joiner.handed.values())
    events.first_seen[:] = now_us - int(2e6 * HEDGE_S_START)
    verdicts = east.sender.send(events).verdicts
    assert {*verdicts} == {Verdict.REGISTERED, Verdict.HEDGED}
    assert sum(east.joiner.handed.values()) == handed


def far_apart(registry: FakeRegistry) -> Bench:
    """East, where copies of the logs have come to be far apart."""
    east, _ = two_datacenters(registry)
    east.homes.hedge_s = 1.0
    assert east.homes.is_far
    return east


def live(bench: Bench, count: int, first: int) -> Events:
    """Events that happen and are read now."""
    now_us = bench.clock.now_us()
    events = dataclasses.replace(some_events(count, first=first), times=pack_times([now_us] * count))
    events.first_seen[:] = now_us
    return events


@pytest.mark.parametrize("lookup_s", [0.05, 0.3, 0.8, 1.5])
@pytest.mark.parametrize("count", [1, 20])
def test_however_long_lookups_take_who_has_waited_for_its_turn_gets_it(count, lookup_s):
    class Slow(FakeRegistry):
        def lookup(self, ids, times, tell_pending):
            east.clock.advance(lookup_s)
            return super().lookup(ids, times, tell_pending)

    registry = Slow()
    east = far_apart(registry)
    for first in range(0, 40 * count, count):
        events, asked = live(east, count, first), registry.calls
        east.clock.advance(0.013 * first)
        answer = east.sender.send(events)
        while len(answer.hedged):
            due = east.sender.due(events, answer)
            east.clock.advance(max(0.0, due - east.clock.monotonic()) + 0.003)
            east.sender.send_hedged([(events, answer)], due)
        assert registry.calls - asked <= 2 + (count > 1)


def test_what_is_taken_before_its_hedge_is_over_goes_and_says_nothing_of_the_home():
    east = far_apart(FakeRegistry())
    events = live(east, 50, 0)
    answer = east.sender.send(events)
    assert len(answer.hedged)
    for _ in range(3):
        east.sender.send_hedged([(events, answer)], east.clock.monotonic() + 0.1)
    assert not len(answer.hedged)
    assert (east.homes.hedge_s, east.homes.status()["passed_over"]) == (1.0, [])


@pytest.mark.parametrize(("count", "within"), [(1, 60), (20, 8), (200, 4)])
def test_a_datacenter_that_was_passed_over_is_soon_waited_for_when_it_is_back(count, within):
    registry = FakeRegistry()
    east, _ = two_datacenters(registry)
    while not east.sender.passes_over:
        events = live(east, 50, 0)
        answer = east.sender.send(events)
        east.sender.send_hedged([(events, answer)], east.clock.monotonic())
        registry.tokens.clear()
    for first in range(0, within * count, count):
        events = live(east, count, 10_000 + first)
        theirs = np.flatnonzero(east.homes.of(events.ids))
        registry.tokens |= dict.fromkeys((split_ids(events.ids)[row] for row in theirs), b"west's")
        answer = east.sender.send(events)
        east.sender.send_hedged([(events, answer)], east.clock.monotonic())
    assert not east.sender.passes_over


def test_what_is_too_old_to_be_known_is_left_to_nobody():
    registry = FakeRegistry()
    east, _ = two_datacenters(registry)
    events = live(east, 20, 0)
    answer = east.sender.send(events)
    rows = answer.hedged
    registry.expired = {*split_ids(events.ids)}
    (told,) = east.sender.look([(events, answer)], (), False)
    assert {*answer.verdicts[rows]} == {Verdict.TOO_OLD}
    assert not told.left.any()


def test_where_copies_are_far_apart_each_batch_is_looked_up():
    registry = FakeRegistry()
    east = far_apart(registry)
    for number in range(40):  # long enough to find that no lookup pays
        asked = registry.calls
        east.sender.send(live(east, 20, 20 * number))
        assert registry.calls == asked + 1
