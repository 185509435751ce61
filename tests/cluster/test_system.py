"""A system as photon.toml names it: what each process makes of it, and what is refused."""

import contextlib
import dataclasses
import json
import random
import tomllib
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from photon.cluster.local_cluster import placed
from photon.cluster.registry_replicas import members_of
from photon.cluster.roles import ROLES
from photon.cluster.topology import (
    Topology,
    find_system,
    read_system,
    read_topology,
    topology_of,
    unplaced,
    write_topology,
)
from photon.connect.copies import copies_of
from photon.core.errors import SettingsError, UsageError
from photon.core.settings import PIPELINE_ROLES, DatacenterPlace, parse_settings
from photon.rpc.metrics import FAMILIES
from photon.rpc.network import Network

SYSTEM = """
[replicas.r0]
datacenter = "east"
grpc = "r0:7400"
raft = "r0:7401"
[replicas.r1]
datacenter = "west"
grpc = "r1:7400"
raft = "r1:7401"
listen_grpc = "0.0.0.0:17400"
[replicas.r2]
datacenter = "west-2"
grpc = "r2:7400"
raft = "[fd00::2]:7401"
[datacenters.east]
region = "us-east"
primary = ["/logs/queries*"]
foreign = ["/logs/clicks*"]
eventstores = ["es:7410", "es-1:7410"]
joiners = ["joiner:7420"]
dispatchers = ["dispatcher:7430"]
[datacenters.west]
region = "us-west"
primary = ["/logs/queries*"]
foreign = ["/logs/clicks*"]
eventstores = ["es-w:7410"]
joiners = ["joiner-w:7420"]
dispatchers = ["dispatcher-w:7430"]
[datacenters.west-2]
region = "us-west"
[via.east]
"r1:7400" = "proxy:27400"
"r1:7401" = "proxy:27401"
"""


def system(more: str = "", without: str = "") -> dict[str, Any]:
    return tomllib.loads(SYSTEM.replace(without, "") + more)


def planned(more: str = "", without: str = "") -> Topology:
    return topology_of(parse_settings(system(more, without)))


def test_every_process_has_its_place():
    topology = planned()
    assert topology.titles() == [
        "registry-r0", "registry-r1", "registry-r2", "eventstore-east", "eventstore-east-1",
        "eventstore-west", "joiner-east", "joiner-west", "dispatcher-east", "dispatcher-west",
    ]  # fmt: skip
    assert [p.datacenter for p in topology.pipelines] == ["east", "west"]  # west-2 has a replica only
    assert topology.process("eventstore", "east/1").address == "es-1:7410"
    assert topology.patterns_of(topology.pipeline("west"), "primary") == ["/logs/queries*"]
    assert topology.replica("r2").raft_address == ("fd00::2", 7401)
    assert topology.replica("r1").listen_grpc == "0.0.0.0:17400"


def test_lookups_go_to_the_own_datacenter_then_to_the_own_region():
    topology = planned()
    assert [r.name for r in topology.nearest_first("west")] == ["r1", "r2", "r0"]
    assert [r.name for r in topology.nearest_first("west-2")] == ["r2", "r1", "r0"]
    assert [r.name for r in topology.nearest_first("east")] == ["r0", "r1", "r2"]


def test_replicas_whose_majority_one_region_would_take_with_it_draw_a_warning_when_they_start(
    caplog, monkeypatch
):
    topology = planned()
    monkeypatch.setattr("idregistry.server.RegistryServer", lambda *_: None)
    with caplog.at_level("WARNING"):
        ROLES["registry"].make(
            topology, topology.process("registry", "r0"), Network(bind="127.0.0.1"), lambda _: None
        )
    (record,) = caplog.records
    assert record.message.startswith("2 of 3 registry replicas are in region us-west")
    assert planned(without='region = "us-west"\n').crowded() is None
    assert dataclasses.replace(topology, regions={}).crowded() is None  # of one machine


def test_what_is_dialed_for_an_address_is_each_datacenters_own():
    topology = planned()
    assert topology.network("east").dialed("r1", 7401) == ("proxy", 27401)
    assert topology.network("west").dialed("r1", 7401) == ("r1", 7401)
    assert topology.network("").dialed("r1", 7401) == ("r1", 7401)


def test_scrapes_are_answered_so_far_above_the_grpc_port():
    metrics = planned("[metrics]\nserve = true\nport_offset = 10\n").metrics
    assert metrics["joiner-east"] == "joiner:7430"
    assert metrics["registry-r0"] == "r0:7410"


@pytest.mark.parametrize(
    ("more", "without", "told"),
    [
        ("", "[replicas.r0]", "unknown section|lacks"),
        ("", 'raft = "r0:7401"\n', r"\[replicas.r0\] lacks 'raft'"),
        ("", 'joiners = ["joiner:7420"]\n', r"\[datacenters.east\] lacks joiners"),
        ("", 'grpc = "r0:7400"\n', r"\[replicas.r0\] lacks 'grpc'"),
        ('[via.south]\n"a:1" = "b:2"\n', "", r"there is no \[datacenters.south\]"),
        ('[via.west]\n"r0:7400" = "b"\n', "", "'via.west.r0:7400': 'b' is no address"),
        ('[via.west]\n"r0:7400" = 2\n', "", "must be a string"),
        (
            '[via.west]\n"r0:740" = "b:1"\n',
            "",
            r"\[via.west\]: r0:740 is the address of no process; did you mean 'r0:740[01]'",
        ),
        ('[via.west]\n"joiner-w:7402" = "b:1"\n', "", "did you mean 'joiner-w:7420'"),
        ('[replicas.R9]\ndatacenter = "east"\ngrpc = "a:1"\nraft = "a:2"\n', "", "even number|lower-case"),
        ("[replicas]\nr9 = 1\n", "[replicas.r0]\n", "must be a section|lacks|unknown"),
        ("[metrics]\nserve = true\nport_offset = 59_000\n", "", "past port 65535"),
        ('[system]\nsecret_file = "/nowhere/secret"\n', "", "cannot be read"),
    ],
)
def test_what_can_not_be_is_told_with_its_place(more, without, told):
    with pytest.raises((SettingsError, tomllib.TOMLDecodeError), match=told):
        planned(more, without)


@pytest.mark.parametrize(
    "address", ["h:" + "1" * 5000, "[x:1", "ho st:7400", "a/b:7400", "h:\u0667\u0664", "[abc]:1", "[::1:7400"]
)
@pytest.mark.parametrize("key", ["grpc", "raft", "listen_grpc", "listen_raft"])
def test_what_is_no_address_is_told_with_its_place(key, address):
    document = system()
    document["replicas"]["r0"][key] = address
    with pytest.raises(SettingsError, match=rf"'replicas\.r0\.{key}': .* is no address: give HOST:PORT"):
        topology_of(parse_settings(document))


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("joiner:7499", "joiner:7499"),
        ("localhost:7499", "127.0.0.1:7499"),
        ("LOCALHOST:7499", "localhost:7499"),
        ("[::1]:7499", "[0:0:0:0:0:0:0:1]:7499"),
        ("Joiner:7420", "joiner:7420"),
    ],
)
def test_two_servers_at_one_address_however_it_is_spelled_are_refused(one, other):
    document = system()
    document["replicas"]["r1"]["grpc"], document["replicas"]["r2"]["raft"] = one, other
    with pytest.raises(SettingsError, match="have the same address"):
        topology_of(parse_settings(document))


def test_metrics_on_the_port_of_a_server_are_refused():
    document = system("[metrics]\nserve = true\nport_offset = 1\n")
    with pytest.raises(SettingsError, match=r"'metrics.port_offset' leads the metrics of 'replicas.r0.grpc'"):
        topology_of(parse_settings(document))
    document["metrics"]["serve"] = False
    topology_of(parse_settings(document))


def test_metrics_of_an_ipv6_address_keep_its_brackets():
    document = system("[metrics]\nserve = true\n")
    document["replicas"]["r0"]["grpc"] = "[fd00::1]:7400"
    assert topology_of(parse_settings(document)).metrics["registry-r0"] == "[fd00::1]:8400"


@pytest.mark.parametrize("name", ["run", "lock", "logs", "registry", "recovery", "logs-east", "borrowed"])
def test_a_datacenter_of_the_name_of_a_file_in_the_work_directory_is_refused(name):
    document = system()
    document["datacenters"][name] = {"region": "us-west"}
    with pytest.raises(SettingsError, match=rf"\[datacenters.{name}\]: Photon has files of that name"):
        topology_of(parse_settings(document))


def test_two_processes_of_one_name_are_refused():
    document = system()
    document["datacenters"]["west"]["joiners"] = ["a:1", "a:2", "a:3"]
    document["datacenters"]["west-2"] |= {
        **document["datacenters"]["east"],
        **{role: [f"{role}:1"] for role in ("eventstores", "joiners", "dispatchers")},
    }
    with pytest.raises(SettingsError, match="two processes would be named joiner-west-2"):
        topology_of(parse_settings(document))


def test_an_even_number_of_replicas_is_refused():
    document = system()
    del document["replicas"]["r1"]
    with pytest.raises(SettingsError, match="even number"):
        topology_of(parse_settings(document))


@pytest.mark.parametrize(
    ("text", "mode", "refused"),
    [
        ("0123456789abcdef\n", 0o600, ""),
        ("0123456789abcdef\n", 0o400, ""),
        ("short", 0o600, "16 bytes"),
        *(
            ("0123456789abcdef", mode, f"open to others .*{mode:o}.*: chmod 600")
            for mode in (0o644, 0o602, 0o610)
        ),
    ],
)
def test_a_secret_is_long_and_for_its_owner_alone(tmp_path: Path, text: str, mode: int, refused: str):
    secret = tmp_path / "secret"
    secret.write_text(text)
    secret.chmod(mode)
    told = pytest.raises(SettingsError, match=refused) if refused else contextlib.nullcontext()
    with told:
        found = planned(f'[system]\nsecret_file = "{secret}"\n').secret
        assert bytes.fromhex(found) == b"0123456789abcdef"


def test_who_only_asks_needs_no_secret(tmp_path: Path):
    config = tmp_path / "photon.toml"
    config.write_text(SYSTEM + '[system]\nsecret_file = "/nowhere/secret"\n')
    assert find_system(None, config).secret == ""
    with pytest.raises(SettingsError, match="cannot be read"):
        read_system(config, None)


def test_one_of_the_two_files_is_named_and_a_mistake_is_told_with_its_name(tmp_path: Path):
    for files in ((None, None), (Path("a"), Path("b"))):
        with pytest.raises(UsageError, match="one of --config"):
            read_system(*files)
    config = tmp_path / "photon.toml"
    config.write_text("[registry]\n")
    with pytest.raises(SettingsError, match=r"photon\.toml: the settings name no registry replica"):
        read_system(config, None)


def test_an_ipv6_address_is_found_among_what_is_dialed_instead():
    network = Network(via={"[fd00::2]:7401": "[fd00::9]:27401"})
    assert network.dialed("fd00::2", 7401) == ("fd00::9", 27401)


def test_every_role_has_its_metrics_and_its_place_in_the_settings(tmp_path):
    assert [*ROLES] == [*FAMILIES]
    assert [*ROLES] == ["registry", *PIPELINE_ROLES]
    places = {field.name for field in dataclasses.fields(DatacenterPlace)}
    assert {f"{role}s" for role in PIPELINE_ROLES} < places
    for foreign, importers in (("/logs/clicks", 0), ("kafka://h:9092/clicks", 1)):
        topology = unplaced(parse_settings({}), ["/logs/queries"], [foreign], Path("out"), drain=True)
        here = placed(topology, members_of(tmp_path, 3), {}, ["east"], tmp_path, random.Random(1))
        counts = Counter(process.role for process in here.processes())
        assert [counts[role] for role in ROLES] == [3, importers, 1, 1, 1]


def test_a_pipeline_reads_the_copies_of_its_sources():
    of_west = {
        "primary": ("/logs/queries*", "kafka://h:9092/queries?config=f"),
        "foreign": ("/logs/*.csv",),
        "importers": ("w:7440",),
    }
    settings = parse_settings(system())
    west = dataclasses.replace(settings.datacenters["west"], **of_west)
    topology = topology_of(dataclasses.replace(settings, datacenters={**settings.datacenters, "west": west}))
    pipeline = topology.pipeline("west")
    assert topology.process("importer", "west").address == "w:7440"
    assert topology.sources_of(pipeline) == {
        "primary": ["kafka://h:9092/queries?config=f"], "foreign": ["/logs/*.csv"],
    }  # fmt: skip
    assert topology.sources_of(topology.pipeline("east")) == {}
    home = pipeline.home("importer")
    plain, copies = topology.patterns_of(pipeline, "primary")
    assert (plain, Path(copies).parent.parent) == ("/logs/queries*", home / "primary")
    assert Path(topology.patterns_of(pipeline, "foreign")[0]).parent.parent == home / "foreign"


@pytest.mark.parametrize(
    ("foreign", "importers"),
    [("/logs/clicks*", ("w:7440",)), ("kafka://h/t", ()), ("kafka://h/t", ("w:7440", "w:7441"))],
)
def test_a_pipeline_has_an_importer_where_it_has_sources(foreign, importers):
    settings = parse_settings(system())
    west = dataclasses.replace(settings.datacenters["west"], foreign=(foreign,), importers=importers)
    settings = dataclasses.replace(settings, datacenters={**settings.datacenters, "west": west})
    with pytest.raises(
        SettingsError, match=r"'datacenters\.west\.importers': name the address of one importer"
    ):
        topology_of(settings)


def test_the_settings_of_a_topology_are_checked_where_it_is_read(tmp_path):
    path = tmp_path / "topology.json"
    topology = planned()
    write_topology(topology, path)
    assert read_topology(path) == topology
    document = json.loads(path.read_bytes())
    document["settings"]["joiner"]["processes"] = 0
    path.write_text(json.dumps(document))
    with pytest.raises(SettingsError, match="'joiner\\.processes' must be from 1"):
        read_topology(path)


@pytest.mark.parametrize("run_from", [".", "elsewhere"])
def test_a_table_is_the_same_source_by_its_relative_name(tmp_path, monkeypatch, run_from):
    """Where the run stood in the same directory."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / run_from)
    copies = copies_of(tmp_path / "home", "primary", str(tmp_path / "q.csv"))
    copies.mkdir(parents=True)
    place = SimpleNamespace(pipelines=[SimpleNamespace(home=lambda _: tmp_path / "home")])
    if run_from == ".":
        assert Topology.logs_of(place, "primary", ["q.csv"]) == (str(copies / "*.jsonl"),)
    else:
        with pytest.raises(UsageError, match="no datacenter of this run"):
            Topology.logs_of(place, "primary", ["q.csv"])
