"""`photon dead-letters list|show|replay`: what was not joined, why, and another try."""

import itertools
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

import click

from photon.cli.options import config_option, json_flag, path_option, work_option
from photon.cluster.dead_letters import (
    FATES,
    REPLAYED,
    Filter,
    count_letters,
    read_letters,
    replay_in,
)
from photon.cluster.topology import Topology, find_system
from photon.connect.rows import place_of
from photon.core.errors import UsageError
from photon.core.fates import Fate

_ROWS_SHOWN: Final = 50


def _which(command: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        json_flag("Print JSON."),
        click.option("--id", "event_id", metavar="ID", help="Only the foreign event of this id."),
        click.option("--reason", default="", metavar="SUBSTRING", help="Only those whose reason has it."),
        click.option("--fate", "fates", multiple=True, type=click.Choice(FATES), help="Repeatable."),
        click.option("--datacenter", help="Only of this one  [default: all]"),
        config_option("Settings (photon.toml) that name the system's [datacenters]."),
        work_option("Work directory of a run here  [default: OUT/.photon]"),
        path_option("--out", help="Output of the run  [default: that of --work or --config]"),
    ):
        command = option(command)
    return command


@click.group("dead-letters")
def dead_letters() -> None:
    """What was not joined, and why: count it, show it, put it before the dispatchers again."""


@dead_letters.command("list")
@_which
def list_letters(as_json: bool, **which: Any) -> None:
    """Count the letters of each datacenter by fate and reason."""
    chosen = _filter(which)
    rows = [
        {"datacenter": directory.name, **row}
        for directory in _directories(which)
        for row in count_letters(directory, chosen)
    ]
    if as_json:
        click.echo(json.dumps(rows))
        return
    for row in rows[:_ROWS_SHOWN]:
        log = " (primary log)" if row["log"] == "primary" else ""
        again = f"  ({row['replayed']:,} replayed)" if row["replayed"] else ""
        click.echo(
            f"{row['datacenter']:<8}{row['count']:>12,}  {row['fate']:<10}  {row['reason']}{log}{again}"
        )
    if len(rows) > _ROWS_SHOWN:
        click.echo(f"and {len(rows) - _ROWS_SHOWN:,} more reasons (--json shows them)")
    if not rows:
        click.echo("no dead letters")


@dead_letters.command("show")
@_which
@click.option("--limit", type=click.IntRange(1), help="At most so many.")
def show_letters(as_json: bool, limit: int | None, **which: Any) -> None:
    """Print letters: with --json as they are kept, an object a line."""

    chosen = _filter(which)
    letters = itertools.chain.from_iterable(map(read_letters, _directories(which)))
    for line, letter in itertools.islice((one for one in letters if chosen.takes(one[1])), limit):
        head = f"{letter.fate.value}: {letter.reason}\n  {place_of(letter.file, letter.offset)}\n  "
        sys.stdout.buffer.write(line if as_json else head.encode() + letter.line() + b"\n")


@dead_letters.command("replay")
@_which
@click.option("--again", is_flag=True, help="Also what was replayed before.")
@click.option(
    "--rate", type=click.IntRange(1), metavar="N", help="So many events a second  [default: at once]"
)
def replay_letters(as_json: bool, again: bool, rate: int | None, **which: Any) -> None:
    """Put events before the dispatchers again: at once where a run is under way, else in the next one.

    Of a system on several machines: on each that has dispatchers, for its own datacenter.

    Without --fate, malformed lines are left out. An event is joined once, however often it is replayed; it
    counts as one more event read, and what is replayed once is left out the next time.
    """
    topology = _topology(which)
    chosen = _filter({**which, "fates": which["fates"] or [fate.value for fate in REPLAYED]})
    counts = {}
    for directory in _directories(which):
        counts[directory.name] = sum(replay_in(topology, directory, chosen, again, rate))
    if as_json:
        click.echo(json.dumps(counts))
        return
    for datacenter, count in counts.items():
        click.echo(f"{datacenter:<8}{count:>12,}  replayed")


def _directories(which: dict[str, Any]) -> Iterator[Path]:
    """Of the letters of each datacenter that is meant. UsageError if there is none."""
    home = (which["out"] or Path(_topology(which).output)) / "dead-letters"
    names = sorted(path.name for path in home.glob("*") if path.is_dir())
    if not names:
        raise UsageError(f"{home}: no dead letters are kept there; name the --out of a run")
    chosen = which["datacenter"]
    if chosen is not None and chosen not in names:
        raise UsageError(f"no dead letters of '{chosen}' in {home}; there are those of: {', '.join(names)}")
    return (home / name for name in ([chosen] if chosen else names))


def _filter(which: dict[str, Any]) -> Filter:
    fates = tuple(Fate(fate) for fate in which["fates"])
    if which["event_id"] is None:
        return Filter(fates, which["reason"])
    path = _topology(which).settings.foreign.id
    return Filter(fates, which["reason"], which["event_id"], path)


def _topology(which: dict[str, Any]) -> Topology:
    out, work, config = which["out"], which["work"], which["config"]
    if out is work is config is None:
        raise UsageError(
            "name the system by one of --out, --work (of a run here) and --config (its photon.toml)"
        )
    return find_system(out / ".photon" if out and work is config is None else work, config)
