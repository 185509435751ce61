"""`photon verify`: accounts for every foreign event, from logs and registry (docs/verification.md)."""

import contextlib
import json
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import click

from photon.cli.options import (
    TIME_FORM,
    config_option,
    json_flag,
    logs_option,
    parse_time_us,
    run_in,
    work_option,
)
from photon.cluster.ledgers import known_to
from photon.cluster.registry_access import Named, asked_registry
from photon.cluster.statuses import working
from photon.cluster.topology import read_topology, settings_of
from photon.connect.importer import SIDES
from photon.core.errors import UsageError
from spark.options import ALL, Span, SparkOptions, scan_timeout_option, spark_options
from spark.verification.rules import SETTLE_S


@click.command("verify")
@logs_option("foreign", sources="what the run imported")
@click.option(
    "--out", multiple=True, required=True, metavar="DIR", help="The --out of `photon join`; repeatable."
)
@config_option("Settings (photon.toml) of the system, or of a run that is not here.")
@click.option(
    "--primary",
    multiple=True,
    metavar="GLOB|URI",
    help="Primary logs; repeatable. With them: which events could have been joined, and are the primaries "
    "inside those of the logs?",
)
@work_option("State of the run: settings, registry, ledgers  [default: OUT/.photon, if there]")
@click.option("--registry", metavar="HOST:PORT,...", help="Ask the registry whose replicas answer there.")
@click.option("--export", default="", metavar="DIR", help="Ask an export of the registry.")
@click.option("--from", "start", metavar="TIME", help=f"Only events of this time or later: {TIME_FORM}.")
@click.option("--to", "end", metavar="TIME", help="Only events before this time.")
@click.option(
    "--settle",
    "settle_s",
    type=click.FloatRange(min=0),
    default=SETTLE_S,
    show_default=True,
    metavar="SECONDS",
    help="What was registered so shortly before is in flight, not lost; where all is complete nothing is.",
)
@click.option(
    "--complete",
    is_flag=True,
    help="Every event was to be read and to have its fate by now: what is pending is lost. So it is after a "
    "`photon join` without --follow.",
)
@click.option("--details", default="", metavar="DIR", help="Write every id and its verdict there (Parquet).")
@json_flag("Print the report as JSON.")
@scan_timeout_option
@partial(spark_options, optional=True)
def command(
    out: tuple[str, ...],
    config: Path | None,
    work: Path | None,
    registry: str | None,
    start: str | None,
    end: str | None,
    as_json: bool,
    scan_timeout: float,
    spark: SparkOptions | None,
    **given: Any,
) -> int:
    """Check that every foreign event came out once, with the right primary event, or see what became of it.

    It works in this process, and needs no Java, unless --master names a Spark, a path is a URI, or the logs
    are more than 4 GiB. Without --work, --registry or --export the registry of the run in the first --out
    is asked, and started if the run has ended; of no run, the [replicas] that --config names. Times are ISO
    8601, or seconds since 1970.

    Ends with status 1 if an event was lost, joined twice, without being registered, with the wrong primary
    event or without being in the inputs, or was given up though it can be joined.
    """
    from spark.verification.rules import as_table
    from spark.verification.verify import Question, engine_for, verify

    span = Span(
        ALL.start if start is None else parse_time_us(start, "--from"),
        ALL.end if end is None else parse_time_us(end, "--to"),
    )
    if given["export"] and (work is not None or registry is not None):
        raise UsageError("--export: the registry itself or an export of it is asked, not both")
    elsewhere = registry is not None or bool(given["export"])
    if work is None and not elsewhere:
        work = run_in(out[0])
    work = None if work is None else work.absolute()
    run = None if work is None else read_topology(work / "topology.json")
    settings = settings_of(config, run, work)
    if run is not None:
        given |= {side: run.logs_of(side, given[side]) for side in SIDES}
    question = Question(out=out, span=span, scan_timeout_s=scan_timeout, **given)
    question.check()
    began = time.monotonic()
    with contextlib.ExitStack() as held:
        held.enter_context(working("verifying"))
        asked = None
        if not question.export and (work is not None or registry is not None or settings.replicas):
            asked = held.enter_context(asked_registry(Named(work, registry, settings)))
            question = replace(question, registry=asked.registry)
        if run is not None and work is not None:
            known = known_to(question, run, work)
            over = asked is not None and asked.started and run.drain
            question = replace(known, complete=known.complete or (over and known.positions is not None))
        with engine_for(question, spark) as engine:
            report = verify(engine, question, settings)
    document: dict[str, Any] = {**report.as_document(), "seconds": round(time.monotonic() - began, 2)}
    if as_json:
        click.echo(json.dumps(document))
    else:
        click.echo(as_table(report))
        if question.details:
            click.echo(f"details: {question.details}")
    return 1 if report.broken else 0
