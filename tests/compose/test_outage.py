"""docker-compose.yml run for real: a datacenter dies and comes back, and nobody does anything by hand."""

import json
import re
import urllib.error
from pathlib import Path

import pytest

from tests.compose.deployed import ADDRESSES, Deployed, pipeline
from tests.compose.engine import Engine
from tests.compose.machine import snapshot
from tests.compose.monitoring import dashboard_expressions, scrape_server_name, scrape_targets
from tests.faults.kit.checkers import Facts, JoinedLine, check, joined_twice, joined_wrong, lost
from tests.faults.kit.feeder import Truth
from tests.faults.kit.output import id_of

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1800)]

EAST = pipeline("r0", "east")
WEST = pipeline("r2", "west")

_SCRAPE = """
import http.client, socket, ssl, sys
context = ssl.create_default_context(cafile="{certs}/ca.pem")
context.load_cert_chain("{certs}/node.pem", "{certs}/node.key")
for address in sys.argv[1:]:
    host, _, port = address.rpartition(":")
    connection = http.client.HTTPSConnection(host, int(port), timeout=60, context=context)
    plain = socket.create_connection((host, int(port)), 60)
    connection.sock = context.wrap_socket(plain, server_hostname="{server_name}")
    connection.request("GET", "/metrics")
    answer = connection.getresponse()
    assert answer.status == 200, (address, answer.status)
    print(answer.read().decode())
"""


def scraped(deployed: Deployed, service: str) -> str:
    """What a process tells, asked from its own container."""
    host, _, port = ADDRESSES[service].rpartition(":")
    code = _SCRAPE.format(certs="/certs", server_name=scrape_server_name())
    return deployed.execute(service, "python3", "-c", code, f"{host}:{int(port) + 1000}")


def scraped_as_prometheus_does(deployed: Deployed) -> str:
    """What all targets tell the one who has monitoring's certificate, as the user that Prometheus runs as."""
    # `operator` is in all networks, as Prometheus is.
    options = ["--rm", "-T", "--no-deps", "--user=65534", "--entrypoint=python3"]
    options.append(f"--volume={deployed.project}_monitoring-certs:/monitoring:ro")
    code = _SCRAPE.format(certs="/monitoring", server_name=scrape_server_name())
    targets = sorted(set().union(*scrape_targets().values()))
    return deployed.compose("run", *options, "operator", "-c", code, *targets)


def figure(text: str, name: str) -> int:
    """The value of a metric without labels but its process."""
    found = re.search(rf"^{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
    assert found, f"{name} is not among the metrics"
    return int(float(found[1]))


def test_every_process_serves_and_none_runs_as_root(deployed: Deployed) -> None:
    for service, address in ADDRESSES.items():
        deployed.wait(f"{service} serves", lambda s=service: deployed.serves(s))
        assert deployed.container(service)["Config"]["User"] == "photon"
        assert f"PHOTON_ADDRESS={address}" in deployed.container(service)["Config"]["Env"]
    assert deployed.execute("r0", "id", "--user", "--name").strip() == "photon"


def test_every_link_between_datacenters_has_a_proxy_as_slow_as_the_distance(deployed: Deployed) -> None:
    """Paper, section 4: 100 ms between regions."""

    def made() -> bool:
        try:
            proxies = deployed.toxiproxy("/proxies")
        except (OSError, urllib.error.URLError):
            return False
        return len(proxies) == 40 and all(proxy["enabled"] for proxy in proxies.values())

    deployed.wait("all proxies are there", made)
    proxies = deployed.toxiproxy("/proxies")
    for name, one_way in (("grpc:west>r0", 50), ("raft:east>r4", 50), ("raft:east>r1", 1)):
        assert [toxic["attributes"]["latency"] for toxic in proxies[name]["toxics"]] == [one_way, one_way]


def test_no_datacenter_reaches_another_but_through_toxiproxy(deployed: Deployed) -> None:
    reached = "import socket; socket.create_connection(('{}', {}), 3)"
    deployed.execute("r0", "python3", "-c", reached.format("toxiproxy", 20300))
    networks = deployed.container("r3")["NetworkSettings"]["Networks"].values()
    addresses = [network["IPAddress"] for network in networks]
    assert addresses
    for host in ("r3", *addresses):
        with pytest.raises(AssertionError, match=r"gaierror|timed out|TimeoutError|unreachable|refused"):
            deployed.execute("r0", "python3", "-c", reached.format(host, 7400))


def test_a_datacenter_dies_and_comes_back_and_every_pair_is_there_once(deployed: Deployed) -> None:
    deployed.compose("up", "--detach", "--no-build", "generator")
    deployed.wait("both join", lambda: min(_joined(deployed)) > 100)

    deployed.compose("kill", *EAST)
    before = deployed.joined_lines("dispatcher-west", "west")
    deployed.wait("west joins alone", lambda: deployed.joined_lines("joiner-west", "west") > before + 250)
    for service in EAST:
        assert not deployed.container(service)["State"]["Running"]
    deployed.compose("start", *EAST)
    east, _ = _joined(deployed)
    deployed.wait("east joins again", lambda: _joined(deployed)[0] > east + 50)
    assert deployed.container("generator")["State"]["Running"], "all this was to happen while events come"
    deployed.compose("stop", "--timeout", "120", "generator")

    truth = json.loads(deployed.volume("east-logs")["run-000000/truth.json"])
    assert truth["foreign_distinct_ids"] > 500
    deployed.wait("all is joined", lambda: sum(_joined(deployed)) >= truth["distinct_joined_pairs"])
    for service in ("dispatcher-east", "dispatcher-west"):
        deployed.wait(
            f"{service} has a fate for each event", lambda s=service: _decided(scraped(deployed, s), truth)
        )

    logs = {
        name: content for name, content in deployed.volume("east-logs").items() if name.endswith(".jsonl")
    }
    west_logs = deployed.volume("west-logs")
    assert logs == {name: content for name, content in west_logs.items() if name.endswith(".jsonl")}
    known = _truth(_lines(logs, "/queries/"), _lines(logs, "/clicks/"))
    assert len(known.pairs) == truth["distinct_joined_pairs"]
    joined = [
        JoinedLine(datacenter, datacenter, id_of(line), line + b"\n")
        for datacenter in ("east", "west")
        for line in _lines(deployed.volume(f"{datacenter}-data"), "out/joined/")
    ]
    check(Facts(known, joined), (joined_twice, joined_wrong, lost)).hold()


def test_the_operator_sees_every_process_and_the_fates_add_up(deployed: Deployed) -> None:
    arguments = ["run", "--rm", "-T", "operator", "status", "--config", "/etc/photon/photon.toml", "--json"]

    def all_answer() -> bool:
        """`photon status` ends with 1 where one does not, or they don't."""
        try:
            told = json.loads(deployed.compose(*arguments))
        except AssertionError:
            return False
        return len(told) == len(ADDRESSES) + 1 and set(told["fates"]) == {"east", "west"}

    deployed.wait("the operator sees all", all_answer)


def test_prometheus_is_served_each_metric_of_the_dashboard(deployed: Deployed) -> None:
    names = set(re.findall(r"photon_[a-z_]+", " ".join(dashboard_expressions())))
    # By a pattern, which has other names than metrics in it.
    names -= {name for name in names if name.endswith("_")}
    assert names
    served = scraped_as_prometheus_does(deployed)
    assert {name for name in names if name not in served} == set()


def test_the_engine_finds_every_process_healthy(deployed: Deployed) -> None:
    """After a death as before it: by the image's own health check."""
    for service in ADDRESSES:
        deployed.wait(
            f"{service} is healthy",
            lambda s=service: deployed.container(s)["State"]["Health"]["Status"] == "healthy",
        )


def test_monitoring_is_started_by_those_who_ask_for_it(deployed: Deployed) -> None:
    """Whether its profile is valid is told in test_files."""
    label = f"label=com.docker.compose.project={deployed.project}"
    there = deployed.engine.docker("ps", "--all", "--format", "{{.Names}}", "--filter", label)
    assert "joiner-east" in there
    assert "grafana" not in there
    assert "prometheus" not in there


def test_a_stop_is_a_drain(deployed: Deployed) -> None:
    deployed.compose("stop", "--timeout", "60", *ADDRESSES, "links", "generator")
    for service in (*ADDRESSES, "links", "generator"):
        assert deployed.container(service)["State"]["ExitCode"] == 0, deployed.compose("logs", service)


def test_the_machine_is_left_as_it_was_found(
    deployed: Deployed, engine: Engine, found: dict[str, str]
) -> None:
    """Last of all: everything is torn down; firewall, forwarding, interfaces and routes are compared."""
    deployed.down()
    label = f"label=com.docker.compose.project={deployed.project}"
    for kind in ("container", "volume", "network"):
        every = ["--all"] if kind == "container" else []
        assert engine.docker(kind, "ls", *every, "--quiet", "--filter", label) == ""
    if not engine.own:
        return  # its own bridge and rules are none of ours
    directory = engine.directory
    assert directory is not None
    engine.stop()
    assert snapshot() == found
    assert not directory.exists()
    assert str(directory) not in Path("/proc/mounts").read_text()


def _joined(deployed: Deployed) -> tuple[int, int]:
    return deployed.joined_lines("joiner-east", "east"), deployed.joined_lines("joiner-west", "west")


def _decided(text: str, truth: dict[str, int]) -> bool:
    events = figure(text, "photon_dispatcher_events_total")
    return events == truth["foreign_rows"] and figure(text, "photon_dispatcher_pending_events") == 0


def _truth(queries: list[bytes], clicks: list[bytes]) -> Truth:
    """What must become of the clicks."""
    truth = Truth({str(id_of(line)): line for line in queries}, {str(id_of(line)): line for line in clicks})
    named = {text: json.loads(line)["primary_id"] for text, line in truth.clicks.items()}
    truth.pairs = {text: primary for text, primary in named.items() if primary in truth.queries}
    return truth


def _lines(files: dict[str, bytes], part: str) -> list[bytes]:
    return [
        line
        for name, c in files.items()
        if part in name and name.endswith(".jsonl")
        for line in c.splitlines()
    ]
