"""One request through the joiner: every event its own outcome, refusals, full disks (paper 3.3.1, 3.3.2)."""

import errno
import os
from collections import Counter

import pytest

from joiner.commit import PROBE_INTERVAL_S
from joiner.worker import UNRESOLVED_MAX
from photon.core.errors import (
    DiskFullError,
    LockedError,
    OverloadedError,
    StorageError,
    UsageError,
)
from photon.core.fates import Found
from tests.joiner.fakes import (
    NOW_US,
    FailingWrites,
    batch_of,
    end_all,
    fail_one_sync,
    fates,
    joined_line,
    lines_of,
    output_lines,
    packed_id,
    primary_line,
)

EXPIRED = "older than the IdRegistry remembers"
LACKS_A = {"q-a": Found.ABSENT}


@pytest.mark.parametrize(
    ("names", "given", "outcomes", "reasons", "written"),
    [
        ("abc", {}, "JOINED JOINED JOINED", {}, "abc"),
        ("", {}, "", {}, ""),
        ("abc", {"taken": "b"}, "JOINED DUPLICATE JOINED", {}, "ac"),
        ("abb", {"expired": "b"}, "JOINED EXPIRED EXPIRED", dict.fromkeys((1, 2), EXPIRED), "a"),
        (
            "abcde",
            {"lacks": {"q-b": Found.ABSENT, "q-c": Found.BEHIND, "q-d": Found.UNREADABLE}},
            "JOINED RETRY_ABSENT RETRY_ABSENT RETRY_UNAVAILABLE JOINED",
            {},
            "ae",
        ),
        (
            "ab",
            {"lacks": LACKS_A, "drain": True},
            "UNJOINABLE JOINED",
            {0: "no primary event in the logs"},
            "b",
        ),
        ("abaca", {}, "JOINED JOINED DUPLICATE JOINED DUPLICATE", {}, "abc"),
        ("aa", {"down": True}, "RETRY_UNAVAILABLE RETRY_UNAVAILABLE", {}, ""),
    ],
    ids=["all", "none", "taken", "expired", "waits", "drained", "repeated", "unknown"],
)
def test_each_event_of_a_batch_has_its_own_outcome_and_what_is_joined_is_in_the_log(
    make, registry, store, tmp_path, names, given, outcomes, reasons, written
):
    worker = make(drain=given.get("drain", False))
    registry.tokens |= {packed_id(name): b"another joiner's" for name in given.get("taken", "")}
    registry.expired |= {packed_id(name) for name in given.get("expired", "")}
    registry.down = given.get("down", False)
    store.lacks = given.get("lacks", {})
    answer = worker.join(batch_of(names))
    assert (fates(answer), answer.reasons) == (outcomes.split(), reasons)
    assert output_lines(tmp_path) == lines_of(written)


def test_an_event_that_is_sent_again_is_a_duplicate(make, tmp_path):
    worker = make()
    worker.join(batch_of(["a"]))
    assert fates(worker.join(batch_of(["a", "b"]))) == ["DUPLICATE", "JOINED"]
    assert fates(worker.join(batch_of(["a"]))) == ["DUPLICATE"]
    assert worker.status()["unresolved"] == 0
    assert output_lines(tmp_path) == lines_of("ab")


@pytest.mark.parametrize(
    ("lacks", "drain", "tries", "age_s", "outcome"),
    [
        (Found.ABSENT, False, 9, 200_000, "RETRY_ABSENT"),
        (Found.ABSENT, False, 10, 86_399, "RETRY_ABSENT"),
        (Found.ABSENT, False, 10, 86_400, "UNJOINABLE"),
        (Found.ABSENT, False, 500, 90_000, "UNJOINABLE"),
        # Never given up while the logs are not read.
        (Found.BEHIND, True, 99, 9 * 86_400, "RETRY_ABSENT"),
        (Found.UNREADABLE, True, 99, 9 * 86_400, "RETRY_UNAVAILABLE"),
    ],
)
def test_an_event_is_unjoinable_after_so_many_tries_and_so_long(
    make, store, lacks, drain, tries, age_s, outcome
):
    store.lacks = {"q-a": lacks}
    sent = batch_of(["a"], tries=tries, age_us=age_s * 1_000_000)
    answer = make(drain=drain).join(sent)
    assert fates(answer) == [outcome]
    if outcome == "UNJOINABLE":
        assert answer.reasons == {0: f"no primary event after {tries + 1} tries in {age_s} s"}


def test_no_clock_of_another_machine_has_a_say_in_what_is_unjoinable(make, store, clock):
    """The dispatcher tells ages; the joiner's clock may be a day ahead of it."""
    store.lacks = {"q-a": Found.ABSENT}
    sent = batch_of(["a"], tries=10, age_us=2_000_000)
    clock.advance(86_400)
    worker = make()
    assert fates(worker.join(sent)) == ["RETRY_ABSENT"]


def test_a_fresh_row_is_joined_behind_an_expired_one_of_the_same_id(make, registry, tmp_path):
    registry.boundary_us = NOW_US
    times = [NOW_US - 1, NOW_US, NOW_US + 1, NOW_US - 1, NOW_US - 1]
    events = [b'{"id":"a","n":%d}' % n for n in range(3)] + [b'{"id":"b"}'] * 2
    answer = make().join(batch_of("aaabb", primaries=["q"] * 5, events=events, times_us=times))
    assert fates(answer) == ["DUPLICATE", "DUPLICATE", "JOINED", "EXPIRED", "EXPIRED"]
    assert answer.reasons == dict.fromkeys((3, 4), EXPIRED)
    assert output_lines(tmp_path) == Counter([events[2][:-1] + b',"primary":' + primary_line("q") + b"}"])


def test_while_the_event_store_is_away_all_are_tried_again(make, store, registry):
    store.down = True
    assert fates(make().join(batch_of(["a", "b"]))) == ["RETRY_UNAVAILABLE"] * 2
    assert registry.commits == 0


def test_a_repeated_id_is_judged_by_its_own_primary(make, store, tmp_path):
    store.lacks = {"q-gone": Found.ABSENT}
    batch = batch_of(["a", "a", "b", "b"], primaries=["q-gone", "q-x", "q-y", "q-gone"])
    assert fates(make(drain=True).join(batch)) == ["UNJOINABLE", "JOINED", "JOINED", "UNJOINABLE"]
    assert output_lines(tmp_path) == Counter([joined_line("a", "q-x"), joined_line("b", "q-y")])


ADAPTERS = """
from joiner.adapter import Adapter, Skip

class Choosy(Adapter):
    def join(self, primary, foreign):
        kind = foreign.data["id"][0]
        if kind == "s":
            return Skip("starts with s")
        if kind == "x":
            raise ValueError("no x")
        if kind == "y":
            raise MemoryError
        return {"same": "line"} if kind == "m" else None
"""


@pytest.fixture
def choosy(tmp_path, monkeypatch):
    (tmp_path / "choosy_adapters.py").write_text(ADAPTERS)
    monkeypatch.syspath_prepend(tmp_path)
    return "choosy_adapters:Choosy"


def test_skipped_events_are_filtered_raising_ones_errors_and_batch_mates_go_on(make, store, choosy, tmp_path):
    store.lacks = {"q-absent": Found.ABSENT}
    answer = make(adapter=choosy).join(batch_of(["absent", "s1", "a", "x1", "s2", "b", "a"]))
    others = ["FILTERED", "JOINED", "ADAPTER_ERROR", "FILTERED", "JOINED", "DUPLICATE"]
    assert fates(answer) == ["RETRY_ABSENT", *others]
    assert answer.reasons[1] == answer.reasons[4] == "starts with s"
    assert answer.reasons[3].startswith("adapter raised ValueError: no x (choosy_adapters.py:")
    assert output_lines(tmp_path) == lines_of("ab")


def test_want_of_memory_says_nothing_of_an_event(make, choosy, tmp_path):
    answer = make(adapter=choosy).join(batch_of(["a", "y1", "b"]))
    assert (fates(answer), answer.reasons) == (["JOINED", "RETRY_UNAVAILABLE", "JOINED"], {})
    assert output_lines(tmp_path) == lines_of("ab")


def test_events_whose_joined_lines_are_alike_are_all_written(make, choosy, registry, tmp_path):
    worker = make(adapter=choosy)
    worker.join(batch_of(["m1", "m2"]))
    registry.tokens[packed_id("m4")] = b"another's"
    worker.join(batch_of(["m3", "m4", "m5"]))
    assert output_lines(tmp_path) == {b'{"same":"line"}': 4}


@pytest.mark.parametrize("lost", ["before", "after"])
def test_an_unknown_outcome_is_resolved_with_the_same_token(make, registry, tmp_path, lost):
    """Paper 3.3.2: a lost answer loses no event, and the dispatcher's own retry doubles none."""
    worker = make()
    registry.failures = [lost, lost, lost]
    assert fates(worker.join(batch_of(["a", "b"]))) == ["RETRY_UNAVAILABLE"] * 2
    assert output_lines(tmp_path) == Counter()
    assert worker.status()["unresolved"] == 1
    registry.failures = [""]
    again = fates(worker.join(batch_of(["a", "c"])))
    assert again == (["JOINED", "JOINED"] if lost == "before" else ["DUPLICATE", "JOINED"])
    registry.failures = ["before"]
    end_all(worker)
    assert output_lines(tmp_path) == lines_of("abc")
    assert "no quorum" in worker.status()["notices"][0]


def test_many_unresolved_batches_refuse_new_ones_until_the_registry_is_back(make, registry, tmp_path):
    worker = make()
    registry.down = True
    for number in range(UNRESOLVED_MAX):
        worker.join(batch_of([f"a{number}"]))
    with pytest.raises(OverloadedError, match="64 batches wait"):
        worker.join(batch_of(["b"]))
    registry.down = False
    end_all(worker)
    assert fates(worker.join(batch_of(["b"]))) == ["JOINED"]
    assert sum(output_lines(tmp_path).values()) == UNRESOLVED_MAX + 1
    assert worker._resolver.unresolved_bytes == 0


def test_a_registry_answer_of_the_wrong_length_is_taken_for_none(make, registry, monkeypatch, tmp_path):
    worker = make()
    with monkeypatch.context() as mixed:
        mixed.setattr(registry, "commit", lambda *_: b"\x00")
        assert fates(worker.join(batch_of(["a", "b"]))) == ["RETRY_UNAVAILABLE"] * 2
    end_all(worker)
    assert output_lines(tmp_path) == lines_of("ab")


def test_a_full_disk_under_the_joined_log_loses_and_doubles_nothing(make, registry, monkeypatch, tmp_path):
    worker = make()
    worker.join(batch_of(["a"]))
    full = FailingWrites(monkeypatch, "/joined/")
    assert fates(worker.join(batch_of(["b", "c"]))) == ["RETRY_UNAVAILABLE"] * 2
    assert output_lines(tmp_path) == lines_of("a")
    assert "no space left" in worker.status()["storage_error"]
    commits = registry.commits
    with pytest.raises(DiskFullError, match="no space left"):
        worker.join(batch_of(["d"]))
    assert registry.commits == commits
    full.full = False
    end_all(worker)
    assert worker.status()["storage_error"] is None
    assert fates(worker.join(batch_of(["b", "d"]))) == ["DUPLICATE", "JOINED"]
    assert output_lines(tmp_path) == lines_of("abcd")


def test_a_full_disk_under_the_intents_registers_nothing_until_a_probe_gets_through(
    make, registry, clock, monkeypatch, tmp_path
):
    worker = make()
    full = FailingWrites(monkeypatch, "/intents-")
    for _ in range(3):
        with pytest.raises(DiskFullError, match="no space left"):
            worker.join(batch_of(["a"]))
    assert registry.commits == 0
    clock.advance(PROBE_INTERVAL_S)
    full.full = False
    with pytest.raises(DiskFullError):
        worker.join(batch_of(["a"]))
    assert worker.can_work()
    assert fates(worker.join(batch_of(["a"]))) == ["JOINED"]
    assert fates(worker.join(batch_of(["b"]))) == ["JOINED"]
    assert worker.status()["storage_error"] is None
    assert output_lines(tmp_path) == lines_of("ab")


def test_after_a_failed_sync_of_the_intents_nothing_is_registered_and_a_restart_is_asked_for(
    make, registry, monkeypatch
):
    fatal = []
    worker = make(fsync=True, on_fatal=fatal.append)
    with monkeypatch.context() as broken:

        def fail(_fd):
            raise OSError(errno.EIO, os.strerror(errno.EIO))

        broken.setattr(os, "fdatasync", fail)
        with pytest.raises(StorageError, match="Input/output error"):
            worker.join(batch_of(["a"]))
    assert registry.commits == 0
    assert worker.status()["unresolved"] == 0
    assert "Input/output error" in str(fatal[0])


def test_a_sync_that_could_not_begin_does_not_write_the_lines_twice(make, registry, monkeypatch, tmp_path):
    worker = make(fsync=True)
    worker.join(batch_of(["a"]))
    fail_one_sync(monkeypatch)
    assert fates(worker.join(batch_of(["b"]))) == ["RETRY_UNAVAILABLE"]
    end_all(worker)
    assert output_lines(tmp_path) == lines_of("ab")


def test_a_batch_whose_columns_differ_in_length_is_told_so():
    batch = batch_of(["a", "b"])
    short = type(batch)(batch.ids, batch.primary_ids[:-1], batch.times, batch.events[:-1], batch.tries, b"")
    with pytest.raises(UsageError, match=r"columns of 2 events: primary_ids, ages, events of another"):
        short.check()
    batch.check()
    with pytest.raises(UsageError, match="65537 events in one request, at most 65536 are taken"):
        batch_of(["a"] * 65_537).check()


def test_two_joiners_cannot_work_in_one_directory(make):
    make()
    with pytest.raises(LockedError):
        make()
