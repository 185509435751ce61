"""`photon recover`: joins lost events again (docs/recovery.md)."""

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from photon.cli.options import config_option, json_flag, logs_option, path_option, work_option
from photon.cluster.statuses import working
from photon.cluster.topology import Topology, read_topology, settings_of
from photon.core.clock import SystemClock
from photon.core.errors import UsageError
from photon.core.settings import Settings
from spark.options import SparkOptions, scan_timeout_option, spark_options

if TYPE_CHECKING:
    from photon.recovery.recover import Job

_MARK: Final = "run"
"""In the joined logs of each root: whose they are (photon.cluster.preflight)."""


@dataclass(frozen=True, slots=True)
class Options:
    """As they were given."""

    foreign: tuple[str, ...]
    out: tuple[str, ...]
    work: Path | None
    registry: str | None
    config: Path | None
    inbox: Path | None
    datacenter: str | None
    apply: bool
    gone: bool
    details: str
    scan_timeout: float
    as_json: bool


@click.command("recover")
@logs_option("foreign", sources="what the run imported")
@click.option(
    "--out",
    multiple=True,
    metavar="DIR",
    help="The --out of `photon join`, of every datacenter; repeatable. Also where complete files were moved "
    "to  [default: that of --work]",
)
@work_option("State of the run (OUT/.photon).")
@click.option("--registry", metavar="HOST:PORT,...", help="The registry's replicas, instead of --work.")
@config_option(
    "Settings (photon.toml) of the run, with --registry; or of the system whose [replicas] they name."
)
@click.option("--datacenter", metavar="NAME", help="Whose dispatcher gets the events  [default: the first]")
@path_option("--inbox", metavar="DIR", help="A dispatcher's inbox, instead of that.")
@click.option("--apply", is_flag=True, help="Do it. Without it: say what would be done.")
@click.option(
    "--gone-for-good",
    "gone",
    is_flag=True,
    help="What is not in the outputs is deleted, not moved, and no other output was written to: join it "
    "again, were it much, or a backfill's.",
)
@click.option("--details", default="", metavar="DIR", help="Write every id that is missing there (Parquet).")
@scan_timeout_option
@json_flag("Print the report as JSON.")
@spark_options
def command(spark: SparkOptions, **given: Any) -> int:
    """Join again what was registered and is in no joined log, once its joiner can write no more.

    A dry run, unless --apply is given. Ends with status 1 while lost events remain.
    """
    from photon.cluster.registry_access import Named, asked_registry
    from spark.options import check_requirements

    options = Options(**given)
    topology = None if options.work is None else _topology(options.work)
    settings = settings_of(options.config, topology, options.work)  # read otherwise, events seem lost
    if topology is not None:
        options = replace(options, foreign=topology.logs_of("foreign", options.foreign))
    outs = _outs(options, topology, settings)
    job = _job(options, topology, outs)
    check_requirements()
    from photon.recovery.recover import recover
    from photon.recovery.rules import as_text
    from spark.reading.paths import check_new, input_paths
    from spark.recovery import Sources, SparkReading, check_told
    from spark.session import open_session

    check_told(settings)
    input_paths(options.foreign)
    if options.details:
        check_new(options.details)
    began, clock = time.monotonic(), SystemClock()
    named = Named(options.work, options.registry, settings)
    with (
        working("starting") as tell,
        asked_registry(named) as asked,
        asked.registry.client(settings.registry.request_timeout_s, clock) as client,
    ):
        client.configuration()  # before Spark starts: it may not answer
        with open_session(spark) as session:
            sources = Sources(options.foreign, outs, asked.registry, options.scan_timeout)
            reading = SparkReading(session, sources, settings, options.details)
            report = recover(replace(job, ended=asked.started), client, reading, clock, tell)
    seconds = round(time.monotonic() - began, 2)
    if options.as_json:
        click.echo(json.dumps({**report.as_document(), "seconds": seconds}))
    else:
        click.echo(as_text(report))
    return report.status


def _topology(work: Path) -> Topology:
    """UsageError if it is another run's: the one of which this was copied would get the events."""
    topology = read_topology(work / "topology.json")
    for pipeline in topology.pipelines:
        if not Path(pipeline.directory).resolve().is_relative_to(work.resolve()):
            raise UsageError(
                f"{work / 'topology.json'}: its datacenter {pipeline.datacenter} lies in "
                f"{pipeline.directory}, not under {work}: this run was copied or moved; name the --work "
                "where it runs, or move it back"
            )
    return topology


def _outs(options: Options, topology: Topology | None, settings: Settings) -> list[str]:
    """Every directory (or URI) with joined/ in it: what is in one of them is not lost. UsageError."""
    from spark.reading.paths import check_output, is_uri

    own = [*settings.joiner.output_roots, *([topology.output] if topology else [])]
    for root in own:
        if not options.gone and not Path(root, "joined", _MARK).is_file():
            raise UsageError(
                f"{root}: no joined logs of a run are there; mount the disk or bring them back, or say "
                "--gone-for-good if they are deleted"
            )
    for out in options.out:
        check_output(out)
    named = [out if is_uri(out) else str(Path(out).absolute()) for out in [*options.out, *own]]
    outs = list(dict.fromkeys(named))
    if not outs:
        raise UsageError("name the joined logs with --out; each datacenter's, or what is in them seems lost")
    return outs


def _job(options: Options, topology: Topology | None, outs: Sequence[str]) -> "Job":
    from photon.recovery.recover import Job
    from spark.reading.paths import is_uri

    inbox = _inbox(options, topology)
    work = None if options.work is None else options.work.absolute()
    return Job(
        outs=[Path(out) for out in outs if not is_uri(out)],
        work=work,
        inbox=inbox,
        plans=inbox / ".recovery" if work is None else work / "recovery",
        apply=options.apply,
        gone=options.gone,
    )


def _inbox(options: Options, topology: Topology | None) -> Path:
    """UsageError if there is none to put events into."""
    if options.inbox is not None:
        if options.datacenter is not None:
            raise UsageError("say either --inbox or --datacenter")
        if options.apply and not options.inbox.is_dir():
            raise UsageError(
                f"--inbox {options.inbox}: no such directory; name a dispatcher's (docs/operating.md)"
            )
        return options.inbox.absolute()
    if topology is None:
        if options.apply:
            raise UsageError("--apply without --work needs the --inbox of a dispatcher")
        return Path()
    name = options.datacenter or topology.pipelines[0].datacenter
    return topology.pipeline(name).home("dispatcher") / "inbox"
