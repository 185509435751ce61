"""`photon logmap`: log file maps built by Spark, and loaded into an event store (docs/logmap.md)."""

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import click

from photon.cli.options import json_flag, logs_option, path_option
from photon.cluster.registry_access import notice
from photon.core.settings import load_settings
from spark.options import SparkOptions, check_requirements, spark_options

_DIRECTORY: Final = click.Path(path_type=Path, file_okay=False)
_MEANINGS: Final = {
    "new": "logs that were not known",
    "grown": "known logs that had grown",
    "gone": "known logs that are gone or hold something else now",
    "bytes": "bytes of logs that were read",
    "files": "logs",
    "events": "primary events",
    "malformed": "malformed lines",
    "entries": "entries of the map",
}


@click.group("logmap")
def logmap() -> None:
    """Log file maps, built by Spark from logs too large for one reader, and loaded into an event store."""


@logmap.command("build")
@logs_option("primary")
@click.option(
    "--map",
    "directory",
    required=True,
    type=_DIRECTORY,
    help="The built map; made if there is none, else what the logs have gained is added.",
)
@path_option("--config", help="Settings (photon.toml) of the pipelines.")
@json_flag("Print the summary as JSON.")
@spark_options
def build_command(
    primary: tuple[str, ...], directory: Path, config: Path | None, as_json: bool, spark: SparkOptions
) -> None:
    """Build the log file map of primary logs, or add to it what they have gained since.

    On a cluster every executor must see the logs and the map by the same names.
    """
    from spark.session import open_session

    settings = load_settings(config)
    check_requirements()
    from spark.logmap import build, local_names

    local_names(primary)  # a typo costs no time
    began = time.monotonic()
    with open_session(spark) as session:
        built = build(session, primary, directory, settings)
    _tell({**built.as_document(), "seconds": round(time.monotonic() - began, 2)}, as_json)


@logmap.command("load")
@click.option("--map", "built", required=True, type=_DIRECTORY, help="What `photon logmap build` wrote.")
@click.option(
    "--into",
    required=True,
    type=_DIRECTORY,
    help="The map of an event store that does not run: WORK/DATACENTER/eventstore/map.",
)
@click.option(
    "--dead-letters",
    type=_DIRECTORY,
    help="Where that datacenter's dead letters are (OUT/dead-letters/DATACENTER): malformed lines go there.",
)
@path_option("--config", help="Settings (photon.toml) of the pipelines.")
@json_flag("Print the summary as JSON.")
def load_command(
    built: Path, into: Path, dead_letters: Path | None, config: Path | None, as_json: bool
) -> None:
    """Make a built map the map of an event store: it serves all that is in it at once, and reads on behind.

    Run it where the event store runs, before its first start. Needs no Spark.
    """
    from eventstore.built_map import load

    began = time.monotonic()
    loaded = load(built, into, load_settings(config), dead_letters)
    _tell({**loaded.as_document(), "seconds": round(time.monotonic() - began, 2)}, as_json)
    for name in loaded.missing:
        notice(
            f"{name} is not there, nor under another name in its directory; what the map knew of it "
            "is left out, and the event store reads it as a new log if it finds it"
        )
    if loaded.malformed and dead_letters is None:
        notice(
            f"{loaded.malformed} malformed lines are counted, not among the dead letters "
            f"(--dead-letters); they stand in {built}/generation-*/malformed-*.jsonl"
        )


def _tell(document: Mapping[str, Any], as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(document))
        return
    for name, meaning in _MEANINGS.items():
        if name in document:
            click.echo(f"{name:<10}{document[name]:>14,}   {meaning}")
    click.echo(f"{'seconds':<10}{document['seconds']:>14,}")
