"""`photon backfill`: joins old logs as a Spark job, beside what runs (docs/backfill.md)."""

import json
import os
import re
import shutil
import signal
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from photon.cli.options import config_option, json_flag, logs_option, path_option, run_in, work_option
from photon.cluster.preflight import check_not_matched
from photon.cluster.registry_access import Named, asked_registry, notice
from photon.cluster.statuses import working
from photon.cluster.topology import load_alike, read_topology
from photon.connect.copies import patterns_of
from photon.connect.importer import copy_all, copying
from photon.connect.uris import is_known_source
from photon.core.errors import UsageError
from photon.core.fates import Fate
from photon.core.settings import OUTPUT_FORMATS, Settings, load_settings
from spark.backfill.job import Phase, Place
from spark.options import SparkOptions, check_requirements, spark_options

if TYPE_CHECKING:
    from spark.backfill.run import Order

_COPIES: Final = "copies"
"""Of Kafka topics and tables."""
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_KILL_AT: Final = "PHOTON_BACKFILL_KILL_AT"
"""For tests: the process kills itself at that point."""


@click.command("backfill")
@logs_option("primary", sources="Kafka, S3, CSV, Parquet")
@logs_option("foreign", sources="Kafka, S3, CSV, Parquet")
@path_option("--out", required=True, help="The --out of `photon join`.")
@work_option("Work directory of the run; without --registry OUT/.photon, where that is there.")
@click.option("--registry", "addresses", metavar="ADDR,...", help="gRPC addresses of its replicas.")
@config_option("Settings (photon.toml) of that run, or system.")
@click.option("--datacenter", default="backfill", show_default=True, help="Names the output's directory.")
@click.option(
    "--format",
    "output_format",
    type=click.Choice(OUTPUT_FORMATS),
    default="jsonl",
    show_default=True,
    help="Of the joined logs.",
)
@click.option("--follow", "follows", is_flag=True, help="Go on with what the logs gain, until it is stopped.")
@click.option("--abandon", is_flag=True, help="Give an unfinished backfill up; others may join its events.")
@json_flag("Print the summary as JSON; with --follow one of each batch, a line.")
@spark_options
def command(
    primary: tuple[str, ...],
    foreign: tuple[str, ...],
    out: Path,
    work: Path | None,
    addresses: str | None,
    config: Path | None,
    datacenter: str,
    output_format: str,
    follows: bool,
    abandon: bool,
    as_json: bool,
    spark: SparkOptions,
) -> int:
    """Join the events of old logs that nobody has joined yet; write each exactly once. With --follow, those
    of growing ones, too, as a Structured Streaming job.

    Output: OUT/joined/<datacenter>/backfill-*, complete files that its manifest lists, and OUT/dead-letters.
    Live pipelines on the same registry may run meanwhile, over the same logs too. A backfill that was stopped
    or killed is resumed by the same command.
    """
    if not _NAME.fullmatch(datacenter):
        raise UsageError(f"--datacenter '{datacenter}': letters, digits, '.', '_' and '-' only")
    if work is None and addresses is None:
        work = run_in(out)
    settings = _settings(config, work)
    place = Place(out, datacenter)
    written = (
        place.joined / "backfill-000000.jsonl",
        place.letters / "foreign-backfill-000000.jsonl",
        place.staging / "joined-000000.jsonl",
    )
    given, copies = {"primary": primary, "foreign": foreign}, place.home / _COPIES
    # Other URIs are Spark's to read.
    logs = {side: patterns_of(copies, side, texts, is_known_source) for side, texts in given.items()}
    check_not_matched([*logs["primary"], *logs["foreign"]], written, "this backfill")
    if not abandon:
        check_requirements()
    with asked_registry(Named(work, addresses, settings)) as asked:
        from spark.backfill.follow import load_followed
        from spark.backfill.run import Order, backfill
        from spark.session import open_session

        patterns = tuple(logs["primary"]), tuple(logs["foreign"])
        order = Order(*patterns, place, output_format, asked.registry, settings)
        if abandon:
            return _abandon(order, as_json)
        imported = {side: list(filter(is_known_source, texts)) for side, texts in given.items()}
        if follows:
            return _follow(order, spark, imported, copies, as_json)
        if load_followed(place) is not None:
            raise UsageError(f"{place.home} follows logs; go on with --follow, or name another --datacenter")
        job = place.load()
        if job is None or job.phase is Phase.DONE:  # what an unfinished one reads does not change
            copy_all(imported, copies, settings, notice)
        with working("joining"):
            summary = backfill(order, lambda: open_session(spark), notice, _checkpoint)
    _print(summary, place, as_json)
    return 0


def _follow(
    order: "Order", spark: SparkOptions, imported: Mapping[str, list[str]], copies: Path, as_json: bool
) -> int:
    from spark.backfill.follow import follow
    from spark.session import open_session
    from spark.streaming import SESSION_CONF

    def told(number: int, summary: dict[str, Any]) -> None:
        counts = {fate.value: summary[fate.value] for fate in Fate if summary[fate.value]}
        shown = ", ".join(f"{count:,} {fate}" for fate, count in counts.items())
        line = f"batch {number}: {shown or 'no foreign event'} in {summary['seconds']:.1f} s"
        click.echo(json.dumps({"batch": number, **summary}) if as_json else line)

    failed: list[BaseException] = []
    with copying(imported, copies, order.settings, notice, failed.append):
        begin = partial(open_session, spark.with_defaults(SESSION_CONF))
        follow(order, begin, told, notice, _checkpoint, lambda: not failed)
    if failed:
        raise failed[0]
    return 0


def _abandon(order: "Order", as_json: bool) -> int:
    from spark.backfill.follow import abandon_followed, load_followed
    from spark.backfill.publishing import FENCE_WAIT_S_MAX, abandon
    from spark.backfill.run import locked

    place = order.place
    with locked(place), order.registry.client(FENCE_WAIT_S_MAX) as client:
        if load_followed(place) is not None:
            given_up = abandon_followed(order, client, notice)
            if given_up is None:
                raise UsageError(f"{place.home}: no unfinished batch to abandon; run it again with --follow")
            told = f"released {given_up.released:,} events; with --follow it goes on, and joins them anew"
            click.echo(json.dumps({"released": given_up.released}) if as_json else told)
            return 0
        job = place.load()
        if job is None:
            raise UsageError(f"{place.home}: no unfinished backfill to abandon")
        if job.phase is Phase.DONE:
            raise UsageError(
                f"{place.home}: no unfinished backfill to abandon, this one is done; if joined files were "
                "lost, `photon recover --gone-for-good` has their events joined again"
            )
        done = abandon(job, place, client, notice)
        shutil.rmtree(place.staging, ignore_errors=True)
        place.put_away(job, "abandoned")
    told = f"released {done.released:,} events; {done.kept} of {job.buckets} buckets stay published"
    document = {"released": done.released, "published_buckets": done.kept}
    click.echo(json.dumps(document) if as_json else told)
    return 0


def _settings(config: Path | None, work: Path | None) -> Settings:
    """Those of the run, where it is known: events that are read otherwise would be joined twice."""
    if work is None:
        settings = load_settings(config)
    else:
        runs = read_topology(work / "topology.json").settings
        settings = runs if config is None else load_alike(config, runs, work)
    if settings.joiner.mark_matched:
        raise UsageError(
            "'joiner.mark_matched' is set, and a backfill marks nothing: what it joins could be called "
            "unmatched; join these logs by `photon join` or the running system"
        )
    return settings


def _checkpoint(where: str) -> None:
    if os.environ.get(_KILL_AT) == where:
        os.kill(os.getpid(), signal.SIGKILL)


def _print(summary: Mapping[str, Any], place: Place, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(summary))
        return
    click.echo(f"{summary['foreign_events']:,} foreign events in {summary['seconds']:.1f} s")
    for fate in (fate for fate in Fate if fate is not Fate.PENDING):
        click.echo(f"  {fate:<14}{summary[fate.value]:>12,}")
    click.echo(f"joined logs:   {place.joined}")
    click.echo(f"dead letters:  {place.letters}")
