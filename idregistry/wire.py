"""Messages of the registry as its rules have them, and back: for its replicas and its clients."""

from collections.abc import Iterable, Iterator
from typing import Final

from idregistry.rules import commands
from idregistry.rules.names import replica_mistake
from idregistry.rules.packing import TIME_BYTES
from idregistry.rules.sharding import Route
from idregistry.rules.surveys import Scanned
from photon.core.ids import ID_BYTES
from photon.core.settings import MAIN_SET
from photon.rpc import idregistry_pb2 as pb

LOOKUP_PART: Final = 4096
"""Ids looked up in one go, with the interpreter's lock held."""


def row_of(replica: pb.Replica) -> commands.Row:
    name = replica.set or MAIN_SET
    return commands.Row(replica.name, replica.raft_host, replica.raft_port, replica.grpc, name)


def replicas_of(rows: Iterable[commands.Row]) -> list[pb.Replica]:
    return [
        pb.Replica(name=r.name, raft_host=r.raft_host, raft_port=r.raft_port, grpc=r.grpc, set=r.set)
        for r in rows
    ]


def mistake_of(replica: pb.Replica) -> str | None:
    host = f"[{replica.raft_host}]" if ":" in replica.raft_host else replica.raft_host
    return replica_mistake(replica.name, f"{host}:{replica.raft_port}", replica.grpc)


def parts_of(request: pb.LookupRequest) -> Iterator[tuple[bytes, bytes]]:
    """Its ids and times, LOOKUP_PART at a time."""
    ids, times = request.ids, request.times  # each a copy of the whole field
    for start in range(0, len(ids) // ID_BYTES, LOOKUP_PART):
        end = start + LOOKUP_PART
        yield ids[ID_BYTES * start : ID_BYTES * end], times[TIME_BYTES * start : TIME_BYTES * end]


def scanned_to_wire(scanned: Scanned) -> pb.ScanResponse:
    return pb.ScanResponse(
        ids=scanned.ids,
        times=scanned.times,
        holders=scanned.holders,
        holder_of=scanned.holder_of.tobytes(),
        token_times=scanned.token_times.tobytes(),
        boundary_us=scanned.boundary_us,
        guards=scanned.guards,
    )


def route_of(request: pb.CommitRequest | pb.ReleaseRequest) -> Route:
    return Route(request.route.known_us, request.route.guard)
