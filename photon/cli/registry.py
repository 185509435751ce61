"""`photon reshard` and `photon registry replace|release-hold|scan|export` (paper 2.2.2, 2.3, 3.3.3)."""

import json
import sys
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from photon.cli.options import TIME_FORM, parse_time_us, registry_options, show_time
from photon.cluster.registry_access import Named, asked_registry, asking
from photon.cluster.topology import Replica, Topology, read_topology, topology_of, write_topology
from photon.core.addresses import joined
from photon.core.columns import split_ids, unpack_times
from photon.core.errors import PhotonError, UsageError
from spark.options import (
    SCAN_TIMEOUT_S,
    SCAN_TIMEOUT_S_MAX,
    SparkOptions,
    check_requirements,
    scan_timeout_option,
    spark_options,
)

if TYPE_CHECKING:
    from idregistry.client import RegistryClient
    from photon.rpc import idregistry_pb2 as pb

TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.2


@click.command("reshard")
@click.argument("shards", type=click.IntRange(1, 4096))
@click.option(
    "--at",
    "at",
    metavar="TIME",
    help=f"Event time from which on it holds: {TIME_FORM}  [default: soon]",
)
@registry_options
@click.option("--json", "as_json", is_flag=True)
def reshard(shards: int, at: str | None, named: Named, as_json: bool) -> None:
    """Spread events from a time in the future on over another number of shards, more or fewer.

    Older events stay where they are: no id ever changes its shard. The time must lie ahead by more than
    registry.clock_skew_s, and no event from it on may be registered yet.
    """
    with asking(named.at(), TIMEOUT_S) as client:
        result = client.reshard(shards, None if at is None else parse_time_us(at))
        intervals = client.configuration().intervals
    if as_json:
        told = {key: getattr(result, key) for key in ("adopted", "version", "start_us", "why")}
        told["intervals"] = [[interval.start_us, len(interval.shards)] for interval in intervals]
        click.echo(json.dumps(told))
    if not result.adopted:
        raise PhotonError(f"not adopted, nothing has changed: {result.why}")
    if not as_json:
        when = show_time(result.start_us)
        click.echo(f"{shards} shards for events from {when} on (version {result.version})")


@click.command("replace")
@click.argument("old", required=False)
@click.option("--name", help="Of the new replica: one that was never used before.")
@click.option("--raft", metavar="HOST:PORT", help="Where the other replicas reach it.")
@click.option("--grpc", metavar="HOST:PORT", help="Where clients reach it.")
@click.option("--cancel", metavar="NEW", help="Instead of all these: let NEW go again, and OLD stay.")
@registry_options
@click.option("--wait", type=float, default=0.0, show_default=True, help="Seconds to wait until it is done.")
def replace_replica(
    old: str | None,
    name: str | None,
    raft: str | None,
    grpc: str | None,
    cancel: str | None,
    named: Named,
    wait: float,
) -> None:
    """Let an empty replica take the place of OLD, which is dead or to be moved and never comes back.

    Start the new one with `photon registry serve` from a topology that has "joining": true for it. Such a one
    is written as topology-NAME.json: into the directory of --work; into this one, where --config names the
    system's [replicas]. Before or after this: it is let in when it is there. One replacement goes at a time.
    One that can't be finished (the new one's address was wrong) is cancelled: `photon registry replace
    --cancel NEW`; its name is not used again.
    """
    if cancel is not None:
        if old or name or raft or grpc:
            raise UsageError("--cancel NEW stands alone: without OLD, --name, --raft and --grpc")
        with asking(named.at(), TIMEOUT_S) as client:
            client.cancel_replacement(cancel)
            click.echo(f"the replacement by {cancel} is cancelled")
            _wait_until_gone(client, cancel, wait)
        return
    if not (old and name and raft and grpc):
        raise UsageError("give OLD, --name, --raft and --grpc; or --cancel NEW alone")
    from idregistry.client import check_replica

    check_replica(name, raft, grpc)
    system = _system(named)
    with asking(named.at(), TIMEOUT_S) as client:
        client.replace(old, name, raft, grpc)
        click.echo(f"{name} takes the place of {old}")
        if system is not None:
            replicas = client.directory().replicas
            path = _write_joining_topology(*system, replicas, old, name, raft, grpc)
            click.echo(f"start it: photon registry serve --topology {path} --name {name}")
        _wait_until_gone(client, old, wait)


@click.command("add-set")
@click.argument("name")
@registry_options
def add_set(name: str, named: Named) -> None:
    """Let the set NAME in: the replicas that [replicas] of --config has with set = "NAME".

    Start them before or after this: `photon registry serve --config photon.toml --name ...`. They hold
    nothing until a resharding: `photon reshard N` spreads N shards over all sets, for events from then on.
    """
    from idregistry.rules.commands import Row

    replicas = topology_of(named.settings).replicas if named.settings.replicas else []
    rows = [Row(one.name, *one.raft_address, one.grpc, name) for one in replicas if one.set == name]
    if not rows:
        raise UsageError(f'no [replicas.NAME] of --config has set = "{name}": add them there')
    others = tuple(one.grpc for one in replicas if one.set != name)
    with asking(replace(named.at(), addresses=others), TIMEOUT_S) as client:
        client.add_set(rows)
    click.echo(f"set {name} is there, with {', '.join(row.name for row in rows)}; next: photon reshard")


@click.command("retire-set")
@click.argument("name")
@registry_options
def retire_set(name: str, named: Named) -> None:
    """Give the set NAME up: it gets no new shard, and is gone when the registry has forgotten what it holds.

    Where it takes new events still, `photon reshard N` leaves it out. `photon status` shows what it has, and
    no such set any more when its processes can be stopped.
    """
    with asking(named.at(), TIMEOUT_S) as client:
        client.retire_set(name)
        newest = client.configuration().intervals[-1].shards
        directory = client.directory()
    held = {shard for shard, home in zip(directory.shards, directory.homes, strict=True) if home == name}
    more = f"; next: photon reshard {len(newest)}" if held & {*newest} else ""
    click.echo(f"set {name} gets no new shard, and goes with its {len(held)} shards{more}")


@click.command("release-hold")
@click.argument("name")
@registry_options
def release_hold(name: str, named: Named) -> None:
    """Let events expire though the dispatcher NAME, which never comes back, may not have ended them.

    `photon status` shows who holds the registry's boundary back. A dispatcher that runs holds it again.
    """
    with asking(named.at(), TIMEOUT_S) as client:
        if not client.release_hold(name):
            raise UsageError(
                f"no dispatcher named {name} holds the boundary (`photon status` tells who has for long)"
            )
    click.echo(f"{name} holds the boundary no longer")


def _wait_until_gone(client: "RegistryClient", name: str, wait: float) -> None:
    """ReplaceError if it is not after `wait` seconds. 0: don't wait."""
    deadline = time.monotonic() + wait
    while wait:
        directory = client.directory()
        if all(replica.name != name for replica in directory.replicas):
            click.echo(f"done: the replicas are {', '.join(sorted(r.name for r in directory.replicas))}")
            return
        if time.monotonic() > deadline:
            raise PhotonError(f"{name} is not gone after {wait:g} s; does the one that takes its place run?")
        time.sleep(_POLL_S)


def _system(named: Named) -> tuple[Topology, Path] | None:
    """The system whose registry it is, and where a topology of it is written; None: it is not known."""
    if named.work is not None:
        return read_topology(named.work / "topology.json"), named.work
    return (topology_of(named.settings), Path()) if named.settings.replicas else None


def _write_joining_topology(
    topology: Topology,
    directory: Path,
    replicas: Iterable["pb.Replica"],
    old: str,
    name: str,
    raft: str,
    grpc: str,
) -> Path:
    """`replicas`: as the directory has them by now, which may be others than the run began with."""
    known = {r.name: (r.grpc, joined(r.raft_host, r.raft_port)) for r in replicas} | {name: (grpc, raft)}
    sites = {r.name: r.datacenter for r in topology.replicas}
    sites[name] = sites.get(old, "")
    homes = Path(topology.replicas[0].directory).parent
    placed = [
        Replica(sites.get(one, ""), *addresses, name=one, directory=str(homes / one), joining=one == name)
        for one, addresses in known.items()
    ]
    path = directory / f"topology-{name}.json"
    write_topology(replace(topology, replicas=placed), path)
    return path


@click.command("scan")
@click.argument("shard", type=click.IntRange(0, 4095))
@click.option("--from", "address", metavar="ADDR", help="The replica to read from  [default: any]")
@click.option("--fresh", is_flag=True, help="From the shard's leader, with all that was acknowledged before.")
@click.option(
    "--timeout",
    type=click.FloatRange(0, SCAN_TIMEOUT_S_MAX, min_open=True),
    default=SCAN_TIMEOUT_S,
    show_default=True,
    help="Seconds until it must be done.",
)
@registry_options
def scan(shard: int, address: str | None, fresh: bool, timeout: float, named: Named) -> None:
    """Print all that a shard holds, a line an id: id, hour (us since 1970), token (hex).

    Behind an id that it only guards, because another copy of the event may come with an earlier time, stands
    the word guard. Of a run that is over (--work) the replicas are started meanwhile, and the leader is read.
    """
    with asked_registry(named) as asked, asking(asked.registry, TIMEOUT_S) as client:
        if shard not in (shards := client.configuration().shards):
            raise UsageError(f"there is no shard {shard}; there are: {', '.join(map(str, shards))}")
        fresh = fresh or (asked.started and address is None)  # others may not have read their logs yet
        for part in client.scan(shard, address, timeout, fresh):
            times = unpack_times(part.times).tolist()
            ends = ["\n", " guard\n"]
            rows = zip(split_ids(part.ids), times, part.tokens, part.guarded.tolist(), strict=True)
            sys.stdout.write(
                "".join(f"{i.hex()} {t} {token.hex()}{ends[guard]}" for i, t, token, guard in rows)
            )


@click.command("export")
@click.argument("directory", metavar="DIR")
@registry_options
@scan_timeout_option
@spark_options
def export(directory: str, named: Named, scan_timeout: float, spark: SparkOptions) -> None:
    """Keep what all shards hold now as Parquet in DIR, a new directory or a URI for Spark (needs Java).

    Of a run that is over (--work) the replicas are started meanwhile.
    """
    from spark.session import open_session, spark_failures

    check_requirements()
    from spark.reading.paths import check_new
    from spark.registered import write_export

    check_new(directory, "DIR")
    with asked_registry(named) as asked, open_session(spark) as session, spark_failures():
        ids = write_export(session, asked.registry, directory, scan_timeout)
    click.echo(f"{ids:,} ids in {directory}")
