import pytest

from tests.millwheel.running import System


@pytest.fixture
def system(tmp_path):
    running = System(tmp_path)
    yield running
    running.kill()
