"""The registry of a run: resharded, its replicas replaced, by the commands and by itself."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from photon.app.registry_cli import _write_joining_topology, parse_time_us
from photon.app.registry_members import members_of
from photon.app.topology import Replica, Topology, read_topology, write_topology
from photon.core.errors import UsageError
from photon.wire import idregistry_pb2 as pb
from tests.app.kit import join_arguments, photon, start_photon, write_lines
from tests.idregistry.cluster import wait_until

pytestmark = pytest.mark.cluster


def make_logs(directory: Path) -> Path:
    write_lines(directory / "queries" / "q.jsonl", [{"id": "q", "ts_us": 1}])
    clicks = [{"id": f"c{n}", "primary_id": "q", "ts_us": n} for n in range(200)]
    write_lines(directory / "clicks" / "c.jsonl", clicks)
    return directory


def statuses(work: Path) -> dict[str, Any]:
    shown: dict[str, Any] = json.loads(photon("status", "--work", work, "--json").stdout)
    return shown


def test_a_running_system_is_resharded_and_told_why_when_it_can_not_be(tmp_path: Path) -> None:
    logs, out = make_logs(tmp_path / "logs"), tmp_path / "out"
    work = out / ".photon"
    (tmp_path / "photon.toml").write_text("[registry]\nclock_skew_s = 0.5\n")
    process = start_photon(*join_arguments(logs, out, "--follow", "--config", tmp_path / "photon.toml"))
    try:
        wait_until(lambda: (work / "topology.json").exists(), 60.0)
        done = photon("reshard", 3, "--work", work, "--json")
        assert done.returncode == 0, done.stderr
        assert [shards for _, shards in json.loads(done.stdout)["intervals"]] == [1, 3]
        past = photon("reshard", 2, "--at", "2020-01-01", "--work", work)
        assert past.returncode == 2
        assert "in the future" in past.stderr
        assert past.stderr.count("\n") == 1
        wait_until(lambda: len(statuses(work)["registry-r0"]["shards"]) == 3, 60.0)
    finally:
        process.terminate()
        process.communicate(timeout=30)
    again = photon(*join_arguments(logs, out, "--config", tmp_path / "photon.toml"))
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["joined"] == 200


def test_a_replica_that_lost_its_directory_is_replaced_while_the_run_goes_on(tmp_path: Path) -> None:
    logs, out = make_logs(tmp_path / "logs"), tmp_path / "out"
    work = out / ".photon"
    assert photon(*join_arguments(logs, out)).returncode == 0
    shutil.rmtree(work / "registry" / "r1")
    process = start_photon(*join_arguments(logs, out, "--follow"))
    try:
        wait_until(
            lambda: members_of(work, 3).names == ["r0", "r2", "r3"] and not members_of(work, 3).lost, 60.0
        )
        wait_until(
            lambda: json.loads((work / "registry" / "r0" / "replicas.json").read_text())["removed"] == ["r1"]
        )
    finally:
        process.terminate()
        _, said = process.communicate(timeout=30)
    assert "r3 takes its place" in said
    shutil.rmtree(work / "registry" / "r0")  # another one may go now
    again = photon(*join_arguments(logs, out))
    assert again.returncode == 0, again.stderr
    assert json.loads(again.stdout)["joined"] == 200


def test_a_new_replica_is_told_of_those_that_came_since_the_run_began(tmp_path: Path) -> None:
    """Who leads may be one of them, and nobody speaks to a stranger."""

    def replica(name: str) -> Replica:
        return Replica(name, f"{name}:1", f"raft-{name}", 2, "/somewhere")

    began = Topology({}, [], [], "/out", "00", True, [replica("r0"), replica("r1"), replica("r2")], [])
    write_topology(began, tmp_path / "topology.json")
    now = [
        pb.Replica(name=name, grpc=f"{name}:1", raft_host=f"raft-{name}", raft_port=2)
        for name in ("r1", "r2", "r3")  # r4 may not have come to who was asked
    ]
    made = read_topology(_write_joining_topology(tmp_path, now, "r4", "[::1]:7", "[::1]:8"))
    assert [(r.name, r.raft_host, r.joining) for r in made.replicas] == [
        *((name, f"raft-{name}", False) for name in ("r1", "r2", "r3")),
        ("r4", "::1", True),
    ]
    assert (made.replica("r4").raft_port, made.replica("r4").grpc) == (7, "[::1]:8")
    assert made.replica("r4").directory == str(tmp_path / "registry" / "r4")


def test_times_are_given_as_iso_or_in_seconds() -> None:
    assert parse_time_us("2026-01-31T12:00:00+00:00") == 1_769_860_800_000_000
    assert parse_time_us("1769860800.5") == 1_769_860_800_500_000
    for text in ("soon", "1769860800000000", "-5", "nan"):
        with pytest.raises(UsageError, match="--at"):
            parse_time_us(text)


@pytest.mark.parametrize(
    "arguments",
    [
        ["reshard", "3"],
        ["reshard", "3", "--work", "nowhere"],
        ["reshard", "0", "--registry", "127.0.0.1:1"],
        ["registry", "replace", "r1", "--name", "r3", "--raft", "x", "--grpc", "h:1", "--registry", "h:1"],
        ["registry", "scan", "0", "--work", "a", "--registry", "b:1"],
    ],
)
def test_bad_usage_is_told_in_a_line(arguments: list[str]) -> None:
    done = photon(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1


def test_an_unused_number_is_the_new_replicas_name(tmp_path: Path) -> None:
    assert members_of(tmp_path, 3).names == ["r0", "r1", "r2"]
    for name in ("r0", "r2", "r3"):
        (tmp_path / "registry" / name / "group-0000").mkdir(parents=True)
        (tmp_path / "registry" / name / "group-0000" / "ballot").touch()
    members = members_of(tmp_path, 3)
    assert members.lost == [("r1", "r4")]
    assert (members.names, members.joining) == (["r0", "r4", "r2"], {"r4"})
