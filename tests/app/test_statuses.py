"""Who asks all processes for their status leaves nothing behind."""

import socket
import threading
import time

import pytest

from photon.app import statuses
from photon.app.statuses import StatusReader
from photon.app.topology import Pipeline, Replica, Topology, document_of
from photon.core.errors import UnavailableError
from photon.core.settings import Settings
from tests.app.test_join import wait_for


def system(joiner="127.0.0.1:4"):
    replica = Replica("r0", "127.0.0.1:1", "127.0.0.1", 2, "/nowhere")
    east = Pipeline("east", ["127.0.0.1:3"], [joiner], ["127.0.0.1:5"], "/nowhere")
    return Topology(document_of(Settings()), [], [], "/out", "", False, [replica], [east])


def test_a_reader_that_is_closed_does_not_wait_for_who_stands_still(monkeypatch):
    monkeypatch.setattr(statuses, "TIMEOUT_S", 300.0)
    with socket.create_server(("127.0.0.1", 0)) as standing:  # it accepts, and never answers
        address = f"127.0.0.1:{standing.getsockname()[1]}"
        reader = StatusReader(system(joiner=address))
        asked = reader._pool.submit(lambda: reader._ask("joiner-east"))
        wait_for(asked.running, 60)
        began = time.monotonic()
        reader.close()
        assert asked.result(timeout=0) is None and time.monotonic() - began < 100.0


def test_a_reader_that_is_closed_leaves_no_threads_and_no_channels():
    before = {*threading.enumerate()}
    reader = StatusReader(system())
    reader.read(("registry", "joiner"))
    assert len(reader.silent()) == 4
    assert any(thread.name.startswith("status") for thread in {*threading.enumerate()} - before)
    asked = [ask.__self__ for name, ask in reader._calls.items() if name == "joiner-east"]
    reader.close()
    assert not any(thread.name.startswith("status") for thread in {*threading.enumerate()} - before)
    for client in asked:
        with pytest.raises(UnavailableError, match="closed channel"):
            client.status()
