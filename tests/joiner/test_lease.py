"""Leases: when they run, when they are asked for, who is told; and tokens (design.md, paper 3.3.2)."""

import itertools
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from joiner.leases import RETRY_S_MAX, Lease, LeaseKeeper, TokenSource
from photon.core.clock import ManualClock, SystemClock
from photon.core.errors import CorruptStateError, FencedError, OverloadedError, SettingsMismatchError
from photon.core.ids import Token, parse_token
from tests.fake_registry import FakeRegistry


class Slow(FakeRegistry):
    """Its answers take `seconds` of the clock; `calls` says when it was asked for which incarnation."""

    def __init__(self, clock):
        super().__init__()
        self.seconds, self.calls = 0.0, []

        def note(_call, incarnation):
            self.calls.append((round(clock.monotonic(), 3), incarnation))
            clock.advance(self.seconds)

        self.before = note


@pytest.fixture
def registry(clock):
    return Slow(clock)


@pytest.fixture
def notices():
    return []


@pytest.fixture
def keeper(registry, clock, notices, fatal):
    return LeaseKeeper(registry, Lease("a:1", 7, 9.0), clock, notices.append, fatal.append)


def run(keeper, clock, seconds):
    """As the thread does: ask, wait as long as told, ask again."""
    end = clock.monotonic() + seconds
    while (wait_s := keeper.renew_due()) <= end - clock.monotonic():
        clock.advance(wait_s)
    clock.advance(end - clock.monotonic())


def test_there_is_no_lease_before_the_registry_has_given_one(keeper):
    with pytest.raises(OverloadedError, match="holds no lease"):
        keeper.check(keeper.own)
    keeper.renew_due()
    keeper.check(keeper.own)


def test_a_lease_is_asked_for_again_when_a_third_of_it_is_over(keeper, registry, clock):
    run(keeper, clock, 10)
    assert registry.calls == [(0, 7), (3, 7), (6, 7), (9, 7)]
    assert registry.asked_leases[0] == ("a:1", 7, 9.0)


def test_a_lease_runs_from_when_it_was_asked_for_not_from_the_answer(keeper, registry, clock):
    registry.seconds = 5.0
    keeper.renew_due()
    assert keeper.own.until_s == 9.0
    assert keeper.renew_due() == 0  # a third of it was over before the answer came
    assert registry.calls == [(0, 7), (5, 7)]


def test_an_answer_that_takes_longer_than_the_lease_gives_none(keeper, registry, clock):
    registry.seconds = 9.0
    keeper.renew_due()
    with pytest.raises(OverloadedError):
        keeper.check(keeper.own)


def test_a_lease_outlives_an_outage_shorter_than_two_thirds_of_it(keeper, registry, clock):
    run(keeper, clock, 2.9)
    registry.down = True
    run(keeper, clock, 6.0)
    keeper.check(keeper.own)
    registry.down = False
    run(keeper, clock, 1.0)
    assert keeper.own.left_s(clock.monotonic()) > 7


def test_a_lost_lease_is_told_and_comes_back(keeper, registry, clock, notices):
    keeper.renew_due()
    registry.down = True
    run(keeper, clock, 9.0)
    with pytest.raises(OverloadedError):
        keeper.check(keeper.own)
    status = keeper.status()
    assert (status["seconds_left"], status["fenced"], status["trouble"]) == (0, False, "registry: no quorum")
    assert notices == ["no answer to the request for a lease: registry: no quorum"]
    registry.down = False
    run(keeper, clock, 1.0)
    keeper.check(keeper.own)
    assert keeper.status()["trouble"] is None


def test_while_the_registry_is_away_it_is_asked_often_but_not_at_once(keeper, registry, clock):
    registry.down = True
    run(keeper, clock, 9.5)
    times = [when for when, _ in registry.calls]
    assert {round(b - a, 3) for a, b in itertools.pairwise(times)} == {0.9}
    long = Lease("a:1", 7, 3_600.0)
    long.failed(0)
    assert long.due_s == RETRY_S_MAX


def test_an_error_of_any_kind_is_survived_and_told(keeper, registry, monkeypatch):
    def broken(*_):
        raise ZeroDivisionError

    with monkeypatch.context() as patch:
        patch.setattr(registry, "keep_alive", broken)
        keeper.renew_due()
    assert keeper.status()["trouble"] == "ZeroDivisionError"


def test_a_fenced_joiner_is_ended_once_and_asks_no_more(keeper, registry, clock, fatal):
    keeper.renew_due()
    registry.fences.add(7)
    run(keeper, clock, 30)
    assert [type(error) for error in fatal] == [FencedError]
    assert len(registry.calls) == 2
    assert keeper.status()["fenced"]
    keeper.own.granted(clock.monotonic())  # an answer that comes late gives nothing back
    with pytest.raises(OverloadedError):
        keeper.check(keeper.own)


def test_a_joiner_with_other_settings_is_ended_once_and_gives_nothing_up(registry, clock, notices, fatal):
    """What a life before it registered is ended by the next start, with the right settings."""
    registry.settings = b"a" * 16
    keeper = LeaseKeeper(registry, Lease("a:1", 7, 9.0), clock, notices.append, fatal.append, b"b" * 16)
    earlier = keeper.inherit(Token("b:2", 5, 0))
    run(keeper, clock, 30)
    assert [type(error) for error in fatal] == [SettingsMismatchError]
    assert keeper.refused is fatal[0]
    assert len(registry.calls) == 1
    assert not keeper.own.fenced
    assert not earlier.fenced
    for lease in (keeper.own, earlier):
        with pytest.raises(OverloadedError):
            keeper.check(lease)
    assert "other" in keeper.status()["trouble"]


def test_a_joiner_ends_at_a_registry_that_was_founded_anew(registry, clock, notices, fatal, tmp_path):
    """It knows nothing of what is joined, and all of that would be joined again."""

    def start():
        return LeaseKeeper(registry, Lease("a:1", 7, 9.0), clock, notices.append, fatal.append, home=tmp_path)

    for _ in range(2):
        keeper = start()
        run(keeper, clock, 4)
        keeper.check(keeper.own)
    registry.founded = "1" * 32
    asked = len(registry.calls)
    keeper = start()
    run(keeper, clock, 30)
    assert [type(error) for error in fatal] == [CorruptStateError]
    assert "founded anew" in str(fatal[0])
    assert len(registry.calls) == asked
    with pytest.raises(OverloadedError):
        keeper.check(keeper.own)


def test_a_joiner_that_runs_ends_when_its_registry_is_founded_anew(registry, clock, notices, fatal, tmp_path):
    """The addresses are the same, and the lease is asked for as ever."""
    keeper = LeaseKeeper(registry, Lease("a:1", 7, 9.0), clock, notices.append, fatal.append, home=tmp_path)
    run(keeper, clock, 4)
    registry.founded = "1" * 32
    run(keeper, clock, 30)
    assert [type(error) for error in fatal] == [CorruptStateError]
    assert "founded anew" in str(fatal[0])
    with pytest.raises(OverloadedError):
        keeper.check(keeper.own)


def test_the_settings_are_told_with_every_lease(registry, clock, notices, fatal):
    registry.settings = b"a" * 16
    keeper = LeaseKeeper(registry, Lease("a:1", 7, 9.0), clock, notices.append, fatal.append, b"a" * 16)
    earlier = keeper.inherit(Token("b:2", 5, 0))
    run(keeper, clock, 4)
    keeper.check(keeper.own)
    keeper.check(earlier)
    assert fatal == []


def test_a_commit_that_is_fenced_fences_the_lease_while_it_runs(keeper, fatal):
    keeper.renew_due()
    keeper.fenced(keeper.own)
    keeper.fenced(keeper.own)
    assert len(fatal) == 1
    with pytest.raises(OverloadedError):
        keeper.check(keeper.own)


def test_the_lease_of_an_earlier_life_is_kept_until_its_last_batch_ends(keeper, registry, clock, fatal):
    earlier = keeper.inherit(Token("b:2", 5, 0))
    assert keeper.inherit(Token("b:2", 5, 1)) is earlier
    run(keeper, clock, 2)
    assert registry.calls == [(0, 7), (0, 5)]
    assert registry.asked_leases[1] == ("b:2", 5, 9.0)
    keeper.check(earlier)
    keeper.ended(earlier)
    keeper.ended(keeper.own)
    run(keeper, clock, 2)
    assert registry.calls[2:] == [(3, 7), (3, 5)]
    keeper.ended(earlier)
    run(keeper, clock, 9)
    assert {incarnation for _, incarnation in registry.calls[4:]} == {7}
    assert fatal == []


def test_an_earlier_life_that_is_fenced_ends_no_process(keeper, registry, clock, fatal, notices):
    earlier = keeper.inherit(Token("b:2", 5, 0))
    registry.fences.add(5)
    run(keeper, clock, 4)
    assert earlier.fenced
    assert fatal == []
    assert notices == ["incarnation 0000000000000005 is fenced: what it had not written is recovery's"]
    keeper.check(keeper.own)


def test_the_thread_keeps_a_short_lease_alive_and_lets_it_run_out_when_stopped():
    registry = FakeRegistry()
    keeper = LeaseKeeper(registry, Lease("a:1", 7, 0.6), SystemClock(), lambda _: None, lambda _: None)
    keeper.start()
    deadline = time.monotonic() + 60
    while len(registry.asked_leases) < 6 and time.monotonic() < deadline:
        keeper.check(keeper.own)
        time.sleep(0.01)
    keeper.stop()
    assert len(registry.asked_leases) >= 6
    assert not any(thread.name == "leases" for thread in threading.enumerate())


def test_a_token_can_be_read_again():
    for token in [
        Token("127.0.0.1:4000", 2**64 - 1, 1_700_000_000_000_000),
        Token("[::1]:80", 0, -5),
        Token("", 7, 0),
    ]:
        assert parse_token(token.pack()) == token


@pytest.mark.parametrize("packed", [b"", b"\x01short", b"\x02" + Token("a", 1, 2).pack()[1:]])
def test_bytes_that_are_no_token_are_told(packed):
    with pytest.raises(ValueError, match="not a joiner's token"):
        parse_token(packed)


def test_tokens_of_an_incarnation_rise_even_when_the_clock_goes_back():
    clock = ManualClock()
    source = TokenSource("a:1", clock, random.Random(1))
    times = []
    for step in (0, 0, 5, -60, 1):
        clock.advance(step)
        times.append(parse_token(source.next()).time_us)
    assert times == sorted(set(times))


def test_no_token_is_given_twice_to_threads_that_ask_together():
    source = TokenSource("a:1", ManualClock(), random.Random(1))
    with ThreadPoolExecutor(8) as pool:
        tokens = list(pool.map(lambda _: source.next(), range(2_000)))
    assert len(set(tokens)) == 2_000


def test_two_lives_of_a_joiner_have_different_tokens():
    clock = ManualClock()
    first, second = (TokenSource("a:1", clock, random.Random()) for _ in range(2))
    assert first.next() != second.next()
    assert first.incarnation == parse_token(first.next()).incarnation
