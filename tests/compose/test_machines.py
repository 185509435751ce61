"""The profile `machines` of docker-compose.yml: one datacenter of two machines. One is killed, and the links
between them are cut, while events come, and nobody does anything by hand.
"""

import json
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compose.deployed import Deployed
from tests.compose.engine import Engine
from tests.compose.images import PHOTON

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1200)]

ROLES = ("eventstore", "joiner", "dispatcher")
A = ["ra", *(f"{role}-a" for role in ROLES)]
B = ["rb", *(f"{role}-b" for role in ROLES)]
SERVICES = [*A, *B, "rc"]


@pytest.fixture(scope="module")
def machines(engine: Engine, staged: Path, deployed: Deployed) -> Iterator[Deployed]:
    """A project of its own, of the images that `deployed` has built."""
    generator = {"rate": 100, "click_rate": 50, "duration": 3600, "runs": 1}
    system = Deployed(engine, staged, f"{deployed.project}machines", generator)
    try:
        compose(system, "up", "--detach", "--no-build", *SERVICES)
        yield system
    finally:
        compose(system, "down", "--volumes", "--timeout", "5")


def compose(system: Deployed, *arguments: object) -> str:
    return system.compose("--profile", "machines", *arguments)


def joined(system: Deployed, *machines: str) -> int:
    return sum(system.joined_lines(f"joiner-{machine}", "east") for machine in machines)


def link(system: Deployed, enabled: bool, *services: str) -> None:
    """All ways to these services from other machines."""
    directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for name in system.toxiproxy("/proxies"):
        if name.partition(":")[0] in services:
            url = f"http://127.0.0.1:{system._toxiproxy_port}/proxies/{name}"
            request = urllib.request.Request(url, json.dumps({"enabled": enabled}).encode(), method="POST")
            directly.open(request, timeout=10).close()


def test_either_machine_may_be_lost_or_cut_off(machines: Deployed) -> None:
    for service in SERVICES:
        machines.wait(f"{service} serves", lambda s=service: machines.serves(s))
    compose(machines, "up", "--detach", "--no-build", "machines-generator")
    machines.wait("both join", lambda: min(joined(machines, "a"), joined(machines, "b")) > 50)

    compose(machines, "kill", *A)
    # And the disks of the event store and the dispatcher are gone.
    volume = f"--volume={machines.project}_a-data:/data"
    gone = "rm -r /data/work/east/eventstore /data/work/east/dispatcher"
    machines.engine.docker(
        "run", "--rm", "--network=none", "--user=0:0", volume, "--entrypoint=sh", PHOTON, "-c", gone
    )
    before = joined(machines, "b")
    machines.wait("b joins alone", lambda: joined(machines, "b") > before + 250)
    compose(machines, "start", *A)
    before = joined(machines, "a")
    machines.wait("a joins again", lambda: joined(machines, "a") > before + 50)

    link(machines, False, *B)  # of what others dial
    link(machines, False, *A)
    before = joined(machines, "a", "b")
    machines.wait("one of them joins", lambda: joined(machines, "a", "b") > before + 250)
    link(machines, True, *A, *B)
    for machine in ("a", "b"):
        before = joined(machines, machine)
        machines.wait(f"{machine} joins again", lambda m=machine, n=before: joined(machines, m) > n + 50)

    compose(machines, "stop", "--timeout", "120", "machines-generator")
    truth = json.loads(machines.volume("machines-logs")["run-000000/truth.json"])
    assert truth["foreign_distinct_ids"] > 500
    machines.wait("all is joined", lambda: joined(machines, "a", "b") >= truth["distinct_joined_pairs"])
    pairs: Counter[str] = Counter()
    for machine in ("a", "b"):
        for name, content in machines.volume(f"{machine}-data").items():
            if name.startswith("out/joined/") and name.endswith(".jsonl"):
                pairs.update(json.loads(line)["id"] for line in content.splitlines())
    assert len(pairs) == pairs.total() == truth["distinct_joined_pairs"]
