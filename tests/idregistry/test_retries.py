"""What a client makes of a failed call."""

import pytest

from idregistry.routes import (
    Failure,
    Part,
    final_error,
    named_leader,
    next_address,
    sort_out,
    try_timeout_s,
    whole,
)
from idregistry.rules.packing import LEADER_DETAILS
from photon.core.errors import NoQuorumError, OverloadedError, PhotonError, UnavailableError

ADDRESSES = ["a:1", "b:1", "c:1"]


def call(shard: int = 0) -> Part:
    return whole(bytes(16), bytes(8), shard)


def failed(*failures: Failure, leader: str | None = None) -> Part:
    made = call()
    for failure in failures:
        made.failed(failure, "a:1", "details", leader)
    return made


def test_the_leader_that_is_named_is_asked_next_else_the_next_in_the_list() -> None:
    assert next_address(ADDRESSES, "a:1", Failure.NOT_LEADER, "c:1") == "c:1"
    assert next_address(ADDRESSES, "a:1", Failure.NOT_LEADER, None) == "b:1"
    assert next_address(ADDRESSES, "c:1", Failure.UNKNOWN, None) == "a:1"


def test_an_overloaded_leader_is_asked_again() -> None:
    assert next_address(ADDRESSES, "b:1", Failure.OVERLOADED, None) == "b:1"


@pytest.mark.parametrize(
    ("details", "leader"),
    [
        ("leader=b:1", "b:1"),
        ("leader=", None),
        ("leader=a:1", None),
        ("leader=stranger:1", None),
        ("b:1", None),
    ],
)
def test_only_a_leader_among_our_own_addresses_is_followed(details: str, leader: str | None) -> None:
    assert named_leader(details, LEADER_DETAILS, ADDRESSES, asked="a:1") == leader


def test_replicas_that_send_us_round_in_a_circle_are_followed_only_so_far() -> None:
    made = call()
    followed = [made.failed(Failure.NOT_LEADER, "a:1", "details", "b:1") for _ in range(9)]
    assert followed == [True, True, False] * 3


def test_one_try_leaves_time_to_ask_another_replica() -> None:
    assert try_timeout_s(10.0, 10.0) == 2.5
    assert try_timeout_s(10.0, 1.0) == 1.0
    assert try_timeout_s(0.1, 0.1) == 0.1


@pytest.mark.parametrize(
    ("calls", "error"),
    [
        ([failed(Failure.OVERLOADED)], OverloadedError),
        ([failed(Failure.OVERLOADED), failed(Failure.OVERLOADED)], OverloadedError),
        ([failed(Failure.UNKNOWN, Failure.OVERLOADED)], UnavailableError),
        ([failed(Failure.OVERLOADED), failed(Failure.UNKNOWN)], UnavailableError),
        ([failed(Failure.NOT_LEADER)], NoQuorumError),
        ([failed(Failure.UNKNOWN)], UnavailableError),
        ([failed(Failure.MISROUTED)], OverloadedError),
        ([failed(Failure.UNKNOWN, Failure.MISROUTED)], UnavailableError),
    ],
)
def test_overloaded_is_said_only_where_certainly_nothing_was_done(
    calls: list[Part], error: type[PhotonError]
) -> None:
    assert type(final_error(calls, 1.0, 1)) is error


def test_a_call_of_which_one_shard_was_committed_is_not_called_overloaded() -> None:
    done = call()
    done.outcomes = b"\0"
    assert type(final_error([done, failed(Failure.OVERLOADED)], 1.0, 1)) is UnavailableError


def test_what_was_misrouted_keeps_that_an_earlier_try_may_have_been_done() -> None:
    unsure = whole(bytes(32), bytes(16), 0)
    unsure.failed(Failure.UNKNOWN, "a:1", "details", None)
    unsure.outcomes = bytes([4, 0])
    settled, stray = sort_out(unsure, 4, None)
    assert (settled.outcomes, settled.misrouted) == (b"\0", False)
    assert (stray.outcomes, stray.misrouted) == (None, True)
    assert type(final_error([stray], 1.0, 1)) is UnavailableError
