"""Copies that several machines share: each record once, whoever is killed, frozen or cut off."""

import contextlib
import json
import os
import random

import pytest

from photon.connect.copies import known_to
from photon.connect.ports import Batch, Loss
from photon.connect.shared_copies import GONE_S, SharedCopies
from photon.core.errors import FencedError, StorageError, UsageError

FILE_BYTES = 300
SOURCE = "kafka://host/topic"


class Rows:
    """What all machines reach, in memory."""

    def __init__(self):
        self.reign, self.number, self.rows = 0, 0, {}


class Held:
    """A ledger as one machine has it. `fails`: the next puts, "before" or "after" they are made."""

    def __init__(self, rows, reign):
        self.reign, self._rows, self._number, self.fails = reign, rows, 0, []

    def claim(self):
        if self.reign < self._rows.reign:
            raise FencedError("another machine")
        self._rows.reign = self.reign
        self._rows.number = self._number = self._rows.number + 1
        return self._number, dict(self._rows.rows)

    def put(self, rows):
        fails = self.fails.pop() if self.fails else None
        if fails == "before":
            raise StorageError("away")
        if self._number != self._rows.number:
            raise FencedError("another one")
        for name, value in rows.items():
            if value is None:
                del self._rows.rows[name]
            else:
                self._rows.rows[name] = value
        if fails == "after":
            raise StorageError("no answer")


@pytest.fixture
def rows():
    return Rows()


@pytest.fixture
def copies(tmp_path, rows):
    def open_them(reign, rows=rows):
        return SharedCopies(tmp_path / "copies", FILE_BYTES, SOURCE, Held(rows, reign))

    return open_them


def batch(partition, first, count):
    lines = [json.dumps({"p": partition, "n": n}).encode() + b"\n" for n in range(first, first + count)]
    return Batch(partition, b"".join(lines), ((first, count),))


def read(directory, reign):
    """All that counts, as workers of this reign read it."""
    lines = []
    for name, end in known_to(directory, reign).ends:
        data = (directory / name).read_bytes()[:end]
        assert len(data) == end and (not data or data.endswith(b"\n"))
        lines += [(event["p"], event["n"]) for event in map(json.loads, data.splitlines())]
    return sorted(lines)


def test_who_copies_next_goes_on_in_files_of_its_own(copies, tmp_path):
    one = copies(1)
    one.append([batch("a", 0, 3), batch("b", 5, 2)])
    two = copies(2)
    assert two.after == {"a": 2, "b": 6}
    two.append([batch("a", 3, 2)])
    two.tell(0, False, "", ())
    assert read(tmp_path / "copies", 2) == [("a", n) for n in range(5)] + [("b", 5), ("b", 6)]


def test_what_a_machine_appends_that_does_not_know_yet_that_another_copies_counts_for_nothing(
    copies, tmp_path
):
    one = copies(1)
    one.append([batch("a", 0, 3)])
    two = copies(2)
    with pytest.raises(FencedError):
        one.append([batch("a", 3, 9)])
    one.tell(9, True, "", ())  # which workers of the other reign don't ask for
    two.append([batch("a", 3, 1)])
    two.tell(0, False, "", ())
    assert read(tmp_path / "copies", 2) == [("a", n) for n in range(4)]
    with pytest.raises(FencedError):
        copies(1)


def test_a_claim_of_the_same_machine_shuts_out_what_is_under_way_of_its_former_one(copies, tmp_path):
    """A statement may still be on its way to the server when who sent it was killed and is back."""
    one, two = copies(1), copies(1)
    with pytest.raises(FencedError):
        one.append([batch("a", 0, 3)])
    two.append([batch("a", 0, 3)])
    two.tell(0, False, "", ())
    assert read(tmp_path / "copies", 1) == [("a", 0), ("a", 1), ("a", 2)]


def test_lost_records_are_known_to_who_copies_next(copies):
    copies(1).note(Loss("a", 5, 10))
    two = copies(2)
    two.note(Loss("a", 5, 12))  # told again
    assert (two.lost, copies(3).lost) == (12, 12)


@pytest.mark.parametrize("seed", range(12))
def test_each_record_counts_once_whoever_copies_and_whatever_fails(copies, tmp_path, rows, seed):
    rng = random.Random(seed)
    machines, reign, directory = [copies(1)], 1, tmp_path / "copies"
    told, seen = 0, set()
    for _ in range(60):
        one = rng.choice(machines)
        turn = [batch(name, one.after.get(name, -1) + 1, rng.randrange(1, 6)) for name in "abcde"]
        turn = rng.sample(turn, rng.randrange(1, 5))
        if rng.random() < 0.2:
            one._ledger.fails = [rng.choice(["before", "after"])]
        try:
            one.append(turn)
            one.tell(0, False, "", ())
        except (StorageError, FencedError):  # opened anew, as an importer does
            machines.remove(one)
            with contextlib.suppress(FencedError):
                machines.append(copies(one._ledger.reign))
        if rng.random() < 0.15 or not machines:
            reign += 1
            machines.append(copies(reign))
        newest = next(one for one in machines if one._ledger.reign == reign)
        if rng.random() < 0.3:
            assert newest.sweep(0.0, 0.0) > 0 or not newest.after
        newest.tell(0, False, "", ())
        found = read(directory, reign)
        assert len(found) == len(set(found)) and seen <= set(found)
        told, seen = max(told, len(found)), set(found)
    after = copies(reign).after
    assert seen == {(name, n) for name, last in after.items() for n in range(last + 1)} and told > 60


def test_what_counts_for_nothing_is_swept_and_what_was_read_is_forgotten_late(copies, tmp_path, rows):
    one = copies(1)
    one.append([batch("a", 0, 3)])
    one.tell(0, False, "", ())
    two = copies(2)
    with pytest.raises(FencedError):
        one.append([batch("b", 0, 3)])
    two.append([batch("a", 3, 1)])
    two.tell(0, False, "", ())
    two.sweep(0.0, 0.0)
    directory = tmp_path / "copies"
    ends = dict(known_to(directory, 2).ends)
    assert {path.name for path in directory.glob("*.jsonl")} == set(ends)
    assert {path.name for path in directory.glob("known*")} == {"known-2.json"}
    (old,) = [name for name in ends if ends[name] == max(ends.values())]
    os.unlink(directory / old)
    for now_s, there in [(0.0, True), (GONE_S, True), (GONE_S + 1, False)]:
        two.sweep(0.0, now_s)
        two.tell(0, False, "", ())
        assert (old in dict(known_to(directory, 2).ends)) is there
    assert copies(3).after == {"a": 3}


def test_a_file_that_is_seen_late_is_not_forgotten(copies, tmp_path):
    copies(1).append([batch("a", 0, 3)])
    two = copies(2)
    two.tell(0, False, "", ())
    ((name, _),) = [one for one in known_to(tmp_path / "copies", 2).ends if one[1]]
    path = tmp_path / "copies" / name
    path.rename(tmp_path / name)
    two.sweep(0.0, 0.0)
    (tmp_path / name).rename(path)
    two.sweep(0.0, GONE_S)
    path.rename(tmp_path / name)
    two.sweep(0.0, GONE_S + 1)
    two.tell(0, False, "", ())
    assert name in dict(known_to(tmp_path / "copies", 2).ends)


def test_a_directory_has_the_copies_of_one_run(copies, tmp_path, rows):
    copies(1).append([batch("a", 0, 3)])
    other = Rows()
    SharedCopies(tmp_path / "elsewhere", FILE_BYTES, SOURCE, Held(other, 1))
    with pytest.raises(UsageError, match="holds the copies of another run"):
        copies(1, other)
    with pytest.raises(UsageError, match="holds the copies of another run"):
        copies(1, Rows())
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "0-000000.jsonl").touch()
    with pytest.raises(UsageError, match="holds other files"):
        SharedCopies(tmp_path / "other", FILE_BYTES, SOURCE, Held(Rows(), 1))
    with pytest.raises(UsageError, match="are not there"):
        SharedCopies(tmp_path / "empty", FILE_BYTES, SOURCE, Held(rows, 2))


def test_a_claim_that_was_killed_before_it_had_its_mark_is_made_again(copies, tmp_path):
    class Killed(Held):
        def put(self, rows):
            raise StorageError("killed")

    with pytest.raises(StorageError):
        SharedCopies(tmp_path / "copies", FILE_BYTES, SOURCE, Killed(Rows(), 1))
    copies(1).append([batch("a", 0, 3)])
