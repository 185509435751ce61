import pytest

from eventstore.client import EventStoreClient
from tests.eventstore.kit import serve


@pytest.fixture
def root(tmp_path):
    """Where an event store works; its logs are in `logs`."""
    (tmp_path / "logs").mkdir()
    return tmp_path


@pytest.fixture
def home(root):
    server = serve(root)
    yield server
    server.stop()


@pytest.fixture
def client(home):
    client = EventStoreClient(home.listen, 10.0)
    yield client
    client.close()
