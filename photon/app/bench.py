"""`photon bench`: figures of this machine, printed with the machine."""

from typing import Any

import click

from photon.app import bench_join
from photon.app.bench_registry import command as registry


@click.group("bench", invoke_without_command=True)
@bench_join.options
@click.pass_context
def command(context: click.Context, /, **given: Any) -> None:
    """Measure this machine: all of `photon bench join`, or one of the commands below."""
    if context.invoked_subcommand is None:
        bench_join.run(**given)


command.add_command(bench_join.command)
command.add_command(registry)
