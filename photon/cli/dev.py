"""`photon dev`: a system of several datacenters on this machine, to look at and to kill datacenters of."""

import json
from pathlib import Path
from typing import Any, Final

import click

from photon.cli.console import LISTEN, MISSING, is_installed, watch_of
from photon.cli.options import duration, json_flag, path_option
from photon.core.errors import UsageError
from photon.core.settings import forgetting, parse_settings, read_document

DEFAULT_OUT: Final = "photon-dev"


@click.command("dev")
@path_option("--config", help="Settings (photon.toml).")
@path_option(
    "--out", help=f"Directory of the output.  [default: {DEFAULT_OUT}, or system.out of the settings]"
)
@path_option("--work", help="State to resume from  [default: OUT/.photon]")
@click.option("--datacenters", type=click.IntRange(1, 5), help="Pipelines to run.  [default: 2]")
@click.option("--primary", multiple=True, metavar="GLOB", help="Existing primary logs; repeatable.")
@click.option("--foreign", multiple=True, metavar="GLOB", help="Existing foreign logs; repeatable.")
@click.option("--queries-per-s", type=click.FloatRange(1, 200_000), default=1_000.0, show_default=True)
@click.option("--clicks-per-s", type=click.FloatRange(0, 200_000), default=200.0, show_default=True)
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True, help="Of the generated events.")
@click.option(
    "--for", "seconds", metavar="DURATION", callback=duration, help="End by itself after so long, e.g. 60s."
)
@click.option("--kill-datacenter", metavar="NAME", help="Play an outage: SIGKILL all its processes.")
@click.option(
    "--after",
    metavar="DURATION",
    callback=duration,
    default="20s",
    help="The kill, after all was up.  [default: 20s]",
)
@click.option(
    "--restore-after",
    metavar="DURATION",
    callback=duration,
    help="After the kill; without it, it stays down.",
)
@click.option(
    "--millwheel", is_flag=True, help="Count what is joined by country and second, on the page as a graph."
)
@click.option("--console/--no-console", default=True, help="Serve a page that shows it.  [default: yes]")
@click.option("--listen", default=LISTEN, show_default=True, metavar="HOST:PORT", help="Of the page.")
@json_flag("JSON lines: a look a second, at last the summary.")
def command(
    config: Path | None,
    out: Path | None,
    work: Path | None,
    datacenters: int | None,
    kill_datacenter: str | None,
    after: float,
    restore_after: float | None,
    millwheel: bool,
    console: bool,
    listen: str,
    as_json: bool,
    **given: Any,
) -> int:
    """Run several datacenters on this machine and show how they do, until Ctrl-C.

    By default two pipelines, and five registry replicas in five datacenters of three regions; a generator
    writes the same queries and clicks to the logs of both. At the end the output is checked: status 1 if
    something is wrong with it. The same command resumes what is in --work.
    """
    from photon.dev.checks import print_dev_summary
    from photon.dev.doings import Doings, Outage
    from photon.dev.plan import named_replicas
    from photon.dev.run import DevJob, run_dev
    from photon.dev.view import View

    document = forgetting(read_document(config))
    settings = parse_settings(document, str(config))
    described = bool(settings.replicas or settings.datacenters)
    if described and datacenters is not None:
        raise UsageError(f"{config} names the datacenters; leave --datacenters out")
    if restore_after is not None and kill_datacenter is None:
        raise UsageError("--restore-after needs --kill-datacenter NAME")
    outage = None if kill_datacenter is None else Outage(kill_datacenter, after, restore_after)
    if outage is not None and (seconds := given["seconds"]) is not None and seconds < outage.ends_s:
        raise UsageError(
            f"--for {seconds:g}s is over before the outage is, at {outage.ends_s:g}s; give it more"
        )
    if out is None:
        out = Path(settings.system.out if described else DEFAULT_OUT)
    if work is None:
        work = Path(settings.system.work) if described else out / ".photon"
    replicas = len(settings.replicas) or named_replicas(document)
    view, doings, watch = View(as_json), Doings(outage), None
    wheel = work / "millwheel" if millwheel else None
    if console and is_installed():
        watch = watch_of(listen, view.notice, doings, wheel)
    elif console:
        view.notice(f"no page shows this run: {MISSING}")
    job = DevJob(
        out,
        work,
        settings,
        replicas,
        datacenters=datacenters or 2,
        doings=doings,
        watch=watch,
        wheel=wheel,
        **given,
    )
    try:
        summary = run_dev(job, view)
    finally:
        view.close()
    if as_json:
        click.echo(json.dumps({"summary": summary}))
    else:
        print_dev_summary(summary)
        click.echo(f"joined logs:   {out / 'joined'}\nlook closer:   photon status --work {work}")
    return 0 if summary["ok"] else 1
