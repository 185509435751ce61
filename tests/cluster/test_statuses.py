"""Who asks all processes for their status leaves nothing behind."""

import contextlib
import dataclasses
import socket
import threading
import time
from types import SimpleNamespace

import grpc
import pytest
from click.testing import CliRunner

from photon.cli.status import command
from photon.cluster import statuses
from photon.cluster.run import RunLoop
from photon.cluster.statuses import Sample, StatusReader
from photon.cluster.supervisor import Supervisor
from photon.cluster.told import line_of
from photon.cluster.topology import Pipeline, Replica, Topology, write_topology
from photon.core.disk import DirectoryLock
from photon.core.errors import UnavailableError
from photon.core.settings import Settings, load_settings
from photon.rpc import network as failures
from photon.rpc.network import Network
from photon.rpc.servers import Server, to_photon_error
from tests.certificates import Authority
from tests.system import photon
from tests.waiting import wait_until


def system(joiner="127.0.0.1:4"):
    replica = Replica("", "127.0.0.1:1", "127.0.0.1:2", name="r0", directory="/nowhere")
    east = Pipeline(
        datacenter="east",
        eventstores=("127.0.0.1:3",),
        joiners=(joiner,),
        dispatchers=("127.0.0.1:5",),
        directory="/nowhere",
    )
    return Topology(Settings(), [], [], "/out", "", False, [replica], [east])


def test_a_reader_that_is_closed_does_not_wait_for_who_stands_still(monkeypatch):
    monkeypatch.setattr(statuses, "TIMEOUT_S", 300.0)
    with socket.create_server(("127.0.0.1", 0)) as standing:  # it accepts, and never answers
        address = f"127.0.0.1:{standing.getsockname()[1]}"
        reader = StatusReader(system(joiner=address))
        asked = reader._pool.submit(lambda: reader._ask("joiner-east"))
        wait_until(asked.running, 60)
        began = time.monotonic()
        reader.close()
        assert asked.result(timeout=0) is None and time.monotonic() - began < 100.0


def test_a_reader_that_is_closed_leaves_no_threads_and_no_channels():
    before = {*threading.enumerate()}
    reader = StatusReader(system())
    assert len(reader.read(("registry", "joiner")).silent()) == 4
    assert "127.0.0.1:4" in reader.why_silent["joiner-east"] and "dispatcher-east" not in reader.why_silent
    assert all(len(why) <= statuses.WHY_CHARS_MAX + 3 for why in reader.why_silent.values())
    assert any(thread.name.startswith("status") for thread in {*threading.enumerate()} - before)
    asked = [ask.__self__ for name, ask in reader._calls.items() if name == "joiner-east"]
    reader.close()
    assert not any(thread.name.startswith("status") for thread in {*threading.enumerate()} - before)
    for client in asked:
        with pytest.raises(UnavailableError, match="closed channel"):
            client.status()


def test_event_stores_tell_how_many_they_are_unless_one_is_all():
    assert line_of({"members": {"r0": "127.0.0.1:1", "r1": "127.0.0.1:2"}}) == ""
    assert line_of({"members": ["127.0.0.1:3"]}) == ""
    assert line_of({"members": ["127.0.0.1:3", "127.0.0.1:4"]}) == "one of 2 that serve"


@pytest.fixture
def work(tmp_path):
    """Of a run that is on."""
    with DirectoryLock(tmp_path):
        yield tmp_path


def test_a_person_is_told_why_a_process_does_not_answer(work):
    write_topology(system(), work / "topology.json")
    told = CliRunner().invoke(command, ["--work", str(work)])
    lines = {line.split()[0]: line for line in told.output.splitlines()}
    assert told.exit_code == 1 and not any(t.name.startswith("status") for t in threading.enumerate())
    assert "does not answer (" in lines["joiner-east"] and "127.0.0.1:4" in lines["joiner-east"]


@pytest.mark.parametrize("mend", [mend for _, mend in failures._MENDS])
def test_how_to_mend_tls_is_told_whole_whatever_grpc_adds(mend, monkeypatch):
    class Refused(grpc.RpcError):
        def code(self):
            return grpc.StatusCode.UNAVAILABLE

        def details(self):
            sign = next(sign for sign, known in failures._MENDS if known == mend)
            return f"failed to connect to all addresses; last error: {'x' * 200} {sign} {'y' * 200}"

    def refused():
        raise to_photon_error(Refused(), "joiner j-east.central.photon.example:7403")

    reader = StatusReader(system())
    with contextlib.closing(reader):
        monkeypatch.setitem(reader._calls, "joiner-east", refused)
        reader.read()
        told = reader.why_silent["joiner-east"]
    assert mend in told and len(told) <= statuses.WHY_CHARS_MAX + 3


@pytest.mark.parametrize("ill", ["other CA", "no TLS"])
def test_photon_status_says_how_to_mend_tls_and_nothing_of_grpc_beside(tmp_path, work, ill):
    ours, theirs = (Authority(tmp_path / who).issue("node", tls_name="photon") for who in ("ours", "theirs"))
    (tmp_path / "photon.toml").write_text(
        f'[tls]\ncert = "{ours.cert}"\nkey = "{ours.key}"\nca = "{ours.ca}"\n', "utf-8"
    )
    settings = load_settings(tmp_path / "photon.toml")
    server = Server("127.0.0.1:0", 1, network=Network(tls=theirs) if ill == "other CA" else Network())
    server.start()
    planned = dataclasses.replace(system(joiner=server.listen), settings=settings)
    write_topology(planned, work / "topology.json")
    done = photon("status", "--work", work)
    server.stop(0)
    line = next(line for line in done.stdout.splitlines() if line.startswith("joiner-east"))
    assert ("take both from one CA" if ill == "other CA" else "set [tls] at both ends or at none") in line
    assert done.returncode == 1 and done.stderr == ""


def test_what_the_supervisor_noticed_is_told_in_the_order_in_which_it_happened(tmp_path):
    cluster, told = SimpleNamespace(supervisor=Supervisor(tmp_path)), []
    cluster.supervisor.notices += ["r0 ended", "r1 ended"]
    RunLoop(cluster, None, None, [], told.append, 1.0)._tell(Sample(0.0, {}))
    assert told == ["r0 ended", "r1 ended"] and cluster.supervisor.notices == []


def test_a_registry_of_two_sets_has_a_quorum_when_each_shard_has_one():
    def replica(*, hosts, led):
        shards = [{"shard": shard, "has_quorum": shard in led} for shard in hosts]
        return {"directory": {"has_quorum": True}, "shards": shards, "shards_expected": hosts}

    def has_quorum(led_of_main, led_of_b):
        of_main, of_b = replica(hosts=[0, 1], led=led_of_main), replica(hosts=[2], led=led_of_b)
        return Sample(0.0, {"registry-r0": of_main, "registry-s0": of_b, "registry-s1": None}).has_quorum()

    assert has_quorum([0, 1], [2])
    assert not has_quorum([0], [2])
    assert not has_quorum([0, 1], [])
