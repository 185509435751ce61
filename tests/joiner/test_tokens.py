"""Tokens are unique for ever and say who asked (paper 3.3.2)."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from joiner.pipeline import TokenSource
from photon.core.clock import ManualClock
from photon.core.ids import Token, parse_token


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
