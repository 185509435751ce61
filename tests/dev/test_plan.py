"""Who runs where in `photon dev`."""

import os
import random
from collections import Counter

import pytest
from click.testing import CliRunner

from photon.cli.dev import command
from photon.cluster.local_cluster import LocalCluster
from photon.cluster.supervisor import FreshLauncher
from photon.cluster.topology import write_topology
from photon.core.errors import SettingsError, UsageError
from photon.core.settings import Settings, load_settings
from photon.dev.plan import fed_datacenters, logs_of, named_replicas, plan_dev, replica_sites
from photon.dev.run import DevJob, _check_planned

DESCRIBED = """
[registry]
shards = 2
[replicas.a]
datacenter = "here"
grpc = "127.0.0.1:7400"
raft = "127.0.0.1:7401"
[datacenters.here]
region = "home"
eventstores = ["localhost:7410"]
joiners = ["127.0.0.1:7420", "127.0.0.1:7421"]
dispatchers = ["127.0.0.1:7430"]
"""


@pytest.fixture
def plan(tmp_path):
    def planned(settings=None, datacenters=2, primary=(), foreign=(), **more):
        work, out = tmp_path / "work", tmp_path / "out"
        work.mkdir(exist_ok=True)
        return plan_dev(
            settings or Settings(), work, out, primary, foreign, datacenters, random.Random(1), **more
        )

    return planned


def described(tmp_path, text=DESCRIBED):
    path = tmp_path / "photon.toml"
    path.write_text(text)
    return load_settings(path)


def test_five_replicas_are_in_five_datacenters_of_three_regions_and_no_region_has_a_majority(plan):
    topology = plan()
    assert {r.name: r.datacenter for r in topology.replicas} == {
        "r0": "east", "r1": "east-2", "r2": "west", "r3": "west-2", "r4": "central",
    }  # fmt: skip
    regions = Counter(topology.regions[r.datacenter] for r in topology.replicas)
    assert len(regions) == 3 and max(regions.values()) <= 2


def test_two_pipelines_are_in_two_regions_and_each_reads_its_own_logs(plan, tmp_path):
    topology = plan()
    assert [topology.regions[p.datacenter] for p in topology.pipelines] == ["us-east", "us-west"]
    east, west = topology.pipelines
    assert east.primary == (str(logs_of(tmp_path / "work", "east") / "queries" / "*.jsonl"),)
    assert west.foreign == (str(logs_of(tmp_path / "work", "west") / "clicks" / "*.jsonl"),)
    assert fed_datacenters(topology, tmp_path / "work") == ["east", "west"]


def test_the_processes_of_a_datacenter_are_known_by_its_name(plan, tmp_path):
    cluster = LocalCluster(plan(), tmp_path / "work", FreshLauncher())
    assert cluster.topology.datacenters == ["east", "west", "east-2", "west-2", "central"]
    assert cluster.processes_of("east") == [
        "registry-r0", "eventstore-east", "joiner-east", "dispatcher-east"
    ]  # fmt: skip
    with pytest.raises(UsageError, match="no process runs in a datacenter 'north'"):
        cluster.kill_datacenter("north")


def test_every_process_has_an_address_of_its_own(plan):
    topology = plan(datacenters=5)
    addresses = [r.grpc for r in topology.replicas] + [r.raft for r in topology.replicas]
    addresses += [a for p in topology.pipelines for a in p.eventstores + p.joiners + p.dispatchers]
    assert len(addresses) == len({*addresses}) == 5 * 2 + 5 * 3


@pytest.mark.parametrize(
    ("replicas", "regions"),
    [(1, {"us-east": 1}), (3, {"us-east": 1, "us-west": 1, "central": 1}), (7, None), (9, None)],
)
def test_another_number_of_replicas_is_spread_over_the_regions(plan, replicas, regions):
    topology = plan(replicas=replicas)
    found = Counter(topology.regions[r.datacenter] for r in topology.replicas)
    assert found.total() == replicas == topology.settings.registry.replicas
    assert found == regions if regions else max(found.values()) <= replicas // 2


def test_there_are_five_replicas_unless_the_settings_name_a_number():
    assert named_replicas({"registry": {"shards": 2}}) == 5
    assert named_replicas({"registry": {"replicas": 3}}) == 3
    assert named_replicas({}) == 5


def test_a_replica_that_takes_the_place_of_another_is_where_that_was():
    assert replica_sites(["r0", "r1", "r3", "r4", "r5"], 5)["r5"] == "west"


def test_a_resumed_system_leaves_its_replicas_where_they_were(plan, tmp_path):
    write_topology(plan(), tmp_path / "work" / "topology.json")
    again = plan()
    assert [r.datacenter for r in again.replicas] == ["east", "east-2", "west", "west-2", "central"]


def test_given_logs_are_read_by_all_and_nothing_is_generated(plan, tmp_path):
    topology = plan(primary=["q/*.jsonl"], foreign=["/c/*.jsonl"])
    assert fed_datacenters(topology, tmp_path / "work") == []
    for pipeline in topology.pipelines:
        assert topology.patterns_of(pipeline, "foreign") == ["/c/*.jsonl"]
        assert topology.patterns_of(pipeline, "primary")[0].endswith("/q/*.jsonl")


def test_a_system_of_settings_is_used_as_it_is(plan, tmp_path):
    topology = plan(described(tmp_path))
    assert [(r.name, r.grpc, r.datacenter) for r in topology.replicas] == [("a", "127.0.0.1:7400", "here")]
    (here,) = topology.pipelines
    assert (here.joiners, topology.regions) == (("127.0.0.1:7420", "127.0.0.1:7421"), {"here": "home"})
    assert fed_datacenters(topology, tmp_path / "work") == ["here"]
    assert topology.output == str(tmp_path / "out")


def test_a_described_datacenter_of_another_name_and_a_joiner_less_are_refused(plan, tmp_path):
    job = DevJob(out=tmp_path / "out", work=tmp_path / "work")
    there = DESCRIBED[DESCRIBED.index("[datacenters.here]") :].replace("here", "there").replace(":74", ":75")

    def check(text):
        _check_planned(job, plan(described(tmp_path, text)), 0)

    check(DESCRIBED + there)
    with pytest.raises(UsageError, match="datacenters here, there, and there, which is left out"):
        check(DESCRIBED + there.replace("there", "elsewhere"))
    with pytest.raises(UsageError, match="joiner-there-1, which is left out"):
        check(DESCRIBED + there.replace(', "127.0.0.1:7521"', ""))
    check(DESCRIBED + there)


def test_logs_that_the_settings_name_are_not_written(plan, tmp_path):
    text = DESCRIBED + 'primary = ["/q/*.jsonl"]\nforeign = ["/c/*.jsonl"]\n'
    topology = plan(described(tmp_path, text))
    assert fed_datacenters(topology, tmp_path / "work") == []
    assert topology.pipelines[0].primary == ("/q/*.jsonl",)


@pytest.mark.parametrize("elsewhere", ['grpc = "r0:7400"', 'raft = "10.0.0.1:7401"'])
def test_a_system_of_other_machines_is_refused(plan, tmp_path, elsewhere):
    key = elsewhere.split()[0]
    text = "\n".join(elsewhere if line.startswith(key) else line for line in DESCRIBED.splitlines())
    with pytest.raises(UsageError, match=r"replica a: .* is not of this machine"):
        plan(described(tmp_path, text))


def test_a_settings_file_is_read_but_once_so_it_may_be_a_pipe(tmp_path):
    read, write = os.pipe()
    os.write(write, b'[adapter]\nuse = "no_such_module:adapt"\n')
    os.close(write)
    result = CliRunner().invoke(
        command, ["--config", f"/dev/fd/{read}", "--out", str(tmp_path / "out"), "--for", "1s"]
    )
    os.close(read)
    assert "no_such_module" in str(result.exception)


@pytest.mark.parametrize("fields", ['[foreign]\nid = "click_id"\n', '[primary]\ntime_unit = "ms"\n'])
def test_settings_that_cannot_read_generated_logs_are_refused(plan, tmp_path, fields):
    settings = described(tmp_path, fields)
    job = DevJob(out=tmp_path / "out", work=tmp_path / "work")
    with pytest.raises(UsageError, match="generated logs"):
        _check_planned(job, plan(settings), 0)
    _check_planned(job, plan(settings, primary=["/q/*"], foreign=["/c/*"]), 0)


def test_two_processes_of_one_name_are_refused(plan, tmp_path):
    path = tmp_path / "photon.toml"
    path.write_text("[joiner]\nprocesses = 3\n")
    with pytest.raises(SettingsError, match="joiner-east-2"):
        plan(load_settings(path), datacenters=4)
