"""Who runs where in `photon dev`: as in section 4 of the paper, unless the settings say otherwise."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, TypeVar

from photon.cluster.local_cluster import placed
from photon.cluster.registry_replicas import members_of
from photon.cluster.topology import Topology, check_processes, topology_of, unplaced
from photon.core.disk import make_directory
from photon.core.errors import UsageError
from photon.core.settings import PIPELINE_ROLES, DatacenterPlace, Settings
from photon.rpc.network import is_loopback

REPLICAS: Final = 5
REGIONS: Final[Mapping[str, str]] = {
    "east": "us-east",
    "east-2": "us-east",
    "west": "us-west",
    "west-2": "us-west",
    "central": "central",
}
"""Datacenter -> region: no region holds a majority of five replicas."""
PIPELINE_SITES: Final = ("east", "west", "central", "east-2", "west-2")
_FEW_REPLICAS: Final = {1: ("east",), 3: ("east", "west", "central")}
"""A region each."""
_MORE_SITES: Final = (*REGIONS, "central", "west", "central", "east")
"""Of five replicas and more: no region gets a majority of 5, 7 or 9."""

_Place = TypeVar("_Place", bound=DatacenterPlace)


def plan_dev(
    settings: Settings,
    work: Path,
    out: Path,
    primary: Sequence[str],
    foreign: Sequence[str],
    datacenters: int,
    rng: random.Random,
    replicas: int = REPLICAS,
) -> Topology:
    """The system that the settings describe, or else `datacenters` pipelines and `replicas` replicas.

    `primary`, `foreign`: what all pipelines read; none: each reads its own `logs_of`. Ports are chosen free.
    UsageError for a system that is not all on this machine; UnavailableError without free ports.
    """
    if settings.replicas or settings.datacenters:
        return _described(settings, work, out, primary, foreign)
    settings = replace(settings, registry=replace(settings.registry, replicas=replicas))
    members = members_of(work, replicas)
    topology = replace(unplaced(settings, primary, foreign, out, drain=False), regions=dict(REGIONS))
    sites = replica_sites(members.names, replicas)
    topology = placed(topology, members, sites, PIPELINE_SITES[:datacenters], work, rng)
    pipelines = [
        _read_by(each, work, each.datacenter, topology.primary, topology.foreign)
        for each in topology.pipelines
    ]
    topology = replace(topology, pipelines=pipelines)
    check_processes(topology)
    return topology


def logs_of(work: Path, datacenter: str) -> Path:
    """A datacenter's own copy of the generated logs: `queries` and `clicks` in it."""
    return work.absolute() / f"logs-{datacenter}"


def fed_datacenters(topology: Topology, work: Path) -> list[str]:
    """Whose logs the generator has to write."""
    return [p.datacenter for p in topology.pipelines if p.primary == (_patterns(work, p.datacenter)[0],)]


def make_logs(topology: Topology, work: Path) -> None:
    """The directories that the generator has to fill."""
    for name in fed_datacenters(topology, work):
        for kind in ("queries", "clicks"):
            make_directory(logs_of(work, name) / kind)


def named_replicas(document: Mapping[str, Any]) -> int:
    """`registry.replicas` where checked settings name it (that of a join is 3 by default), else REPLICAS."""
    named: int = document.get("registry", {}).get("replicas", REPLICAS)
    return named


def replica_sites(names: Sequence[str], replicas: int) -> dict[str, str]:
    """Replica -> datacenter. One that takes another's place is where one is free."""
    sites = _FEW_REPLICAS.get(replicas) or _MORE_SITES[:replicas]
    founders = dict(zip((f"r{number}" for number in range(replicas)), sites, strict=True))
    free = [site for name, site in founders.items() if name not in names]
    new = [name for name in names if name not in founders]
    return founders | dict(zip(new, free, strict=False))


def _patterns(work: Path, datacenter: str) -> tuple[str, str]:
    logs = logs_of(work, datacenter)
    return str(logs / "queries" / "*.jsonl"), str(logs / "clicks" / "*.jsonl")


def _described(
    settings: Settings, work: Path, out: Path, primary: Sequence[str], foreign: Sequence[str]
) -> Topology:
    places = {
        name: _read_by(place, work, name, primary, foreign) for name, place in settings.datacenters.items()
    }
    system = replace(settings.system, work=str(work.absolute()), out=str(out.absolute()))
    topology = topology_of(replace(settings, system=system, datacenters=places))
    check_on_this_machine(topology)
    return topology


def _read_by(place: _Place, work: Path, name: str, primary: Sequence[str], foreign: Sequence[str]) -> _Place:
    """The given logs; else those of the settings; else the generated ones."""
    if not place.joiners or (not primary and (place.primary or place.foreign)):
        return place
    queries, clicks = _patterns(work, name)
    return replace(place, primary=tuple(primary) or (queries,), foreign=tuple(foreign) or (clicks,))


def check_on_this_machine(topology: Topology) -> None:
    """UsageError for an address that is not of loopback."""
    addresses = {f"replica {r.name}": [r.grpc, r.raft] for r in topology.replicas}
    for pipeline in topology.pipelines:
        addresses[f"datacenter {pipeline.datacenter}"] = [
            address for role in PIPELINE_ROLES for address in pipeline.addresses(role)
        ]
    for who, its in addresses.items():
        for address in its:
            if not is_loopback(address):
                raise UsageError(
                    f"{who}: {address} is not of this machine; `photon dev` runs a whole system on "
                    "loopback addresses. Start the roles by `photon <role> serve --config` where they belong"
                )
