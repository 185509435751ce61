"""Who asks all processes for their status leaves nothing behind."""

import socket
import threading
import time

import pytest
from click.testing import CliRunner

from photon.app import statuses
from photon.app.status import command, line_of
from photon.app.statuses import StatusReader
from photon.app.topology import Pipeline, Replica, Topology, document_of, write_topology
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
    assert "127.0.0.1:4" in reader.why_silent("joiner-east") and not reader.why_silent("dispatcher-east")
    assert all(len(reader.why_silent(name)) <= statuses.WHY_CHARS_MAX + 3 for name in reader.silent())
    assert any(thread.name.startswith("status") for thread in {*threading.enumerate()} - before)
    asked = [ask.__self__ for name, ask in reader._calls.items() if name == "joiner-east"]
    reader.close()
    assert not any(thread.name.startswith("status") for thread in {*threading.enumerate()} - before)
    for client in asked:
        with pytest.raises(UnavailableError, match="closed channel"):
            client.status()


def test_only_an_event_store_has_caches_beside_it():
    assert line_of({"members": {"r0": "127.0.0.1:1", "r1": "127.0.0.1:2"}}) == ""
    assert line_of({"members": ["127.0.0.1:3"]}) == "1 cache processes beside"


def test_a_person_is_told_why_a_process_does_not_answer(tmp_path):
    write_topology(system(), tmp_path / "topology.json")
    told = CliRunner().invoke(command, ["--work", str(tmp_path)])
    lines = {line.split()[0]: line for line in told.output.splitlines()}
    assert told.exit_code == 1 and not any(t.name.startswith("status") for t in threading.enumerate())
    assert "does not answer (" in lines["joiner-east"] and "127.0.0.1:4" in lines["joiner-east"]
