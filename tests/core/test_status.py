"""Histograms of durations: what dispatcher and event store count their latencies with."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon.core.status import BUCKETS, EDGES_US, Histogram, count_latencies


@given(st.lists(st.floats(0, 1e11), max_size=50), st.sampled_from([1.0, 100.0]))
def test_each_duration_is_counted_once_in_the_first_bucket_whose_edge_it_does_not_pass(durations, finest_us):
    histogram = Histogram(finest_us)
    for duration in durations:
        histogram.count(duration)
    status = histogram.status()
    edges = [*status["edges"], float("inf")]
    assert len(status["counts"]) == len(edges) == BUCKETS
    expected = [0] * BUCKETS
    for duration in durations:
        expected[next(n for n, edge in enumerate(edges) if duration <= edge)] += 1
    assert status["counts"] == expected
    assert status["sum"] == pytest.approx(sum(durations), abs=1)


@given(st.lists(st.integers(0, 10**11), max_size=50))
def test_counting_one_by_one_and_a_column_at_a_time_agree(durations):
    histogram = Histogram()
    for duration in durations:
        histogram.count(duration)
    assert histogram.status()["counts"] == count_latencies(np.array(durations, np.int64)).tolist()


def test_four_buckets_to_a_doubling():
    assert np.allclose(EDGES_US[4:] / EDGES_US[:-4], 2.0, rtol=0.02)


def test_threads_count_at_once_and_nothing_is_lost():
    histogram = Histogram()

    def count():
        for _ in range(2000):
            histogram.count(150.0, times=2)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(histogram.status()["counts"]) == 16_000


def test_latencies_fall_into_the_bucket_whose_upper_edge_is_next():
    counts = count_latencies(np.array([0, -5, 100, 101, int(EDGES_US[-1]) + 1]))
    assert len(counts) == BUCKETS == len(EDGES_US) + 1
    assert (counts[0], counts[1], counts[-1], counts.sum()) == (3, 1, 1, 5)
