"""The files of the deployment agree with each other and with the settings; nothing is started."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from deploy.links import links_of
from photon.cluster.topology import Topology, topology_of
from photon.core.settings import parse_settings
from photon.rpc.metrics import FAMILIES
from tests.compose.deployed import ADDRESSES
from tests.compose.images import ROOT
from tests.compose.monitoring import dashboard_expressions, scrape_targets

DOCUMENT = tomllib.loads((ROOT / "deploy/photon.toml").read_text())
COMPOSE = (ROOT / "docker-compose.yml").read_text()


@pytest.fixture
def topology(tmp_path: Path) -> Topology:
    """Of deploy/photon.toml, with a secret that is here."""
    secret = tmp_path / "secret"
    secret.touch(0o600)
    secret.write_text("x" * 32)
    document = {**DOCUMENT, "system": {**DOCUMENT["system"], "secret_file": str(secret)}}
    return topology_of(parse_settings(document, "deploy/photon.toml"))


def test_five_datacenters_in_three_regions_with_a_replica_each_and_two_pipelines(topology: Topology) -> None:
    """Paper, section 4."""
    assert len(topology.regions) == 5
    assert len(set(topology.regions.values())) == 3
    assert {replica.datacenter for replica in topology.replicas} == set(topology.regions)
    assert [pipeline.datacenter for pipeline in topology.pipelines] == ["east", "west"]


def test_each_address_of_the_settings_is_a_service_of_the_compose_file(topology: Topology) -> None:
    addresses = {replica.grpc for replica in topology.replicas}
    addresses |= {process.address for process in topology.processes()}
    assert addresses == set(ADDRESSES.values())
    for service, address in ADDRESSES.items():
        assert f"\n  {service}:\n" in COMPOSE
        assert f"PHOTON_ADDRESS: {address}\n" in COMPOSE


def test_every_link_between_two_datacenters_goes_through_a_proxy_of_its_own(topology: Topology) -> None:
    links = links_of(DOCUMENT, between_regions_ms=100, within_region_ms=2)
    assert {link.name for link in links} == {
        f"{kind}:{datacenter}>{replica.name}"
        for kind in ("grpc", "raft")
        for datacenter in topology.regions
        for replica in topology.replicas
        if replica.datacenter != datacenter
    }
    assert len({link.listen for link in links}) == len(links)
    slow = {link.name for link in links if link.round_trip_ms == 100}
    assert {"raft:east>r2", "grpc:central>r3"} <= slow
    assert not {"raft:east>r1", "grpc:west-2>r2"} & slow


def test_prometheus_scrapes_each_process_by_the_address_it_answers_at(topology: Topology) -> None:
    scraped = scrape_targets()
    assert set().union(*scraped.values()) == set(topology.metrics.values())
    for replica in topology.replicas:
        assert topology.metrics[f"registry-{replica.name}"] in scraped[replica.datacenter]
    for pipeline in topology.pipelines:
        assert topology.metrics[f"joiner-{pipeline.datacenter}-1"] in scraped[pipeline.datacenter]


def test_the_dashboard_asks_for_metrics_that_there_are() -> None:
    """By name alone; tests of the running system look at what is served."""
    known = {f"photon_{room}_{family.name}" for room, families in FAMILIES.items() for family in families}
    asked = set(re.findall(r"photon_[a-z_]+[a-z]\b(?!\()", " ".join(dashboard_expressions())))
    assert asked
    assert {name for name in asked if re.sub("_(total|bucket)$", "", name) not in known} == set()


def test_what_the_image_is_made_of_is_in_the_build_context() -> None:
    dockerfile = (ROOT / "Dockerfile").read_text()
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    sources = [
        source
        for line in re.findall(r"^COPY (?!--from)(.+) \S+$", dockerfile, re.MULTILINE)
        for source in line.split()
    ]
    assert sources
    for source in sources:
        assert f"!{source}" in allowed
        assert (ROOT / source).exists()


def services() -> dict[str, str]:
    """Service -> its lines in the compose file."""
    section = COMPOSE.partition("\nservices:\n")[2].partition("\nnetworks:\n")[0]
    parts = re.split(r"^  ([a-z0-9-]+):\n", section, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_what_a_container_says_never_fills_the_disk() -> None:
    assert "max-size" in COMPOSE
    assert set(ADDRESSES) < services().keys()
    for name, lines in services().items():
        kinds = ("<<: *photon\n", "<<: *machine\n", "<<: *wheel\n", "<<: *wheel-db\n")
        kinds += ("    logging: *logging\n",)
        assert any(kind in lines for kind in kinds), name


def test_who_mounts_certificates_waits_until_they_are_made() -> None:
    """But for `operator`, which is started beside a system."""
    waits = re.compile(r"prepare:\n +condition: service_completed_successfully\n", re.MULTILINE)
    for kind in ("x-photon:", "x-machine:", "x-wheel:"):
        assert waits.search(COMPOSE.partition(kind)[2].partition("\n\n")[0])
    mounting = {name: lines for name, lines in services().items() if "-certs:/certs:ro" in lines}
    assert {"r4", "prometheus", "operator"} <= mounting.keys()
    for name in mounting.keys() - {"operator"}:
        made = any(f"<<: *{kind}\n" in mounting[name] for kind in ("photon", "machine", "wheel"))
        assert made or waits.search(mounting[name]), name


def test_another_distance_makes_toxiproxy_anew() -> None:
    """Links that are there are left as they are."""
    for service in ("links", "toxiproxy"):
        assert "${ROUND_TRIP_MS:-100}" in services()[service]


def test_both_composes_can_read_the_file() -> None:
    """Today's ignores a `version`, and warns; the one before it takes `profiles` only without."""
    assert not re.search("^version:", COMPOSE, re.MULTILINE)
    if shutil.which("docker-compose") is None:
        pytest.skip("there is no docker-compose")
    command = [
        "docker-compose",
        "-f",
        str(ROOT / "docker-compose.yml"),
        "--profile",
        "monitoring",
        "config",
        "--quiet",
    ]
    subprocess.run(command, check=True, timeout=60)
