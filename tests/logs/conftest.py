import pytest


@pytest.fixture
def logs(tmp_path):
    """Where the logs of a test are."""
    (tmp_path / "logs").mkdir()
    return tmp_path / "logs"
