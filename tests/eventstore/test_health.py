"""An event store whose map can't be written says so; a cache serves while home sends clients there."""

import pytest

from eventstore.server import SERVICE_NAME
from photon.core.errors import StorageError
from tests.eventstore.kit import append, line
from tests.eventstore.test_sharing import serve, serve_cache
from tests.health import NOT_SERVING, SERVING, await_health, health
from tests.waiting import wait_until


@pytest.fixture
def root(tmp_path):
    (tmp_path / "logs").mkdir()
    return tmp_path


def test_an_event_store_whose_disk_fails_does_not_serve_until_it_works_again(root, monkeypatch):
    server = serve(root)
    try:
        assert health(server.listen, SERVICE_NAME) == health(server.listen) == SERVING

        def broken(*_):
            raise StorageError("the disk is not there")

        with monkeypatch.context() as failing:
            failing.setattr(server._map, "write", broken)
            append(root / "logs" / "a.jsonl", line("q-1"))
            await_health(NOT_SERVING, server.listen, SERVICE_NAME)
        await_health(SERVING, server.listen, SERVICE_NAME)
        wait_until(lambda: server.status()["primary_events"] == 1)
    finally:
        server.stop()


def test_a_cache_serves_while_it_is_a_member(root):
    home = serve(root)
    cache = serve_cache(home.listen)
    try:
        await_health(SERVING, cache.listen, SERVICE_NAME)
        home.stop(0)
        await_health(NOT_SERVING, cache.listen, SERVICE_NAME)
        home = serve(root, home.listen)
        await_health(SERVING, cache.listen, SERVICE_NAME)
    finally:
        cache.stop()
        home.stop()
