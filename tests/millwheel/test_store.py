"""One contract for both stores: whole commits, fenced by the newest claim (paper 5.2, 6.2)."""

import hashlib
from copy import copy

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millwheel.disk import Disk
from millwheel.engine import logged
from millwheel.engine.records import SLOTS
from millwheel.engine.store import (
    TIMERS,
    MemoryStore,
    key_row,
    node_rows,
    pack_floors,
    rows_of_slots,
    slot_of_row,
    unpack_floors,
)
from millwheel.errors import ZombieError
from tests.connect.postgresql import Postgresql, need_server

ALL = range(SLOTS)


class InMemory:
    def __init__(self):
        self._store, self._sequencer = MemoryStore(), 0

    def claim(self, slots=ALL, me=0, workers=1):
        self._sequencer += 1
        return self._store.claim(slots, self._sequencer)


class OnDisk:
    def __init__(self, work):
        self._work, self._first = work, None

    def claim(self, slots=ALL, me=0, workers=1):
        store = Disk(self._work) if self._first is None else copy(self._first)
        self._first = self._first or store
        store.claim(slots, me, workers)
        return store


class InPostgresql:
    def __init__(self, uri):
        self._uri, self._open = uri, []

    def claim(self, slots=ALL, me=0, workers=1):
        from millwheel.postgresql import PostgresqlStore

        store = PostgresqlStore(self._uri)
        self._open.append(store)
        store.claim(slots, me, workers)
        return store

    def close(self):
        for store in self._open:
            store.close()


@pytest.fixture(scope="module")
def postgresql():
    made = Postgresql(need_server())
    yield made
    made.close()


@pytest.fixture(params=["memory", "disk", "disk, often", "postgresql", "postgresql, often"])
def stores(request, tmp_path, monkeypatch):
    """`often`: those that write their table after a few commits."""
    kind, _, often = request.param.partition(", ")
    if often:
        monkeypatch.setattr(logged, "LOG_ROWS_MAX", 2)
    if kind == "postgresql":
        server = request.getfixturevalue("postgresql")
        schema = hashlib.md5(request.node.name.encode()).hexdigest()
        made = InPostgresql(f"{server.uri}?schema=s{schema}&may_lose_acknowledged=yes")
        yield made
        made.close()
    else:
        yield InMemory() if kind == "memory" else OnDisk(tmp_path)


def test_rows_are_read_as_they_were_last_put(stores):
    store = stores.claim()
    store.commit({b"a": b"1", b"b": b"2"})
    store.commit({b"a": b"3", b"b": None, b"c": b""})
    assert store.read([b"a", b"b", b"c", b"d"]) == [b"3", None, b"", None]
    for number in range(5):
        store.commit({b"a": b"%d" % number, b"c": None if number % 2 else b"5", b"d%d" % number: b""})
        assert store.read([b"a", b"c"]) == [b"%d" % number, None if number % 2 else b"5"]


def test_a_claim_has_all_that_was_committed(stores):
    store = stores.claim()
    for number in range(10):
        store.commit({b"k%d" % number: b"%d" % number, b"k%d" % (number - 3): None})
    again = stores.claim()
    assert list(again.scan(b"k")) == [(b"k%d" % n, b"%d" % n) for n in (7, 8, 9)]
    assert list(again.scan(b"k8")) == [(b"k8", b"8")]


def test_a_scan_may_be_for_some_slots_alone(stores):
    slots = [0, 1, 40, 255, 256, 511, SLOTS - 1]
    store = stores.claim()
    rows = {
        key_row(TIMERS, node, slot, key): key.encode() for node in (1, 256) for slot in slots for key in "ab"
    }
    store.commit(rows)
    found = list(stores.claim().scan(node_rows(TIMERS, 256), rows_of_slots({511, 3, 1, 256})))
    assert found == [
        (key_row(TIMERS, 256, slot, key), key.encode()) for slot in (1, 256, 511) for key in "ab"
    ]
    assert [slot_of_row(row) for row, _ in found] == [1, 1, 256, 256, 511, 511]
    assert list(stores.claim().scan(node_rows(TIMERS, 2), rows_of_slots(slots))) == []


@given(st.lists(st.integers(0, (1 << 63) - 1), min_size=1, max_size=5), st.integers(0, 1 << 32))
def test_what_each_slot_has_consumed_is_kept(numbers, seed):
    floors = np.random.default_rng(seed).choice(np.array(numbers, np.int64), SLOTS)
    packed = pack_floors(floors)
    assert unpack_floors(packed).tolist() == floors.tolist()
    assert len(packed) < 150 * (len(numbers) + 1)


def test_who_was_replaced_commits_nothing_more(stores):
    old = stores.claim()
    old.commit({b"a": b"1"})
    new = stores.claim()
    with pytest.raises(ZombieError):
        old.commit({b"a": b"2"})
    assert new.read([b"a"]) == [b"1"]
    new.commit({b"a": b"3"})
    assert new.read([b"a"]) == [b"3"]


def test_one_slot_that_was_taken_is_enough(stores):
    old = stores.claim([0, 1], 0, 2)
    stores.claim([1, 2], 1, 2)
    with pytest.raises(ZombieError):
        old.commit({b"a": b"1"})


def test_workers_with_other_slots_go_on(stores):
    one, two = stores.claim([0], 0, 2), stores.claim([1], 1, 2)
    one.commit({b"a": b"1"})
    two.commit({b"b": b"2"})
    one.commit({b"a": b"3"})
    fewer = stores.claim(ALL, 0, 1)
    assert fewer.read([b"a", b"b"]) == [b"3", b"2"]
