"""`photon dispatcher init`: where the dispatchers begin to read (paper 3.2.2); `photon drain`."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

import click

from photon.cli.options import TIME_FORM, config_option, parse_time_us, work_option
from photon.cluster.registry_access import Named, asking, notice
from photon.cluster.roles import dispatchers_group
from photon.cluster.topology import DATACENTER_NAMES, find_system
from photon.core.clock import SystemClock
from photon.core.errors import PhotonError, UsageError
from photon.core.settings import Settings, load_settings
from photon.logs.files import check_patterns

if TYPE_CHECKING:
    from dispatcher.initialise import Start

_Place = tuple[Path, list[str], int]
"""The directory of a datacenter's dispatchers, the patterns of their logs, and how many they are."""

_FILES_SHOWN: Final = 20


@click.command("init")
@click.option(
    "--from",
    "start",
    metavar="now|TIME|start",
    required=True,
    help=f"The logs' ends, the first event of a time, or their starts. A time: {TIME_FORM}.",
)
@work_option("Work directory of a run here (OUT/.photon).")
@click.option("--datacenter", help="Only of this one  [default: all]")
@click.option(
    "--foreign", multiple=True, metavar="GLOB", help="Where WORK is new: the foreign logs; repeatable."
)
@config_option(
    "Settings (photon.toml): in place of --work, those that name the datacenters; else those of WORK."
)
def init(
    start: str, work: Path | None, datacenter: str | None, foreign: tuple[str, ...], config: Path | None
) -> None:
    """Set from where on the foreign logs are read, while no run is under way.

    For a state that was lost, or a first run that shall leave out what is old. What was counted and what
    waits for a retry stays. Events read again are joined once all the same; those passed over are not read.
    """
    from dispatcher.initialise import initialise

    begin = cast("Start", start) if start in ("now", "start") else parse_time_us(start, "--from")
    settings, places = _where(work, datacenter, foreign, config)
    for _, patterns, _ in places:  # all of them before the first place is set
        check_patterns(patterns)
    empty = []
    for number, (directory, patterns, workers) in enumerate(places):
        try:
            offsets = initialise(directory, patterns, settings, begin, SystemClock(), notice, workers)
        except (PhotonError, OSError):
            if number:
                done = ", ".join(str(directory) for directory, *_ in places[:number])
                notice(f"set already, and they stay so: {done}; not {directory}, nor what comes after it")
            raise
        click.echo(f"{directory}: {len(offsets):,} files")
        for name, offset in list(offsets.items())[:_FILES_SHOWN]:
            click.echo(f"  {offset:>16,}  {name}")
        if len(offsets) > _FILES_SHOWN:
            click.echo(f"  and {len(offsets) - _FILES_SHOWN:,} more")
        if not offsets:
            empty += patterns
    if empty:
        raise UsageError(
            f"no file that can be read matches {', '.join(empty)}, so no place was set there: what comes is "
            "read from its start; check the patterns, or wait until there are logs"
        )


def _where(
    work: Path | None, datacenter: str | None, foreign: tuple[str, ...], config: Path | None
) -> tuple[Settings, list[_Place]]:
    if foreign:
        return _of_new_run(work, datacenter, foreign, config)
    topology = find_system(work, config)
    pipelines = topology.pipelines if datacenter is None else [topology.pipeline(datacenter)]
    if not pipelines:
        raise UsageError(f"{config} names no dispatchers: add [datacenters.NAME]")
    return topology.settings, [
        (p.home("dispatcher"), topology.patterns_of(p, "foreign"), topology.shares_of(p)) for p in pipelines
    ]


def _of_new_run(
    work: Path | None, datacenter: str | None, foreign: tuple[str, ...], config: Path | None
) -> tuple[Settings, list[_Place]]:
    """Before its first run, which writes the topology."""
    if work is None:
        raise UsageError("--foreign is for a new work directory: name it by --work")
    settings = load_settings(config)
    named = {n: len(place.dispatchers) for n, place in settings.datacenters.items() if place.dispatchers}
    known = named or dict.fromkeys(DATACENTER_NAMES, settings.dispatcher.workers)
    if datacenter is not None and datacenter not in known:
        raise UsageError(
            f"no datacenter '{datacenter}'; there are: {', '.join(known)}. Others are named in settings "
            "(--config) under [datacenters]"
        )
    names = list(known) if datacenter is None else [datacenter]
    patterns = [str(Path.cwd() / pattern) for pattern in foreign]
    return settings, [(work.absolute() / name / "dispatcher", patterns, known[name]) for name in names]


_DRAIN_S: Final = 60.0
_POLL_S: Final = 0.2


@click.command("drain")
@click.argument("dispatcher")
@config_option("Settings (photon.toml) that name the system.")
def drain(dispatcher: str, config: Path | None) -> None:
    """Give the shares of a dispatcher (`dispatcher-east-1`, as `photon status` names it) to the others of its
    datacenter, and return when it has none.

    It gets none again until it is started anew. To take other processes away, stop them: event stores and
    joiners hand over as they end, and `photon registry retire-set` empties replicas.
    """
    topology = find_system(None, config)
    processes = {one.title: one for one in topology.processes("dispatcher")}
    if dispatcher not in processes:
        raise UsageError(f"no dispatcher '{dispatcher}' in {config}; there are: {', '.join(processes)}")
    group_name = dispatchers_group(processes[dispatcher].datacenter)
    with asking(Named(settings=topology.settings).at(), _DRAIN_S) as client:
        deadline = time.monotonic() + _DRAIN_S
        while True:
            shares = client.drain(group_name, dispatcher).owned(dispatcher)
            if not shares:
                break
            if time.monotonic() > deadline:
                raise PhotonError(
                    f"{dispatcher} has {len(shares)} shares still after {_DRAIN_S:.0f} s; they go on moving: "
                    "see `photon status`"
                )
            time.sleep(_POLL_S)
    click.echo(f"{dispatcher} has no shares any more and can be stopped")
