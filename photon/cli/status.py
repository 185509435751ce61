"""`photon status`: what every process of a running system says of itself, and the fates of all events."""

import contextlib
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NoReturn

import click

from photon.cli.options import json_flag, system_options
from photon.cluster.ledgers import ledger_of
from photon.cluster.registry_access import RESUME, has_ended
from photon.cluster.statuses import Sample, Status, StatusReader, fates_of
from photon.cluster.told import fates_line, group_line, groups_of, line_of, verdict
from photon.cluster.topology import Topology, find_system

_WATCH_S: Final = 2.0
_WIDTH = 24


@click.command("status")
@system_options
@json_flag("Print everything as JSON.")
@click.option("--watch", is_flag=True, help="Show it again every two seconds, until Ctrl-C.")
def command(work: Path | None, config: Path | None, as_json: bool, watch: bool) -> None:
    """Show whether all is well, and the processes of a system and the fates of all events.

    The first line is the verdict. Of a run that has ended, the fates that it left. Status 1 if it has, if a
    process does not answer, if the fates of a datacenter do not add up to the events read, or if a joiner
    registered what stands in no output.
    """
    topology = find_system(work, config)
    if work is not None and has_ended(work):
        _tell_of_ended(topology, work, as_json)
    with contextlib.closing(StatusReader(topology)) as reader:
        while True:
            sample = reader.read()
            fates = sample.fates()
            if as_json:
                page = json.dumps({**sample.statuses, "fates": fates})
            else:
                page = _page(sample, reader.why_silent, fates)
            if watch and not as_json:
                click.clear()  # of a terminal
            click.echo(page)
            if not watch:
                break
            time.sleep(_WATCH_S)
    wrong = any(not row["adds_up"] for row in fates.values())
    wrong |= any(joiner.get("account", {}).get("unwritten") for joiner in sample.of("joiner"))
    raise SystemExit(1 if sample.silent() or wrong else 0)


def _page(sample: Sample, why_silent: Mapping[str, str], fates: Mapping[str, Status]) -> str:
    lines = [verdict(sample)]
    for name, status in sample.answered().items():
        lines.append(f"{name:<{_WIDTH}}{line_of(status)}")
    for name in sample.silent():
        why = f" ({why_silent[name]})" if name in why_silent else ""
        lines.append(f"{name:<{_WIDTH}}does not answer{why}")
    for name, group in groups_of(sample).items():
        lines.append(f"{'shares ' + name:<{_WIDTH}}{group_line(group)}")
    return "\n".join([*lines, *_fates_lines(fates)])


def _tell_of_ended(topology: Topology, work: Path, as_json: bool) -> NoReturn:
    fates = {p.datacenter: fates_of(ledger_of(topology, p)) for p in topology.pipelines}
    if as_json:
        click.echo(json.dumps({**dict.fromkeys(topology.titles()), "ended": True, "fates": fates}))
    else:
        click.echo(f"the run in {work} has ended; {RESUME}")
        click.echo("\n".join(_fates_lines(fates)))
    raise SystemExit(1)


def _fates_lines(fates: Mapping[str, Status]) -> list[str]:
    return [f"{'fates ' + datacenter:<{_WIDTH}}{fates_line(row)}" for datacenter, row in fates.items()]
