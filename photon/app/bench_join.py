"""`photon bench join`: the whole system measured, part by part, beside what users would take instead."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from photon.app.bench_parts import HALF_LOAD, PARTS, Plan, Row, half_load, steady
from photon.app.bench_peers import PEERS, beside_peers
from photon.app.bench_tables import as_text
from photon.app.machine import describe_machine

NAMES: Final = (*list(PARTS)[:3], HALF_LOAD, *list(PARTS)[3:])
_QUICK_DIVISOR: Final = 20
_QUICK_LIVE_S: Final = 3.0

_Command = TypeVar("_Command", bound=Callable[..., Any])


def options(command: _Command) -> _Command:
    """Those of `photon bench join`, which the bare `photon bench` takes, too."""
    for option in reversed(
        (
            click.option(
                "--dir",
                "directory",
                type=click.Path(path_type=Path),
                default=Path("bench-out"),
                show_default=True,
                help="For logs and output: on the disk that is meant.",
            ),
            click.option(
                "--only", multiple=True, type=click.Choice(NAMES), help="This part; may be repeated."
            ),
            click.option("--queries", type=int, default=1_000_000, show_default=True, help="Catch-up."),
            click.option("--clicks", type=int, default=200_000, show_default=True, help="Catch-up."),
            click.option("--runs", type=int, default=3, show_default=True, help="Of each; medians are told."),
            click.option("--live-seconds", type=float, default=30.0, show_default=True),
            click.option("--quick", is_flag=True, help="A minute, to see that it works, not to compare."),
            click.option(
                "--peers", is_flag=True, help="Also what users would take instead, where installed."
            ),
            click.option(
                "--peer-python",
                "pythons",
                multiple=True,
                metavar="NAME=PATH",
                help=f"The interpreter that has a peer ({', '.join(PEERS)}); this one if not given.",
            ),
            click.option("--json", "as_json", is_flag=True),
        )
    ):
        command = option(command)
    return command


@click.command("join")
@options
def command(**given: Any) -> None:
    """Measure the whole system on generated logs: files to files, start included, every output checked.

    catch-up: `photon join` over existing logs. steady: the middle 80 % of a run with few primaries and many
    foreign events. live: from a click's line written to its joined line readable, 2,000 queries/s and 400
    clicks/s; half-load: the same at half of the steady rate. memory: peaks over logs of one length and of
    ten. lookups: what looking up before sending saves two datacenters. fsync: its price. fast-path: live
    with it and without.
    """
    run(**given)


def run(
    directory: Path,
    only: tuple[str, ...],
    queries: int,
    clicks: int,
    runs: int,
    live_seconds: float,
    quick: bool,
    peers: bool,
    pythons: tuple[str, ...],
    as_json: bool,
) -> None:
    """Measure, and print. BenchError for a wrong output; UsageError for a peer's interpreter that is none."""
    plan = Plan(directory, queries, clicks, runs=runs, live_seconds=live_seconds)
    if quick:
        plan = Plan(
            directory,
            queries // _QUICK_DIVISOR,
            clicks // _QUICK_DIVISOR,
            plan.steady_queries // _QUICK_DIVISOR,
            plan.steady_clicks // _QUICK_DIVISOR,
            runs=1,
            live_seconds=_QUICK_LIVE_S,
        )
    report: dict[str, Any] = {"machine": {**describe_machine(), "load": round(os.getloadavg()[0], 1)}}
    for name in NAMES:
        if name in only or not (only or peers):
            click.echo(f"measuring {name} ...", err=True)
            report[name] = _measured(name, plan, report)
    if peers:
        report["peers"] = beside_peers(
            plan, pythons, lambda what: click.echo(f"measuring {what} ...", err=True)
        )
    click.echo(json.dumps(report) if as_json else as_text(report))


def _measured(name: str, plan: Plan, report: dict[str, Any]) -> list[Row]:
    if name != HALF_LOAD:
        return PARTS[name](plan)
    rate = (report.get("steady") or steady(plan))[0]["joined_per_s"]
    return half_load(plan, rate)
