"""What deploy/ has for Prometheus and Grafana."""

import json
import re

from tests.compose.images import ROOT


def dashboard_expressions() -> list[str]:
    """The queries of all panels."""
    dashboard = json.loads((ROOT / "deploy/grafana/dashboards/photon.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]


def scrape_server_name() -> str:
    """Whose certificate Prometheus takes."""
    found = re.search(r"^ +server_name: (\S+)", (ROOT / "deploy/prometheus.yml").read_text(), re.MULTILINE)
    assert found
    return found[1]


def scrape_targets() -> dict[str, set[str]]:
    """Datacenter -> addresses, of deploy/prometheus.yml."""
    found: dict[str, set[str]] = {}
    datacenter = ""
    for line in (ROOT / "deploy/prometheus.yml").read_text().splitlines():
        if label := re.search(r"datacenter: ([a-z0-9-]+)", line):
            datacenter = label[1]
        elif target := re.fullmatch(r" +- ([a-z0-9-]+:\d+)", line):
            found.setdefault(datacenter, set()).add(target[1])
    return found
