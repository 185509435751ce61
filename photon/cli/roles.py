"""`photon <role> serve`: one process of a system."""

from pathlib import Path

import click

from photon.cli.dispatcher import init
from photon.cli.registry import export, replace_replica, scan

_NAMES = "Datacenter (`east`); the second process of its kind there is `east/1`."


def _group(role: str, text: str, names: str) -> click.Group:
    @click.group(role, help=text)
    def group() -> None:
        pass

    @group.command("serve", help=f"Serve until SIGTERM, which drains; a second one forces. {text}")
    @click.option(
        "--config", type=click.Path(path_type=Path), help="Settings (photon.toml) that name the whole system."
    )
    @click.option(
        "--topology", type=click.Path(path_type=Path), help="In its place: what `photon join` has planned."
    )
    @click.option("--name", required=True, help=names)
    def serve(config: Path | None, topology: Path | None, name: str) -> None:
        from photon.cluster.supervisor import die_with_parent

        die_with_parent()  # before anything that takes time
        from photon.cluster.roles import serve_role
        from photon.cluster.system import read_system

        serve_role(role, read_system(config, topology), name)

    return group


registry = _group(
    "registry", "The IdRegistry: one process hosts a replica of every shard.", "Name of the replica."
)
registry.add_command(replace_replica)
registry.add_command(scan)
registry.add_command(export)
eventstore = _group("eventstore", "The EventStore: finds primary events in cache and logs.", _NAMES)
joiner = _group("joiner", "The joiner: joins, registers, writes.", _NAMES)
dispatcher = _group("dispatcher", "The dispatcher: reads foreign events and keeps them until joined.", _NAMES)
dispatcher.add_command(init)
