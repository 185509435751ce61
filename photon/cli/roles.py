"""`photon <role> serve`: one process of a system."""

from pathlib import Path

import click

from photon.cli.dispatcher import init
from photon.cli.options import config_option, path_option
from photon.cli.registry import add_set, export, release_hold, replace_replica, retire_set, scan
from photon.cluster.roles import ROLES, Role, serve_role
from photon.cluster.supervisor import die_with_parent
from photon.cluster.topology import read_system
from photon.core.settings import PIPELINE_ROLES

_NAMES = "Datacenter (`east`); the second process of its kind there is `east/1`."


def _group(role: Role) -> click.Group:
    @click.group(role.name, help=role.text)
    def group() -> None:
        pass

    @group.command("serve", help=f"Serve until SIGTERM, which drains; a second one forces. {role.text}")
    @config_option("Settings (photon.toml) that name the whole system.")
    @path_option("--topology", help="In its place: what `photon join` has planned.")
    @click.option(
        "--name", required=True, help=_NAMES if role.name in PIPELINE_ROLES else "Name of the replica."
    )
    def serve(config: Path | None, topology: Path | None, name: str) -> None:
        die_with_parent()  # before anything that takes time
        serve_role(role.name, read_system(config, topology), name)

    return group


GROUPS = {name: _group(role) for name, role in ROLES.items()}
"""Role -> its command."""
for _command in (replace_replica, add_set, retire_set, release_hold, scan, export):
    GROUPS["registry"].add_command(_command)
GROUPS["dispatcher"].add_command(init)
