"""`photon millwheel`: computations over streams, with keys, timers and low watermarks."""

import contextlib
import json
import logging
import os
import signal
from collections.abc import Callable, Sequence
from functools import cache
from io import BufferedReader
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Final, TypeVar, get_args

import click

from millwheel.topology import Late, Logs, Unit, load_topology
from photon.cli.history import history, live_on_spark, shown, verify
from photon.cli.options import config_option, duration, json_flag, path_option, show_time
from photon.cluster.registry_access import notice
from photon.cluster.supervisor import die_with_parent
from photon.connect.uris import parse_uri
from photon.core.addresses import split_address
from photon.core.clock import SystemClock
from photon.core.disk import DirectoryLock
from photon.core.errors import UsageError
from photon.core.settings import Settings, load_settings
from photon.core.signals import on_signals
from photon.core.status import Notices
from photon.rpc.network import network_of


@click.group("millwheel")
def group() -> None:
    """Say what events mean as they happen, exactly once: windows, sessions, anomalies (docs/millwheel.md)."""


group.add_command(history)
group.add_command(live_on_spark)
group.add_command(verify)
_Command = TypeVar("_Command", bound=Callable[..., Any])
_WORK: Final = path_option("--work", required=True, help="Directory of the run's state.")


def _running(command: _Command) -> _Command:
    workers = click.option("--workers", default=1, show_default=True, help="Processes that compute.")
    follow = "The logs grow: go on until Ctrl-C. Else: end when all is worked off."
    command = json_flag("The summary as JSON.")(command)
    return _WORK(workers(click.option("--follow", is_flag=True, help=follow)(command)))


@group.command("run")
@click.argument("topology", metavar="MODULE:TOPOLOGY")
@click.option(
    "--store",
    "stores",
    multiple=True,
    metavar="URI",
    help="State in PostgreSQL, on several servers if repeated; else in --work.",
)
@path_option("--history", help="Begin where this one (`photon millwheel history --goes-on`) ended.")
@click.option(
    "--machine",
    default="",
    metavar="HOST:PORT",
    help="Others run this on the same --store, too, and reach this one here; workers have the next ports.",
)
@config_option("Settings (photon.toml): [imports] of sources, and [tls] of the links between machines.")
@_running
def run(topology: str, work: Path, workers: int, follow: bool, as_json: bool, **more: Any) -> int:
    """Run a topology. What a work directory has begun, the same command goes on with.

    Status 1 if there are dead letters (WORK/dead-letters, or the topology's sink of that name, says why) or
    lost records, which a source deleted before they were copied, and without --follow if it was stopped, or
    gave up, before all was worked off.
    """
    return _run(topology, work, workers, follow, as_json, **more)


def _run(topology: str, work: Path, workers: int, follow: bool, as_json: bool, **more: Any) -> int:
    """`more`: stores, history, machine and config, as of WheelRun."""
    from photon.cluster.master import STALL_S
    from photon.cluster.wheels import WheelRun

    die_with_parent()  # of `photon dev`
    run = WheelRun(topology, work, workers, follow, notice, **more)
    summary = run.run()
    for name, counts in summary["counts"].items():
        if 2 * counts.get("late", 0) > counts.get("records", 0):
            notice(
                f"most records of '{name}' came late, behind the low watermark: see lateness_s of its logs"
                + ("; what was written long ago is read by a run without --follow" if follow else "")
            )
    stopped = not (follow or summary["ended"])
    for one in summary["sinks"]:
        if one["trouble"] and one["behind"] and run.stalled is None:
            notice(f"nothing of '{one['stream']}' is published to {one['sink']} ({one['trouble']})")
    if run.stalled is not None:
        notice(f"nothing has moved for {STALL_S:g} s: {_because(run.stalled)}; the same command goes on")
    elif stopped:
        notice("stopped before all was worked off; the same command goes on")
    elif summary["ended"] and summary["timers"]:
        notice(
            f"{summary['timers']:,} keys have timers on the wall clock that are not due yet: they fire when "
            "the same command runs then, or with --follow"
        )
    if as_json:
        click.echo(json.dumps(summary))
    else:
        _print_summary(summary)
        if summary["dead_letters"]:
            click.echo(f"dead letters: {run.dead_letters}")
    return 1 if summary["dead_letters"] or summary["lost_records"] or stopped else 0


@group.command("worker", hidden=True)
@click.argument("topology")
@click.argument("given")
@_WORK
def worker(topology: str, given: str, work: Path) -> None:
    """One process of a run. `given`: as photon.cluster.wheels writes it, JSON."""
    from millwheel.code import load_kept
    from millwheel.links import Ways
    from millwheel.worker import Worker, store_of

    die_with_parent()
    logging.basicConfig()
    mine = json.loads(given)
    network = network_of(load_settings(mine["config"]))
    ways = Ways(work, mine["holder"], mine["round"], mine["lead"], tuple(mine["addresses"]), network)
    store = store_of(work, mine["store"], mine["round"])
    of_round = mine["worker"], mine["owners"], mine["drain"]
    Worker(ways, load_kept(topology, work), *of_round, SystemClock(), store, mine["reign"]).run()


@group.command("receiver", hidden=True)
@click.argument("topology")
@_WORK
@click.option("--injector", required=True)
@click.option("--drain", is_flag=True)
@click.option("--shared", nargs=2, type=(str, int), help="Where the ledger of its copies is, and its reign.")
@config_option("Settings (photon.toml) with [imports].")
def receiver(
    topology: str,
    work: Path,
    injector: str,
    drain: bool,
    shared: tuple[str, int] | None,
    config: Path | None,
) -> None:
    """The process of a run that is pushed to, or copies sources."""
    from millwheel.code import load_kept
    from millwheel.push import PushedLogs, PushServer

    die_with_parent()
    logging.basicConfig()
    found = load_kept(topology, work).injectors[injector]
    received = found.received(work, injector)
    if found.imported:
        return _copy(injector, found, received, load_settings(config), drain, shared)
    network = network_of(Settings(tls=found.tls))
    server = PushServer(PushedLogs(received, SystemClock()), found.listen, network)
    on_signals(server.stop, signal.SIGTERM)
    server.run()


def _copy(
    name: str,
    found: Logs,
    received: Path,
    settings: Settings,
    drain: bool,
    shared: tuple[str, int] | None,
) -> None:
    """Until SIGTERM."""
    from millwheel.worker import shared_store
    from photon.connect.copies import CopiedLogs, Copies
    from photon.connect.importer import copying
    from photon.connect.shared_copies import Ledger, SharedCopies

    @cache
    def ledger(directory: Path) -> Ledger:
        assert shared is not None
        uri, reign = shared
        return shared_store(uri, number=reign).ledger(f"{name}/{directory.name}", reign)

    def open_shared(directory: Path, file_bytes_max: int, source: str) -> CopiedLogs:
        return SharedCopies(directory, file_bytes_max, source, ledger(directory))

    notices = Notices("importer")
    ended: SimpleQueue[BaseException | None] = SimpleQueue()
    on_signals(lambda: ended.put(None), signal.SIGTERM)
    told = settings, notices.tell, ended.put, drain, found.fields, notices.lines
    lock = contextlib.nullcontext() if shared else DirectoryLock(received)
    with lock, copying({"": found.patterns}, received, *told, opened=open_shared if shared else Copies):
        if (error := ended.get()) is not None:
            raise error


@group.command("push")
@click.argument("address", metavar="HOST:PORT")
@click.argument("file", type=click.File("rb"), default="-")
@click.option("--producer", required=True, help="Who pushes: a name that no other pusher has.")
@config_option("Settings (photon.toml) whose [tls] the receiver is asked with.")
def push(address: str, file: BufferedReader, producer: str, config: Path | None) -> int:
    """Push lines of JSON to an injector: a file's, or those of standard input.

    Of a file only what this producer has not pushed yet, each line once, whatever happened to a former push.
    A last line without a newline waits there for the rest of it. A line of more than 4 MiB is passed over,
    and the status is 1.
    """
    from millwheel.push import Pusher

    split_address(address, "HOST:PORT")
    with Pusher(address, producer, network_of(load_settings(config)), notice=notice) as pusher:
        start = pusher.number
        if file.seekable():
            size = file.seek(0, os.SEEK_END)
            if size < start:
                raise UsageError(
                    f"{producer} has pushed {start:,} bytes, of a file of {size:,}: name another producer"
                )
            if not pusher.go_on(file):
                raise UsageError(
                    f"{producer} has pushed {start:,} bytes of another file than {file.name}: name another "
                    "producer"
                )
        left = pusher.push_all(file, grows=file.seekable())
        click.echo(f"pushed {pusher.bytes:,} bytes")
        if left:
            notice(
                f"{file.name}: its last line ({left:,} bytes) has no newline and is not pushed: push again "
                "once it has one, or end it yourself (echo >> FILE)"
            )
        return 1 if pusher.too_long else 0


@group.command("check")
@click.argument("topology", metavar="MODULE:TOPOLOGY")
def check(topology: str) -> None:
    """Load a topology, and say what it does."""
    from millwheel.testing import Bench
    from photon.cluster.preflight import check_published

    found = load_topology(topology)
    check_published(found)
    Bench(found)  # what a worker would refuse is refused here
    for name, injector in found.injectors.items():
        reads = [parse_uri(text).shown if injector.imported else text for text in injector.patterns]
        click.echo(f"{name:<20} injector, {injector.listen or ', '.join(reads)}")
    for name in found.order():
        made = found.computations[name]
        of = ", ".join(read.stream for read in made.inputs)
        makes = ", ".join(stream.name for stream in made.streams) or "nothing"
        weak = ", weak" if made.productions == "weak" else ""
        often = "" if made.exactly_once else ", not exactly once"
        click.echo(f"{name:<20} {type(made.computation).__name__}: {of} -> {makes}{weak}{often}")
    for name, sink in found.sinks.items():
        to = "".join(f" -> {parse_uri(uri).shown}" for uri in sink.published_to)
        click.echo(f"{name:<20} sink, {sink.directory}{to}")


@group.command("status")
@_WORK
@json_flag("As JSON.")
def status(work: Path, as_json: bool) -> None:
    """Counts and low watermarks of a run."""
    from photon.cluster.master import shown_hot
    from photon.cluster.wheels import ask

    told = ask(work, "status")
    if as_json:
        click.echo(json.dumps(told))
        return
    on = f" of {', '.join(told['machines'])}" if len(told["machines"]) > 1 else ""
    counted = f"{told['workers']} workers{on}, {told['restarts']} restarts, {told['seconds']:g} s"
    click.echo(f"{told['topology']}, {counted}\n")
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
    click.echo(f"\n{'worker':<20} {'busy':>12} {'intervals':>12}")
    for worker, one in told["processes"].items():
        busy = "starting" if one["busy"] is None else f"{one['busy']:.0%}"
        click.echo(f"{worker:<20} {busy:>12} {one['slots']:>12}  {one['machine']}".rstrip())
    for one in told["sinks"]:
        how = f"{one['published']:,} published" + (f", {one['refused']:,} refused" if one["refused"] else "")
        how += (", behind" if one["behind"] else "") + (f": {one['trouble']}" if one["trouble"] else "")
        click.echo(f"{one['stream']} -> {one['sink']}: {how}")
    for worker, one in told["processes"].items():
        if one["hot"] is not None:
            click.echo(f"worker {worker}: {shown_hot(one['hot'])}")


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
    watermark goes back. Records under way to a computation that is removed or renamed, or by a stream that it
    no longer reads, become dead letters. Code that `check` refuses is refused here too, and the run goes on
    as it was.
    """
    from photon.cluster.wheels import DEPLOY_S, ask

    ask(work, "deploy", timeout_s=DEPLOY_S)
    click.echo("deployed")


# Ready-made: each names a topology of millwheel.ready.topologies and runs it. Options that one alone has
# are arguments of its topology.


def _lasts(name: str, argument: str, text: str, **given: Any) -> Callable[[_Command], _Command]:
    return click.option(name, argument, metavar="DURATION", callback=duration, help=text, **given)


def _globs(name: str, argument: str, text: str) -> Callable[[_Command], _Command]:
    return click.option(
        name, argument, multiple=True, required=True, metavar="GLOB", help=f"{text}; repeatable."
    )


def _field(name: str, argument: str, text: str, required: bool = True) -> Callable[[_Command], _Command]:
    return click.option(name, argument, required=required, metavar="FIELD", help=text)


_KEY: Final = _field("--key", "key", "Path of the key in a line, for example user.id.")
_INPUT: Final = _globs("--input", "paths", "Logs, JSON lines")


def _ready(command: _Command) -> _Command:
    for option in (
        _field("--time", "time", "Path of the event's time in a line."),
        click.option("--unit", type=click.Choice(get_args(Unit)), default="us", show_default=True),
        _lasts("--lateness", "lateness_s", "How late a line may come.", default="0s", show_default=True),
        click.option(
            "--late",
            type=click.Choice(get_args(Late)),
            default="process",
            show_default=True,
            help="What becomes of a line that is later.",
        ),
        path_option("--out", help="Directory of the output, JSON lines.  [default: WORK/out]"),
        config_option("Settings (photon.toml) with [imports], for sources."),
        click.option(
            "--sink", "sinks", multiple=True, metavar="URI", help="Publish it there, too; repeatable."
        ),
        _running,
    ):
        command = option(command)
    return command


def _run_ready(
    name: str,
    logs: dict[str, tuple[Sequence[str], str]],
    unit: str,
    lateness_s: float,
    late: str,
    out: Path | None,
    config: Path | None,
    sinks: Sequence[str],
    work: Path,
    workers: int,
    follow: bool,
    as_json: bool,
    **given: Any,
) -> int:
    """`logs`: paths and time field by argument; `given`: the arguments that only this topology has."""
    from photon.cluster.begun import READY

    reading = {
        argument: {"paths": paths, "time": time, "unit": unit, "lateness_s": lateness_s}
        for argument, (paths, time) in logs.items()
    }
    sink = {"directory": str(out or work / "out"), "publish": sinks}
    arguments = {**reading, **given, "late": late, "sink": sink}
    return _run(f"{READY}{name} {json.dumps(arguments)}", work, workers, follow, as_json, config=config)


@group.command("windows")
@_INPUT
@_KEY
@_lasts("--window", "length_s", "Length of a window.", required=True)
@_lasts("--every", "every_s", "A window begins so often.  [default: where the one before ends]")
@_ready
def windows(paths: Sequence[str], time: str, **options: Any) -> int:
    """Count the lines of each key by window, tumbling or sliding."""
    return _run_ready("windows", {"logs": (paths, time)}, **options)


@group.command("sessions")
@_INPUT
@_KEY
@_lasts("--gap", "gap_s", "Lines of a key with less between them are one session.", required=True)
@_ready
def sessions(paths: Sequence[str], time: str, **options: Any) -> int:
    """Find the sessions of each key: first line, last line, number of lines."""
    return _run_ready("sessions", {"logs": (paths, time)}, **options)


@group.command("zeitgeist")
@_INPUT
@_KEY
@_lasts(
    "--window", "length_s", "Lines are counted by windows of this length.", default="1s", show_default=True
)
@click.option("--learn", default=20, show_default=True, help="Windows of a key before one can be odd.")
@click.option(
    "--sigmas", default=3.0, show_default=True, help="Standard deviations from the mean that are odd."
)
@click.option("--row", default=3, show_default=True, help="Odd windows in a row that are an anomaly.")
@_ready
def zeitgeist(paths: Sequence[str], time: str, **options: Any) -> int:
    """Find keys that spike or dip: more or fewer lines than their own past lets expect."""
    return _run_ready("zeitgeist", {"logs": (paths, time)}, **options)


@group.command("unmatched")
@_globs("--asking", "asking", "Logs of what wants an answer (impressions)")
@_globs("--answers", "answers", "Logs of the answers (clicks)")
@_field("--asking-key", "asking_key", "What an answer names, in an asking line.")
@_field("--answer-key", "answer_key", "The same in an answer.")
@_field("--answer-time", "answer_time", "The time of an answer.  [default: as --time]", required=False)
@_lasts("--after", "after_s", "How long an answer may take.", required=True)
@_ready
def unmatched(
    asking: Sequence[str], answers: Sequence[str], answer_time: str | None, time: str, **options: Any
) -> int:
    """Find the lines that had no answer in time."""
    logs = {"asking": (asking, time), "answers": (answers, answer_time or time)}
    return _run_ready("unmatched", logs, **options)


@group.command("attribution")
@_globs("--touches", "touches", "Logs of touches (clicks)")
@_globs("--conversions", "conversions", "Logs of conversions (purchases)")
@_field("--key", "touch_key", "Whose they are (a user), in a touch.")
@_field(
    "--conversion-key", "conversion_key", "The same in a conversion.  [default: as --key]", required=False
)
@_field("--conversion-time", "conversion_time", "Its time.  [default: as --time]", required=False)
@_lasts("--lookback", "lookback_s", "How old a touch may be.", required=True)
@_ready
def attribution(
    touches: Sequence[str],
    conversions: Sequence[str],
    conversion_key: str | None,
    conversion_time: str | None,
    time: str,
    **options: Any,
) -> int:
    """Give each conversion the last touch of the same key before it."""
    logs = {"touches": (touches, time), "conversions": (conversions, conversion_time or time)}
    options["conversion_key"] = conversion_key or options["touch_key"]
    return _run_ready("attribution", logs, **options)


_MISSING: Final = {
    "expected": "expected and not there",
    "quiet": 'read to its end and silent, and silent="hold" waits for it',
    "least_far": "read least far",
}
"""Why an injector's files hold its low watermark."""


def _because(held: dict[str, Any]) -> str:
    where = f"{held['name']}: worker {held.get('worker')}"
    match held["held_by"]:
        case "input":
            return f"{where} waits for '{held['input']}'"
        case "timer" | "hold" as kind:
            tag = f" tag {held['tag']!r}," if kind == "timer" else ""
            return f"{where}, a {kind} of key {held['key']!r},{tag} at {show_time(held['low'])}"
        case "production":
            return f"{where}, records that worker {held['for_worker']} has not taken yet"
        case "injector":
            which = next((which for which in _MISSING if held.get(which)), None)
            files, missing = ("", "") if which is None else (", ".join(held[which]), _MISSING[which])
            percentile = held.get("percentile")
            unreadable = "".join(f"; {file}: {why}" for file, why in held.get("unreadable", {}).items())
            copies = "".join(
                f"; in {one['copies']} is "
                + (f"all up to {show_time(one['upto_us'])}" if one["upto_us"] else "not known how much yet")
                + (f" ({one['trouble']})" if one["trouble"] else "")
                for one in held.get("copies", ())
            )
            return (
                f"{where}, its logs"
                + (f" ({missing}: {files})" if files else " (read to their end)")
                + unreadable
                + copies
                + (
                    f"; lines more than {held['lateness_s']:,.3f} s late are left behind ({percentile:g} %)"
                    if percentile
                    else ""
                )
            )
        case "sink":
            why = held["trouble"] or "it takes nothing"
            return f"{held['sink']} has not all of '{held['name']}' ({why})"
    return f"{where} is starting"


def _print_summary(summary: dict[str, Any]) -> None:
    for name, counts in summary["counts"].items():
        click.echo(f"{name:<20} {shown(counts)}")
    if summary["lost_records"]:
        lost = f"{summary['lost_records']:,} of sources, deleted there before they were copied"
        click.echo(f"{'LOST records':<20} {lost}")
    how = "done" if summary["ended"] else "stopped"
    click.echo(f"{how:<20} {summary['seconds']:g} s, {summary['restarts']} restarts")
