"""A topology made ready to run: numbers for what rows and frames name, and who reads what."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, Final

import msgspec

from millwheel.computation import Computation
from millwheel.engine.records import opener
from millwheel.engine.store import NAMES, STATE, node_rows
from millwheel.errors import TopologyError
from millwheel.topology import DEAD_LETTERS, Input, LogSink, Node, Topology, decoder_of

_numbers: Final = msgspec.msgpack.Decoder(dict[str, int]).decode
_LOOKED_AT: Final = 100
"""States of a computation that a run looks at before it begins."""


class Plan:
    """`numbers`: of computations, inputs, injectors and sinks, by "<kind> <name>"; a number is never used
    again.
    """

    def __init__(self, topology: Topology, numbers: Mapping[str, int]) -> None:
        """`numbers` as `numbered` gives them."""
        self.topology = topology
        self.order = topology.order()
        makers = {name: name for name in topology.injectors}
        kinds: dict[str, Any] = dict.fromkeys(topology.injectors, Any)
        for name, made in topology.computations.items():
            for stream in made.streams:
                makers[stream.name], kinds[stream.name] = name, stream.type
        self.nodes = {name: numbers[f"computation {name}"] for name in self.order}
        self.injectors = {name: numbers[f"injector {name}"] for name in topology.injectors}
        self.sinks = {name: numbers[f"sink {name}"] for name in (*topology.sinks, DEAD_LETTERS)}
        self.inputs: dict[int, tuple[str, Input, Any]] = {}
        """Consumer, input, type of its values."""
        self.gone: dict[int, tuple[str, str]] = {}
        """Consumer and stream of inputs that are no longer there: records may be under way to them."""
        self.readers: dict[str, list[int]] = {stream: [] for stream in makers}
        self.inputs_of: dict[str, list[int]] = {name: [] for name in self.order}
        self.makers: dict[str, list[str]] = {}
        """Of a computation: the injectors and computations that it reads from."""
        for name in self.order:
            reads = topology.computations[name].inputs
            for known, read in zip(_inputs(name, reads), reads, strict=True):
                number = numbers[known]
                kind = kinds[read.stream] if read.type is None else read.type
                self.inputs[number] = (name, read, kind)
                self.inputs_of[name].append(number)
                self.readers[read.stream].append(number)
            self.makers[name] = sorted({makers[read.stream] for read in reads})
        for known, number in numbers.items():
            if known.startswith("input ") and number not in self.inputs:
                _, consumer, _, read_from = known.split(" ", 3)
                self.gone[number] = consumer, read_from
        self.openers = {
            stream: opener(decoder_of(kind), msgspec.json.decode) for stream, kind in kinds.items()
        }
        """Of values of a stream as they travel."""

    @property
    def sources(self) -> list[str]:
        """What has a low watermark of its own."""
        return [*self.topology.injectors, *self.order]

    @property
    def graph(self) -> dict[str, dict[str, Any]]:
        """By name what kind each is, and whom it reads from; sinks by their stream's name, as `sink NAME`."""
        made = self.topology.computations
        makers = {stream.name: name for name in self.order for stream in made[name].streams}
        graph: dict[str, dict[str, Any]] = {
            name: {"kind": "injector", "reads": []} for name in self.injectors
        }
        graph |= {name: {"kind": "computation", "reads": self.makers[name]} for name in self.order}
        sinks = [sink for sink in self.topology.sinks if sink in makers]
        return graph | {f"sink {sink}": {"kind": "sink", "reads": [makers[sink]]} for sink in sinks}

    def sink(self, stream: str) -> LogSink | None:
        return self.topology.sinks.get(stream)


def state_type(made: Node) -> Any:
    """Of a key's state."""
    computation = made.computation
    return type(computation).state if isinstance(computation, Computation) else dict[int, Any]


def shown_type(kind: Any) -> str:
    return kind.__qualname__ if isinstance(kind, type) else str(kind)


def check_states(plan: Plan, scan: Callable[[bytes], Iterator[tuple[bytes, bytes]]]) -> None:
    """Look whether the code reads the state that there is: if not, each record and timer of its keys would
    become a dead letter. TopologyError.
    """
    for name, number in plan.nodes.items():
        kind = state_type(plan.topology.computations[name])
        decode = decoder_of(kind)
        try:
            for _, packed in list(islice(scan(node_rows(STATE, number)), _LOOKED_AT)):
                decode(packed)
        except msgspec.DecodeError as error:
            raise TopologyError(
                f"computation '{name}': there is state of it that is no {shown_type(kind)} ({error}). "
                "Declare a type that reads it too, or give the computation another name"
            ) from error


def _inputs(name: str, reads: Sequence[Input]) -> list[str]:
    """Of a computation: what each is known by, wherever it stands among those of other streams."""
    seen = Counter[str]()
    known = []
    for read in reads:
        known.append(f"input {name} {seen[read.stream]} {read.stream}")
        seen[read.stream] += 1
    return known


def numbered(topology: Topology, known: Mapping[str, int]) -> dict[str, int]:
    """The known numbers, and new ones for what is new. What is no longer there keeps its number."""
    wanted = [f"sink {DEAD_LETTERS}", *(f"sink {name}" for name in topology.sinks)]
    wanted += [f"injector {name}" for name in topology.injectors]
    for name, made in topology.computations.items():
        wanted.append(f"computation {name}")
        wanted += _inputs(name, made.inputs)
    numbers = dict(known)
    for name in wanted:
        numbers.setdefault(name, len(numbers))
    return numbers


def shape(topology: Topology) -> tuple[str, ...]:
    """Names of all that has a number."""
    return tuple(sorted(numbered(topology, {})))


NUMBERS_ROW: Final = NAMES


def unpack_numbers(packed: bytes | None) -> dict[str, int]:
    return {} if packed is None else _numbers(packed)
