"""CacheEventStore (paper 3.4.1)."""

import gc
import threading
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventstore.cache import BLOCK_ENTRY_BYTES, ENTRY_BYTES, Block, CacheEventStore
from photon.core.columns import hash_ids
from photon.logs.formats import split_chunk

KEYS = [bytes([n]) * 16 for n in range(40)]
SMALL = ENTRY_BYTES + 10


def block_of(*texts):
    """Of events by text, as (key, line); the first with each id count."""
    events = [event for text in texts for event in text]
    ids = b"".join(key for key, _ in events)
    hashes = hash_ids(ids)
    order = np.argsort(hashes, kind="stable")
    _, first = np.unique(hashes[order], return_index=True)
    lines = [split_chunk(b"".join(line + b"\n" for _, line in text)) for text in texts]
    return Block(ids, lines, hashes[order][first], order[first])


def lines_of(numbers, size=10):
    return [(KEYS[n], b'{"%d":"%s"}' % (n, b"x" * size)) for n in numbers]


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


def test_events_of_a_block_are_found_until_newer_ones_need_their_place():
    events = lines_of(range(12))
    block = block_of(events[:5], events[5:8], [*events[8:], (KEYS[0], b'{"again":0}')])
    cache = CacheEventStore(5 * block.held_bytes)
    cache.put_block(block)
    assert (cache.events, cache.held_bytes) == (12, block.held_bytes)
    assert cache.get_many([KEYS[6], KEYS[39], KEYS[0], KEYS[6]]) == [
        events[6][1],
        None,
        events[0][1],
        events[6][1],
    ]
    cache.put_block(block_of(lines_of(range(20, 36))))  # the first becomes the older generation
    assert cache.get_many([KEYS[2], KEYS[11]]) == [events[2][1], events[11][1]]
    cache.put_block(block_of(lines_of(range(12, 20), 100)))
    assert cache.get_many([KEYS[0], KEYS[2], KEYS[3]]) == [None, events[2][1], None]
    assert cache.get_many([KEYS[12], KEYS[35]]) == [lines_of([12], 100)[0][1], lines_of([35])[0][1]]


def test_the_line_in_a_block_stays_whatever_is_put_later():
    block = block_of(lines_of(range(12)))
    cache = CacheEventStore(4 * block.held_bytes)
    cache.put_block(block)
    cache.put_many(KEYS[10:14], [b"a", b"b", b"c", b"d"])
    assert cache.get_many(KEYS[11:14]) == [lines_of([11])[0][1], b"c", b"d"]


def test_ids_of_one_hash_are_told_apart_in_a_block():
    block = block_of(lines_of([1, 2, 3]))
    wrong = Block(b"".join(KEYS[7:10]), block._lines, block._hashes, block._rows)
    cache = CacheEventStore(4 * block.held_bytes)
    cache.put_block(wrong)
    assert cache.get_many(KEYS[:10]) == [None] * 10


def test_a_small_block_is_put_event_by_event():
    block = block_of(lines_of([1]))
    cache = CacheEventStore(80 * block.held_bytes)
    cache.put_block(block)
    assert cache.get_many(KEYS[:2]) == [None, lines_of([1])[0][1]]
    assert cache.held_bytes == ENTRY_BYTES + len(lines_of([1])[0][1])


def test_of_a_block_that_is_too_great_the_last_texts_are_kept():
    events = lines_of(range(20))
    block = block_of(events[:9], [*events[9:14], (KEYS[2], b'{"again":2}')], events[14:])
    cache = CacheEventStore(block.held_bytes * 3 // 2)
    cache.put_block(block)
    assert cache.get_many(KEYS[:20]) == [None] * 9 + [line for _, line in events[9:]]
    cache = CacheEventStore(block.held_bytes // 2)  # too little for the last text
    cache.put_block(block)
    assert cache.get_many([KEYS[13], KEYS[14]]) == [None, events[14][1]]


batches = st.lists(
    st.tuples(st.booleans(), st.lists(st.tuples(st.integers(0, 39), st.integers(0, 200)), max_size=12)),
    max_size=40,
)


@given(batches, st.integers(2 * SMALL, 20 * SMALL), st.booleans())
def test_the_cache_never_returns_a_wrong_line_and_stays_within_its_bytes(steps, bytes_max, in_blocks):
    cache = CacheEventStore(bytes_max)
    put = {}
    for is_put, rows in steps:
        keys = [KEYS[n] for n, _ in rows]
        fresh = [(KEYS[n], b'{"%d":"%s"}' % (n, b"x" * size)) for n, size in rows if KEYS[n] not in put]
        if is_put and in_blocks and fresh:
            cache.put_block(block_of(fresh))
            for key, line in fresh:
                put.setdefault(key, set()).add(line)
        elif is_put:
            lines = [b"%d:" % n + b"x" * size for n, size in rows]
            cache.put_many(keys, lines)
            for key, line in zip(keys, lines):
                put.setdefault(key, set()).add(line)
        else:
            for key, line in zip(keys, cache.get_many(keys)):
                assert line is None or line in put[key]
        held = {**cache._cold, **cache._hot}
        blocks = [*cache._cold_blocks, *cache._hot_blocks]
        size = sum(len(line) + ENTRY_BYTES for line in held.values()) + sum(b.held_bytes for b in blocks)
        assert size <= cache.held_bytes <= bytes_max
        assert cache.events >= len({*held, *(key for block in blocks for key in block.events()[0])})


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


def test_the_bytes_counted_of_a_block_are_no_fewer_than_it_takes():
    ids = [n.to_bytes(16, "big") for n in range(60_000)]
    gc.collect()
    tracemalloc.start()
    try:
        block = block_of([(key, b'{"%s":1}' % (b"y" * 180)) for key in ids])
        gc.collect()
        taken = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert block.held_bytes - BLOCK_ENTRY_BYTES * 60_000 == 60_000 * 187
    assert 0.999 * taken <= block.held_bytes <= 1.5 * taken


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
