"""`photon join`: the whole system embedded on this machine, over existing or growing logs."""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import click

from photon.cli.console import MISSING, is_installed, watch_of
from photon.cli.options import json_flag, logs_option, path_option
from photon.cluster.registry_access import notice
from photon.cluster.statuses import print_summary
from photon.core.errors import UsageError
from photon.core.settings import load_settings

_SHOWN_BYTES: Final = 300


@click.command("join")
@logs_option("primary", sources="Kafka, S3, CSV, Parquet, -")
@logs_option("foreign", sources="Kafka, S3, CSV, Parquet, -")
@path_option("--out", help="Directory of the output.")
@path_option("--config", help="Settings (photon.toml).")
@path_option("--work", help="State to resume from  [default: OUT/.photon]")
@click.option(
    "--datacenters", type=click.IntRange(1, 5), default=1, show_default=True, help="Pipelines to run."
)
@click.option(
    "--sink", "sinks", multiple=True, metavar="URI", help="Publish joined events there, too; repeatable."
)
@click.option("--follow", is_flag=True, help="Go on tailing until Ctrl-C or SIGTERM.")
@click.option("--console", metavar="HOST:PORT", help="With --follow: serve a page there that shows the run.")
@click.option("--check", is_flag=True, help="Make nothing: show what a sample of the events would join with.")
@json_flag("Print the summary as JSON.")
def command(
    out: Path | None, follow: bool, console: str | None, check: bool, as_json: bool, **given: Any
) -> int:
    """Join each foreign event with the primary event it names; write it exactly once.

    Output: OUT/joined/<datacenter>/*.jsonl, and OUT/dead-letters/<datacenter>/*.jsonl for the rest.
    A run that was stopped or killed is resumed by the same command.

    \b
    photon join --primary 'logs/queries/*' --foreign 'logs/clicks/*' --out joined
    photon join --check --config photon.toml --primary 'logs/queries/*' --foreign 'logs/clicks/*'
    """
    if check:
        return _check(as_json, **given)
    if out is None:
        raise click.MissingParameter(param_hint="--out", param_type="option")
    from photon.cluster.run import StalledError, join

    watch = None
    if console is not None:
        if not (follow and is_installed()):
            raise UsageError(MISSING if follow else "--console is for --follow: else the run is soon over")
        watch = watch_of(console, notice)
    try:
        summary = join(out=out, follow=follow, watch=watch, **given)
    except StalledError as error:
        _show(error.summary, out, as_json)
        raise
    _show(summary, out, as_json)
    settled = summary["joined"] + summary["duplicate"] + summary["filtered"]
    nothing = summary["foreign_events"] > 0 and not settled and not follow
    if nothing:
        click.echo("photon: nothing was joined; `photon join --check` shows what a sample finds", err=True)
    lost = summary["lost_bytes"] or summary["lost_records"]
    incomplete = summary["unread_files"] or lost or not summary["adds_up"]
    if follow:
        return 1 if incomplete else 0
    unread = not summary["foreign_events"] and summary["unended_files"]
    if unread:
        click.echo(
            "photon: no foreign event was read: an event is a JSON object on a line of its own, and the line "
            "ends in a newline (`photon init` says what it finds in the logs)",
            err=True,
        )
    if summary["stopped"]:
        click.echo("photon: stopped before all was read and joined; the same command goes on", err=True)
    return 1 if incomplete or nothing or unread or summary["stopped"] or summary["unlisted_files"] else 0


def _show(summary: Mapping[str, Any], out: Path, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(summary))
        return
    print_summary(summary)
    click.echo(f"joined logs:   {out / 'joined'}")
    click.echo(f"dead letters:  {out / 'dead-letters'}")


def _check(
    as_json: bool, primary: Sequence[str], foreign: Sequence[str], config: Path | None, **_: Any
) -> int:
    from photon.cluster.trial import try_join

    trial = try_join(load_settings(config), primary, foreign)
    if as_json:
        pairs = [[one.decode("utf-8", "replace") for one in pair] for pair in trial.pairs]
        click.echo(json.dumps(dataclasses.asdict(trial) | {"pairs": pairs}))
        return 0 if trial.found else 1
    for of_foreign, of_primary in trial.pairs:
        click.echo(f"foreign  {_shown(of_foreign)}\nprimary  {_shown(of_primary)}\n")
    read = "all primary logs" if trial.whole else f"the first {trial.primary:,} primary events"
    share = f" ({trial.found / trial.foreign:.1%})" if trial.foreign else ""
    click.echo(
        f"{trial.found:,} of {trial.foreign:,} foreign events{share} have their primary event in {read}"
    )
    for side, why in trial.malformed.items():
        click.echo(f"no {side} event: {why}")
    if not trial.found:
        click.echo(
            "nothing would be joined: check the fields in photon.toml, or let `photon init` guess them"
        )
    return 0 if trial.found else 1


def _shown(line: bytes) -> str:
    return line[:_SHOWN_BYTES].decode("utf-8", "replace") + ("..." if len(line) > _SHOWN_BYTES else "")
