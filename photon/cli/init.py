"""`photon init`: a photon.toml for the user's own logs, guessed from their first lines."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import click

from photon.cli.options import logs_option, path_option
from photon.connect.importer import fields_of, side_of_stdin
from photon.connect.sample import sampled
from photon.connect.uris import is_csv
from photon.core.errors import UsageError
from photon.core.settings import Settings
from photon.logs.fields import Found, Guess, guess
from photon.logs.sample import Sample, no_json_lines, sample

PRIMARY_LINES: Final = 50_000
FOREIGN_LINES: Final = 2_000
_SHOWN: Final = 12


@click.command("init")
@logs_option("primary", sources="Kafka, S3, CSV, Parquet, -")
@logs_option("foreign", sources="Kafka, S3, CSV, Parquet, -")
@path_option("--config", default=Path("photon.toml"), show_default=True, help="The file to write.")
def command(primary: Sequence[str], foreign: Sequence[str], config: Path) -> int:
    """Write a commented photon.toml: which fields of your logs are the ids, the reference and the times.

    It is guessed from the first lines of each file. Each line of the settings says how sure it is.

    \b
    photon init --primary 'logs/queries/*' --foreign 'logs/clicks/*'
    photon join --check --config photon.toml --primary 'logs/queries/*' --foreign 'logs/clicks/*'
    """
    if config.exists():
        raise UsageError(f"{config}: is there already; remove it, or name another with --config")
    side_of_stdin({"primary": primary, "foreign": foreign})
    of_primary, of_foreign = (
        _lines("primary", primary, PRIMARY_LINES),
        _lines("foreign", foreign, FOREIGN_LINES),
    )
    # Of CSV every value is text, but for the time that the settings name: there are none yet.
    texts = [side for side, named in (("primary", primary), ("foreign", foreign)) if any(map(is_csv, named))]
    found = guess(of_primary.events, of_foreign.events, texts)
    config.write_text(settings_text(found, of_primary, of_foreign), "utf-8")
    told = {
        "primary.id": found.primary_id,
        "primary.time": found.primary_time,
        "foreign.id": found.foreign_id,
        "foreign.primary_id": found.foreign_primary_id,
        "foreign.time": found.foreign_time,
    }
    for setting, one in told.items():
        click.echo(f"{setting:<20}{_told(one)}")
    click.echo(f"written: {config}; next: photon join --check --config {config} --primary ... --foreign ...")
    needed = (found.primary_id, found.foreign_id, found.foreign_primary_id)
    return 0 if all(needed) else 1


def _lines(side: str, patterns: Sequence[str], lines: int) -> Sample:
    """UsageError where none is a JSON object."""
    with sampled(patterns, fields_of(Settings(), side), lines) as first:
        found = sample(first.patterns, lines)
    if not found.events:
        raise UsageError(f"--{side} {' '.join(patterns)}: {no_json_lines(found.first)}")
    return found


def _told(found: Found | None) -> str:
    if found is None:
        return "not found: fill it in"
    return f"{found.path}  ({'' if found.sure else 'perhaps: '}{found.why})"


def settings_text(found: Guess, primary: Sample, foreign: Sample) -> str:
    """The file, which loads: what was not found stands in a comment."""
    lines = [
        f"# By photon init, from {len(primary.events):,} primary and {len(foreign.events):,} foreign lines.",
        "# All settings: docs/configuration.md",
        "",
        "[primary]",
        _line("id", found.primary_id, "who reads it must know which event it is"),
        *_time(found.primary_time),
        f"# fields: {', '.join(found.fields['primary'][:_SHOWN])}",
        "",
        "[foreign]",
        _line("id", found.foreign_id, "each event has one of its own: it is joined once"),
        _line("primary_id", found.foreign_primary_id, "names the primary event"),
        *_time(found.foreign_time),
        f"# fields: {', '.join(found.fields['foreign'][:_SHOWN])}",
    ]
    return "\n".join(lines) + "\n"


def _line(key: str, found: Found | None, meaning: str) -> str:
    if found is None:
        return f'# {key} = "?"  # not found: {meaning}'
    path = json.dumps(found.path, ensure_ascii=False)
    return f"{key} = {path}  # {'' if found.sure else 'PERHAPS: '}{found.why}"


def _time(found: Found | None) -> list[str]:
    if found is None:
        return ['# time = "?"  # not found; ids that Photon makes carry their time, others need it']
    return [_line("time", found, ""), f'time_unit = "{found.unit}"']
