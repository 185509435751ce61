"""`photon millwheel history` and `verify`: a topology over logs that are there (docs/millwheel.md)."""

import json
import tempfile
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from millwheel.computation import BEFORE, NEVER
from millwheel.topology import load_topology
from photon.cli.options import TIME_FORM, duration, json_flag, parse_time_us, path_option, show_time
from photon.cluster.statuses import working
from photon.core.errors import UsageError
from spark.options import Span, SparkOptions, check_requirements, spark_options

if TYPE_CHECKING:
    from spark.history.compare import Verdict

_Command = TypeVar("_Command", bound=Callable[..., Any])


def _input(command: _Command) -> _Command:
    return click.option(
        "--input",
        "given",
        multiple=True,
        metavar="INJECTOR=GLOB|URI",
        help="Logs that are read in place of an injector's own; repeatable.",
    )(command)


def _inputs(given: tuple[str, ...]) -> dict[str, tuple[str, ...]]:
    inputs: dict[str, tuple[str, ...]] = {}
    for text in given:
        injector, equals, pattern = text.partition("=")
        if not equals or not injector or not pattern:
            raise UsageError(f"--input {text}: write INJECTOR=GLOB, for example clicks='old/clicks-*.gz'")
        inputs[injector] = (*inputs.get(injector, ()), pattern)
    return inputs


@click.command("history")
@click.argument("topology", metavar="MODULE:TOPOLOGY")
@_input
@path_option("--out", required=True, help="New directory, for outputs and what a run goes on from.")
@click.option("--goes-on", is_flag=True, help="The logs grow: keep what waits for more, for `run --history`.")
@json_flag("Print the summary as JSON.")
@spark_options
def history(
    topology: str, given: tuple[str, ...], out: Path, goes_on: bool, as_json: bool, spark: SparkOptions
) -> int:
    """Run a topology over the logs that are there, all at once, on Spark.

    The same computations, by the time of the records: no record is late. Lines of sinks are in
    OUT/sinks/<sink>. With --goes-on, `photon millwheel run --history OUT` goes on where this ends, each
    record counted once. Status 1 if there are dead letters (OUT/sinks/dead-letters says why).
    """
    check_requirements()
    from spark.history.run import SESSION_CONF, Recomputed, check_new, recompute
    from spark.session import open_session

    check_new(out)
    made = Recomputed(topology, _inputs(given), goes_on)
    with working("computing"), open_session(spark.with_defaults(SESSION_CONF)) as session:
        summary = recompute(session, made, out)
    if as_json:
        click.echo(json.dumps(summary))
    else:
        _print(summary, out)
    return 1 if summary["dead_letters"] else 0


def shown(counts: Mapping[str, int]) -> str:
    """What a computation has counted, in words."""
    told = [f"{what.replace('_', ' ')} {count:,}" for what, count in counts.items() if count]
    return ", ".join(told) or "nothing"


def _print(summary: dict[str, Any], out: Path) -> None:
    for name, counts in summary["counts"].items():
        mark = summary["low_watermarks"].get(name, NEVER)
        upto = "" if not BEFORE < mark < NEVER else f", low watermark {show_time(mark)}"
        click.echo(f"{name:<20} {shown(counts)}{upto}")
    click.echo(f"{'done':<20} {summary['seconds']:g} s: {out}/sinks")


def _period(ctx: click.Context, param: click.Parameter, value: str) -> float | None:
    if (seconds := duration(ctx, param, value)) == 0:
        raise click.BadParameter(f"{value!r} is no time at all; write 1s or 500ms")
    return seconds


@click.command("spark")
@click.argument("topology", metavar="MODULE:TOPOLOGY")
@path_option("--work", required=True, help="Directory for its state, which all executors see.")
@click.option(
    "--every",
    "every_s",
    metavar="DURATION",
    default="1s",
    show_default=True,
    callback=_period,
    help="So often a batch begins, or when the one before it is done.",
)
@json_flag("Print the summary of each batch as JSON, a line.")
@spark_options
def live_on_spark(topology: str, work: Path, every_s: float, as_json: bool, spark: SparkOptions) -> int:
    """Run a topology live on Spark, as a Structured Streaming job (transformWithState), until it is stopped.

    The same computations, and the same sinks, each line once, some seconds later than by `photon millwheel
    run`. State and timers are in Spark's state below WORK. What is stopped or killed goes on by the same
    command. What Spark can't run is refused.
    """
    check_requirements()
    from spark.history.live import SESSION_CONF, live
    from spark.session import open_session

    def told(batch: dict[str, Any]) -> None:
        if as_json:
            click.echo(json.dumps(batch))
            return
        counts = {name: count.get("records", 0) for name, count in batch["counts"].items()}
        shown = ", ".join(f"{name} {count:,}" for name, count in counts.items() if count)
        click.echo(f"batch {batch['batch']}: {shown or 'timers'} in {batch['seconds']:.1f} s")

    live(topology, work, lambda: open_session(spark.with_defaults(SESSION_CONF)), every_s, told)
    return 0


@click.command("verify")
@click.argument("topology", metavar="MODULE:TOPOLOGY")
@_input
@click.option("--sink", "sinks", multiple=True, metavar="SINK", help="Compare these alone; repeatable.")
@click.option("--from", "start", metavar="TIME", help=f"Compare lines of this time or later: {TIME_FORM}.")
@click.option("--to", "end", metavar="TIME", help="Compare lines before this time.")
@click.option(
    "--warm-up",
    "warm_up_s",
    metavar="DURATION",
    callback=duration,
    help="How far before --from records matter.  [default: all do]",
)
@click.option(
    "--history",
    "histories",
    multiple=True,
    type=click.Path(path_type=Path),
    help="A history that the run went on from, whose lines count as well; repeatable.",
)
@path_option("--scratch", help="Directory that all executors see.  [default: a temporary one]")
@json_flag("Print the verdicts as JSON.")
@spark_options
def verify(
    topology: str,
    given: tuple[str, ...],
    sinks: tuple[str, ...],
    start: str | None,
    end: str | None,
    warm_up_s: float | None,
    histories: tuple[Path, ...],
    scratch: Path | None,
    as_json: bool,
    spark: SparkOptions,
) -> int:
    """Compute again what a topology's sinks should have, and compare: each line, and how often it is there.

    Of a run that goes on give --to, a time that its low watermark has passed (`photon millwheel status`).
    Ends with status 1 if a line is missing or too many. What was late when it came may have made other
    lines; so may code of another version.
    """
    check_requirements()
    from spark.history.compare import check, compare
    from spark.history.run import SESSION_CONF, Recomputed
    from spark.session import open_session

    if warm_up_s is not None and start is None:
        raise UsageError("--warm-up is of --from: give that, too")
    kept = Span(
        BEFORE if start is None else parse_time_us(start, "--from"),
        NEVER if end is None else parse_time_us(end, "--to"),
    )
    first = BEFORE if warm_up_s is None else kept.start - round(warm_up_s * 1e6)
    if scratch is None and not spark.is_local:
        raise UsageError("--scratch: name a directory that all executors see")
    chosen = check(load_topology(topology), sinks, kept)
    made = Recomputed(topology, _inputs(given), read=Span(first, kept.end), kept=kept)
    with working("computing") as say, ExitStack() as opened:
        here = opened.enter_context(tempfile.TemporaryDirectory(prefix="photon-verify-", dir=scratch))
        session = opened.enter_context(open_session(spark.with_defaults(SESSION_CONF)))
        made.run(session, Path(here))
        say("comparing")
        verdicts = compare(made, session, chosen, histories, kept)
    if as_json:
        click.echo(json.dumps({sink: asdict(verdict) for sink, verdict in verdicts.items()}))
    else:
        for sink, verdict in verdicts.items():
            _print_verdict(sink, verdict)
    return 0 if all(verdict.ok for verdict in verdicts.values()) else 1


def _print_verdict(sink: str, verdict: "Verdict") -> None:
    if verdict.ok:
        click.echo(f"{sink:<20} ok: {verdict.equal:,} lines are as they should be")
        return
    click.echo(
        f"{sink:<20} WRONG: {verdict.missing:,} lines missing, {verdict.extra:,} too many, "
        f"{verdict.equal:,} right"
    )
    for what, lines in (("missing", verdict.examples_missing), ("too many", verdict.examples_extra)):
        for line in lines:
            click.echo(f"  {what:<18} {line}")
