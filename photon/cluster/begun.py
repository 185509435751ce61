"""What a run has begun: where that is, whether it may go on with it, and the plan by which it does."""

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from millwheel import history
from millwheel.engine.logged import LoggedStore
from millwheel.engine.plan import NUMBERS_ROW, Plan, check_states, numbered, unpack_numbers
from millwheel.engine.records import SLOTS
from millwheel.engine.store import COPIES, GIVEN, SERVER, SINK, TAKEN_UP, node_rows
from millwheel.machines import holder_of
from millwheel.sinks import is_elsewhere
from millwheel.topology import Topology
from millwheel.worker import shared_store, store_of
from photon.connect.uris import parse_uri
from photon.core.disk import make_directory, storage_errors, write_file
from photon.core.errors import UsageError

READY: Final = "millwheel.ready.topologies:"
"""What names of ready-made topologies begin with."""
ELSEWHERE: Final = "store"
"""Says where the state of a run is, if not in its work directory."""


@dataclass(frozen=True, slots=True)
class Begun:
    """`name`: of the topology. `stores`: URIs, none if the state is in the work directory. `history`: what a
    run that has not begun takes up first."""

    name: str
    work: Path
    stores: tuple[str, ...]
    history: Path | None

    def check_place(self) -> None:
        """A run whose state is on this machine's disk would begin anew elsewhere, and the other way round.
        UsageError."""
        begun = (self.work / "state").exists()
        marked = self.work / ELSEWHERE
        if self.stores and begun:
            raise UsageError(
                f"{self.work} has its state on this disk: leave --store out, or take another --work"
            )
        if not self.stores and marked.exists():
            raise UsageError(f"{self.work} has its state in {marked.read_text()}: name it by --store")

    def number(self, topology: Topology, number: int) -> Plan:
        """Before the workers of this round start, whose number may be another: what former ones left is for
        all to see, and none of them commits any more. UsageError, StorageError."""
        if self.stores:
            with storage_errors(self.work):
                shown = " and ".join(parse_uri(uri).shown for uri in self.stores)
                write_file(self.work / ELSEWHERE, shown.encode())
        with self._opened(number) as stores:
            first = stores[0]
            self._same_servers(stores)
            self._go_on(first)
            self._same_copies(first, topology)
            for store in stores:
                store.claim(range(SLOTS), 0, 1)
            known = unpack_numbers(first.numbers(NUMBERS_ROW)) or self._take_up(stores)
            if self.history is not None and first.numbers(TAKEN_UP) is None:
                raise UsageError(f"{self.work} has begun without a history: give it a --work of its own")
            numbers = numbered(topology, known)
            plan = Plan(topology, numbers)
            _check_stored(
                plan, lambda prefix: itertools.chain.from_iterable(store.scan(prefix) for store in stores)
            )
            for store in reversed(stores):  # the first one last: it says what is known
                store.numbers(NUMBERS_ROW, msgspec.msgpack.encode(numbers))
        return plan

    def check(self, topology: Topology, number: int) -> None:
        """Whether it reads what the run has stored by this round, while that goes on. UsageError,
        StorageError."""
        with self._opened(number) as stores:
            known = unpack_numbers(stores[0].numbers(NUMBERS_ROW))
            logged = [store.logged() for store in stores]

            def scan(prefix: bytes) -> Iterator[tuple[bytes, bytes]]:
                for store, newer in zip(stores, logged, strict=True):
                    for row, value in newer.items():
                        if value is not None and row.startswith(prefix):
                            yield row, value
                    yield from (one for one in store.scan(prefix) if one[0] not in newer)

            _check_stored(Plan(topology, numbered(topology, known)), scan)

    @contextlib.contextmanager
    def _opened(self, number: int) -> Iterator[list[LoggedStore]]:
        with contextlib.ExitStack() as held:
            stores = [store_of(self.work, self.stores[0] if self.stores else "", number)]
            held.callback(stores[0].close)
            for uri in self.stores[1:]:
                other = shared_store(uri, number=number)
                held.callback(other.close)
                other.reach()
                stores.append(other)
            yield stores

    def _same_servers(self, stores: list[LoggedStore]) -> None:
        """Each has the slots of its place among them. UsageError."""
        if not self.stores:
            return
        for place, store in enumerate(stores, 1):
            here = f"{place} of {len(stores)}"
            there = store.numbers(SERVER)
            if there is None:
                store.numbers(SERVER, here.encode())
            elif there.decode() != here:
                uri = parse_uri(self.stores[place - 1]).shown
                raise UsageError(f"{uri} is store {there.decode()}: give the same ones in the same order")

    def _same_copies(self, store: LoggedStore, topology: Topology) -> None:
        """Copies that were begun elsewhere would be made anew, and count twice. UsageError."""
        for name, injector in topology.injectors.items() if self.stores else ():
            if not (injector.imported or injector.listen):
                continue
            row = COPIES + name.encode()
            here = "" if injector.copies else f"{holder_of(self.work)} {self.work.absolute()}"
            there = store.numbers(row)
            if there is None:
                store.numbers(row, here.encode())
                continue
            holder, _, where = there.decode().partition(" ")
            if holder != here.partition(" ")[0]:
                raise UsageError(
                    f"injector '{name}' has what it received in {where}: go on with that --work"
                    if where
                    else f"injector '{name}' has shared copies: name their directory again (copies=...)"
                )

    def _take_up(self, stores: list[LoggedStore]) -> dict[str, int]:
        """The history, into stores that have not begun, or in which that was cut off. The numbers that its
        rows go by. UsageError."""
        first = stores[0]
        cut_off = first.numbers(TAKEN_UP)
        given = None if self.history is None else str(self.history.absolute()).encode()
        if cut_off is not None and cut_off != given:
            raise UsageError(f"{self.work} has a part of {cut_off.decode()}: name it by --history once more")
        if self.history is None or given is None:
            return {}
        left = history.load(self.history)
        if left.topology != self.name:
            raise UsageError(f"{self.history} is of {left.topology}, and not of {self.name}")
        first.numbers(TAKEN_UP, given)
        history.take_up(stores, self.history, left)
        for store in stores:
            store.claim(range(SLOTS), 0, 1)  # for all to see
        return left.numbers

    def _go_on(self, store: LoggedStore) -> None:
        """What is ready-made goes on with its own state, which is of its arguments. UsageError."""
        topology, _, given = self.name.partition(" ")
        if not topology.startswith(READY):
            return
        began = store.numbers(GIVEN)
        if began is None:
            store.numbers(GIVEN, self.name.encode())
            return
        former, _, arguments = began.decode().partition(" ")
        if former != topology:
            raise UsageError(f"{self.work} was begun by another command: give this one a --work of its own")
        old, new = json.loads(arguments), json.loads(given)
        for one in (old, new):
            one["sink"] = one["sink"]["directory"]  # where it goes on to may be another at each start
        changed = [f"{name} {old[name]!r}, now {new[name]!r}" for name in old if old[name] != new[name]]
        if changed:
            raise UsageError(
                f"{self.work} was begun with {'; '.join(changed)}: what it holds is of that. Give the same "
                "again, or another --work"
            )


def _check_stored(plan: Plan, scan: Callable[[bytes], Iterator[tuple[bytes, bytes]]]) -> None:
    """Whether this code goes on with it, and can write its sinks. TopologyError, UsageError, StorageError."""
    check_states(plan, scan)
    for name, sink in plan.topology.sinks.items():
        with storage_errors(Path(sink.directory)):
            make_directory(Path(sink.directory))
        for row, place in scan(node_rows(SINK, plan.sinks[name])) if sink.published_to else ():
            if is_elsewhere(place, sink, name, int.from_bytes(row[-2:], "big")):
                raise UsageError(
                    f"sink '{name}': {sink.directory} is not where its files are, of which not all may be "
                    "published; name that directory again, or leave publish out"
                )
