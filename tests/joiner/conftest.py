"""What most tests of the joiner work with."""

import pytest

from joiner.client import JoinerClient
from photon.core.clock import ManualClock
from tests.fake_registry import FakeRegistry
from tests.joiner.fakes import IDENTITY, FakeEventStore, make_server, make_worker


@pytest.fixture
def registry():
    return FakeRegistry()


@pytest.fixture
def store():
    return FakeEventStore()


@pytest.fixture
def clock():
    return ManualClock()


@pytest.fixture
def fatal():
    """What the workers of `make` and the servers of `serve` are told to end by."""
    return []


@pytest.fixture
def make(tmp_path, registry, store, clock, fatal):
    """A worker that writes to `more` output roots, too; options as of `make_worker`."""
    made = []

    def build(*more, **options):
        values = {"clock": clock, "on_fatal": fatal.append}
        if more:
            values["output_roots"] = tuple(str(tmp_path / name) for name in more)
        registered = options.pop("registry", registry)
        made.append(make_worker(tmp_path, registered, store, **(values | options)))
        return made[-1]

    yield build
    for worker in made:
        worker.close()


@pytest.fixture
def serve(tmp_path, registry, store, fatal):
    """A joiner that serves; options as of `make_server`."""
    servers = []

    def start(name="joiner", **options):
        values = {"registry": registry, "store": store, "on_fatal": fatal.append}
        server = make_server(tmp_path, name=name, **(values | options))
        server.start()
        servers.append(server)
        return server

    yield start
    for server in servers:
        server.stop(0)


@pytest.fixture
def connect():
    """A client of some joiners, each a server or an address."""
    clients = []

    def open_client(*joiners, identity=IDENTITY, **options):
        addresses = [joiner if isinstance(joiner, str) else joiner.listen for joiner in joiners]
        clients.append(JoinerClient(addresses, 20.0, identity=identity, **options))
        return clients[-1]

    yield open_client
    for client in clients:
        client.close()
