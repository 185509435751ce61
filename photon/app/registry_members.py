"""The registry replicas of a work directory: who they are by now, and a new one for each that lost its disk.

A replica that has lost its directory has forgotten what it acknowledged, so the others refuse it. In a run on
one machine it is replaced by an empty one with a new name, by itself, while the run goes on.
"""

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from idregistry.client import RegistryClient
from idregistry.hosting import TABLE_FILE
from idregistry.peers import Table, read_table
from photon.app.topology import Topology
from photon.core.clock import SystemClock
from photon.core.errors import UnavailableError, UsageError

TIMEOUT_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Members:
    """`names` run; those `joining` are blank and wait; `lost`: (who lost its disk, who takes its place)."""

    names: list[str]
    joining: frozenset[str]
    lost: list[tuple[str, str]]


def members_of(work: Path, count: int) -> Members:
    """As the replicas themselves noted it down; r0, r1, ... in a work directory without a registry.

    CorruptStateError where such a note can't be read.
    """
    home = work / "registry"
    table = max(
        (read_table(path) for path in home.glob(f"*/{TABLE_FILE}")),
        key=lambda one: (len(one.removed), len(one.replicas)),
        default=Table(),
    )
    names = sorted(row.name for row in table.replicas) or [f"r{number}" for number in range(count)]
    blank = [name for name in names if is_blank(home / name)]
    if len(blank) > len(names) // 2:
        return Members(names, frozenset(), [])  # nothing to go on from: founded now, or refused elsewhere
    if table.leaving is not None:
        # One replacement at a time: the next run sees to the others.
        return Members(names, frozenset(blank) & {table.leaving[1]}, [])
    used = {*names, *table.removed, *(path.name for path in home.glob("*"))}
    fresh = (name for number in range(len(used) + len(blank)) if (name := f"r{number}") not in used)
    lost = list(zip(blank[:1], fresh, strict=False))
    new = dict(lost)
    return Members([new.get(name, name) for name in names], frozenset(new.values()), lost)


def is_blank(home: Path) -> bool:
    """Whether a replica's directory holds none of its groups."""
    return not any(home.glob("*/*"))


class Replacing:
    """Tells the registry, in a thread, who takes whose place."""

    def __init__(
        self, topology: Topology, lost: list[tuple[str, str]], notice: Callable[[str], None]
    ) -> None:
        self._topology = topology
        self._lost = lost
        self._notice = notice
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="replacing", daemon=True)

    def start(self) -> None:
        for old, new in self._lost:
            self._notice(f"registry replica {old} has lost its directory: {new} takes its place")
        if self._lost:
            self._thread.start()

    def stop(self) -> None:
        self._stop.set()

    def _run(self) -> None:
        replicas = [replica.grpc for replica in self._topology.replicas if not replica.joining]
        client = RegistryClient(replicas, TIMEOUT_S, SystemClock(), random.Random())
        try:
            for old, new in self._lost:
                self._replace(client, old, new)
        finally:
            client.close()

    def _replace(self, client: RegistryClient, old: str, new: str) -> None:
        row = self._topology.replica(new)
        while not self._stop.is_set():
            try:
                client.replace(old, new, f"{row.raft_host}:{row.raft_port}", row.grpc)
                return
            except UnavailableError:
                continue  # it is starting; it has waited for its answer
            except UsageError as error:
                self._notice(f"registry replica {old} can't be replaced by {new}: {error}")
                return
