"""A dispatcher that can't record anything says so, and when it is told to end."""

import resource

import pytest

from photon.core.fates import Joined
from tests.dispatcher.fakes import Site, clicks, fast_settings
from tests.health import NOT_SERVING, SERVING, await_health, health
from tests.waiting import wait_until

NAME = "photon.dispatcher.v1.Dispatcher"


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path)


def test_a_dispatcher_whose_disk_is_full_does_not_serve_until_there_is_space(site):
    site.joiner.answer = lambda _line, _tries: (Joined.FILTERED, None)
    (site.logs / "a.jsonl").write_bytes(clicks(0, 20_000))
    server = site.server(fast_settings(retry_delay_ms_max=10))
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    server.start()
    try:
        assert health(server.address) in (SERVING, NOT_SERVING)
        resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, limits[1]))
        try:
            await_health(NOT_SERVING, server.address, NAME)
            assert "no space left" in server.status()["storage_error"]
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        wait_until(lambda: sum(server.status()["fates"].values()) == 20_000, 60)
        await_health(SERVING, server.address, NAME)
    finally:
        server.stop()
    assert health(server.address) == "UNAVAILABLE"


def test_health_is_told_before_the_work_that_is_under_way_has_ended(site, monkeypatch):
    server = site.server(fast_settings())
    server.start()
    seen = []
    stop = server._driver.stop
    monkeypatch.setattr(server._driver, "stop", lambda: (seen.append(health(server.address, NAME)), stop()))
    server.stop()
    assert seen == [NOT_SERVING]
