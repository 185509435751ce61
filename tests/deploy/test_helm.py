"""The chart: what it makes is valid by Kubernetes's own schemas; each pod starts the process it is for."""

import json
import os
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

from photon.cluster.topology import topology_of
from photon.core.settings import parse_settings

kubernetes_validate = pytest.importorskip("kubernetes_validate")

CHART = Path(__file__).parents[2] / "deploy" / "helm" / "photon"
BUILT = Path(__file__).parents[2] / ".helm" / "bin" / "helm"
HELM = shutil.which("helm") or (str(BUILT) if BUILT.exists() else None)
KUBERNETES = ["1.27", "1.31", "1.34"]
OWN = {"cert-manager.io/v1"}
"""Kinds that no version of Kubernetes knows."""

WEST = {
    "domain": "photon.svc.west.example",
    "registry": ["r3"],
    "eventstores": 2,
    "joiners": 1,
    "dispatchers": 2,
    "primary": ["/logs/q/*.jsonl"],
    "foreign": ["/logs/c/*.jsonl"],
}
WITNESS = {"domain": "photon.svc.witness.example", "registry": ["r4"]}
SYSTEM = {
    "datacenters": {"west": WEST, "witness": WITNESS},
    "settings": {"dispatcher": {"workers": 4}, "foreign": {"id": "click.id"}},
    "tls": {"issuer": {"kind": "ClusterIssuer", "name": "photon-ca"}},
}

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(HELM is None, reason="no helm: install it, or Go and `make .helm/bin/helm`"),
]


def helm(tmp_path, *words, **values):
    file = tmp_path / "values.yaml"
    file.write_text(json.dumps(values))
    command = [HELM, *words, str(CHART), "--namespace", "photon", "--values", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def made(tmp_path, version="1.31", **values):
    """Kind and name -> object."""
    done = helm(tmp_path, "template", "photon", "--kube-version", version, **values)
    assert done.returncode == 0, done.stderr
    found = [one for one in yaml.safe_load_all(done.stdout) if one]
    return {(one["kind"], one["metadata"]["name"]): one for one in found}


def topology_in(found, datacenter):
    """As a command sees it, which has no secret."""
    document = tomllib.loads(found["ConfigMap", f"{datacenter}-photon"]["data"]["photon.toml"])
    document["system"]["secret_file"] = ""
    return topology_of(parse_settings(document, "photon.toml"), "photon.toml")


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("values", [{}, SYSTEM | {"datacenter": "west"}], ids=["default", "west"])
def test_what_it_makes_is_valid_and_so_says_helm(tmp_path, version, values):
    found = made(tmp_path, version, **values)
    for one in found.values():
        if one["apiVersion"] not in OWN:
            kubernetes_validate.validate(one, version, strict=True)
    linted = helm(tmp_path, "lint", "--strict", **values)
    assert linted.returncode == 0, linted.stdout


def test_all_datacenters_get_the_same_settings_and_these_name_every_pod(tmp_path):
    texts, pods = set(), set()
    for datacenter in ("east", "west", "witness"):
        found = made(tmp_path, datacenter=datacenter, **SYSTEM)
        topology = topology_in(found, datacenter)
        texts.add(found["ConfigMap", f"{datacenter}-photon"]["data"]["photon.toml"])
        for (kind, name), one in found.items():
            if kind == "StatefulSet":
                service = one["spec"]["serviceName"]
                assert ("Service", service) in found and ("PodDisruptionBudget", name) in found
                pods |= {f"{name}-{n}.{service}." for n in range(one["spec"]["replicas"])}
    assert len(texts) == 1
    assert {process.address.split("photon.")[0] for process in topology.processes()} == pods
    assert len(pods) == 5 + 3 + 3 + 3
    assert topology.settings.dispatcher.workers == 4 and topology.settings.foreign.id == "click.id"


def test_each_pod_starts_the_process_of_its_number(tmp_path):
    found = made(tmp_path, datacenter="west", **SYSTEM)
    topology = topology_in(found, "west")
    told = tmp_path / "bin" / "photon"
    told.parent.mkdir()
    told.write_text('#!/bin/sh\necho "$@"\n')
    told.chmod(0o755)
    started = {}
    for (kind, name), one in found.items():
        for number in range(one["spec"]["replicas"] if kind == "StatefulSet" else 0):
            [container] = one["spec"]["template"]["spec"]["containers"]
            environment = {"HOSTNAME": f"{name}-{number}", "PATH": f"{told.parent}:{os.environ['PATH']}"}
            command = [*container["command"], *container["args"]]
            done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
            role, serve, config, path, option, process = done.stdout.split()
            assert (serve, config, path, option) == ("serve", "--config", "/etc/photon/photon.toml", "--name")
            host = f"{name}-{number}.{one['spec']['serviceName']}.{WEST['domain']}"
            port = container["ports"][0]["containerPort"]
            assert {"name": "PHOTON_ADDRESS", "value": f"127.0.0.1:{port}"} in container["env"]
            started[role, process] = f"{host}:{port}"
    west = {(p.role, p.name): p.address for p in topology.processes() if p.datacenter == "west"}
    assert started == west


def test_a_pod_is_asked_by_the_settings_it_was_started_with_and_is_never_killed_for_being_unready(tmp_path):
    """The ConfigMap's new text is in all its mounts at once, before it is each pod's turn to restart."""
    for (kind, _), one in made(tmp_path).items():
        if kind != "StatefulSet":
            continue
        spec = one["spec"]["template"]["spec"]
        [prepare], [container] = spec["initContainers"], spec["containers"]
        mounts = {mount["mountPath"]: mount for mount in container["volumeMounts"]}
        assert "settings" not in {mount["name"] for mount in mounts.values()}
        settings = mounts["/etc/photon/photon.toml"]
        assert (settings["name"], settings["subPath"]) == ("run", "photon.toml")
        assert "/run/photon/photon.toml" in prepare["args"][0]
        assert "startupProbe" not in container and "livenessProbe" not in container


def test_a_pod_that_can_not_become_ready_does_not_keep_its_node_from_being_drained(tmp_path):
    """But of a registry's replicas a majority goes before."""
    asked = "unhealthyPodEvictionPolicy"
    budgets = {
        name: one["spec"] for (kind, name), one in made(tmp_path).items() if kind == "PodDisruptionBudget"
    }
    assert {name for name, spec in budgets.items() if spec.get(asked) == "AlwaysAllow"} == {
        "east-eventstore",
        "east-joiner",
        "east-dispatcher",
    }
    alone = made(tmp_path, datacenter="witness", **SYSTEM)["PodDisruptionBudget", "witness-registry"]
    assert alone["spec"][asked] == "AlwaysAllow"


def test_no_pod_runs_as_root_or_may_become_it(tmp_path):
    for (kind, _), one in made(tmp_path).items():
        if kind != "StatefulSet":
            continue
        spec = one["spec"]["template"]["spec"]
        assert spec["securityContext"]["runAsNonRoot"] and not spec["automountServiceAccountToken"]
        for container in spec["containers"] + spec["initContainers"]:
            context = container["securityContext"]
            assert context["readOnlyRootFilesystem"] and not context["allowPrivilegeEscalation"]
            assert context["capabilities"] == {"drop": ["ALL"]}


def test_an_image_is_named_by_its_digest_where_there_is_one(tmp_path):
    digest = f"sha256:{'0' * 64}"
    found = made(tmp_path, image={"digest": digest})
    images = {
        container["image"]
        for (kind, _), one in found.items()
        if kind == "StatefulSet"
        for container in one["spec"]["template"]["spec"]["containers"]
    }
    assert images == {f"photon-joiner@{digest}"}


@pytest.mark.parametrize(
    ("values", "why"),
    [
        ({"datacenter": "mars"}, "datacenter 'mars' is not among datacenters: east"),
        ({"datacenters": {"east": {"registry": ["r0"]}}}, "three at least"),
        ({"datacenters": {"west": WEST | {"registry": ["r0"]}}}, "two registry replicas have one name"),
        (
            {"datacenters": {"east": {"domain": "other.svc.cluster.local"}}},
            "under photon.svc.cluster.local: name that as its domain, or install with --namespace other",
        ),
    ],
)
def test_a_system_that_can_not_be_is_refused_before_anything_is_made(tmp_path, values, why):
    done = helm(tmp_path, "template", "photon", "--kube-version", "1.31", **values)
    assert done.returncode == 1 and why in done.stderr
