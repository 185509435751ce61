"""`photon verify`: accounts for every foreign event from the logs alone (docs/verification.md)."""

import json
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import click

from photon.core.settings import load_settings


@click.command("verify")
@click.option("--foreign", multiple=True, required=True, metavar="GLOB", help="Foreign logs; repeatable.")
@click.option("--out", required=True, metavar="DIR", help="The --out of `photon join`.")
@click.option("--config", type=click.Path(path_type=Path), help="Settings (photon.toml) of that run.")
@click.option(
    "--primary",
    multiple=True,
    metavar="GLOB",
    help="Primary logs; repeatable. With them: which events could have been joined, and are the primaries "
    "inside those of the logs?",
)
@click.option("--master", default="local[*]", show_default=True, help="Where Spark runs.")
@click.option("--driver-memory", default="1g", show_default=True, help="Memory of Spark's JVM.")
@click.option("--details", default="", metavar="DIR", help="Write every id and its verdict there (Parquet).")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(
    foreign: tuple[str, ...],
    out: str,
    config: Path | None,
    primary: tuple[str, ...],
    master: str,
    driver_memory: str,
    details: str,
    as_json: bool,
) -> int:
    """Check that every foreign event came out once, with the right primary event, or see what became of it.

    Ends with status 1 if an event was joined twice, with the wrong primary event or without being in the
    inputs, or was given up though it can be joined.
    """
    from spark.session import check_requirements, open_session

    settings = load_settings(config)
    check_requirements()
    from spark.verify import Question, verify

    question = Question(foreign, out, primary, details)
    question.check()
    began = time.monotonic()
    with _progress(), open_session(master, driver_memory) as session:
        report = verify(session, question, settings)
    document: dict[str, Any] = {**report.as_document(), "seconds": round(time.monotonic() - began, 2)}
    if as_json:
        click.echo(json.dumps(document))
    else:
        from spark.verdicts import as_table

        click.echo(as_table(report))
        if details:
            click.echo(f"details: {details}")
    return 1 if report.broken else 0


def _progress() -> AbstractContextManager[object]:
    """Something that moves, on a terminal only."""
    from rich.console import Console

    console = Console(stderr=True)
    return console.status("verifying") if console.is_terminal else nullcontext()
