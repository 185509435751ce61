import pytest


@pytest.fixture
def root(tmp_path):
    """Where an event store works; its logs are in `logs`."""
    (tmp_path / "logs").mkdir()
    return tmp_path
