import pytest

from tests.connect.postgresql import Postgresql, need_server
from tests.millwheel.running import Pair, System


@pytest.fixture
def system(tmp_path):
    running = System(tmp_path)
    yield running
    running.kill()


@pytest.fixture(scope="module")
def server():
    """PostgreSQL, without a standby."""
    made = Postgresql(need_server())
    yield made
    made.close()


@pytest.fixture
def pair():
    made = Pair()
    yield made
    made.close()
