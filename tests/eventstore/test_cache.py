"""CacheEventStore (paper 3.4.1)."""

import gc
import threading
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventstore.cache import ENTRY_BYTES, CacheEventStore

KEYS = [bytes([n]) * 16 for n in range(40)]
SMALL = ENTRY_BYTES + 10


def test_a_line_is_found_until_newer_ones_need_its_place():
    cache = CacheEventStore(8 * SMALL)
    for key in KEYS[:20]:
        cache.put_many([key], [key[:10]])
    assert cache.get_many(KEYS[:12]) == [None] * 12
    assert cache.get_many(KEYS[16:20]) == [key[:10] for key in KEYS[16:20]]


def test_an_event_that_is_used_outlives_those_that_are_not():
    cache = CacheEventStore(8 * SMALL)
    cache.put_many(KEYS[:1], [b"used"])
    for key in KEYS[1:30]:
        cache.put_many([key], [key[:10]])
        assert cache.get_many(KEYS[:1]) == [b"used"]
    assert cache.get_many(KEYS[1:2]) == [None]


def test_the_first_line_with_an_id_wins_within_a_batch_and_over_batches():
    cache = CacheEventStore(8 * SMALL)
    cache.put_many([KEYS[0], KEYS[1], KEYS[0]], [b"first", b"one", b"second"])
    cache.put_many([KEYS[0], KEYS[2]], [b"third", b"two"])
    assert cache.get_many(KEYS[:3]) == [b"first", b"one", b"two"]
    for key in KEYS[3:7]:
        cache.put_many([key], [b"x"])
    cache.put_many([KEYS[2]], [b"a repeat of what is in the older generation"])
    assert cache.get_many([KEYS[2]]) == [b"two"]
    cache.put_many([KEYS[2], KEYS[9], KEYS[9]], [b"again", b"nine", b"nine again"])
    assert cache.get_many([KEYS[2], KEYS[9]]) == [b"two", b"nine"]


def test_a_line_greater_than_half_of_the_cache_is_not_kept():
    cache = CacheEventStore(4 * SMALL)
    cache.put_many(KEYS[:2], [b"small", b"x" * 3 * SMALL])
    assert cache.get_many(KEYS[:2]) == [b"small", None]


def test_hits_and_misses_are_counted():
    cache = CacheEventStore(8 * SMALL)
    cache.put_many(KEYS[:1], [b"x"])
    cache.get_many(KEYS[:3])
    assert (cache.hits, cache.misses, cache.events) == (1, 2, 1)


batches = st.lists(
    st.tuples(st.booleans(), st.lists(st.tuples(st.integers(0, 39), st.integers(0, 200)), max_size=12)),
    max_size=40,
)


@given(batches, st.integers(2 * SMALL, 20 * SMALL))
def test_the_cache_never_returns_a_wrong_line_and_stays_within_its_bytes(steps, bytes_max):
    cache = CacheEventStore(bytes_max)
    put = {}
    for is_put, rows in steps:
        keys = [KEYS[n] for n, _ in rows]
        if is_put:
            lines = [b"%d:" % n + b"x" * size for n, size in rows]
            cache.put_many(keys, lines)
            for key, line in zip(keys, lines):
                put.setdefault(key, set()).add(line)
        else:
            for key, line in zip(keys, cache.get_many(keys)):
                assert line is None or line in put[key]
        held = {**cache._cold, **cache._hot}
        assert sum(len(line) + ENTRY_BYTES for line in held.values()) <= cache.held_bytes <= bytes_max
        assert cache.events == len(held)


def test_the_bytes_counted_are_no_fewer_than_python_takes():
    gc.collect()
    tracemalloc.start()
    try:
        cache = CacheEventStore(32 << 20)
        for start in range(0, 60_000, 1000):
            rows = range(start, start + 1000)
            cache.put_many([n.to_bytes(16, "big") for n in rows], [b"x%d" % n + b"y" * 180 for n in rows])
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert cache.events == 60_000
    assert taken <= cache.held_bytes <= 1.5 * taken


@pytest.mark.timeout(30)
def test_threads_that_fill_and_look_up_at_once_do_not_disturb_each_other():
    cache = CacheEventStore(200 * SMALL)
    wrong = []

    def fill():
        for start in range(0, 20_000, 50):
            keys = [n.to_bytes(16, "big") for n in range(start, start + 50)]
            cache.put_many(keys, [b"%d" % n for n in range(start, start + 50)])

    def look_up():
        for start in range(0, 20_000, 50):
            keys = [n.to_bytes(16, "big") for n in range(start, start + 50)]
            for n, line in zip(range(start, start + 50), cache.get_many(keys)):
                if line not in (None, b"%d" % n):
                    wrong.append((n, line))

    threads = [threading.Thread(target=work) for work in (fill, look_up, fill, look_up)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert cache.held_bytes <= 200 * SMALL
