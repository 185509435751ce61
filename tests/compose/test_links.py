"""deploy/links.py and a real toxiproxy: a link is there as slow as it should be, or not at all."""

import http.client
from collections.abc import Iterator
from typing import Any

import pytest

from deploy.links import Link, Toxiproxy
from tests.faults.kit.toxiproxy import ToxiproxyServer, need_toxiproxy

pytestmark = pytest.mark.links

LINK = Link("grpc:west>r0", "127.0.0.1:0", "127.0.0.1:9", round_trip_ms=100)
REQUESTS = 4
"""That make a link: it, two toxics, and the word to go."""


class KilledError(BaseException):
    """Nothing is done after it."""


class Failing(Toxiproxy):
    """One of its requests raises."""

    def __init__(self, url: str, which: int, error: BaseException) -> None:
        super().__init__(url)
        self._before, self._error = which, error

    def _call(self, method: str, path: str, body: object = None) -> Any:
        self._before -= 1
        if self._before == -1:
            raise self._error
        return super()._call(method, path, body)


@pytest.fixture
def url() -> Iterator[str]:
    server = ToxiproxyServer(need_toxiproxy())
    yield f"http://127.0.0.1:{server.port}"
    server.close()


def one_ways(url: str) -> list[int]:
    """Of the link, which is up."""
    (proxy,) = Toxiproxy(url)._call("GET", "/proxies").values()
    assert proxy["enabled"]
    assert (proxy["name"], proxy["upstream"]) == (LINK.name, LINK.upstream)
    return [toxic["attributes"]["latency"] for toxic in proxy["toxics"]]


@pytest.mark.parametrize("which", range(REQUESTS))
@pytest.mark.parametrize("error", [OSError(), http.client.BadStatusLine("")], ids=["unreachable", "garbled"])
def test_a_link_that_can_not_be_made_whole_is_taken_back_and_made_later(
    url: str, which: int, error: Exception
) -> None:
    with pytest.raises(type(error)):
        Failing(url, which, error).make(LINK, 0.0)
    assert Toxiproxy(url)._call("GET", "/proxies") == {}
    Toxiproxy(url).make(LINK, 0.0)
    assert one_ways(url) == [50, 50]


@pytest.mark.parametrize("which", range(1, REQUESTS))
def test_a_link_whose_maker_was_killed_is_made_anew(url: str, which: int) -> None:
    with pytest.raises(KilledError):
        Failing(url, which, KilledError()).make(LINK, 0.0)
    assert Toxiproxy(url)._call("GET", "/proxies")[LINK.name]["enabled"] is False
    assert Toxiproxy(url).names() == set()
    Toxiproxy(url).make(LINK, 0.0)
    assert one_ways(url) == [50, 50]


def test_a_link_that_others_disabled_or_freed_of_its_toxics_stays_so(url: str) -> None:
    toxiproxy = Toxiproxy(url)
    toxiproxy.make(LINK, 0.0)
    for stream in ("upstream", "downstream"):
        toxiproxy._call("DELETE", f"/proxies/{LINK.name}/toxics/latency_{stream}")
    toxiproxy._call("POST", f"/proxies/{LINK.name}", {"enabled": False})
    assert toxiproxy.names() == {LINK.name}
    assert toxiproxy._call("GET", "/proxies")[LINK.name]["enabled"] is False
