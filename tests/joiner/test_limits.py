"""Limits of a request: commits on their way, and the caller's deadline (paper 3.3.2)."""

import threading
import time
from functools import partial

import pytest

from joiner.client import JoinerClient
from photon.core.errors import OverloadedError, UnavailableError
from photon.core.fates import Joined
from tests.joiner.fakes import IDENTITY, batch_of, end_all, lines_of, output_lines, running
from tests.waiting import wait_until


class Held:
    """Commits wait until they are let go; knows how many there are at a time."""

    def __init__(self, registry):
        self.go, self._lock = threading.Event(), threading.Lock()
        self.at_a_time = self.most = 0
        registry.before = self._before

    def _before(self, call, _incarnation):
        if call != "commit":
            return
        with self._lock:
            self.at_a_time += 1
            self.most = max(self.most, self.at_a_time)
        assert self.go.wait(60)
        with self._lock:
            self.at_a_time -= 1


def test_no_more_commits_are_on_their_way_than_the_settings_say(make, registry, tmp_path):
    held = Held(registry)
    worker = make(commits_in_flight_max=2, requests_in_flight_max=8)
    with running(*(partial(worker.join, batch_of([name])) for name in "abcdef")):
        wait_until(lambda: worker.status()["in_flight"] == 6 and held.at_a_time == 2)
        assert worker.status()["commits_in_flight"] == 2
        assert worker.status()["unresolved"] == 2, "the others have not even noted their intent"
        held.go.set()
    assert held.most == 2
    assert worker.status()["commits_in_flight"] == 0
    assert output_lines(tmp_path) == lines_of("abcdef")


def test_a_request_that_gets_no_turn_to_commit_before_its_deadline_leaves_nothing(make, registry, tmp_path):
    held = Held(registry)
    worker = make(commits_in_flight_max=1)
    with running(partial(worker.join, batch_of(["a"]))):
        wait_until(lambda: held.at_a_time == 1)
        with pytest.raises(OverloadedError, match="1 commits are on their way"):
            worker.join(batch_of(["b"]), timeout_s=0.02)
        held.go.set()
    assert registry.commits == 1
    assert worker.join(batch_of(["b"])).outcomes == bytes([Joined.JOINED])
    assert output_lines(tmp_path) == lines_of("ab")


def test_batches_that_the_resolver_ends_count_too_and_the_slot_is_free_after_a_failure(make, registry):
    worker = make(commits_in_flight_max=1)
    registry.failures = ["before"] * 4
    for name in "abc":
        worker.join(batch_of([name]))
    end_all(worker)
    assert worker.status()["commits_in_flight"] == 0
    assert worker.join(batch_of(["d"])).outcomes == bytes([Joined.JOINED])


@pytest.mark.parametrize("step", ["looked up", "intent appended"])
def test_nothing_is_registered_after_the_deadline(make, registry, clock, tmp_path, step):
    worker = make(checkpoint=lambda at: clock.advance(5) if at == step else None)
    with pytest.raises(OverloadedError, match="deadline has passed and nothing was registered"):
        worker.join(batch_of(["a"]), timeout_s=5)
    assert (registry.commits, worker.status()["unresolved"]) == (0, 0)
    worker.leases.renew_due()
    assert worker.join(batch_of(["a"]), timeout_s=5.1).outcomes == bytes([Joined.JOINED])
    assert output_lines(tmp_path) == lines_of("a")


def test_what_is_registered_is_written_though_the_deadline_passes(make, clock, tmp_path):
    worker = make(checkpoint=lambda at: clock.advance(9) if at == "registered" else None)
    worker.join(batch_of(["a"]), timeout_s=5)
    assert output_lines(tmp_path) == lines_of("a")


def test_the_lookup_has_no_more_time_than_the_caller(make, store):
    worker = make()
    worker.join(batch_of(["a"]), timeout_s=3)
    worker.join(batch_of(["b"]))
    assert store.timeouts_s == [3, None]


def test_the_deadline_of_a_call_reaches_the_joiner(serve, registry, store):
    server = serve()
    client = JoinerClient([server.listen], 7.0, identity=IDENTITY)
    client.join(batch_of(["a"]))
    assert 6 < store.timeouts_s[0] <= 7
    store.hold = threading.Event()
    with pytest.raises(UnavailableError, match="deadline_exceeded"):
        client.join(batch_of(["b"]), timeout_s=0.05)
    left_s = store.timeouts_s[1:]  # none where the call was over before the lookup
    time.sleep(max((s for s in left_s if s is not None), default=0.0))  # the joiner's own deadline, too
    store.hold.set()
    wait_until(lambda: server.status()["in_flight"] == 0)
    assert registry.commits == 1
    client.close()
