"""Server-side batching (paper 2.2.1) and sharding (2.2.2): the pure parts."""

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from idregistry.rules.commands import Commit, decode
from idregistry.rules.packing import BATCH_BYTES_MAX, IDS_MAX, request_bytes
from idregistry.shard import Answer, Line, Overloaded, Request, build_command, split_outcomes
from photon.core.ids import TOKEN_BYTES_MAX
from tests.idregistry.kit import NOW_US, event_ids, same_times


def request(
    count: int,
    deadline: float = 10.0,
    answer: Callable[[Answer], object] = lambda _answer: None,
    token: bytes = b"t",
) -> Request:
    return Request(event_ids(*range(count)), same_times(count), token, deadline, answer)


def line(ids_max: int) -> Line[Request]:
    return Line(ids_max, lambda: None, "{} wait", "late")


def test_no_minimum_batch() -> None:
    """2.2.1: "We do not enforce a minimum batch size, hence there is no tradeoff on latency"."""
    queue = line(100)
    alone = request(1)
    assert queue.offer(alone) is None
    assert queue.take(0.0, 1000, BATCH_BYTES_MAX) == [alone]


def test_a_batch_takes_all_that_waits() -> None:
    queue = line(100)
    requests = [request(n) for n in (1, 5, 3)]
    assert not any(map(queue.offer, requests))
    assert queue.take(0.0, 1000, BATCH_BYTES_MAX) == requests
    assert (len(queue), queue.weight) == (0, 0)


def test_a_request_larger_than_a_batch_still_goes() -> None:
    queue = line(100)
    large, small = request(50), request(1)
    queue.offer(large)
    queue.offer(small)
    assert queue.take(0.0, 10, BATCH_BYTES_MAX) == [large]
    assert queue.take(0.0, 10, BATCH_BYTES_MAX) == [small]


def test_a_full_queue_refuses_but_an_empty_one_takes_any_request() -> None:
    queue = line(10)
    assert queue.offer(request(50)) is None
    assert queue.offer(request(1)) == Overloaded("50 wait")
    queue.take(0.0, 10, BATCH_BYTES_MAX)
    assert queue.offer(request(9)) is None
    assert queue.offer(request(1)) is None
    assert queue.offer(request(1)) == Overloaded("10 wait")


def test_what_is_past_its_deadline_is_dropped_before_it_is_proposed() -> None:
    queue = line(100)
    answers: list[Answer] = []
    late, fine = request(2, 1.0, answers.append), request(3, 2.0)
    queue.offer(late)
    queue.offer(fine)
    assert queue.take(1.0, 100, BATCH_BYTES_MAX) == [fine]
    assert answers == [Overloaded("late")]


def test_many_small_requests_with_long_tokens_stay_within_the_logs_bound() -> None:
    queue = line(1_000_000)
    for _ in range(3000):
        queue.offer(request(1, token=bytes(TOKEN_BYTES_MAX)))
    batch = queue.take(0.0, 1_000_000, BATCH_BYTES_MAX)
    assert 1 < len(batch) < 3000
    assert len(build_command(batch, NOW_US)) < 2 << 20


def test_the_largest_request_fits_a_command() -> None:
    assert request_bytes(bytes(16 * IDS_MAX), bytes(TOKEN_BYTES_MAX)) < BATCH_BYTES_MAX


@given(
    st.lists(st.tuples(st.integers(0, 9), st.sampled_from([0.0, 1.0, 5.0])), max_size=30),
    st.integers(1, 20),
    st.integers(1, 60),
    st.randoms(use_true_random=False),
)
def test_no_request_is_lost_doubled_or_overtaken(sizes, ids_max, queue_max, rng) -> None:  # type: ignore[no-untyped-def]
    queue = line(queue_max)
    put: list[Request] = []
    out: list[Request] = []
    late: list[Request] = []
    for count, deadline in [*sizes, (0, 9.0)]:
        new = request(count, deadline, lambda _answer: late.append(put[-1]))
        put.append(new)
        if queue.offer(new) is not None:
            put.pop()
        if rng.random() < 0.3:
            batch = queue.take(1.0, ids_max, BATCH_BYTES_MAX)
            assert all(r.deadline > 1.0 for r in batch)
            assert len(batch) <= 1 or sum(r.weight for r in batch) <= ids_max
            out += batch
    out += queue.take(1.0, 10**6, BATCH_BYTES_MAX)
    assert [id(r) for r in out] == [id(r) for r in put if r.deadline > 1.0]
    assert len(late) == sum(r.deadline <= 1.0 for r in put)
    assert (len(queue), queue.weight) == (0, 0)


@given(st.lists(st.integers(0, 5), max_size=8))
def test_a_command_holds_the_requests_in_order_and_its_result_is_split_back(counts: list[int]) -> None:
    batch = [request(count, token=b"token-%d" % n) for n, count in enumerate(counts)]
    command = decode(build_command(batch, NOW_US))
    assert isinstance(command, Commit)
    assert list(command.counts) == counts
    assert command.tokens == [r.token for r in batch]
    assert command.ids == b"".join(r.ids for r in batch)
    column = bytes(n % 3 for n in range(sum(counts)))
    split = split_outcomes(batch, column)
    assert list(map(len, split)) == counts
    assert b"".join(split) == column
