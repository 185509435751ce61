"""`photon recover`."""

import click


@click.command("recover")
def command() -> int:
    raise click.UsageError("not here yet")
