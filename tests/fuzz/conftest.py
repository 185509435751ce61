"""Two systems for all tests here: one plain, one inside TLS."""

import os
from collections.abc import Iterator

import pytest

from tests.fuzz.site import ROLES, Site, certified


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield from _running(Site(tmp_path_factory.mktemp("plain") / "site"))


@pytest.fixture(scope="session")
def secure(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    yield from _running(certified(tmp_path_factory.mktemp("secure")))


@pytest.fixture(params=["plain", "secure"])
def site(request: pytest.FixtureRequest) -> Site:
    """Each of them."""
    found: Site = request.getfixturevalue(request.param)
    return found


def _running(site: Site) -> Iterator[Site]:
    try:
        yield site.start()
        # Down the stream: who is told to end together with whom it still needs waits for that one.
        assert [site.terminate(role) for role in reversed(ROLES)] == [[0]] * len(ROLES), site.told()
    finally:
        site.kill()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Those that run for as long as they are told to run only where they are told so (`make fuzz`)."""
    if "PHOTON_FUZZ_EXAMPLES" in os.environ:
        return
    left = [item for item in items if item.get_closest_marker("fuzz")]
    items[:] = [item for item in items if item not in left]
    config.hook.pytest_deselected(items=left)
