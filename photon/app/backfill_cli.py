"""`photon backfill`."""

import click


@click.command("backfill")
def command() -> int:
    raise click.UsageError("not here yet")
