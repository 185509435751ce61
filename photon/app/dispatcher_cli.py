"""`photon dispatcher init`: where the dispatchers begin to read (paper 3.2.2)."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from photon.core.errors import UsageError

if TYPE_CHECKING:
    from dispatcher.initialise import Start
    from photon.core.settings import Settings

_FILES_SHOWN: Final = 20


@click.command("init")
@click.option(
    "--from",
    "start",
    metavar="now|TIME|start",
    required=True,
    help="The logs' ends, the first event of a time (ISO 8601, or seconds since 1970), or their starts.",
)
@click.option(
    "--work", type=click.Path(path_type=Path), required=True, help="Work directory of the run (OUT/.photon)."
)
@click.option("--datacenter", help="Only of this one  [default: all]")
@click.option(
    "--foreign", multiple=True, metavar="GLOB", help="Where WORK is new: the foreign logs; repeatable."
)
@click.option("--config", type=click.Path(path_type=Path), help="Where WORK is new: settings (photon.toml).")
def init(
    start: str, work: Path, datacenter: str | None, foreign: tuple[str, ...], config: Path | None
) -> None:
    """Set from where on the foreign logs are read, while no run is under way.

    For a state that was lost, or a first run that shall leave out what is old. What was counted and what
    waits for a retry stays. Events read again are joined once all the same; those passed over are not read.
    """
    from dispatcher.initialise import initialise
    from photon.core.clock import SystemClock

    begin = _start(start)
    settings, patterns, directories = _where(work, datacenter, foreign, config)
    for directory in directories:
        offsets = initialise(directory, patterns, settings, begin, SystemClock(), _tell)
        click.echo(f"{directory}: {len(offsets):,} files")
        for name, offset in list(offsets.items())[:_FILES_SHOWN]:
            click.echo(f"  {offset:>16,}  {name}")
        if len(offsets) > _FILES_SHOWN:
            click.echo(f"  and {len(offsets) - _FILES_SHOWN:,} more")


def _start(text: str) -> "Start":
    if text == "now":
        return "now"
    if text == "start":
        return "start"
    from photon.app.registry_cli import parse_time_us

    return parse_time_us(text, "--from")


def _where(
    work: Path, datacenter: str | None, foreign: tuple[str, ...], config: Path | None
) -> tuple["Settings", list[str], list[Path]]:
    """Settings, patterns, and the dispatchers' directories."""
    from photon.app.topology import DATACENTER_NAMES, read_topology
    from photon.core.settings import load_settings

    if foreign:
        names = DATACENTER_NAMES if datacenter is None else (datacenter,)
        if names[0] not in DATACENTER_NAMES:
            raise UsageError(f"no datacenter '{datacenter}'; there are: {', '.join(DATACENTER_NAMES)}")
        patterns = [str(Path.cwd() / pattern) for pattern in foreign]
        return load_settings(config), patterns, [work.absolute() / name / "dispatcher" for name in names]
    topology = read_topology(work / "topology.json")
    pipelines = topology.pipelines if datacenter is None else [topology.pipeline(datacenter)]
    directories = [Path(pipeline.directory) / "dispatcher" for pipeline in pipelines]
    return topology.checked_settings(), topology.foreign, directories


def _tell(notice: str) -> None:
    sys.stderr.write(f"photon: {notice}\n")
