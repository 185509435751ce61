"""Whether a batch asks the registry before it is sent."""

from dispatcher.lookup_share import PAYS_FROM, PROBE_EVERY, LookupShare


def asked(share: LookupShare, batches: int) -> int:
    return sum(share.pays() for _ in range(batches))


def untold(batches: int = 40) -> LookupShare:
    """One that has seen so many batches of which the registry knew nothing."""
    share = LookupShare()
    for _ in range(batches):
        share.observe(0, 1_000)
    return share


def test_at_first_every_batch_asks() -> None:
    assert asked(LookupShare(), 100) == 100


def test_where_nothing_is_known_one_batch_in_so_many_asks() -> None:
    assert asked(untold(), 10 * PROBE_EVERY) == 10


def test_one_answer_that_would_have_paid_lets_every_batch_ask_again() -> None:
    share = untold()
    share.observe(30, 1_000)
    assert asked(share, 100) == 100


def test_a_share_below_the_mark_does_not_pay_and_one_above_goes_on_to() -> None:
    share = untold()
    for _ in range(50):
        share.observe(int(1_000 * PAYS_FROM) - 5, 1_000)
    assert asked(share, PROBE_EVERY) == 1
    for _ in range(50):
        share.observe(int(1_000 * PAYS_FROM) + 5, 1_000)
    assert asked(share, PROBE_EVERY) == PROBE_EVERY


def test_an_empty_batch_says_nothing() -> None:
    share = LookupShare()
    share.observe(0, 0)
    assert asked(share, 10) == 10


def test_joins_in_vain_let_every_batch_ask_at_once() -> None:
    share = untold()
    share.joined(29, 1_000)
    assert asked(share, PROBE_EVERY) == 1
    share.joined(30, 1_000)
    assert asked(share, 100) == 100
