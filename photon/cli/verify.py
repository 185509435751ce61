"""`photon verify`: accounts for every foreign event, from logs and registry (docs/verification.md)."""

import contextlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from photon.cli.options import json_flag, logs_option, parse_time_us, path_option
from photon.cluster.registry_access import Named, asked_registry, registry_of
from photon.cluster.statuses import working
from photon.cluster.topology import read_topology
from photon.core.errors import UnavailableError, UsageError
from photon.core.settings import load_settings
from spark.options import SparkOptions, scan_timeout_option, spark_options
from spark.verification.rules import SETTLE_S

if TYPE_CHECKING:
    from idregistry.client import RegistryAt

_PROBE_S: Final = 2.0


@click.command("verify")
@logs_option("foreign")
@click.option(
    "--out", multiple=True, required=True, metavar="DIR", help="The --out of `photon join`; repeatable."
)
@path_option("--config", help="Settings (photon.toml) of that run, or system.")
@click.option(
    "--primary",
    multiple=True,
    metavar="GLOB",
    help="Primary logs; repeatable. With them: which events could have been joined, and are the primaries "
    "inside those of the logs?",
)
@path_option("--work", help="Ask the registry of this work directory.")
@click.option("--registry", metavar="HOST:PORT,...", help="Ask the registry whose replicas answer there.")
@click.option("--export", default="", metavar="DIR", help="Ask an export of the registry.")
@click.option("--from", "start", metavar="TIME", help="Only events of this time or later.")
@click.option("--to", "end", metavar="TIME", help="Only events before this time.")
@click.option(
    "--settle",
    "settle_s",
    type=click.FloatRange(min=0),
    default=SETTLE_S,
    show_default=True,
    metavar="SECONDS",
    help="What was registered so shortly before is in flight, not lost.",
)
@click.option("--details", default="", metavar="DIR", help="Write every id and its verdict there (Parquet).")
@json_flag("Print the report as JSON.")
@scan_timeout_option
@spark_options
def command(
    out: tuple[str, ...],
    config: Path | None,
    work: Path | None,
    registry: str | None,
    start: str | None,
    end: str | None,
    as_json: bool,
    scan_timeout: float,
    spark: SparkOptions,
    **given: Any,
) -> int:
    """Check that every foreign event came out once, with the right primary event, or see what became of it.

    Without --work, --registry or --export the registry of the run in the first --out is asked if it runs; of
    no run, the [replicas] that --config names. Times are ISO 8601, or seconds since 1970.

    Ends with status 1 if an event was lost after it was registered, joined twice, without being registered,
    with the wrong primary event or without being in the inputs, or was given up though it can be joined.
    """
    from spark.options import check_requirements
    from spark.session import open_session

    settings = load_settings(config)
    check_requirements()
    from dataclasses import replace

    from spark.verification.jobs import Span
    from spark.verification.verify import Question, verify

    span = Span(
        None if start is None else parse_time_us(start, "--from"),
        None if end is None else parse_time_us(end, "--to"),
    )
    if given["export"] and (work is not None or registry is not None):
        raise UsageError("--export: the registry itself or an export of it is asked, not both")
    question = Question(out=out, span=span, scan_timeout_s=scan_timeout, **given)
    question.check()
    began = time.monotonic()
    with (
        working("verifying"),
        _registry(Named(work, registry, settings), given["export"], out) as asked,
        open_session(spark) as session,
    ):
        report = verify(session, replace(question, registry=asked), settings)
    document: dict[str, Any] = {**report.as_document(), "seconds": round(time.monotonic() - began, 2)}
    if as_json:
        click.echo(json.dumps(document))
    else:
        from spark.verification.rules import as_table

        click.echo(as_table(report))
        if question.details:
            click.echo(f"details: {question.details}")
    return 1 if report.broken else 0


@contextmanager
def _registry(named: Named, export: str, outs: tuple[str, ...]) -> Iterator["RegistryAt | None"]:
    """The one that was named; or else that of the run in the first --out, if it runs; or none."""
    given = named.work is not None or named.addresses is not None
    topology = Path(outs[0]) / ".photon" / "topology.json"
    if export:
        yield None
    elif not given and topology.is_file():
        yield _running(registry_of(read_topology(topology)))
    elif given or named.settings.replicas:
        with asked_registry(named) as asked:
            yield asked.registry
    else:
        yield None


def _running(registry: "RegistryAt") -> "RegistryAt | None":
    """It, if one of its replicas answers."""
    with contextlib.suppress(UnavailableError), registry.client(_PROBE_S) as client:
        client.directory()
        return registry
    return None
