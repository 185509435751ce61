"""`photon millwheel`: computations over streams, with keys, timers and low watermarks."""

import json
import logging
import os
import signal
from io import BufferedReader
from pathlib import Path
from typing import Any, Final

import click

from photon.cli.options import json_flag, path_option, show_time
from photon.core.errors import UsageError


@click.group("millwheel")
def group() -> None:
    """Say what events mean as they happen, exactly once: windows, sessions, anomalies (docs/millwheel.md)."""


_WORK: Final = path_option("--work", required=True, help="Directory of the run's state.")


@group.command("run")
@click.argument("topology", metavar="MODULE:TOPOLOGY")
@_WORK
@click.option("--workers", default=1, show_default=True, help="Processes that compute.")
@click.option(
    "--follow", is_flag=True, help="The logs grow: go on until Ctrl-C. Else: end when all is worked off."
)
@json_flag("The summary as JSON.")
def run(topology: str, work: Path, workers: int, follow: bool, as_json: bool) -> int:
    """Run a topology. What a work directory has begun, the same command goes on with.

    Status 1 if there are dead letters (WORK/dead-letters says why).
    """
    from photon.cluster.wheels import WheelRun

    run = WheelRun(topology, work, workers, follow, lambda line: click.echo(f"photon: {line}", err=True))
    summary = run.run()
    if as_json:
        click.echo(json.dumps(summary))
    else:
        _print_summary(summary, work)
    return 1 if summary["dead_letters"] else 0


@group.command("worker", hidden=True)
@click.argument("topology")
@_WORK
@click.option("--worker", "me", type=int, required=True)
@click.option("--workers", type=int, required=True)
@click.option("--drain", is_flag=True)
def worker(topology: str, work: Path, me: int, workers: int, drain: bool) -> None:
    """One process of a run."""
    from millwheel.topology import load_topology
    from millwheel.worker import serve
    from photon.cluster.supervisor import die_with_parent
    from photon.core.clock import SystemClock

    die_with_parent()
    logging.basicConfig()
    serve(work, load_topology(topology), me, workers, drain, SystemClock())


@group.command("receiver", hidden=True)
@click.argument("topology")
@_WORK
@click.option("--injector", required=True)
def receiver(topology: str, work: Path, injector: str) -> None:
    """The process of a run that is pushed to."""
    from millwheel.push import PushedLogs, PushServer
    from millwheel.topology import load_topology
    from millwheel.worker import pushed_logs
    from photon.cluster.supervisor import die_with_parent
    from photon.cluster.topology import network_of
    from photon.core.clock import SystemClock
    from photon.core.settings import Settings

    die_with_parent()
    logging.basicConfig()
    found = load_topology(topology).injectors[injector]
    network = network_of(Settings(tls=found.tls))
    server = PushServer(PushedLogs(pushed_logs(work, injector), SystemClock()), found.listen, network)
    signal.signal(signal.SIGTERM, lambda *_: server.stop())
    server.run()


@group.command("push")
@click.argument("address", metavar="HOST:PORT")
@click.argument("file", type=click.File("rb"), default="-")
@click.option("--producer", required=True, help="Who pushes: a name that no other pusher has.")
@path_option("--config", help="Settings (photon.toml) whose [tls] the receiver is asked with.")
def push(address: str, file: BufferedReader, producer: str, config: Path | None) -> None:
    """Push lines of JSON to an injector: a file's, or those of standard input.

    Of a file only what this producer has not pushed yet, each line once, whatever happened to a former push.
    """
    from millwheel.push import Pusher
    from photon.cluster.topology import network_of
    from photon.core.settings import load_settings

    with Pusher(address, producer, network_of(load_settings(config))) as pusher:
        start = pusher.number
        if file.seekable():
            size = file.seek(0, os.SEEK_END)
            if size < start:
                raise UsageError(
                    f"{producer} has pushed {start:,} bytes, of a file of {size:,}: name another producer"
                )
            file.seek(start)
        pusher.push_all(file)
        click.echo(f"pushed {pusher.number - start:,} bytes")


@group.command("check")
@click.argument("topology", metavar="MODULE:TOPOLOGY")
def check(topology: str) -> None:
    """Load a topology, and say what it does."""
    from millwheel.topology import load_topology

    found = load_topology(topology)
    for name, injector in found.injectors.items():
        click.echo(f"{name:<20} injector, {injector.listen or ', '.join(injector.patterns)}")
    for name in found.order():
        made = found.computations[name]
        reads = ", ".join(read.stream for read in made.inputs)
        makes = ", ".join(stream.name for stream in made.streams) or "nothing"
        click.echo(f"{name:<20} {type(made.computation).__name__}: {reads} -> {makes}")
    for name, sink in found.sinks.items():
        click.echo(f"{name:<20} sink, {sink.directory}")


@group.command("status")
@_WORK
@json_flag("As JSON.")
def status(work: Path, as_json: bool) -> None:
    """Counts and low watermarks of a run."""
    from photon.cluster.wheels import ask

    told = ask(work, "status")
    if as_json:
        click.echo(json.dumps(told))
        return
    click.echo(
        f"{told['topology']}, {told['workers']} workers, {told['restarts']} restarts, {told['seconds']:g} s\n"
    )
    click.echo(f"{'':<20} {'records':>12} {'produced':>12} {'late':>8} {'dead':>6}  low watermark")
    for name, mark in told["low_watermarks"].items():
        counts = told["counts"].get(name, {})
        low = mark["low_watermark_us"]
        shown = mark["state"] if low is None else f"{show_time(low)}, {mark['lag_s']:,.3f} s behind now"
        shown += f", leaves stragglers after {mark['lateness_s']:,.3f} s" if "lateness_s" in mark else ""
        columns = (counts.get("records", 0), counts.get("produced", 0))
        click.echo(
            f"{name:<20} {columns[0]:>12,} {columns[1]:>12,} {counts.get('late', 0):>8,} "
            f"{counts.get('dead_letters', 0):>6,}  {shown}"
        )


@group.command("why")
@click.argument("name")
@_WORK
@json_flag("As JSON.")
def why(name: str, work: Path, as_json: bool) -> None:
    """What holds a low watermark: which input, worker, key, timer, production or file."""
    from photon.cluster.wheels import ask

    told = ask(work, "why", name)
    if as_json:
        click.echo(json.dumps(told))
        return
    for held in told["chain"]:
        click.echo(_because(held))


@group.command("deploy")
@_WORK
def deploy(work: Path) -> None:
    """Have the run's workers start again with the topology as it is now. Its logs go on growing meanwhile.

    Consumers may be new or gone and code may be another: nothing is lost or doubled by it, and no low
    watermark goes back. Look at it with `check` first.
    """
    from photon.cluster.wheels import ask

    ask(work, "deploy")
    click.echo("deployed")


def _because(held: dict[str, Any]) -> str:
    where = f"{held['name']}: worker {held['worker']}"
    match held["held_by"]:
        case "input":
            return f"{where} waits for '{held['input']}'"
        case "timer":
            return (
                f"{where}, a timer of key {held['key']!r}, tag {held['tag']!r}, at {show_time(held['low'])}"
            )
        case "hold":
            return f"{where}, a hold of key {held['key']!r}, at {show_time(held['low'])}"
        case "production":
            return f"{where}, records that worker {held['for_worker']} has not taken yet"
        case "injector":
            files = ", ".join(held.get("expected") or held.get("least_far") or held.get("quiet") or [])
            missing = "expected and not there" if held.get("expected") else "read least far"
            percentile = held.get("percentile")
            unreadable = "".join(f"; {file}: {why}" for file, why in held.get("unreadable", {}).items())
            return (
                f"{where}, its logs"
                + (f" ({missing}: {files})" if files else " (read to their end)")
                + unreadable
                + (
                    f"; lines more than {held['lateness_s']:,.3f} s late are left behind ({percentile:g} %)"
                    if percentile
                    else ""
                )
            )
    return f"{where}, which has not begun"


def _print_summary(summary: dict[str, Any], work: Path) -> None:
    for name, counts in summary["counts"].items():
        told = ", ".join(f"{what.replace('_', ' ')} {count:,}" for what, count in counts.items() if count)
        click.echo(f"{name:<20} {told or 'nothing'}")
    how = "done" if summary["ended"] else "stopped"
    click.echo(f"{how:<20} {summary['seconds']:g} s, {summary['restarts']} restarts")
    if summary["dead_letters"]:
        click.echo(f"dead letters: {work / 'dead-letters'}")
