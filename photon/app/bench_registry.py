"""`photon bench registry`: the IdRegistry measured, beside etcd where it is installed (paper 2, Fig. 10, 11).

The measurements are in benchmarks/, which only a checkout has.
"""

import importlib
import json
import sys
from pathlib import Path
from typing import Any, Final

import click

import photon
from photon.core.errors import UsageError

PARTS: Final = ("throughput", "etcd", "wan", "failover", "batching", "reshard")
_QUICK_S: Final = 0.7


@click.command("registry")
@click.option(
    "--dir",
    "directory",
    type=click.Path(path_type=Path),
    default=Path("bench-out"),
    show_default=True,
    help="Where the replicas write: on the disk that is meant.",
)
@click.option("--only", multiple=True, type=click.Choice(PARTS), help="Measure this part; may be repeated.")
@click.option("--quick", is_flag=True, help="Under a minute, not ten: to see that it works, not to compare.")
@click.option("--seconds", type=float, default=4.0, show_default=True, help="Of each measurement.")
@click.option("--rounds", type=int, default=5, show_default=True, help="Beside etcd; medians are compared.")
@click.option("--kills", type=int, default=20, show_default=True, help="Of the leader.")
@click.option("--etcd", default="etcd", show_default=True, help="etcd's program.")
@click.option("--json", "as_json", is_flag=True)
def command(
    directory: Path,
    only: tuple[str, ...],
    quick: bool,
    seconds: float,
    rounds: int,
    kills: int,
    etcd: str,
    as_json: bool,
) -> None:
    """Measure the IdRegistry on this machine: 3 replicas, fsync on, clients in processes of their own.

    throughput: commits and lookups a second as load grows, latencies. etcd: ids created a second beside a
    3-node etcd. wan: 100 ms between the replicas. failover: time to the next commit when the leader is
    killed. batching: requests against Raft commits. reshard: each shard's throughput from 2 to 6 to 3 shards.
    """
    benchmark = load_benchmarks("registry")
    plan = load_benchmarks("registry_parts").Plan(
        directory, _QUICK_S if quick else seconds, rounds, kills, quick, etcd
    )
    parts = [name for name in PARTS if not only or name in only]
    report = benchmark.run(plan, parts, lambda what: click.echo(what, err=True))
    click.echo(json.dumps(report) if as_json else load_benchmarks("registry_tables").as_text(report))


def load_benchmarks(name: str) -> Any:
    """A module of benchmarks/. UsageError where there is none: an installed package does not bring them."""
    root = Path(photon.__file__).resolve().parents[1]
    if not (root / "benchmarks" / f"{name}.py").is_file():
        raise UsageError(
            f"photon bench registry needs the source tree, and {root} has no benchmarks/{name}.py: "
            "run it in a checkout (git clone, then pip install -e .)"
        )
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    return importlib.import_module(f"benchmarks.{name}")
