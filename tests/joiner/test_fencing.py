"""Without a lease nothing is registered or written; what is fenced is recovery's (design.md)."""

import contextlib
import os
import threading
import time
from collections import Counter
from functools import partial

import pytest

from joiner.commit import PROBE_INTERVAL_S
from joiner.intents import IntentJournal
from joiner.rules import outcomes_of_commit
from photon.core import disk
from photon.core.clock import SystemClock
from photon.core.errors import FencedError, OverloadedError, StorageError
from photon.core.fates import Committed, Joined, Released
from photon.core.ids import Token, parse_token
from photon.logs.writer import RotatingLog
from tests.joiner.fakes import (
    Crash,
    batch_of,
    crash_at,
    end_all,
    fail_one_sync,
    fates,
    lines_of,
    output_files,
    output_lines,
    packed_id,
    path_of,
    running,
)
from tests.waiting import wait_until

LONG = 100.0
RETRY = "RETRY_UNAVAILABLE"


def after(function, then):
    def both(*arguments):
        result = function(*arguments)
        then()
        return result

    return both


class StandStill:
    """The process stands still, for longer than its lease, when it writes joined lines: before or after."""

    def __init__(self, monkeypatch, clock, where):
        self.left = 1
        self._real, self._clock, self._where = os.write, clock, where
        monkeypatch.setattr(disk.os, "write", self._write)

    def _write(self, fd, data):
        joined = "/joined/" in path_of(fd) and self.left > 0
        if joined and self._where == "before":
            self._stand()
        written = self._real(fd, data)
        if joined and self._where == "after":
            self._stand()
        return written

    def _stand(self):
        self.left -= 1
        self._clock.advance(LONG)


def test_requests_are_refused_without_a_lease_and_taken_when_it_is_back(
    make, registry, store, clock, tmp_path
):
    worker = make()
    lookups = []
    store.lookup = after(store.lookup, lambda: lookups.append(1))
    worker.join(batch_of(["a"]))
    clock.advance(LONG)
    with pytest.raises(OverloadedError, match="holds no lease, so it registers and writes nothing"):
        worker.join(batch_of(["b"]))
    assert (registry.commits, len(lookups), worker.status()["in_flight"]) == (1, 1, 0)
    worker.leases.renew_due()
    assert fates(worker.join(batch_of(["b"]))) == ["JOINED"]
    assert output_lines(tmp_path) == lines_of("ab")


def test_a_lookup_longer_than_the_lease_ends_in_a_refusal_that_leaves_nothing(make, registry, store, clock):
    worker = make()
    store.lookup = after(store.lookup, lambda: clock.advance(LONG))
    with pytest.raises(OverloadedError):
        worker.join(batch_of(["a"]))
    assert (registry.commits, worker.status()["unresolved"]) == (0, 0)


def test_nothing_is_registered_when_the_lease_ran_out_over_the_intent(make, registry, clock, tmp_path):
    worker = make(checkpoint=lambda step: clock.advance(LONG) if step == "intent synced" else None)
    assert fates(worker.join(batch_of(["a"]))) == [RETRY]
    assert (registry.commits, worker.status()["unresolved"]) == (0, 1)
    end_all(worker)
    assert output_lines(tmp_path) == lines_of("a")


def test_what_is_registered_waits_for_the_lease_and_is_then_written_once(make, registry, clock, tmp_path):
    worker = make(checkpoint=lambda step: step == "registered" and stalls and clock.advance(stalls.pop()))
    stalls = [LONG]
    assert fates(worker.join(batch_of(["a", "b"]))) == [RETRY] * 2
    assert output_lines(tmp_path) == Counter()
    registry.silent_to_leases = True
    worker.start()
    wait_until(lambda: any("holds no lease" in line for line in worker.status()["notices"]))
    assert output_lines(tmp_path) == Counter()
    assert worker.status()["unresolved"] == 1
    registry.silent_to_leases = False
    clock.advance(1)
    wait_until(lambda: worker.status()["unresolved"] == 0)
    assert output_lines(tmp_path) == lines_of("ab")
    assert registry.commits == 1


@pytest.mark.parametrize("where", ["before", "after"])
@pytest.mark.parametrize("file_bytes_max", [1 << 20, 150], ids=["in the same file", "in a new file"])
@pytest.mark.parametrize("by_the_next_life", [False, True])
def test_lines_that_were_written_as_the_lease_ran_out_are_taken_back_and_written_once(
    make, clock, monkeypatch, tmp_path, where, file_bytes_max, by_the_next_life
):
    worker = make(output_file_bytes_max=file_bytes_max, fsync=True)
    worker.join(batch_of(["a"]))
    StandStill(monkeypatch, clock, where)
    assert fates(worker.join(batch_of(["b", "c"]))) == [RETRY] * 2
    assert output_lines(tmp_path) == lines_of("a")
    assert worker.status()["joined"] == 1
    if by_the_next_life:
        worker.close()
        worker = make()
    worker.leases.renew_due()
    worker.join(batch_of(["d"]))
    end_all(worker)
    assert output_lines(tmp_path) == lines_of("abcd")
    assert worker.status()["storage_error"] is None


@pytest.mark.parametrize(("failing", "kept"), [("truncate", "ab"), ("rotate", "a")])
def test_lines_that_cannot_be_taken_back_end_the_process_and_the_next_one_finds_them(
    make, clock, monkeypatch, fatal, tmp_path, failing, kept
):
    worker = make(output_file_bytes_max=1 << 20)
    worker.join(batch_of(["a"]))
    StandStill(monkeypatch, clock, "after")
    with monkeypatch.context() as broken:

        def fail(*_):
            raise StorageError("Input/output error")

        broken.setattr(RotatingLog, failing, fail)
        assert fates(worker.join(batch_of(["b"]))) == [RETRY]
    assert [str(error) for error in fatal] == ["Input/output error"]
    worker.leases.renew_due()
    clock.advance(PROBE_INTERVAL_S)
    assert not worker.can_work(), "only a restart mends it"
    with pytest.raises(StorageError):
        worker.join(batch_of(["c"]))
    assert output_lines(tmp_path) == lines_of(kept)
    worker.close()
    end_all(make())
    assert output_lines(tmp_path) == lines_of("ab")


def test_many_threads_under_a_lease_that_comes_and_goes_write_each_event_once(make, tmp_path):
    clock = SystemClock()
    worker = make(clock=clock, output_file_bytes_max=2_000, requests_in_flight_max=8, fsync=True)
    own = worker.leases.own
    flicker = threading.Event()

    def lose_and_find():
        while not flicker.wait(0.001):
            own.until_s = clock.monotonic() + 0.0015

    def send(thread):
        for number in range(40):
            while True:
                try:
                    worker.join(batch_of([f"t{thread}-{number}", f"shared-{number}", f"u{thread}-{number}"]))
                    break
                except OverloadedError:
                    time.sleep(0.0005)

    worker.start()
    with running(lose_and_find):
        with running(*(partial(send, thread) for thread in range(4))):
            pass
        flicker.set()
    own.granted(clock.monotonic())
    wait_until(lambda: worker.status()["unresolved"] == 0)
    own = [f"{kind}{t}-{n}" for kind in "tu" for t in range(4) for n in range(40)]
    assert output_lines(tmp_path) == lines_of([*own, *(f"shared-{n}" for n in range(40))])
    assert len(output_files(tmp_path)) > 5


def test_a_fenced_commit_writes_nothing_and_ends_the_process(make, registry, fatal, tmp_path):
    worker = make()
    registry.fences.add(worker.leases.own.incarnation)
    assert fates(worker.join(batch_of(["a", "b", "a"]))) == [RETRY] * 3
    assert [type(error) for error in fatal] == [FencedError]
    assert output_lines(tmp_path) == Counter()
    status = worker.status()
    assert (status["unresolved"], status["lease"]["fenced"]) == (1, True)
    with pytest.raises(OverloadedError):
        worker.join(batch_of(["c"]))


def test_what_one_shard_let_win_is_not_written_if_another_says_fenced(make, registry, monkeypatch, tmp_path):
    """The other has not heard of the fence yet; recovery releases the id as soon as it has."""
    worker = make()
    answer = bytes([Committed.WON, Committed.FENCED, Committed.DUPLICATE, Committed.EXPIRED])
    monkeypatch.setattr(registry, "commit", lambda *_: answer)
    assert fates(worker.join(batch_of("abcd"))) == [RETRY] * 4
    assert output_lines(tmp_path) == Counter()


def test_lines_that_stand_but_for_their_sync_stay(make, registry, monkeypatch, tmp_path):
    """They were readable before the fence, so recovery has not released them."""
    worker = make(fsync=True)
    fail_one_sync(monkeypatch)
    assert fates(worker.join(batch_of(["a"]))) == [RETRY]
    worker.leases.fenced(worker.leases.own)
    worker.start()
    wait_until(lambda: worker.status()["unresolved"] == 0)
    assert output_lines(tmp_path) == lines_of("a")


def test_an_outcome_that_no_version_knows_is_never_taken_for_joined():
    assert set(outcomes_of_commit(bytes(range(3, 256)))) == {Joined.RETRY_UNAVAILABLE}


def leave_batch(make, registry, names="ab", lost="after"):
    """A life that ends with a batch without an end; its incarnation."""
    first = make()
    registry.failures = [lost]
    first.join(batch_of(names))
    first.close()
    return first.leases.own.incarnation


def test_a_new_life_ends_the_batches_of_an_old_one_under_the_old_ones_lease(make, registry, clock, tmp_path):
    old = leave_batch(make, registry)
    clock.advance(LONG)
    second = make(address="127.0.0.1:2")
    assert [asked[:2] for asked in registry.asked_leases[1:]] == [
        ("127.0.0.1:2", second.leases.own.incarnation),
        ("127.0.0.1:0", old),
    ]
    end_all(second)
    assert output_lines(tmp_path) == lines_of("ab")
    wait_until(lambda: not second._resolver.unresolved)  # the lease is let go after the end is noted
    asked = len(registry.asked_leases)
    clock.advance(5)
    second.leases.renew_due()
    assert old not in [incarnation for _, incarnation, _ in registry.asked_leases[asked:]]


def test_batches_of_an_old_life_wait_for_the_old_ones_lease(make, registry, monkeypatch, tmp_path):
    """Its own lease is not enough: recovery may fence and release the old life's ids meanwhile."""
    old = leave_batch(make, registry)
    real = registry.keep_alive

    def only_new(address, incarnation, lease_s, settings):
        if incarnation == old:
            raise FencedError("fenced") if old in registry.fences else OverloadedError("busy")
        real(address, incarnation, lease_s, settings)

    monkeypatch.setattr(registry, "keep_alive", only_new)
    second = make(clock=SystemClock())
    second.start()
    wait_until(lambda: any("holds no lease" in line for line in second.status()["notices"]))
    assert fates(second.join(batch_of(["c"]))) == ["JOINED"]
    assert output_lines(tmp_path) == lines_of("c")
    registry.fences.add(old)
    wait_until(lambda: second.status()["unresolved"] == 0)
    assert output_lines(tmp_path) == lines_of("abc")


@pytest.mark.parametrize("left", ["before", "after", "output appended"])
@pytest.mark.parametrize("recovered", ["", "released", "joined elsewhere"])
@pytest.mark.parametrize("again", [None, "intent synced", "registered"])
def test_what_a_fenced_life_left_is_begun_anew_whatever_recovery_did(
    make, registry, fatal, tmp_path, left, recovered, again
):
    """Its lines are cut, may they stand there; its ids are released where it holds them still."""
    if left == "output appended":
        first = make(checkpoint=crash_at(left))
        with pytest.raises(Crash):
            first.join(batch_of("ab"))
        first.close()
    else:
        leave_batch(make, registry, lost=left)
    registry.fences.update(registry.leases)
    elsewhere = lines_of("a") if recovered == "joined elsewhere" else Counter()
    if recovered:
        registry.release_lost(packed_id("a"))
    if elsewhere:
        registry.tokens[packed_id("a")] = Token("other:1", 1, 1).pack()
    if again:
        second = make(checkpoint=crash_at(again))
        second.leases.renew_due()
        with pytest.raises(Crash):
            second._resolver._step()
        second.close()
        registry.fences.update(registry.leases)
    last = make()
    end_all(last)
    assert output_lines(tmp_path) + elsewhere == lines_of("ab")
    assert fatal == []
    assert fates(last.join(batch_of("ab"))) == ["DUPLICATE"] * 2
    last.close()
    assert make().status()["unresolved"] == 0


def test_a_fenced_lifes_intent_stays_until_the_new_one_is_there(make, registry, monkeypatch, tmp_path):
    registry.fences.add(leave_batch(make, registry))

    def crash(*_):
        raise Crash

    second = make()
    with monkeypatch.context() as crashing:
        crashing.setattr(IntentJournal, "append", crash)
        for _ in range(2):  # the first turn hears of the fence
            with contextlib.suppress(Crash):
                second._resolver._step()
    second.close()
    end_all(make())
    assert output_lines(tmp_path) == lines_of("ab")


def test_a_shard_that_does_not_know_of_the_fence_yet_is_waited_for(make, registry, monkeypatch, tmp_path):
    registry.fences.add(leave_batch(make, registry))
    real, answers = registry.release, [bytes([Released.RELEASED, Released.NOT_FENCED])] * 2
    monkeypatch.setattr(registry, "release", lambda *columns: answers.pop() if answers else real(*columns))
    end_all(make(clock=SystemClock()))
    assert not answers
    assert output_lines(tmp_path) == lines_of("ab")


def test_lines_that_were_written_behind_recoverys_back_are_cut(make, registry, clock, monkeypatch, tmp_path):
    """It stood still between look and append, was fenced, recovered elsewhere, went on, and was killed."""
    first = make()
    other = make(name="other")
    real = RotatingLog.append

    def append(log, data):
        if log.directory == tmp_path / "out" / "joined" / "east" and not registry.fences:
            registry.fences.add(first.leases.own.incarnation)
            assert registry.release_lost(packed_id("a"))
            assert fates(other.join(batch_of("a"))) == ["JOINED"]
            real(log, data)
            raise Crash
        return real(log, data)

    monkeypatch.setattr(RotatingLog, "append", append)
    with pytest.raises(Crash):
        first.join(batch_of("a"))
    assert output_lines(tmp_path) == lines_of("aa")
    first.close()
    end_all(make())
    assert output_lines(tmp_path) == lines_of("a")


def test_recovery_between_two_lives_doubles_and_loses_nothing(make, registry, tmp_path):
    old = leave_batch(make, registry)
    registry.fences.add(old)
    assert registry.release_lost(packed_id("a"))
    second = make()
    assert fates(second.join(batch_of(["a"]))) == ["JOINED"]  # re-injected
    end_all(second)
    assert output_lines(tmp_path) == lines_of("ab")
    assert not registry.release_lost(packed_id("a"))
    assert not registry.release_lost(packed_id("b"))
    assert parse_token(registry.tokens[packed_id("b")]).incarnation == second.leases.own.incarnation


def test_a_joiner_that_starts_while_the_registry_is_away_waits_and_says_so(make, registry, tmp_path):
    leave_batch(make, registry)
    registry.down = True
    second = make(clock=SystemClock())
    second.start()
    with pytest.raises(OverloadedError, match="holds no lease"):
        second.join(batch_of(["c"]))
    status = second.status()
    assert (status["unresolved"], status["lease"]["seconds_left"]) == (1, 0)
    assert status["lease"]["trouble"] == "registry: no quorum"
    assert status["notices"][0] == "1 batches were under way when the joiner ended; ending them"
    assert registry.commits == 1
    registry.down = False
    wait_until(lambda: second.status()["unresolved"] == 0)
    assert fates(second.join(batch_of(["c"]))) == ["JOINED"]
    assert output_lines(tmp_path) == lines_of("abc")
    second.close()
    assert not any(thread.name == "leases" for thread in threading.enumerate())


@pytest.mark.parametrize("end", ["fenced", "closed"])
def test_a_process_does_not_end_itself_between_an_append_and_its_take_back(
    make, registry, clock, monkeypatch, tmp_path, end
):
    """The threads of a process that goes on run at once: one hears of the fence, one is in the append."""
    order, written, go = [], threading.Event(), threading.Event()
    worker = make(on_fatal=lambda _: order.append(output_lines(tmp_path)))
    real = RotatingLog.append

    def append(log, data):
        place = real(log, data)
        if log.directory.name == "east":
            clock.advance(LONG)
            written.set()
            assert go.wait(60)
        return place

    monkeypatch.setattr(RotatingLog, "append", append)
    request = threading.Thread(target=worker.join, args=(batch_of(["a"]),))
    request.start()
    assert written.wait(60)
    assert output_lines(tmp_path) == lines_of("a")
    if end == "fenced":
        registry.fences.add(worker.leases.own.incarnation)
    ending = threading.Thread(target=worker.leases.renew_due if end == "fenced" else worker.close)
    ending.start()
    ending.join(0.2)
    assert ending.is_alive()
    go.set()
    ending.join(20)
    request.join(20)
    assert order == ([Counter()] if end == "fenced" else [])
    assert output_lines(tmp_path) == Counter()
