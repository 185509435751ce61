"""`photon logmap`."""

import click


@click.group("logmap")
def logmap() -> None:
    """Log file maps made by Spark."""
