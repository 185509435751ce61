"""Server-side batching (paper 2.2.1) and sharding (2.2.2): the pure parts."""

from hypothesis import given
from hypothesis import strategies as st

from idregistry.rules.commands import Commit, decode
from idregistry.rules.packing import BATCH_BYTES_MAX, IDS_MAX, request_bytes
from idregistry.shard import CommitQueue, Request, build_command, split_outcomes
from photon.core.ids import TOKEN_BYTES_MAX
from tests.idregistry.kit import NOW_US, event_ids, same_times


def request(count: int, token: bytes = b"t", deadline: float = 10.0) -> Request:
    return Request(event_ids(*range(count)), same_times(count), token, deadline, lambda _answer: None)


def test_no_minimum_batch() -> None:
    """2.2.1: "We do not enforce a minimum batch size, hence there is no tradeoff on latency"."""
    queue = CommitQueue(100)
    alone = request(1)
    assert queue.put(alone)
    assert queue.take(1000, BATCH_BYTES_MAX, now=0.0) == ([alone], [])


def test_a_batch_takes_all_that_waits() -> None:
    queue = CommitQueue(100)
    requests = [request(n) for n in (1, 5, 3)]
    assert all(map(queue.put, requests))
    assert queue.take(1000, BATCH_BYTES_MAX, now=0.0) == (requests, [])
    assert queue.ids == 0


def test_a_request_larger_than_a_batch_still_goes() -> None:
    queue = CommitQueue(100)
    large, small = request(50), request(1)
    assert queue.put(large)
    assert queue.put(small)
    assert queue.take(10, BATCH_BYTES_MAX, now=0.0) == ([large], [])
    assert queue.take(10, BATCH_BYTES_MAX, now=0.0) == ([small], [])


def test_a_full_queue_refuses_but_an_empty_one_takes_any_request() -> None:
    queue = CommitQueue(10)
    assert queue.put(request(50))
    assert not queue.put(request(1))
    queue.take(10, BATCH_BYTES_MAX, now=0.0)
    assert queue.put(request(9))
    assert queue.put(request(1))
    assert not queue.put(request(1))


def test_what_is_past_its_deadline_is_dropped_before_it_is_proposed() -> None:
    queue = CommitQueue(100)
    late, fine = request(2, deadline=1.0), request(3, deadline=2.0)
    queue.put(late)
    queue.put(fine)
    assert queue.take(100, BATCH_BYTES_MAX, now=1.0) == ([fine], [late])


def test_many_small_requests_with_long_tokens_stay_within_the_logs_bound() -> None:
    queue = CommitQueue(1_000_000)
    for _ in range(3000):
        queue.put(request(1, token=bytes(TOKEN_BYTES_MAX)))
    batch, _ = queue.take(1_000_000, BATCH_BYTES_MAX, now=0.0)
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
    queue = CommitQueue(queue_max)
    put: list[Request] = []
    out: list[Request] = []
    for count, deadline in [*sizes, (0, 9.0)]:
        new = request(count, deadline=deadline)
        if queue.put(new):
            put.append(new)
        if rng.random() < 0.3:
            batch, late = queue.take(ids_max, BATCH_BYTES_MAX, now=1.0)
            assert all(r.deadline <= 1.0 for r in late)
            assert all(r.deadline > 1.0 for r in batch)
            assert len(batch) <= 1 or sum(r.count for r in batch) <= ids_max
            out += sorted(batch + late, key=put.index)
    out += queue.drain()
    assert [id(r) for r in out] == [id(r) for r in put]
    assert queue.ids == 0


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
