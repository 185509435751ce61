"""All that is known of one foreign event: registry, dispatchers, dead letters, joined logs, event stores.

Each source is asked by itself; one that does not answer is said to be silent, and the others still tell. Of a
run that has ended its files tell.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dispatcher.client import DispatcherClient
from eventstore.client import EventStoreClient
from joiner.joined_lines import blocks_of, joined_files
from joiner.output_files import PARQUET
from photon.cluster.dead_letters import Filter, letter_of, text_at
from photon.cluster.ledgers import waiting_in
from photon.cluster.registry_access import registry_of
from photon.cluster.topology import Pipeline, Topology
from photon.core.errors import PhotonError, UnavailableError
from photon.core.fates import Found
from photon.core.ids import IdPacker, parse_token
from photon.rpc.network import LOOPBACK, Network

if TYPE_CHECKING:
    from idregistry.client import RegistryAt

TIMEOUT_S: Final = 5.0
PENDING_TIMEOUT_S: Final = 30.0
"""It looks through all that waits."""
_PLACES_MAX: Final = 20
"""So many joined lines or letters of one event are shown."""
_NEVER_ESCAPED: Final = re.compile(r"[A-Za-z0-9 _.:-]+")
"""Other characters of a JSON string are spelled in several ways: `/` and `\\/`, `&` and `\\u0026`."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Which event is meant: its id as text and packed; where a foreign event holds its ids."""

    id: str
    packed: bytes
    id_path: str
    primary_path: str


FindJoined = Callable[[Asked, dict[str, str]], Iterable[dict[str, Any]]]
"""As `joined_lines` without its directory."""


def explain(
    topology: Topology,
    event_id: str,
    primary_id: str | None,
    registry_of_ended: Callable[[], "RegistryAt"] | None = None,
    find_joined: FindJoined | None = None,
) -> dict[str, Any]:
    """Plain values: {id, joined, dead_letters, unreadable, not_here, registry, pending, primary}.

    `registry_of_ended`: of a run that has ended, its registry, started for the question: then its ledgers are
    read, and its event stores are not asked. `find_joined`: who knows where joined lines are;
    else all joined logs are looked through. `unreadable`: joined logs that can't be read, and why;
    `not_here`: directories of joined logs and dead letters that are not on this machine; the others as
    their functions say.
    """
    settings = topology.settings
    packer = IdPacker(settings.ids.key.encode())
    asked = Asked(event_id, packer.pack([event_id]), settings.foreign.id, settings.foreign.primary_id)
    unreadable: dict[str, str] = {}
    find = find_joined or partial(joined_lines, Path(topology.output) / "joined")
    joined = list(find(asked, unreadable))[:_PLACES_MAX]
    letters = list(letters_of(Path(topology.output) / "dead-letters", asked))[:_PLACES_MAX]
    network, ended = topology.network(""), registry_of_ended is not None
    ask = partial(waiting_in, topology) if ended else partial(pending, network=network)
    registry = registry_of_ended or partial(registry_of, topology)
    waiting = {p.datacenter: _answer(partial(ask, p, packed=asked.packed)) for p in topology.pipelines}
    if primary_id is None:
        lines = [row["line"] for row in joined] + [row["event"] for row in letters]
        lines += [row["line"] for row in waiting.values() if row is not None and "line" in row]
        primary_id = _primary_id_in(lines, asked)
    return {
        "id": event_id,
        "joined": joined,
        "dead_letters": letters,
        "unreadable": unreadable,
        "not_here": not_here(topology),
        "registry": _answer(partial(registered, topology, asked.packed, registry)),
        "pending": waiting,
        "primary": None
        if primary_id is None
        else primary_in(topology, primary_id, packer.pack([primary_id]), network, ended),
    }


def verdict(found: dict[str, Any]) -> str:
    """The most that can be said of what `explain` found, in a word or two."""
    waits = any(row is not None and "silent" not in row for row in found["pending"].values())
    registry = found["registry"]
    if found["joined"]:
        return "joined"
    if waits:
        return "waits to be tried again"
    if registry is not None and "silent" not in registry:
        return "registered, and in no joined log: " + (
            "it may stand in a file that cannot be read here"
            if found["unreadable"] or found["not_here"]
            else "being written, changed by the adapter, or moved away"
        )
    if found["dead_letters"]:
        return found["dead_letters"][-1]["fate"]  # type: ignore[no-any-return]
    silent = registry is not None or any(row is not None for row in found["pending"].values())
    if silent or found["unreadable"] or found["not_here"]:
        return "nothing is known of it, but not all answer"
    return "not seen: not read yet, or in no log"


def not_here(topology: Topology) -> list[str]:
    """Directories that datacenters write, and that this machine does not have. A joiner makes its own."""
    output = Path(topology.output)
    places = {p.datacenter: output / "joined" / p.datacenter for p in topology.pipelines}
    return [
        str(directory)
        for datacenter, joined in places.items()
        if not joined.is_dir()
        for directory in (joined, output / "dead-letters" / datacenter)
    ]


def _answer(ask: Callable[[], Any]) -> Any:
    """What it says, or {"silent": why} if it does not answer."""
    try:
        return ask()
    except UnavailableError as error:
        return {"silent": str(error)}


def registered(
    topology: Topology, packed: bytes, registry: Callable[[], "RegistryAt"]
) -> dict[str, Any] | None:
    """{shard, joiner, process, incarnation, time_us} of the token that registered the id; None if none has.

    UnavailableError.
    """
    guarded, silent = None, None
    with registry().client(TIMEOUT_S) as client:
        for shard in client.configuration().shards:
            try:
                # Another than the leader may not have read its log yet.
                parts = list(client.scan(shard, timeout_s=TIMEOUT_S, fresh=True, ids=packed))
            except UnavailableError as error:
                silent = error
                continue
            for part in parts:
                for token, is_guard in zip(part.tokens, part.guarded.tolist(), strict=True):
                    found = {"shard": shard, **_token(token, topology)}
                    if not is_guard:
                        return found
                    guarded = found
    if silent is not None and guarded is None:
        raise silent
    return guarded


def _token(packed: bytes, topology: Topology) -> dict[str, Any]:
    token = parse_token(packed)
    processes = {joiner.address: joiner.title for joiner in topology.processes("joiner")}
    whose = {"joiner": token.address, "process": processes.get(token.address)}
    return {**whose, "incarnation": f"{token.incarnation:016x}", "time_us": token.time_us}


def pending(pipeline: Pipeline, packed: bytes, network: Network = LOOPBACK) -> dict[str, Any] | None:
    """What DispatcherClient.pending says of the event: one worker has it. UnavailableError if none says so
    and one does not answer."""
    silent: UnavailableError | None = None
    for address in pipeline.dispatchers:
        try:
            with closing(DispatcherClient(address, PENDING_TIMEOUT_S, network)) as client:
                if (found := client.pending(packed)[0]) is not None:
                    return found
        except UnavailableError as error:
            silent = silent or error
    if silent is not None:
        raise silent
    return None


def primary_in(
    topology: Topology, primary_id: str, packed: bytes, network: Network = LOOPBACK, ended: bool = False
) -> dict[str, Any]:
    """{id, datacenters: {name: {outcome, line}}}: what each event store answers."""

    def look_up(eventstores: Sequence[str]) -> dict[str, Any]:
        if ended:
            return {"silent": "the run has ended"}
        with closing(EventStoreClient(eventstores, TIMEOUT_S, network=network)) as client:
            outcomes, lines = client.lookup(packed)
        found = Found(outcomes[0])
        return {"outcome": found.name.lower(), "line": lines[0].decode() if found is Found.FOUND else None}

    answers = {p.datacenter: _answer(partial(look_up, p.eventstores)) for p in topology.pipelines}
    return {"id": primary_id, "datacenters": answers}


def letters_of(directory: Path, asked: Asked) -> Iterator[dict[str, Any]]:
    """The dead letters of the event, in every datacenter. StorageError for a line that is no letter."""
    chosen = Filter(id=asked.id, id_path=asked.id_path)
    for path in sorted(directory.glob("*/foreign-*.jsonl")):
        for _, line in _lines_with(path, asked):
            letter = letter_of(path, line)
            if chosen.takes(letter):
                yield letter.told(path.parent.name)


def joined_lines(
    directory: Path, asked: Asked, unreadable: dict[str, str] | None = None
) -> Iterator[dict[str, Any]]:
    """{datacenter, file, offset, line} of each joined line of the event; of Parquet `row` for `offset`.

    Files that can't be read get into `unreadable`: path -> why.
    """
    unreadable = {} if unreadable is None else unreadable
    for path in _joined_files(directory):
        place = "row" if path.suffix == PARQUET else "offset"
        try:
            for at, line in _lines_with(path, asked):
                if _holds(line, asked):
                    text = line.decode("utf-8", "replace")
                    yield {"datacenter": path.parent.name, "file": str(path), place: at, "line": text}
        except FileNotFoundError:
            continue
        except (OSError, PhotonError) as error:
            unreadable[str(path)] = str(error)


def _joined_files(directory: Path) -> Iterator[Path]:
    """What is completed as Parquet after it was listed is looked through as such."""
    for path in joined_files(directory):
        yield path
        if path.suffix != PARQUET and not path.exists():
            yield path.with_suffix(PARQUET)


def _lines_with(path: Path, asked: Asked) -> Iterator[tuple[int, bytes]]:
    """Whole lines that hold a part of the id, which are few, and where each begins: at which byte, or row."""
    needle = max(_NEVER_ESCAPED.findall(asked.id), key=len, default="").encode()
    for first, data in blocks_of(path):
        at = data.find(needle)
        while at >= 0:
            start, end = data.rfind(b"\n", 0, at) + 1, data.find(b"\n", at)
            if end < 0:
                break
            row = data.count(b"\n", 0, start) if path.suffix == PARQUET else start
            yield first + row, data[start:end]
            at = data.find(needle, end + 1)


def _holds(line: bytes, asked: Asked) -> bool:
    try:
        return text_at(json.loads(line), asked.id_path) == asked.id
    except (ValueError, RecursionError):
        return False


def _primary_id_in(lines: list[str], asked: Asked) -> str | None:
    for line in lines:
        try:
            found = text_at(json.loads(line), asked.primary_path)
        except ValueError:
            continue
        if found is not None:
            return found
    return None
