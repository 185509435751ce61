"""`photon bench registry`: the IdRegistry measured through gRPC, part by part; fsync is on where it counts.

Each part takes a plan and gives its figures: `rows` are tables, the rest are single figures.
"""

import os
import random
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import cache, partial
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any, Final, Self

import grpc
import numpy as np
import psutil

from benchmarks import registry_size
from benchmarks.measuring import BenchError, Row, cpu_seconds, machine_now, percentiles
from benchmarks.registry_load import (
    WARM_S,
    Clients,
    Cluster,
    Load,
    Meter,
    RegistryCaller,
    client_processes,
    has_toxiproxy,
    measure,
    running,
)
from benchmarks.registry_sets import relief, spread
from benchmarks.registry_turns import told
from photon.cluster.local_cluster import free_ports
from photon.core.fates import Committed
from photon.core.ids import Token

# Ids a request, requests in flight, requests a second (None: each follows the last one's answer).
_IDLE: Final = ((1, 2, 25.0), (1_000, 2, 25.0))
_COMMITS: Final = ((1_000, 16, None), (1, 1, None), (1, 16, None), (1_000, 1, None), (4_000, 8, None))
_LOOKUPS: Final = ((1_000, 16, None), (4_000, 8, None))
_RACES: Final = ((1_000, 16), (4_000, 8))
_LOOKUPS_BESIDE: Final = (0, 16)
_LOOKUP_IDS: Final = 65_536
_COMMIT_EVERY_S: Final = 0.04
_SYNCS: Final = 200
_SYNC_BYTES: Final = 65_536

ETCD_IDS: Final = 1_000
ETCD_IN_FLIGHT: Final = 16

_TRYING: Final = 4
_BEFORE_S: Final = 0.5
_ON_THEIR_WAY_S: Final = 0.2

ROUND_TRIP_MS: Final = 100.0
_WAN_CASES: Final = ((1_000, 16), (1, 1), (1_000, 1), (1_000, 64))
_WAN_KILLS: Final = 5


@dataclass(frozen=True, slots=True)
class Plan:
    """How long and how often. `directory`: where the replicas write."""

    directory: Path
    seconds: float = 4.0
    rounds: int = 5
    kills: int = 20
    quick: bool = False
    etcd: str = "etcd"

    @classmethod
    def of(cls, quick: bool, **given: Any) -> Self:
        """As asked for; `quick`: the first shape of each part, once."""
        return cls(**given | ({"seconds": 0.7, "rounds": 1, "kills": 2, "quick": True} if quick else {}))


def throughput(plan: Plan) -> Row:
    """Latency of a commit when idle; ids a second as load grows, commits and lookups."""
    with running(plan.directory) as (cluster, clients):

        def rows(call: str, shapes: Sequence[tuple[int, int, float | None]]) -> list[Row]:
            found = []
            for ids, n, rate in shapes[: 1 if plan.quick else None]:
                load = {"call": call, "ids": (ids, ids), "in_flight": n, "calls_per_s": rate}
                row = measure(cluster.meter(), clients, plan.seconds, **load).row()
                found.append({"ids": ids, "in_flight": n, **row})
            return found

        report: Row = {
            "latency_rows": rows("commit", _IDLE),
            "commit_rows": rows("commit", _COMMITS),
            "lookup_rows": rows("lookup", _LOOKUPS),
            "ids_held_at_the_end": cluster.status(cluster.leader())["ids"],
        }
    return report | {"ids_per_s": max(row["ids_per_s"] for row in report["commit_rows"])}


def race(plan: Plan) -> Row:
    """Two datacenters send the same batches, each with its own tokens, beside batches of distinct ids in the
    same run: ids asked for a second and the leader's CPU time. Medians of the rounds. Each id is won once.
    """
    rows = []
    with running(plan.directory) as (cluster, clients):
        for ids, in_flight in _RACES[: 1 if plan.quick else None]:
            found: dict[str, list[tuple[float, float]]] = {"commit": [], "race": []}
            for _ in range(plan.rounds):
                for call, costs in found.items():
                    load = {"call": call, "ids": (ids, ids), "in_flight": in_flight}
                    measured = measure(cluster.meter(), clients, plan.seconds, **load)
                    if measured.seen.failures:
                        raise BenchError(f"commits failed: {measured.seen.failures}")
                    speed = measured.row()["ids_per_s"]
                    costs.append((speed, measured.cores["leader"] / speed * 1e6))
            row: Row = {"ids": ids, "in_flight": in_flight}
            for name, costs in zip(("distinct", "raced"), found.values(), strict=True):
                speed, cpu_us = map(statistics.median, zip(*costs, strict=True))
                row |= {f"{name}_ids_per_s": round(speed), f"{name}_leader_us_an_id": round(cpu_us, 2)}
            rows.append(row | {"ratio": round(row["raced_ids_per_s"] / row["distinct_ids_per_s"], 2)})
        won = won_once(clients.ask(attrgetter("raced")))
    return {"race_rows": rows, "ids_won": won}


def won_once(datacenters: Sequence[Mapping[Any, bytes]]) -> int:
    """How many ids were won. Each has told the outcomes by batch. BenchError unless each was won once."""
    total = 0
    for batch in set().union(*datacenters):
        columns = [np.frombuffer(told[batch], np.uint8) for told in datacenters if batch in told]
        won = sum(column == Committed.WON for column in columns)
        taken = sum(column == Committed.DUPLICATE for column in columns)
        if np.any(won != 1) or np.any(won + taken != len(columns)):
            raise BenchError(f"an id of batch {batch} was won {won.min()} to {won.max()} times")
        total += len(won)
    return total


def turns(plan: Plan) -> Row:
    """The leader's raft thread beside lookups of 65,536 ids, all at the leader: its longest turns, and
    commits of one id, 25 a second. A follower stands for election after 300 to 600 ms without a heartbeat.
    """
    rows = []
    with running(plan.directory, 0, command=("benchmarks.registry_turns",)) as (cluster, _):
        cluster.wait_until_settled(0.5 if plan.quick else 4.0)
        leader = cluster.leader()
        nearest = [cluster.grpc[leader], *(one for one in cluster.addresses if one != cluster.grpc[leader])]
        term = cluster.status(leader)["term"]
        with (
            client_processes([partial(RegistryCaller, nearest)]) as busy,
            client_processes([partial(RegistryCaller, nearest)]) as committing,
        ):
            for lookups in _LOOKUPS_BESIDE:
                size = (_LOOKUP_IDS, _LOOKUP_IDS)
                begin, end = busy.begin(plan.seconds, in_flight=lookups, call="lookup", ids=size)
                committing.begin(plan.seconds, in_flight=2, calls_per_s=1 / _COMMIT_EVERY_S)
                looked_up, seen = busy.finish(), committing.finish()
                found = sorted(told(cluster.log(leader), begin, end)) or [0.0]
                row: Row = {
                    "lookups_in_flight": lookups,
                    "lookups_per_s": round(looked_up.ids / plan.seconds),
                    "longest_turn_ms": round(found[-1], 1),
                    "turns_over_100_ms": sum(ms > 100 for ms in found),
                }
                latencies = percentiles(seen.latencies_ms)
                rows.append(row | {f"commit_{name}": ms for name, ms in latencies.items()})
        elections = cluster.status(cluster.leader())["term"] - term
    return {"turn_rows": rows, "elections": elections}


def beside_etcd(plan: Plan) -> Row:
    """Ids created a second beside etcd, at the same ids a transaction and in flight.

    Each round measures both, each on a fresh cluster, alone; their medians are compared.
    """
    told = etcd_version(plan.etcd)
    if told is None:
        return {"skipped": HOW_TO_GET}

    def taken(meter: Meter, clients: Clients) -> Row:
        found = measure(meter, clients, plan.seconds, ids=(ETCD_IDS, ETCD_IDS), in_flight=ETCD_IN_FLIGHT)
        if found.seen.failures:
            raise BenchError(f"commits failed: {found.seen.failures}")
        row = found.row()
        cores = sum(busy for who, busy in found.cores.items() if who != "clients")
        return {**{key: row[key] for key in ("ids_per_s", "p50_ms", "p99_ms")}, "cores": cores}

    def etcd() -> Row:
        with (
            etcd_nodes(plan.etcd, plan.directory, 4 * ETCD_IDS) as (leader, meter),
            client_processes([partial(EtcdCaller, leader, ETCD_IDS, plan.seconds)]) as clients,
        ):
            return taken(meter, clients)

    def ours() -> Row:
        with running(plan.directory) as (cluster, clients):
            return taken(cluster.meter(), clients)

    rounds = [{"etcd nested": etcd(), "photon gRPC": ours()} for _ in range(plan.rounds)]
    rows = []
    for who in rounds[0]:
        ids = [one[who]["ids_per_s"] for one in rounds]
        medians = {key: statistics.median(one[who][key] for one in rounds) for key in rounds[0][who]}
        rounded = {key: round(value, 2) for key, value in medians.items()}
        rows.append({"who": who, **rounded, "lowest": min(ids), "highest": max(ids)})
    return {
        "etcd": told,
        "ids_a_transaction": ETCD_IDS,
        "in_flight": ETCD_IN_FLIGHT,
        "rounds": len(rounds),
        "etcd_rows": rows,
        "ratios": {"photon gRPC": round(rows[1]["ids_per_s"] / rows[0]["ids_per_s"], 1)},
    }


def wan(plan: Plan) -> Row:
    """A long round trip between the replicas, clients near the leader: commits pipeline; a killed leader."""
    if not has_toxiproxy():
        return {"skipped": "no toxiproxy server here, that part is skipped; to have it: make toxiproxy"}
    rows, gaps = [], []
    with running(plan.directory, delay_ms=ROUND_TRIP_MS / 2) as (cluster, clients):
        for ids, in_flight in _WAN_CASES[: 1 if plan.quick else None]:
            row = measure(cluster.meter(), clients, plan.seconds, ids=(ids, ids), in_flight=in_flight).row()
            trips = {f"{p}_trips": round(row[f"{p}_ms"] / ROUND_TRIP_MS, 2) for p in ("p50", "p99")}
            rows.append({"ids": ids, "in_flight": in_flight, **row, **trips})
        for _ in range(0 if plan.quick else min(_WAN_KILLS, plan.kills)):
            cluster.wait_until_settled(8.0)
            gaps.append(round(kill_once(cluster, clients, watch_s=10.0), 2))
    killed = {"killed_p50_s": statistics.median(gaps), "killed_each_s": gaps} if gaps else {}
    return {"round_trip_ms": ROUND_TRIP_MS, "wan_rows": rows, **killed}


def failover(plan: Plan) -> Row:
    """The leader is killed, again and again, at default settings: the time until clients that try succeed."""
    settled_s, watch_s = (0.5, 2.5) if plan.quick else (4.0, 5.0)
    gaps = []
    with running(plan.directory, clients=1) as (cluster, clients):
        for _ in range(plan.kills):
            cluster.wait_until_settled(settled_s)
            gaps.append(kill_once(cluster, clients, watch_s))
    each_s = [round(gap, 3) for gap in gaps]
    p50_s = round(statistics.median(gaps), 3)
    return {"kills": len(gaps), "p50_s": p50_s, "worst_s": max(each_s), "each_s": each_s}


def sets(plan: Plan) -> Row:
    """One, two and four sets: the same load, and as much as each takes with its processes held down."""
    seconds = plan.seconds
    return {"spread_rows": spread(plan.directory, seconds), "relief_rows": relief(plan.directory, seconds)}


def size(plan: Plan) -> Row:
    """What a replica's state costs as it grows."""
    return {"size_rows": registry_size.rows(registry_size.SIZES[: 1 if plan.quick else None], plan.directory)}


def kill_once(cluster: Cluster, clients: Clients, watch_s: float) -> float:
    """Seconds from the kill to the end of the silence it made; the killed one runs again after."""
    begin, end = clients.begin(watch_s, in_flight=_TRYING)
    time.sleep(max(0.0, begin + _BEFORE_S - time.monotonic()))
    leader = cluster.leader()
    killed_at = cluster.kill(leader)
    gap = silence_s(sorted(clients.finish().ends), killed_at, end)
    cluster.start(leader)
    cluster.wait_until_even()
    return gap


def silence_s(successes: list[float], killed_at: float, end: float) -> float:
    """From the kill to the end of the longest time without a success that it began (at most until `end`).

    The first successes after the kill may be answers that were already on their way; a pause that begins
    later has other causes.
    """
    moments = [killed_at, *(at for at in successes if at > killed_at), end]
    begun = [pair for pair in pairwise(moments) if pair[0] <= killed_at + _ON_THEIR_WAY_S]
    _, stop = max(begun, key=lambda pair: pair[1] - pair[0])
    return stop - killed_at


PARTS: Final[dict[str, Callable[[Plan], Row]]] = {
    "throughput": throughput,
    "race": race,
    "turns": turns,
    "etcd": beside_etcd,
    "wan": wan,
    "failover": failover,
    "sets": sets,
    "size": size,
}


def run(plan: Plan, only: Sequence[str], tell: Callable[[str], object]) -> Row:
    """The machine and each part's figures; `tell` hears what comes next. PhotonError if it can't."""
    plan.directory.mkdir(parents=True, exist_ok=True)
    report: Row = {"machine": machine_now() | _disk(plan.directory)}
    for name, part in PARTS.items():
        if not only or name in only:
            tell(name)
            report[name] = part(plan)
    return report


def _disk(directory: Path) -> dict[str, object]:
    """The file system under the replicas, and what a synced append costs there. Without a disk it is none."""
    mounts = sorted(psutil.disk_partitions(all=True), key=lambda mount: len(mount.mountpoint))
    path = directory.resolve()
    kinds = [mount.fstype for mount in mounts if path.is_relative_to(mount.mountpoint)]
    times = []
    with tempfile.TemporaryFile(dir=directory) as file:
        for _ in range(_SYNCS):
            file.write(bytes(_SYNC_BYTES))
            file.flush()
            began = time.perf_counter()
            os.fdatasync(file.fileno())
            times.append(time.perf_counter() - began)
    sync_ms = round(statistics.median(times) * 1e3, 2)
    return {"file_system": kinds[-1] if kinds else "unknown", "sync_64_kib_ms": sync_ms}


# --- etcd: three nodes on this machine; needs etcd and grpcio-tools

ETCD_NODES: Final = ("etcd0", "etcd1", "etcd2")
HOW_TO_GET: Final = "no etcd here, that part is skipped; to have it: apt-get install etcd-server"
_LEADER_S: Final = 30.0
_REQUEST_BYTES: Final = 8_000_000
_ETCD_S: Final = 30.0
_PREPARED_PER_S: Final = 150
"""More transactions than etcd takes on this kind of machine; what is left over is thrown away."""


def etcd_version(program: str) -> str | None:
    """As it says itself: `etcd Version: 3.4.23`; None where it is not installed."""
    if shutil.which(program) is None:
        return None
    told = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return told.split("\n", 1)[0]


@cache
def etcd_stubs() -> tuple[Any, Any]:
    """(messages, stubs), made of etcd.proto."""
    try:
        return grpc.protos_and_services("benchmarks/etcd.proto")  # type: ignore[no-any-return]
    except NotImplementedError as error:
        raise BenchError("etcd's stubs are made by grpcio-tools: pip install grpcio-tools") from error


@contextmanager
def etcd_nodes(program: str, parent: Path, ops_max: int) -> Iterator[tuple[str, Meter]]:
    """The leader's gRPC address, and what all use; commits are not counted. fsync is on: etcd's default.

    `ops_max`: operations a transaction may have (etcd's own default is 128).
    """
    parent.mkdir(parents=True, exist_ok=True)
    ports = free_ports(2 * len(ETCD_NODES), random.Random())
    serve = {node: f"127.0.0.1:{ports.pop()}" for node in ETCD_NODES}
    peer = {node: f"http://127.0.0.1:{ports.pop()}" for node in ETCD_NODES}
    pids = []
    with (
        tempfile.TemporaryDirectory(prefix="etcd-", dir=parent, ignore_cleanup_errors=True) as directory,
        ExitStack() as stack,
    ):
        for node in ETCD_NODES:
            options = {
                "name": node,
                "data-dir": Path(directory) / node,
                "listen-client-urls": f"http://{serve[node]}",
                "advertise-client-urls": f"http://{serve[node]}",
                "listen-peer-urls": peer[node],
                "initial-advertise-peer-urls": peer[node],
                "initial-cluster": ",".join(f"{name}={url}" for name, url in peer.items()),
                "max-txn-ops": ops_max,
                "max-request-bytes": _REQUEST_BYTES,
            }
            command = [program, *(f"--{name}={value}" for name, value in options.items())]
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            stack.callback(process.wait)
            stack.callback(process.kill)
            pids.append(process.pid)
        yield _wait_for_leader(list(serve.values())), lambda: ({"nodes": cpu_seconds(pids)}, 0)


def _wait_for_leader(addresses: list[str]) -> str:
    messages, services = etcd_stubs()
    deadline = time.monotonic() + _LEADER_S
    while time.monotonic() < deadline:
        for address in addresses:
            with grpc.insecure_channel(address) as channel, suppress(grpc.RpcError):
                status = services.MaintenanceStub(channel).Status(messages.StatusRequest(), timeout=1)
                if status.leader and status.leader == status.header.member_id:
                    return address
        time.sleep(0.1)
    raise BenchError(f"etcd has no leader within {_LEADER_S:g} s")


def transaction(ids: int, token: bytes) -> Any:
    """A TxnRequest that creates each of `ids` fresh keys that is absent, and gets each that is there, to know
    a retry from a duplicate: a transaction inside per key, so that each has its outcome, as in the registry.
    """
    messages, _ = etcd_stubs()
    compare, result = messages.Compare.CREATE, messages.Compare.EQUAL
    data = os.urandom(16 * ids)
    each = []
    for at in range(0, len(data), 16):
        key = data[at : at + 16]
        absent = messages.Compare(result=result, target=compare, key=key, create_revision=0)
        put = messages.RequestOp(request_put=messages.PutRequest(key=key, value=token))
        get = messages.RequestOp(request_range=messages.RangeRequest(key=key))
        inside = messages.TxnRequest(compare=[absent], success=[put], failure=[get])
        each.append(messages.RequestOp(request_txn=inside))
    return messages.TxnRequest(success=each)


class EtcdCaller:
    """Made with requests enough for `seconds`, so that as little as can be of this client is measured."""

    def __init__(self, address: str, ids: int, seconds: float) -> None:
        _, services = etcd_stubs()
        self._stub = services.KVStub(grpc.insecure_channel(address))
        count = round((seconds + WARM_S) * _PREPARED_PER_S)
        self._made = [transaction(ids, Token("127.0.0.1:7000", 1, n).pack()) for n in range(count)]

    def __call__(self, load: Load) -> int:
        ids = load.ids[0]
        try:
            request = self._made.pop()
        except IndexError:
            request = transaction(ids, Token("127.0.0.1:7000", 1, 0).pack())
        try:
            answer = self._stub.Txn(request, timeout=_ETCD_S)
        except grpc.RpcError as error:
            raise BenchError(f"{error.code()}: {error.details()}") from error
        assert answer.succeeded, "every key is new"
        return ids
