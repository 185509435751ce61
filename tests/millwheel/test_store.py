"""One contract for both stores: whole commits, fenced by the newest claim (paper 5.2, 6.2)."""

import pytest

from millwheel import disk as disks
from millwheel.disk import Disk
from millwheel.engine.store import MemoryStore
from millwheel.errors import ZombieError
from photon.logs.shares import SLOTS

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
        store = Disk(self._work, self._first)
        self._first = self._first or store
        store.claim(slots, me, workers)
        return store


@pytest.fixture(params=["memory", "disk", "disk that writes its table often"])
def stores(request, tmp_path, monkeypatch):
    if request.param.endswith("often"):
        monkeypatch.setattr(disks, "_LOG_ROWS_MAX", 2)
    return InMemory() if request.param == "memory" else OnDisk(tmp_path)


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
