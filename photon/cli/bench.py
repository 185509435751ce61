"""`photon bench`: figures of this machine, printed with the machine.

The measurements are in benchmarks/, which only a checkout has.
"""

import importlib
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

import photon
from photon.core.errors import UsageError

JOIN_PARTS: Final = ("catch-up", "steady", "live", "half-load")
MILLWHEEL_PARTS: Final = ("throughput", "latency", "cache", "recovery", "machines")
REGISTRY_PARTS: Final = ("throughput", "race", "turns", "etcd", "wan", "failover", "sets", "size")
KAFKA_PARTS: Final = ("catch-up", "live", "killed")
PEERS: Final = ("spark", "pathway", "duckdb")
KAFKA_PEERS: Final = ("streams", "quix", "spark")
MILLWHEEL_PEERS: Final = ("photon", "duckdb", "pathway", "bytewax", "spark", "spark-state", "flink")


def _option(*names: str, default: Any = None, **given: Any) -> click.Option:
    return click.Option(names, default=default, show_default=default is not None, **given)


_OUT: Final[dict[str, Any]] = {"type": click.Path(path_type=Path), "default": Path("bench-out")}
_JSON: Final = click.Option(["--json", "as_json"], is_flag=True)


def _peers(names: Sequence[str]) -> list[click.Parameter]:
    theirs = f"Also what users would take instead, where installed: all, or some of {', '.join(names)}."
    python = "The interpreter that has a peer; this one if not given."
    return [
        _option("--peers", is_flag=False, flag_value="all", metavar="[NAME,...]", help=theirs),
        _option("--peer-python", "pythons", multiple=True, metavar="NAME=PATH", help=python),
    ]


_SHAPE: Final = "Of the matrix, or one of your own: files=3000,line_bytes=2000. May be repeated."
_JOIN: Final[list[click.Parameter]] = [
    _option("--dir", "directory", **_OUT, help="For logs and output: on the disk that is meant."),
    _option("--only", multiple=True, type=click.Choice(JOIN_PARTS), help="This part; may be repeated."),
    _option("--queries", default=1_000_000, help="Catch-up."),
    _option("--clicks", default=200_000, help="Catch-up."),
    _option("--runs", default=3, help="Of each; medians are told."),
    _option("--live-seconds", default=30.0),
    click.Option(["--quick"], is_flag=True, help="A minute, to see that it works, not to compare."),
    click.Option(["--matrix"], is_flag=True, help="Instead: unlike logs, what an event of each costs."),
    click.Option(["--rooms"], is_flag=True, help="Instead: what an event costs in each room."),
    _option("--shape", "shapes", multiple=True, metavar="NAME|KEY=VALUE,...", help=_SHAPE),
    _option("--scale", default=1.0, help="Times 200,000 events in each shape."),
    *_peers(PEERS),
    _JSON,
]
_REGISTRY: Final[list[click.Parameter]] = [
    _option("--dir", "directory", **_OUT, help="Where the replicas write: on the disk that is meant."),
    _option(
        "--only", multiple=True, type=click.Choice(REGISTRY_PARTS), help="Measure this part; may be repeated."
    ),
    click.Option(
        ["--quick"], is_flag=True, help="Under a minute, not ten: to see that it works, not to compare."
    ),
    _option("--seconds", default=4.0, help="Of each measurement."),
    _option("--rounds", default=5, help="Beside etcd; medians are compared."),
    _option("--kills", default=20, help="Of the leader."),
    _option("--etcd", default="etcd", help="etcd's program."),
    _JSON,
]
_MILLWHEEL: Final[list[click.Parameter]] = [
    _option("--dir", "directory", **_OUT, help="For logs and output: on the disk that is meant."),
    _option("--only", multiple=True, type=click.Choice(MILLWHEEL_PARTS), help="This part; may be repeated."),
    _option("--lines", default=1_000_000, help="Of a log."),
    _option("--runs", default=3, help="Of each; medians are told."),
    _option("--live-seconds", default=15.0),
    _option("--store", default="", metavar="URI", help="Of machines: a database, as of `millwheel run`."),
    click.Option(["--quick"], is_flag=True, help="A minute, to see that it works, not to compare."),
    *_peers(MILLWHEEL_PEERS),
    _JSON,
]


_KAFKA: Final[list[click.Parameter]] = [
    _option("--dir", "directory", **_OUT, help="For broker, state and output: on the disk that is meant."),
    _option("--only", multiple=True, type=click.Choice(KAFKA_PARTS), help="This part; may be repeated."),
    _option("--queries", default=1_000_000, help="Catch-up."),
    _option("--clicks", default=200_000, help="Catch-up."),
    _option("--runs", default=3, help="Of catch-up, by turns; the fastest of each is told."),
    _option("--live-seconds", default=30.0),
    click.Option(["--quick"], is_flag=True, help="A minute, to see that it works, not to compare."),
    _option("--broker", "brokers", metavar="HOST:PORT", help="A broker that runs; not one of our own."),
    *_peers(KAFKA_PEERS),
    _JSON,
]


def _measuring(what: str) -> None:
    click.echo(f"measuring {what} ...", err=True)


def _join(
    directory: Path,
    only: Sequence[str],
    matrix: bool,
    rooms: bool,
    shapes: Sequence[str],
    scale: float,
    peers: str | None,
    pythons: Sequence[str],
    as_json: bool,
    **plan: Any,
) -> None:
    """Measure the whole system on generated logs: files to files, start included, every output checked.

    catch-up: `photon join` over existing logs. steady: the middle 80 % of a run with few primaries and many
    foreign events. live: from a click's line written to its joined line readable, 2,000 queries/s and 400
    clicks/s; half-load: the same at half of the steady rate.

    --matrix: CPU us an event and a KiB on logs of unlike shapes, their fit to a + b x KiB, worst and best.
    --rooms: what an event costs in each room: CPU, bytes sent and written, syncs, memory.
    """
    benchmark = load_benchmarks("join")
    sizes = benchmark.Plan.of(directory, **plan)
    if rooms:
        report = load_benchmarks("rooms").run(sizes, _measuring)
    elif matrix or shapes:
        scale /= 20 if plan["quick"] else 1
        report = load_benchmarks("matrix").run(sizes, shapes, scale, peers, pythons, _measuring)
    else:
        report = benchmark.run(sizes, only, peers, pythons, _measuring)
    _show(report, as_json)


def _registry(**given: Any) -> None:
    """Measure the IdRegistry on this machine: 3 replicas, fsync on, clients in processes of their own.

    throughput: commits and lookups a second as load grows, latencies. race: two datacenters commit the same
    ids. turns: how long the leader's raft thread takes for a turn beside lookups. etcd: ids created a second
    beside a 3-node etcd. wan: 100 ms between the replicas (toxiproxy). failover: time to the next commit when
    the leader is killed. sets: one, two and four sets of replicas under the same load. size: a replica's
    state with a million ids and more, up to a hundred million (3.6 GB of disk).
    """
    _run("registry", given, "only")


def _millwheel(**given: Any) -> None:
    """Measure MillWheel: log lines to sink files, start included, every output checked.

    throughput: counts by key and second, in columns and a record at a time, and Zeitgeist, on logs of several
    shapes, also while workers are killed. latency: 1,000 lines/s, from a line's write to the sink's line.
    cache: CPU by the number of keys in memory. recovery: how long lines wait while a worker with half of all
    keys is killed; machines: while one of two machines comes, leaves or is killed. --peers: the same counts
    by other engines, and by them after a SIGKILL half way.
    """
    _run("millwheel", given, "only", "peers", "pythons")


def _kafka(**given: Any) -> None:
    """Measure joins from topics to a topic: start included, every output read as committed and checked.

    catch-up: over filled topics. live: 2,000 queries/s and 400 clicks/s, from a click's record produced to
    its joined record read. killed: catch-up with a SIGKILL to all processes half way: what was lost or
    doubled. A broker is started (Java and Maven), or one is named.
    """
    _run("kafka", given, "only", "peers", "pythons", "brokers")


def _run(name: str, given: dict[str, Any], *asked: str) -> None:
    """benchmarks/NAME.py with what it is `asked` for; the other options are its plan."""
    as_json, arguments = given.pop("as_json"), [given.pop(one) for one in asked]
    benchmark = load_benchmarks(name)
    _show(benchmark.run(benchmark.Plan.of(**given), *arguments, _measuring), as_json)


def _show(report: Any, as_json: bool) -> None:
    click.echo(json.dumps(report) if as_json else load_benchmarks("measuring").text(report))


@click.pass_context
def _all(context: click.Context, /, **given: Any) -> None:
    """Measure this machine: all of `photon bench join`, or one of the commands below."""
    if context.invoked_subcommand is None:
        _join(**given)


command: Final = click.Group(
    "bench", callback=_all, params=_JOIN, help=_all.__doc__, invoke_without_command=True
)
for _run_it, _params in ((_join, _JOIN), (_registry, _REGISTRY), (_kafka, _KAFKA), (_millwheel, _MILLWHEEL)):
    _name = _run_it.__name__.removeprefix("_")
    command.add_command(click.Command(_name, callback=_run_it, params=_params, help=_run_it.__doc__))


def load_benchmarks(name: str) -> Any:
    """A module of benchmarks/. UsageError where there is none: an installed package does not bring them."""
    root = Path(photon.__file__).resolve().parents[1]
    if not (root / "benchmarks" / f"{name}.py").is_file():
        raise UsageError(
            f"photon bench needs the source tree, and {root} has no benchmarks/{name}.py: "
            "run it in a checkout (git clone, then pip install -e .)"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module(f"benchmarks.{name}")
