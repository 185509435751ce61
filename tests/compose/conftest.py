"""One engine, one set of images and one running system for all tests here.

PHOTON_COMPOSE_CACHE: a directory for what is fetched, so that a second run is quick. Where there is no engine
the tests skip; under CI they fail.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

from tests.compose import images
from tests.compose.deployed import ADDRESSES, Deployed
from tests.compose.engine import Engine, NoEngineError
from tests.compose.machine import snapshot


def _do_without(error: NoEngineError) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(f"CI must run these tests: {error}")
    pytest.skip(str(error))


@pytest.fixture(scope="session")
def found() -> dict[str, str]:
    """The machine before anything was started."""
    return snapshot()


@pytest.fixture(scope="session")
def engine(found: dict[str, str]) -> Iterator[Engine]:
    one = Engine()
    try:
        one.start()
        yield one
    except NoEngineError as error:
        _do_without(error)
    finally:
        one.stop()


@pytest.fixture(scope="session")
def staged(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout that images were made of."""
    given = os.environ.get("PHOTON_COMPOSE_CACHE")
    cache = Path(given).absolute() if given else tmp_path_factory.mktemp("cache")
    cache.mkdir(parents=True, exist_ok=True)
    directory = tmp_path_factory.mktemp("checkout")
    try:
        images.make_base(engine, cache)
        images.stage(directory, images.fetch_wheels(engine, cache))
        images.make_toxiproxy(engine, cache, tmp_path_factory.mktemp("toxiproxy") / "context")
    except NoEngineError as error:
        _do_without(error)
    return directory


@pytest.fixture(scope="session")
def deployed(engine: Engine, staged: Path) -> Iterator[Deployed]:
    """`docker-compose build` and `up`, but for the generator: its time comes with the outage."""
    # One run of the generator, however long the waits are: a second would bring events that nobody counts.
    generator = {"rate": 100, "click_rate": 50, "duration": 3600, "runs": 1}
    system = Deployed(engine, staged, f"photontest{os.getpid()}", generator)
    try:
        system.compose("build", "prepare")
        system.compose("up", "--detach", "--no-build", *ADDRESSES)
        yield system
    finally:
        system.down()
        if not engine.own:
            engine.docker("rmi", "--force", images.PHOTON, images.TOXIPROXY, images.BASE)
