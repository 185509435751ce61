"""A dispatcher reads nothing before a joiner has said that it makes the same ids; refused, it ends."""

import threading

import pytest

from photon.core.errors import CorruptStateError, OverloadedError, SettingsMismatchError, UnavailableError
from photon.core.fates import Fate
from tests.dispatcher.fakes import FakeJoiner, Site, adds_up, clicks, fast_settings
from tests.dispatcher.test_sender import Bench
from tests.waiting import wait_until

MISMATCH = SettingsMismatchError("ids.key and all of [foreign] must be the same on all machines")


@pytest.fixture
def site(tmp_path):
    made = Site(tmp_path)
    (made.logs / "0.jsonl").write_bytes(clicks(0, 300) + b"not json\n")
    return made


def refuse(*_):
    raise MISMATCH


def await_end(server):
    """What ended it, as its process sees it."""
    try:
        with pytest.raises(SettingsMismatchError) as told:
            wait_until(lambda: server.wait(0), 60)
    finally:
        server.stop()
    return told.value


def counts(site):
    """Of a dispatcher that is never started: what the ones before it recorded."""
    server = site.server()
    try:
        return server.status()
    finally:
        server.stop()


def test_it_asks_again_until_a_joiner_answers_and_says_why_it_waits():
    answers = [OverloadedError("no lease")] * 9 + [UnavailableError("reset")] * 3
    bench = Bench(FakeJoiner())

    def agree():
        if answers:
            raise answers.pop()

    bench.joiner.agree = agree
    assert bench.sender.agree()
    assert len(bench.waits) == 12 and max(bench.waits) <= 0.5
    assert set(bench.notices) == {"joiner: no lease; nothing is read until one answers"}


def test_it_asks_no_more_when_it_is_time_to_stop_or_a_joiner_refuses():
    def never():
        raise OverloadedError("no joiner is there")

    bench = Bench(FakeJoiner(), waits_max=1)
    bench.joiner.agree = never
    assert not bench.sender.agree()
    bench.joiner.agree = refuse
    with pytest.raises(SettingsMismatchError):
        bench.sender.agree()


def test_one_that_is_refused_at_the_start_has_read_nothing_not_even_what_is_malformed(site):
    site.joiner.agree = refuse
    server = site.server()
    server.start()
    assert await_end(server) is MISMATCH
    assert site.letters() == [] and not site.joiner.handed and site.registry.calls == 0
    assert counts(site)["foreign_events"] == 0
    site.joiner.agree = lambda: None
    status = site.drain()
    assert adds_up(status) and status["fates"][Fate.JOINED.name.lower()] == 300


def test_one_ends_at_a_registry_that_was_founded_anew_and_has_read_nothing(site):
    """Its joiners may have lost their disks with it, and would join everything again."""
    assert site.drain()["fates"]["joined"] == 300
    (site.logs / "1.jsonl").write_bytes(clicks(300, 310))
    site.registry.founded = "1" * 32
    server = site.server()
    server.start()
    try:
        with pytest.raises(CorruptStateError, match="was founded anew") as told:
            wait_until(lambda: server.wait(0), 60)
    finally:
        server.stop()
    assert "\n" not in str(told.value)
    assert counts(site)["foreign_events"] == 301
    site.registry.founded = "0" * 32
    assert site.drain()["foreign_events"] == 311


def test_nothing_is_read_before_a_joiner_is_there_and_stopping_takes_a_moment(site):
    asked, there = threading.Semaphore(0), threading.Event()

    def agree():
        asked.release()
        if not there.is_set():
            raise OverloadedError("no joiner is there")

    site.joiner.agree = agree
    server = site.server(drain=True)
    server.start()
    for _ in range(3):
        assert asked.acquire(timeout=60)
    assert not site.joiner.handed and not site.letters()
    assert not server.status()["drained"]
    server.stop()
    there.set()
    status = site.drain()
    assert status["foreign_events"] == 301 and set(site.joiner.joined.values()) == {1}


def test_one_that_is_refused_at_work_ends_and_the_next_sends_what_it_had_read(site):
    """The joiners were replaced meanwhile by those of another system."""
    site.joiner.before = refuse
    server = site.server(fast_settings(batch_events_max=64, batches_in_flight_max=4))
    server.start()
    assert await_end(server) is MISMATCH
    assert not site.joiner.handed
    status = counts(site)
    assert status["pending"] == 0 and sum(status["fates"].values()) <= 1, "no more than the line in no batch"
    site.joiner.before = lambda _: None
    status = site.drain()
    assert adds_up(status) and status["pending"] == 0
    assert len(site.joiner.joined) == 300 and set(site.joiner.joined.values()) == {1}
