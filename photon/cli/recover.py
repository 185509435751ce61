"""`photon recover`: joins lost events again (docs/recovery.md)."""

import json
import time
from collections.abc import Sequence
from pathlib import Path

import click

from photon.cli.options import config_option, json_flag, logs_option, path_option, work_option
from photon.cluster.preflight import MARK
from photon.cluster.registry_access import Named, asked_registry
from photon.cluster.statuses import working
from photon.cluster.topology import Topology, read_topology, settings_of
from photon.core.clock import SystemClock
from photon.core.errors import UsageError
from photon.core.settings import Settings
from spark.options import SparkOptions, check_requirements, scan_timeout_option, spark_options


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
def command(
    foreign: tuple[str, ...],
    out: tuple[str, ...],
    work: Path | None,
    registry: str | None,
    config: Path | None,
    inbox: Path | None,
    datacenter: str | None,
    apply: bool,
    gone: bool,
    details: str,
    scan_timeout: float,
    as_json: bool,
    spark: SparkOptions,
) -> int:
    """Join again what was registered and is in no joined log, once its joiner can write no more.

    A dry run, unless --apply is given. Ends with status 1 while lost events remain.
    """
    topology = None if work is None else _topology(work)
    settings = settings_of(config, topology, work)  # read otherwise, events seem lost
    if topology is not None:
        foreign = topology.logs_of("foreign", foreign)
    outs = _outs(out, topology, settings, gone)
    inbox = _inbox(inbox, datacenter, topology, apply)
    check_requirements()
    from photon.recovery.recover import Job, recover
    from photon.recovery.rules import as_text
    from spark.reading.paths import check_new, input_paths, is_uri
    from spark.recovery import Sources, SparkReading, check_told
    from spark.session import open_session

    check_told(settings)
    input_paths(foreign)
    if details:
        check_new(details)
    began, clock = time.monotonic(), SystemClock()
    with (
        working("starting") as tell,
        asked_registry(Named(work, registry, settings)) as asked,
        asked.registry.client(settings.registry.request_timeout_s, clock) as client,
    ):
        client.configuration()  # before Spark starts: it may not answer
        with open_session(spark) as session:
            sources = Sources(foreign, outs, asked.registry, scan_timeout)
            reading = SparkReading(session, sources, settings, details)
            job = Job(
                outs=[Path(one) for one in outs if not is_uri(one)],
                work=None if work is None else work.absolute(),
                inbox=inbox,
                plans=inbox / ".recovery" if work is None else work.absolute() / "recovery",
                apply=apply,
                gone=gone,
                ended=asked.started,
            )
            report = recover(job, client, reading, clock, tell)
    seconds = round(time.monotonic() - began, 2)
    if as_json:
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


def _outs(given: Sequence[str], topology: Topology | None, settings: Settings, gone: bool) -> list[str]:
    """Every directory (or URI) with joined/ in it: what is in one of them is not lost. UsageError."""
    from spark.reading.paths import check_output, is_uri

    own = [*settings.joiner.output_roots, *([topology.output] if topology else [])]
    for root in own:
        if not gone and not Path(root, "joined", MARK).is_file():
            raise UsageError(
                f"{root}: no joined logs of a run are there; mount the disk or bring them back, or say "
                "--gone-for-good if they are deleted"
            )
    for out in given:
        check_output(out)
    named = [out if is_uri(out) else str(Path(out).absolute()) for out in [*given, *own]]
    outs = list(dict.fromkeys(named))
    if not outs:
        raise UsageError("name the joined logs with --out; each datacenter's, or what is in them seems lost")
    return outs


def _inbox(inbox: Path | None, datacenter: str | None, topology: Topology | None, apply: bool) -> Path:
    """UsageError if there is none to put events into."""
    if inbox is not None:
        if datacenter is not None:
            raise UsageError("say either --inbox or --datacenter")
        if apply and not inbox.is_dir():
            raise UsageError(f"--inbox {inbox}: no such directory; name a dispatcher's (docs/operating.md)")
        return inbox.absolute()
    if topology is None:
        if apply:
            raise UsageError("--apply without --work needs the --inbox of a dispatcher")
        return Path()
    name = datacenter or topology.pipelines[0].datacenter
    return topology.pipeline(name).home("dispatcher") / "inbox"
