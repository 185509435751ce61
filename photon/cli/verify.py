"""`photon verify`: accounts for every foreign event, from logs and registry (docs/verification.md)."""

import contextlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from photon.cli.options import json_flag, logs_option, parse_time_us, path_option, work_option
from photon.cluster.ledgers import known_to
from photon.cluster.registry_access import Asked, Named, asked_registry
from photon.cluster.statuses import working
from photon.cluster.topology import Topology, load_alike, read_topology
from photon.core.errors import UsageError
from photon.core.settings import Settings, load_settings
from spark.options import SparkOptions, scan_timeout_option, spark_options
from spark.verification.rules import SETTLE_S

if TYPE_CHECKING:
    from spark.verification.verify import Question


@click.command("verify")
@logs_option("foreign")
@click.option(
    "--out", multiple=True, required=True, metavar="DIR", help="The --out of `photon join`; repeatable."
)
@path_option("--config", help="Settings (photon.toml) of the system, or of a run that is not here.")
@click.option(
    "--primary",
    multiple=True,
    metavar="GLOB",
    help="Primary logs; repeatable. With them: which events could have been joined, and are the primaries "
    "inside those of the logs?",
)
@work_option("State of the run: settings, registry, ledgers  [default: OUT/.photon, if there]")
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
    from spark.verification.rules import Span, as_table
    from spark.verification.verify import Question, engine_for, verify

    span = Span(
        None if start is None else parse_time_us(start, "--from"),
        None if end is None else parse_time_us(end, "--to"),
    )
    if given["export"] and (work is not None or registry is not None):
        raise UsageError("--export: the registry itself or an export of it is asked, not both")
    run = _Run.named(work, out, registry is not None or bool(given["export"]))
    settings = run.settings(config) if run else load_settings(config)
    question = Question(out=out, span=span, scan_timeout_s=scan_timeout, **given)
    question.check()
    began = time.monotonic()
    with working("verifying"), _asked(run, registry, settings, question) as asked:
        question = replace(question, registry=None if asked is None else asked.registry)
        if run:
            known = known_to(question, run.topology, run.work)
            over = asked is not None and asked.started and run.topology.drain
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


@dataclass(frozen=True, slots=True)
class _Run:
    work: Path
    topology: Topology

    @classmethod
    def named(cls, work: Path | None, outs: tuple[str, ...], elsewhere: bool) -> "_Run | None":
        """The run of --work; or that in the first --out, if the registry is not named otherwise; or none."""
        own = Path(outs[0]) / ".photon"
        if work is None and (elsewhere or not (own / "topology.json").is_file()):
            return None
        work = (work or own).absolute()
        return cls(work, read_topology(work / "topology.json"))

    def settings(self, config: Path | None) -> Settings:
        """The run's own. SettingsError for a file that reads events otherwise."""
        if config is not None:
            load_alike(config, self.topology.settings, self.work)
        return self.topology.settings


@contextmanager
def _asked(
    run: _Run | None, registry: str | None, settings: Settings, question: "Question"
) -> Iterator[Asked | None]:
    """The registry that was named, or the run's; none for an export, or where nobody named any."""
    named = Named(None if run is None else run.work, registry, settings)
    with contextlib.ExitStack() as held:
        asks = not question.export and (run or registry is not None or settings.replicas)
        yield held.enter_context(asked_registry(named)) if asks else None
