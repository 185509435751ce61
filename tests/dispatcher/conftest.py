"""A site of a test's own, and dispatchers over it that are stopped at its end."""

import pytest

from tests.dispatcher.fakes import Site


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path)


@pytest.fixture
def running(site):
    """Starts dispatchers over the site and stops them at the end."""
    servers = []

    def start(*args, **kwargs):
        servers.append(site.server(*args, **kwargs))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.stop()
