"""How commands that look at a running system find it: by its work directory, or by its settings."""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from photon.cluster.topology import Topology
from photon.core.errors import UsageError


def system_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """--work and --config, of which one must be given."""
    with_config = click.option(
        "--config",
        type=click.Path(path_type=Path),
        help="Settings (photon.toml) that name the system's processes: [replicas], [datacenters].",
    )(command)
    return click.option(
        "--work",
        type=click.Path(path_type=Path),
        help="Work directory of a `photon join` or `photon dev` (OUT/.photon).",
    )(with_config)


def find_system(work: Path | None, config: Path | None) -> Topology:
    """UsageError unless one of the two is given, and it tells of a system."""
    from photon.cluster.system import topology_of
    from photon.cluster.topology import read_topology
    from photon.core.settings import load_settings

    if (work is None) == (config is None):
        raise UsageError("name the system by one of --work (of a run here) and --config (its photon.toml)")
    if work is not None:
        return read_topology(work / "topology.json")
    settings = load_settings(config)
    # Replicas alone prove to each other that they have the secret; who asks need not be able to read it.
    asked = dataclasses.replace(settings, system=dataclasses.replace(settings.system, secret_file=""))
    return topology_of(asked, str(config))
