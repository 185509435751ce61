"""`photon connect test`: does a source or a sink keep what joins rely on (docs/connectors.md)?"""

import json
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import click

from photon.cli.options import json_flag, path_option
from photon.connect.conformance import Check, check_sink, check_source
from photon.connect.importer import SIDES, fields_of
from photon.connect.uris import known_as
from photon.core.columns import split_lines
from photon.core.errors import UsageError
from photon.core.settings import load_settings

_READ_S_MAX: Final = 300.0


@click.group("connect")
def group() -> None:
    """Sources and sinks that events come from and go to."""


@group.command("test")
@click.argument("uri")
@click.option("--as", "kind", type=click.Choice(["source", "sink"]), help="Where the scheme has both.")
@click.option("--side", type=click.Choice(SIDES), default="foreign", show_default=True, help="Of a source.")
@path_option("--config", help="Settings (photon.toml): how events of that side are read.")
@click.option("--read", metavar="COMMAND", help="A shell command that prints all lines that a sink has.")
@json_flag("Print each check as JSON.")
def test(uri: str, kind: str | None, side: str, config: Path | None, read: str | None, as_json: bool) -> int:
    """Check that a source or a sink keeps what joins rely on.

    A source is read to its end, and anew from a dozen places. To a sink some thousand lines are written,
    under writers' names that begin with photon-check; processes are killed meanwhile. Use a topic, a table, a
    prefix of its own.

    \b
    photon connect test kafka://localhost:9092/clicks --as source
    photon connect test postgresql://localhost/try --read "psql -Atc 'select event from joined' try"
    """
    kinds = known_as(uri)
    if kind is None and len(kinds) > 1:
        raise UsageError(f"{uri}: is a source and a sink; say which by --as")
    failed = False
    for check in _checks(uri, kind or kinds[0], side, config, read):
        failed |= check.failed is not None
        if as_json:
            click.echo(json.dumps({"check": check.name, "failed": check.failed, "skipped": check.skipped}))
        else:
            verdict = "FAILED" if check.failed else "not checked" if check.skipped else "ok"
            why = check.failed or check.skipped
            click.echo(f"{verdict:<12} {check.name}{f': {why}' if why else ''}")
    return 1 if failed else 0


def _checks(uri: str, kind: str, side: str, config: Path | None, read: str | None) -> Iterator[Check]:
    if kind == "source":
        return check_source(uri, fields_of(load_settings(config), side))

    def lines() -> list[bytes]:
        assert read is not None
        try:
            done = subprocess.run(["sh", "-c", read], capture_output=True, timeout=_READ_S_MAX, check=False)
        except subprocess.TimeoutExpired as error:
            raise UsageError(f"--read: did not end within {_READ_S_MAX:g} s") from error
        if done.returncode:
            raise UsageError(
                f"--read: status {done.returncode}: {done.stderr.decode('utf-8', 'replace').strip()}"
            )
        return split_lines(done.stdout)

    return check_sink(uri, lines if read else None, random.Random())
