"""`photon generate`: seeded query and click logs with their ground truth, at once or as a live stream.

OUT/queries/*.jsonl (primary), OUT/clicks/*.jsonl (foreign), one log for each server process, and
OUT/truth.json.
"""

import json
import signal
import threading
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import click

from photon.cli.options import json_flag, path_option
from photon.core.clock import SystemClock
from photon.core.errors import UsageError
from photon.core.signals import on_signals
from photon.dev.feeder import generate_stream
from photon.dev.generated_logs import AtOnce, Mix, Stream, generate_at_once

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _share(name: str, of: str) -> Callable[[_Command], _Command]:
    return click.option(f"--{name}", type=float, default=0.0, metavar="SHARE", show_default=True, help=of)


@click.command("generate")
@path_option("--out", required=True, help="Where the logs go.")
@click.option("--seed", type=int, default=1, show_default=True, help="The same seed gives the same bytes.")
@click.option("--queries", type=int, help="How many queries, at once.  [default: 100000]")
@click.option("--clicks", type=int, help="How many clicks, at once.  [default: a fifth of the queries]")
@click.option("--start-us", type=int, help="Time of the first query, at once.  [default: 1700000000000000]")
@click.option(
    "--span", "span_s", type=float, help="Seconds from the first query to the last, at once.  [default: 3600]"
)
@click.option("--rate", type=float, help="Queries a second: write a stream in real time instead.")
@click.option(
    "--click-rate", type=float, help="Clicks a second, as a stream.  [default: a fifth of the rate]"
)
@click.option("--duration", "duration_s", type=float, help="Seconds the stream lasts.  [default: 60]")
@click.option(
    "--files", type=int, default=8, show_default=True, help="Server processes, a log each, per side."
)
@click.option(
    "--rotate-bytes",
    "file_bytes_max",
    type=int,
    default=64 << 20,
    show_default=True,
    help="A log file's size at most.",
)
@click.option(
    "--opaque-ids", "ids", flag_value="opaque", help="Ids of 32 hex digits instead of ip:pid:timestamp."
)
@_share("duplicates", "Clicks that are logged again, byte for byte.")
@_share("early", "Clicks that come before their query.")
@_share("orphans", "Clicks on queries that are never logged.")
@_share("malformed", "Malformed lines among the clicks.")
@_share("duplicate-queries", "Queries that are logged again.")
@_share("malformed-queries", "Malformed lines among the queries.")
@json_flag("Print the truth as JSON.")
def command(out: Path, as_json: bool, **options: Any) -> None:
    """Write query and click logs with their ground truth: at once, or with --rate as a live stream.

    Nine clicks in ten come within a minute of their query, one in a thousand up to a day later (a stream
    scales that to its duration). Shares are parts of one: 0.01 is one in a hundred.
    """
    truth = run(out, options)
    if as_json:
        click.echo(json.dumps(truth))
        return
    click.echo(f"{out}: {truth['primary_rows']:,} query lines, {truth['foreign_rows']:,} click lines")
    for name in ("distinct_joined_pairs", "orphans", "duplicates", "early", "malformed"):
        click.echo(f"  {name.replace('_', ' '):<22}{truth[name]:>12,}")
    click.echo(f"  truth in {out / 'truth.json'}")


def run(out: Path, options: dict[str, Any]) -> dict[str, Any]:
    """Check the command's options (a missing one is None), generate, and give back the truth's document."""
    given = {name: value for name, value in options.items() if value is not None}
    of_mix, at_once, stream = (
        {field.name: given[field.name] for field in fields(kind) if field.name in given}
        for kind in (Mix, AtOnce, Stream)
    )
    mix = Mix(**of_mix)
    streamed = "rate" in given
    if stray := [*(at_once if streamed else stream)]:
        why = (
            "is for logs written at once, without --rate" if streamed else "is for a stream: give --rate too"
        )
        raise UsageError(f"--{stray[0].removesuffix('_s').replace('_', '-')} {why}")
    if streamed:
        return _stream(out, mix, Stream(**{"click_rate": given["rate"] / 5, **stream}))
    at_once.setdefault("clicks", at_once.get("queries", AtOnce().queries) // 5)
    return generate_at_once(out, mix, AtOnce(**at_once)).document()


def _stream(out: Path, mix: Mix, stream: Stream) -> dict[str, Any]:
    """Until its duration is over or the first SIGINT or SIGTERM: either way the truth is written."""
    stop = threading.Event()
    before = on_signals(stop.set, signal.SIGINT, signal.SIGTERM)
    try:
        return generate_stream(out, mix, stream, SystemClock(), stop.wait, stop.is_set).document()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
