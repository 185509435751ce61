import pytest

from eventstore.client import EventStoreClient
from photon.logs import inventory
from tests.eventstore.kit import serve
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def no_late_archives(monkeypatch):
    """A log that vanished is gone as soon as that is seen: its archive is not waited for."""
    monkeypatch.setattr(inventory, "AWAY_S", 0.0)


@pytest.fixture
def root(tmp_path):
    """Where an event store works; its logs are in `logs`."""
    (tmp_path / "logs").mkdir()
    return tmp_path


@pytest.fixture
def home(root):
    server = serve(root)
    wait_until(lambda: server.status()["caught_up"])  # until then nothing is absent
    yield server
    server.stop()


@pytest.fixture
def client(home):
    client = EventStoreClient([home.listen], 10.0)
    yield client
    client.close()
