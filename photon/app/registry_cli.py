"""`photon reshard` and `photon registry replace|scan`: the registry's administration (paper 2.2.2, 3.3.3)."""

import json
import random
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from photon.core.errors import PhotonError, UsageError

if TYPE_CHECKING:
    from idregistry.client import RegistryClient
    from photon.wire import idregistry_pb2 as pb

SCAN_TIMEOUT_S: Final = 600.0
SCAN_S_MAX: Final = 3600.0
"""As the registry has it (idregistry.messages)."""
TIMEOUT_S: Final = 30.0
_POLL_S: Final = 0.2


class ReshardError(PhotonError):
    """The new number of shards was not adopted; nothing has changed."""


class ReplaceError(PhotonError):
    """The replacement is not done yet; it goes on."""


def _where(command: Callable[..., Any]) -> Callable[..., Any]:
    """--work or --registry: which registry is meant."""
    command = click.option(
        "--registry", "addresses", metavar="ADDR,...", help="gRPC addresses of its replicas."
    )(command)
    return click.option(
        "--work", type=click.Path(path_type=Path), help="Work directory of the run (OUT/.photon)."
    )(command)


@contextmanager
def _client(work: Path | None, addresses: str | None) -> Iterator["RegistryClient"]:
    from idregistry.client import RegistryClient
    from photon.core.clock import SystemClock

    if (work is None) == (addresses is None):
        raise UsageError("say which registry: either --work DIR or --registry HOST:PORT,...")
    if work is not None:
        from photon.app.topology import read_topology

        known = [replica.grpc for replica in read_topology(work / "topology.json").replicas]
    else:
        known = [address for address in (addresses or "").split(",") if address]
    client = RegistryClient(known, TIMEOUT_S, SystemClock(), random.Random())
    try:
        yield client
    finally:
        client.close()


@click.command("reshard")
@click.argument("shards", type=click.IntRange(1, 4096))
@click.option(
    "--at",
    "at",
    metavar="TIME",
    help="Event time from which on it holds: ISO 8601 or seconds since 1970  [default: soon]",
)
@_where
@click.option("--json", "as_json", is_flag=True)
def reshard(shards: int, at: str | None, work: Path | None, addresses: str | None, as_json: bool) -> None:
    """Spread events from a time in the future on over another number of shards, more or fewer.

    Older events stay where they are: no id ever changes its shard. The time must lie ahead by more than
    registry.clock_skew_s, and no event from it on may be registered yet.
    """
    with _client(work, addresses) as client:
        result = client.reshard(shards, None if at is None else parse_time_us(at))
        intervals = client.configuration().intervals
    if as_json:
        click.echo(
            json.dumps(
                {
                    "adopted": result.adopted,
                    "version": result.version,
                    "start_us": result.start_us,
                    "why": result.why,
                    "intervals": [[interval.start_us, interval.shards] for interval in intervals],
                }
            )
        )
    if not result.adopted:
        raise ReshardError(f"not adopted, nothing has changed: {result.why}")
    if not as_json:
        click.echo(
            f"{shards} shards for events from {show_time(result.start_us)} on (version {result.version})"
        )


def parse_time_us(text: str, option: str = "--at") -> int:
    """ISO 8601 (without a zone: local time) or seconds since 1970 -> us. UsageError."""
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = datetime.fromisoformat(text).timestamp()
        except ValueError as error:
            raise UsageError(
                f"{option} {text}: give a time as 2026-01-31T12:00:00+00:00, or in seconds since 1970"
            ) from error
    if not 0 < seconds < 1e11:
        raise UsageError(
            f"{option} {text}: {seconds:g} seconds since 1970 can't be; are these micro- or milliseconds?"
        )
    return round(seconds * 1e6)


def show_time(time_us: int) -> str:
    return datetime.fromtimestamp(time_us / 1e6).astimezone().isoformat(timespec="milliseconds")


@click.command("replace")
@click.argument("old", required=False)
@click.option("--name", help="Of the new replica: one that was never used before.")
@click.option("--raft", metavar="HOST:PORT", help="Where the other replicas reach it.")
@click.option("--grpc", metavar="HOST:PORT", help="Where clients reach it.")
@click.option("--cancel", metavar="NEW", help="Instead of all these: let NEW go again, and OLD stay.")
@_where
@click.option("--wait", type=float, default=0.0, show_default=True, help="Seconds to wait until it is done.")
def replace_replica(
    old: str | None,
    name: str | None,
    raft: str | None,
    grpc: str | None,
    cancel: str | None,
    work: Path | None,
    addresses: str | None,
    wait: float,
) -> None:
    """Let an empty replica take the place of OLD, which is dead or to be moved and never comes back.

    Start the new one with `photon registry serve` from a topology that has "joining": true for it; with
    --work, such a topology is written to WORK/topology-NAME.json. Before or after this: it is let in when it
    is there. One replacement goes at a time. One that can't be finished (the new one's address was wrong) is
    cancelled: `photon registry replace --cancel NEW`; its name is not used again.
    """
    if cancel is not None:
        if old or name or raft or grpc:
            raise UsageError("--cancel NEW stands alone: without OLD, --name, --raft and --grpc")
        with _client(work, addresses) as client:
            client.cancel_replacement(cancel)
            click.echo(f"the replacement by {cancel} is cancelled")
            _wait_until_gone(client, cancel, wait)
        return
    if not (old and name and raft and grpc):
        raise UsageError("give OLD, --name, --raft and --grpc; or --cancel NEW alone")
    from idregistry.client import check_replica

    check_replica(name, raft, grpc)
    with _client(work, addresses) as client:
        client.replace(old, name, raft, grpc)
        click.echo(f"{name} takes the place of {old}")
        if work is not None:
            path = _write_joining_topology(work, client.directory().replicas, name, raft, grpc)
            click.echo(f"start it: photon registry serve --topology {path} --name {name}")
        _wait_until_gone(client, old, wait)


def _wait_until_gone(client: "RegistryClient", name: str, wait: float) -> None:
    """ReplaceError if it is not after `wait` seconds. 0: don't wait."""
    deadline = time.monotonic() + wait
    while wait:
        directory = client.directory()
        if all(replica.name != name for replica in directory.replicas):
            click.echo(f"done: the replicas are {', '.join(sorted(r.name for r in directory.replicas))}")
            return
        if time.monotonic() > deadline:
            raise ReplaceError(f"{name} is not gone after {wait:g} s; does the one that takes its place run?")
        time.sleep(_POLL_S)


def _write_joining_topology(
    work: Path, replicas: Iterable["pb.Replica"], name: str, raft: str, grpc: str
) -> Path:
    """`replicas`: as the directory has them by now, which may be others than the run began with."""
    from photon.app.topology import Replica, read_topology, write_topology

    host, _, port = raft.rpartition(":")
    others = {r.name: (r.grpc, r.raft_host, r.raft_port) for r in replicas}
    known = [
        Replica(one, *where, directory=str(work.absolute() / "registry" / one), joining=one == name)
        for one, where in {**others, name: (grpc, host.strip("[]"), int(port))}.items()
    ]
    path = work / f"topology-{name}.json"
    write_topology(replace(read_topology(work / "topology.json"), replicas=known), path)
    return path


@click.command("scan")
@click.argument("shard", type=click.IntRange(0, 4095))
@click.option("--from", "address", metavar="ADDR", help="The replica to read from  [default: any]")
@click.option("--fresh", is_flag=True, help="From the shard's leader, with all that was acknowledged before.")
@click.option(
    "--timeout",
    type=click.FloatRange(0, SCAN_S_MAX, min_open=True),
    default=SCAN_TIMEOUT_S,
    show_default=True,
    help="Seconds until it must be done.",
)
@_where
def scan(
    shard: int, address: str | None, fresh: bool, timeout: float, work: Path | None, addresses: str | None
) -> None:
    """Print all that a shard holds, a line an id: id, hour (us since 1970), token (hex; - if cleared)."""
    from photon.core.columns import split_ids, unpack_times

    with _client(work, addresses) as client:
        for part in client.scan(shard, address, timeout, fresh):
            times = unpack_times(part.times).tolist()
            rows = zip(split_ids(part.ids), times, part.tokens, strict=True)
            sys.stdout.write("".join(f"{i.hex()} {t} {token.hex() or '-'}\n" for i, t, token in rows))
