import pytest

from tests.connect.postgresql import Postgresql, need_server
from tests.millwheel.running import System
from tests.waiting import wait_until


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


class Pair:
    """A server, and its standby, which confirms each commit."""

    def __init__(self):
        programs = need_server()
        self.first = Postgresql(programs, ["synchronous_standby_names=*", "wal_level=replica"])
        self.second = Postgresql(programs, ["synchronous_standby_names="], self.first)
        hosts = ",".join(one.uri.partition("@")[2].partition("/")[0] for one in (self.first, self.second))
        self.uri = f"postgresql://photon@{hosts}/postgres?{{}}"
        import psycopg

        with psycopg.connect(self.first.uri) as connection:
            wait_until(
                lambda: connection.execute(
                    "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'"
                ).fetchone()
            )

    def close(self):
        self.first.close()
        self.second.close()


@pytest.fixture
def pair():
    made = Pair()
    yield made
    made.close()
