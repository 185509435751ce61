"""The registry of a run: resharded, its replicas replaced, by the commands and by itself."""

import contextlib
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from idregistry.client import RegistryAt, check_replica
from idregistry.coordinator import read_table
from photon.cli.certs import Authority
from photon.cli.options import parse_time_us
from photon.cli.registry import _write_joining_topology
from photon.cluster.preflight import _check_replicas
from photon.cluster.registry_access import Named
from photon.cluster.registry_replicas import DiskWatch, members_of, replacing
from photon.cluster.topology import Replica, Topology, read_topology, write_topology
from photon.core.columns import pack_times
from photon.core.errors import CorruptStateError, UnavailableError, UsageError
from photon.core.ids import IdPacker, Token
from photon.core.settings import Settings, load_settings
from photon.raft.store import Home
from photon.rpc import idregistry_pb2 as pb
from tests.health import status_of
from tests.ports import free_ports
from tests.system import (
    PHOTON,
    children_of,
    following,
    join_arguments,
    joined_pairs,
    photon,
    start_photon,
    write_lines,
    write_logs,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.cluster


def statuses(work: Path) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(photon("status", "--work", work, "--json").stdout)
    return shown


@pytest.mark.long
def test_a_running_system_is_resharded_and_told_why_when_it_can_not_be(tmp_path: Path) -> None:
    logs, out = write_logs(tmp_path / "logs", 200), tmp_path / "out"
    work = out / ".photon"
    (tmp_path / "photon.toml").write_text("[registry]\nclock_skew_s = 0.5\n")
    with following(logs, out, "--config", tmp_path / "photon.toml"):
        wait_until(lambda: (work / "topology.json").exists(), 60.0)
        done = photon("reshard", 3, "--work", work, "--json")
        assert done.returncode == 0, done.stderr
        assert [shards for _, shards in json.loads(done.stdout)["intervals"]] == [1, 3]
        past = photon("reshard", 2, "--at", "2020-01-01", "--work", work)
        assert past.returncode == 2
        assert "in the future" in past.stderr
        assert past.stderr.count("\n") == 1
        wait_until(lambda: len(statuses(work)["registry-r0"]["shards"]) == 3, 60.0)
    again = photon(*join_arguments(logs, out, "--config", tmp_path / "photon.toml"))
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["joined"] == 200


@pytest.mark.long
@pytest.mark.soak
def test_a_replica_that_lost_its_directory_is_replaced_while_the_run_goes_on(tmp_path: Path) -> None:
    logs, out = write_logs(tmp_path / "logs", 200), tmp_path / "out"
    work = out / ".photon"
    assert photon(*join_arguments(logs, out)).returncode == 0
    shutil.rmtree(work / "registry" / "r1")
    with following(logs, out) as process:
        wait_until(
            lambda: members_of(work, 3).names == ["r0", "r2", "r3"] and not members_of(work, 3).lost, 60.0
        )
        wait_until(
            lambda: json.loads((work / "registry" / "r0" / "replicas.json").read_text())["removed"] == ["r1"]
        )
    assert "r3 takes its place" in process.said[1]
    shutil.rmtree(work / "registry" / "r0")  # another one may go now
    again = photon(*join_arguments(logs, out))
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["joined"] == 200


@pytest.mark.long
def test_a_disk_lost_during_a_run_is_told_of_and_replaced_by_the_next(tmp_path: Path) -> None:
    logs, out = write_logs(tmp_path / "logs", 200), tmp_path / "out"
    work, errors = out / ".photon", tmp_path / "stderr"
    with errors.open("w") as stderr, following(logs, out, stderr=stderr) as process:
        wait_until(lambda: len(joined_pairs(out, growing=True)) == 200, 60.0)
        shutil.rmtree(work / "registry" / "r0")
        os.kill(children_of(process.pid)["registry-r0"], signal.SIGKILL)
        wait_until(lambda: "run the same command again: it will be replaced" in errors.read_text())
        wait_until(lambda: "killed by signal 9); not started again" in errors.read_text())
        write_lines(logs / "clicks" / "d.jsonl", [{"id": "d", "primary_id": "q0", "ts_us": 1}])
        wait_until(lambda: len(joined_pairs(out, growing=True)) == 201, 60.0)
        assert not (work / "registry" / "r0").exists()
    assert errors.read_text().count("has lost its disk") == 1
    # As an empty one under its old name would leave it.
    (work / "registry" / "r0" / "group-0000").mkdir(parents=True)
    Home(work / "registry" / "r0").close()
    assert members_of(work, 3).lost == [("r0", "r3")]
    with following(logs, out) as process:
        wait_until(lambda: gone(work, "r1") == ["r0"], 60.0)
    assert "r3 takes its place" in process.said[1]
    assert members_of(work, 3).names == ["r1", "r2", "r3"]


def gone(work: Path, name: str) -> list[str]:
    removed: list[str] = json.loads((work / "registry" / name / "replicas.json").read_text())["removed"]
    return removed


@pytest.mark.long
@pytest.mark.soak
def test_a_run_goes_on_with_a_replacement_that_was_begun(tmp_path: Path) -> None:
    """The new replica had started, and had learned nothing yet, when everything was killed."""
    logs, out = write_logs(tmp_path / "logs", 200), tmp_path / "out"
    work = out / ".photon"
    assert photon(*join_arguments(logs, out)).returncode == 0
    shutil.rmtree(work / "registry" / "r1")
    process = start_photon(*join_arguments(logs, out, "--follow"))
    try:
        wait_until(lambda: (work / "registry" / "r3" / "group-0000" / "hard_state").exists(), 60.0)
        children = {name: psutil.Process(pid) for name, pid in children_of(process.pid).items()}
        children["registry-r3"].suspend()
        tables = [work / "registry" / name / "replicas.json" for name in ("r0", "r2")]
        wait_until(lambda: all(read_table(path).leaving == ("r1", "r3") for path in tables), 60.0)
        for role in children.values():
            role.suspend()
    finally:
        process.kill()
        process.communicate(timeout=100)
    psutil.wait_procs(list(children.values()), 10.0)
    members = members_of(work, 3)
    assert (members.names, members.joining, members.lost) == (["r0", "r2", "r3"], frozenset({"r3"}), [])
    again = photon(*join_arguments(logs, out))
    assert again.returncode == 0, again.stderr


def made_home(work: Path, name: str, peers: dict[str, bytes] | None = None) -> bytes:
    """A replica's directory that holds a group; its identity."""
    directory = work / "registry" / name
    home = Home(directory)
    for peer, identity in (peers or {}).items():
        home.identity_seen(peer, identity)
    home.close()
    (directory / "group-0000").mkdir(exist_ok=True)
    (directory / "group-0000" / "hard_state").touch()
    return home.identity


def test_who_is_not_the_one_that_was_met_has_lost_its_disk(tmp_path: Path) -> None:
    identities = {name: made_home(tmp_path, name) for name in ("r0", "r1", "r2")}
    made_home(tmp_path, "r1", identities)
    made_home(tmp_path, "r2", identities)
    assert members_of(tmp_path, 3).lost == []
    shutil.rmtree(tmp_path / "registry" / "r0")
    made_home(tmp_path, "r0", {"r1": identities["r1"]})
    members = members_of(tmp_path, 3)
    assert (members.names, members.lost) == (["r3", "r1", "r2"], [("r0", "r3")])
    _check_replicas(tmp_path, 3)
    shutil.rmtree(tmp_path / "registry" / "r1")
    made_home(tmp_path, "r1")
    with pytest.raises(CorruptStateError, match=r"r0, .*r1: missing, or not what was there before"):
        _check_replicas(tmp_path, 3)


@pytest.mark.long
def test_most_disks_lost_during_a_run_end_it(tmp_path: Path) -> None:
    """Nobody would be left to refuse those that forgot."""
    names = ["r0", "r1", "r2"]
    for name in names:
        made_home(tmp_path, name)
    watch = DiskWatch(tmp_path / "registry", names)
    assert watch.look() == []
    assert not any(map(watch.has_lost, names))
    for name in ("r0", "r1"):
        shutil.rmtree(tmp_path / "registry" / name)
    assert [name for name in names if watch.has_lost(name)] == ["r0", "r1"]
    with pytest.raises(CorruptStateError, match="most of the registry"):
        wait_until(lambda: bool(watch.look()))


@pytest.mark.long
def test_roles_may_open_all_files_they_can_and_no_resharding_needs_more(tmp_path: Path) -> None:
    logs, out = write_logs(tmp_path / "logs", 200), tmp_path / "out"
    limited = ["prlimit", "--nofile=200:300", *PHOTON, *map(str, join_arguments(logs, out, "--follow"))]
    process = subprocess.Popen(limited, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: len(joined_pairs(out, growing=True)) == 200, 60.0)
        role = psutil.Process(children_of(process.pid)["registry-r0"])
        assert role.rlimit(psutil.RLIMIT_NOFILE) == (300, 300)
        refused = photon("reshard", 86, "--work", out / ".photon")
        assert refused.returncode == 2
        assert (
            "86 shards: a replica can have 85 open; raise its limit of open files (ulimit -n)"
            in refused.stderr
        )
    finally:
        process.terminate()
        process.wait(60.0)


def test_a_new_replica_is_told_of_those_that_came_since_the_run_began(tmp_path: Path) -> None:
    """Who leads may be one of them, and nobody speaks to a stranger."""

    def replica(name: str) -> Replica:
        return Replica("", f"{name}:1", f"raft-{name}:2", name=name, directory=f"/somewhere/{name}")

    began = Topology(
        Settings(), [], [], "/out", "00", True, [replica("r0"), replica("r1"), replica("r2")], []
    )
    now = [
        pb.Replica(name=name, grpc=f"{name}:1", raft_host=f"raft-{name}", raft_port=2)
        for name in ("r1", "r2", "r3")  # r4 may not have come to who was asked
    ]
    made = read_topology(_write_joining_topology(began, tmp_path, now, "r1", "r4", "[::1]:7", "[::1]:8"))
    assert [(r.name, r.raft, r.joining) for r in made.replicas] == [
        *((name, f"raft-{name}:2", False) for name in ("r1", "r2", "r3")),
        ("r4", "[::1]:7", True),
    ]
    assert made.replica("r4").grpc == "[::1]:8"
    assert made.replica("r4").directory == "/somewhere/r4"


def test_times_are_given_as_iso_or_in_seconds() -> None:
    assert parse_time_us("2026-01-31T12:00:00+00:00") == 1_769_860_800_000_000
    assert parse_time_us("1769860800.5") == 1_769_860_800_500_000
    for text in ("soon", "1769860800000000", "-5", "nan"):
        with pytest.raises(UsageError, match="--at"):
            parse_time_us(text)


def test_a_replica_that_was_replaced_ends_with_status_2(tmp_path: Path) -> None:
    """It is told so by the log that it reads; a supervisor must not start it again for ever."""
    program = """
import sys
from dataclasses import replace
from pathlib import Path
from photon.cluster import roles
from photon.cluster.topology import read_topology
from photon.core.errors import UsageError
class Role:
    def __init__(self, fail): self.fail = fail
    def start(self): self.fail(UsageError("r1 has been replaced"))
roles.ROLES["registry"] = replace(
    roles.ROLES["registry"], make=lambda topology, process, network, fail: Role(fail)
)
roles.serve_role("registry", read_topology(Path(sys.argv[1])), "r1")
"""
    r1 = Replica("", "127.0.0.1:1", "127.0.0.1:2", name="r1", directory=str(tmp_path))
    write_topology(Topology(Settings(), [], [], "/out", "00", True, [r1], []), tmp_path / "topology.json")
    done = subprocess.run(
        [sys.executable, "-c", program, tmp_path / "topology.json"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (2, "photon: r1 has been replaced\n")


def test_the_place_of_a_lost_replica_is_taken_by_one_with_an_ipv6_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[Any] = []

    class Client:
        def replace(self, old: str, new: str, raft: str, grpc: str) -> None:
            check_replica(new, raft, grpc)
            told.append((old, new, raft))

    r3 = Replica("", "[::1]:7400", "[::1]:7401", name="r3", directory=str(tmp_path), joining=True)
    run = Topology(Settings(), [], [], "/out", "00", True, [r3], [])
    registry = SimpleNamespace(client=lambda _: contextlib.nullcontext(Client()))
    monkeypatch.setattr("idregistry.client.RegistryAt", lambda *_: registry)
    with replacing(run, [("r0", "r3")], told.append):
        wait_until(lambda: len(told) == 2)
    assert told == [
        "registry replica r0 has lost its disk: r3 takes its place",
        ("r0", "r3", "[::1]:7401"),
    ]


SYSTEM = """
[system]
work = "{0}/work"
out = "{0}/out"
secret_file = "{0}/secret"
[registry]
clock_skew_s = 0.5
[replicas.r0]
datacenter = "east"
grpc = "127.0.0.1:{1}"
raft = "127.0.0.1:{2}"
[metrics]
serve = false
[tls]
cert = "node.pem"
key = "node.key"
ca = "ca.pem"
"""


@pytest.mark.long
def test_the_registry_of_a_system_of_settings_is_administered_through_tls(tmp_path: Path) -> None:
    Authority(tmp_path, datetime.datetime.now(datetime.UTC)).issue("node", "photon", 30.0)
    (tmp_path / "secret").touch(0o600)
    (tmp_path / "secret").write_text("sixteen bytes, or more")
    ports = free_ports(4)
    config = tmp_path / "photon.toml"
    config.write_text(SYSTEM.format(tmp_path, *ports))
    address = f"127.0.0.1:{ports[0]}"

    def run(*words: object) -> str:
        done = photon(*words)
        assert done.returncode == 0, done.stderr
        return done.stdout

    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path)  # where the TLS files are, and the new topology will be
        patch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
        processes = [start_photon("registry", "serve", "--config", config, "--name", "r0")]
        try:
            at = Named(settings=load_settings(config)).at()
            with at.client(60.0) as client:
                client.commit(IdPacker().pack(["a"]), pack_times([1]), Token("h:1", 1, 1).pack())
                client.hold("dispatcher-west", 1)
                assert status_of("registry", address, at.network)["directory"]["holds"] == 1
                released = run("registry", "release-hold", "dispatcher-west", "--config", config)
                assert released == "dispatcher-west holds the boundary no longer\n"
                assert status_of("registry", address, at.network)["directory"]["holds"] == 0
                refused = photon("registry", "release-hold", "dispatcher-west", "--config", config)
                assert refused.returncode == 2
                assert "no dispatcher named dispatcher-west holds the boundary" in refused.stderr
            assert "2 shards for events from" in run("reshard", 2, "--config", config)
            scanned = [run("registry", "scan", n, "--registry", address, "--config", config) for n in (0, 1)]
            assert "".join(scanned).split()[0] == IdPacker().pack(["a"]).hex()
            with pytest.raises(UnavailableError), RegistryAt((address,)).client(1.0) as stranger:
                stranger.configuration()
            new = ["--name", "r1", "--raft", f"127.0.0.1:{ports[2]}", "--grpc", f"127.0.0.1:{ports[3]}"]
            replace_r0 = ["registry", "replace", "r0", *new, "--config", config]
            assert "start it: photon registry serve --topology topology-r1.json --name r1" in run(*replace_r0)
            processes.append(
                start_photon("registry", "serve", "--topology", tmp_path / "topology-r1.json", "--name", "r1")
            )
            with Named(addresses=new[-1], settings=load_settings(config)).at().client(2.0) as client:

                def replicas() -> list[str]:
                    with contextlib.suppress(UnavailableError):
                        return [replica.name for replica in client.directory().replicas]
                    return []

                wait_until(lambda: replicas() == ["r1"], 60.0)
            topology = read_topology(tmp_path / "topology-r1.json")
            assert topology.settings.tls.key == str(tmp_path / "node.key")  # it is read elsewhere, too
            made = topology.replica("r1")
            assert (made.datacenter, made.joining) == ("east", True)
            assert (Path(made.directory), Path(made.directory).exists()) == (
                tmp_path / "work/registry/r1",
                True,
            )
        finally:
            for process in processes:
                process.kill()
                process.communicate()


def test_an_unused_number_is_the_new_replicas_name(tmp_path: Path) -> None:
    assert members_of(tmp_path, 3).names == ["r0", "r1", "r2"]
    for name in ("r0", "r2", "r3"):
        (tmp_path / "registry" / name / "group-0000").mkdir(parents=True)
        (tmp_path / "registry" / name / "group-0000" / "hard_state").touch()
    members = members_of(tmp_path, 3)
    assert members.lost == [("r1", "r4")]
    assert (members.names, members.joining) == (["r0", "r4", "r2"], frozenset({"r4"}))
