"""A topology: injectors, computations, sinks, and the streams between them (paper 4.1, 4.2).

It is a Python value in a module of the user's; `photon millwheel run MODULE:NAME` runs it. What a stream is
called is the name of the injector, or what a computation declares; any number of computations may read it.
"""

import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, get_args

import msgspec

from millwheel.computation import BatchComputation, Computation, Stream
from millwheel.errors import TopologyError
from photon.connect.copies import copies_of, patterns_of
from photon.connect.ports import Fields
from photon.connect.uris import is_source, known_as, parse_uri
from photon.core.addresses import split_address
from photon.core.errors import SettingsError, UsageError
from photon.core.settings import Tls, parse_path
from photon.logs.files import as_glob, glob_matches

Late = Literal["process", "drop", "dead-letter"]
Productions = Literal["strong", "weak"]
Unit = Literal["s", "ms", "us", "ns", "rfc3339"]
Key = str | Callable[[Any], str] | None
if TYPE_CHECKING:
    Paths = str | os.PathLike[str] | tuple[str | os.PathLike[str], ...]
else:  # msgspec makes Logs of JSON
    Paths = str | tuple[str, ...]
DEAD_LETTERS: Final = "dead-letters"
"""The sink that every topology has."""
PUSHED: Final = "pushed"
"""What the files of an injector that is pushed to are called."""
WHOLE: Final = "*"
"""As a value: the whole line."""
_SECONDS_MAX: Final = 1e12
"""Of event time, which has 62 bits of microseconds."""


@dataclass(frozen=True, slots=True)
class Input:
    """What a computation reads of a stream, and how it finds the key (paper 4.2: the consumer's choice).

    `key`: of a log's line, the path of a field (`user`, `ctx.query.id`); a function from the value to the
    key; None takes the key that the producer gave. `value`, of a log's line: "*" is all of it, decoded from
    JSON; a path, that field; several paths, a dict of them; None, nothing travels but key and time. `type`:
    to decode the value to; by default the stream's.
    """

    stream: str
    key: Key = None
    value: str | tuple[str, ...] | None = WHOLE
    type: Any = None

    @property
    def fields(self) -> tuple[str, ...]:
        """Paths of what the value is made of, but for a whole line."""
        paths = (self.value,) if isinstance(self.value, str) else self.value or ()
        return tuple(path for path in paths if path != WHOLE)


@dataclass(frozen=True, slots=True)
class Logs:
    """An injector: log files of JSON lines, growing, rotating, compressed, found by globs; or what is copied
    into such files first, all of `paths` then: URIs of Kafka topics and of objects, globs of CSV and Parquet
    files (docs/connectors.md).

    `time`: path of the event's time, in `unit`. `lateness_s`: how far behind the newest line of its file, or
    behind the wall clock once a file is read to its end, an event may be; what is further behind is late.
    `expected`: files (globs) of which each must match one before the low watermark moves at all. `silent`:
    what a file that was read to its end says: "advance", that all up to now was read; "hold", nothing more
    than its last line, or its log's if it was rotated away. `skew_max_s`: a line that is further ahead of the
    clock says nothing of how far its file is. `listed`: read only files that a manifest beside them lists, as
    of joined logs and sinks. `percentile`: the low watermark stays as far behind as this share of recent
    lines was late, so with 99.9 about one line of a thousand is late; `lateness_s` is the most, and what
    counts until enough was seen.
    """

    paths: Paths
    time: str
    unit: Unit = "us"
    lateness_s: float = 0.0
    expected: tuple[str, ...] = ()
    silent: Literal["advance", "hold"] = "advance"
    skew_max_s: float = 3_600.0
    listed: bool = False
    percentile: float | None = None
    log: Literal["file", "directory"] = "file"
    """What is silent, for `silent="hold"`: a file, or all files of a directory together, which one worker
    reads then."""
    copies: str = ""
    """The directory of what is copied, where that is not the run's own: for several machines, which all reach
    it."""
    listen: str = ""
    """Of a `Push`."""
    tls: Tls = field(default_factory=Tls)

    @property
    def imported(self) -> bool:
        """Its records come through copies."""
        return any(map(is_source, self.patterns))

    @property
    def fields(self) -> Fields:
        """As sources are told of them."""
        return Fields((), self.time, self.unit)

    def received(self, work: Path, name: str) -> Path:
        """Where what is pushed to it, or copied for it, is kept, by a run in this directory."""
        return Path(self.copies or work / "received") / name

    def copied_to(self, received: Path) -> list[Path]:
        """The directory of each source."""
        return [copies_of(received, "", text) for text in self.patterns] if self.imported else []

    def within(self, received: Path) -> "Logs":
        """As a run with a directory for what is pushed or copied has it."""
        if self.listen:
            return replace(self, paths=str(received / f"{PUSHED}-*.jsonl"))
        return replace(self, paths=tuple(patterns_of(received, "", self.patterns)))

    @property
    def patterns(self) -> tuple[str, ...]:
        paths = (self.paths,) if isinstance(self.paths, str | os.PathLike) else self.paths
        return tuple(os.fspath(path) for path in paths)


def Push(
    listen: str,
    time: str,
    unit: Unit = "us",
    lateness_s: float = 0.0,
    tls: Tls | None = None,
    percentile: float | None = None,
) -> Logs:
    """An injector that is pushed to, over gRPC on `host:port` (millwheel.push): lines of JSON.

    A program that is not running pushes nothing, and what it pushes later may be late: `lateness_s` says by
    how much it may. `tls`: beyond loopback; files as [tls] has them, of both ends.
    """
    return Logs((), time, unit, lateness_s, percentile=percentile, listen=listen, tls=tls or Tls())


def JoinedLogs(
    out: str,
    time: str = "ts_us",
    unit: Unit = "us",
    lateness_s: float = 60.0,
    listed: bool = False,
    percentile: float | None = None,
    silent: Literal["advance", "hold"] = "advance",
) -> Logs:
    """The joined logs of a `photon join`, `dev` or service: OUT/joined of all its datacenters.

    A foreign event may wait long for its primary, so it may be late by as much: choose `lateness_s` by it.
    Where a joiner can be killed, the last lines of a growing file may come twice (docs/output.md): put
    `millwheel.ready.Deduplicate` behind it, or read only files that are complete (`listed`), as late as
    joiner.output_file_s says. `silent="hold"`: a datacenter that writes nothing any more is waited for, as
    it may come back with events that it had won.
    """
    paths = os.path.join(out, "joined", "*", "*.jsonl")
    reading = Logs(paths, time, unit, lateness_s, silent=silent, listed=listed, percentile=percentile)
    return replace(reading, log="directory") if silent == "hold" else reading


@dataclass(frozen=True, slots=True)
class LogSink:
    """Each record of a stream, once, a JSON line in files `<directory>/<sink>-<worker>-NNNNNN.jsonl`.

    `with_time`: a line is {"time": us, "value": ...}, else the value alone. `publish`: a URI, or several, of
    sinks that the files' lines go on to, each once (docs/connectors.md).
    """

    directory: str
    with_time: bool = False
    file_bytes_max: int = 256 << 20
    publish: str | tuple[str, ...] = ()

    @property
    def published_to(self) -> tuple[str, ...]:
        return (self.publish,) if isinstance(self.publish, str) else tuple(self.publish)


@dataclass(frozen=True, slots=True)
class Node:
    """A computation in a topology."""

    computation: Computation[Any] | BatchComputation
    inputs: tuple[Input, ...]
    streams: tuple[Stream[Any], ...] = ()
    late: Late = "process"
    tries: int = 3
    """Of a record whose call raises, before it becomes a dead letter."""
    exactly_once: bool = True
    productions: Productions = "strong"


def node(
    computation: Computation[Any] | BatchComputation,
    *parts: Input | Stream[Any],
    late: Late = "process",
    tries: int = 3,
    exactly_once: bool = True,
    productions: Productions = "strong",
) -> Node:
    """A computation with what it reads and what it produces to.

    For idempotent code (paper 6.1.3): without `exactly_once` a record may come again after a failure, and is
    not recognized. Weak `productions` leave before the commit that has their cause, and come again after a
    failure: they must follow from the record alone, and their readers must do without `exactly_once`. What a
    timer produces is always strong.
    """
    if wrong := [part for part in parts if not isinstance(part, Input | Stream)]:
        raise TopologyError(f"node(..., {wrong[0]!r}): give Input(...) and Stream(...) only")
    inputs = tuple(part for part in parts if isinstance(part, Input))
    streams = tuple(part for part in parts if isinstance(part, Stream))
    return Node(computation, inputs, streams, late, tries, exactly_once, productions)


@dataclass(frozen=True)
class Topology:
    """`injectors`: by the name of their stream. `sinks`: by the name of the stream that each writes.

    TopologyError for what can't be: a stream that nobody makes, a cycle, an input that does not fit.
    """

    injectors: Mapping[str, Logs]
    computations: Mapping[str, Node]
    sinks: Mapping[str, LogSink] = field(default_factory=dict)

    def __post_init__(self) -> None:
        makers: dict[str, str] = {name: name for name in self.injectors}
        for name in (*self.injectors, *self.computations, *self.sinks):
            own = name == DEAD_LETTERS and name not in self.sinks
            if not name or not all(c.isalnum() or c in "-_." for c in name) or own:
                raise TopologyError(f"'{name}' is no name here: letters, digits, '-', '_' and '.' make one")
        for name, made in self.computations.items():
            _check_node(name, made)
            if name in self.injectors:
                raise TopologyError(f"'{name}' is an injector and a computation: rename one of them")
            for stream in made.streams:
                if stream.name in makers:
                    raise TopologyError(
                        f"stream '{stream.name}' has two producers, '{makers[stream.name]}' and '{name}'"
                    )
                makers[stream.name] = name
        for name, injector in self.injectors.items():
            _check_logs(name, injector)
        for name, made in self.computations.items():
            for read in made.inputs:
                _check_input(name, read, read.stream in self.injectors, makers)
                maker = self.computations.get(makers[read.stream])
                if made.exactly_once and maker is not None and maker.productions == "weak":
                    raise TopologyError(
                        f"computation '{name}' reads '{read.stream}', whose weak productions may come twice: "
                        f"give it exactly_once=False, or '{makers[read.stream]}' strong ones"
                    )
        for name, sink in self.sinks.items():
            _check_sink(name, sink, self.injectors)
            made_here = [stream for stream in makers if stream not in self.injectors]
            if name not in (*made_here, DEAD_LETTERS):  # an injector's lines stand in its logs
                raise TopologyError(
                    f"sink '{name}': no computation produces to that stream; there are {_names(made_here)}"
                )
        self.order()

    def order(self) -> list[str]:
        """The computations, each after those that it reads from. TopologyError for a cycle."""
        makers = {stream.name: name for name, made in self.computations.items() for stream in made.streams}
        graph = {
            name: [makers[read.stream] for read in made.inputs if read.stream in makers]
            for name, made in self.computations.items()
        }
        try:
            return [*TopologicalSorter(graph).static_order()]
        except CycleError as error:
            way = " -> ".join(error.args[1])
            raise TopologyError(f"a cycle, on which a low watermark has no meaning: {way}") from error


def _names(names: Mapping[str, Any] | Sequence[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "none"


def _check_node(name: str, made: Node) -> None:
    if not isinstance(made, Node):
        raise TopologyError(f"computation '{name}': give node(<computation>, Input(...), Stream(...))")
    if not isinstance(made.computation, Computation | BatchComputation):
        kind = type(made.computation).__name__
        hint = "an instance, not the class" if inspect.isclass(made.computation) else "one of ours"
        raise TopologyError(
            f"computation '{name}' is a {kind}: give {hint} (Computation or BatchComputation)"
        )
    _check_computation(name, made.computation)
    if not made.inputs:
        raise TopologyError(f"computation '{name}' reads nothing: give it an Input")
    if made.productions not in get_args(Productions):
        raise TopologyError(f"computation '{name}': productions is one of {_names(get_args(Productions))}")
    if made.late not in get_args(Late):
        raise TopologyError(f"computation '{name}': late is one of {_names(get_args(Late))}")
    if not _is_whole(made.tries):
        raise TopologyError(f"computation '{name}': tries is a whole number, at least 1, not {made.tries!r}")


def _check_computation(name: str, computation: Computation[Any] | BatchComputation) -> None:
    calls: dict[str, Any] = {"process_record": Computation, "process_timer": None}
    if isinstance(computation, BatchComputation):
        calls = {"process_batch": BatchComputation, "process_timers": None}
    for call, base in calls.items():
        found = getattr(computation, call)
        if base is not None and getattr(found, "__func__", None) is getattr(base, call):
            raise TopologyError(
                f"computation '{name}': {type(computation).__name__} has no {call} of its own: write one"
            )
        _check_called(f"computation '{name}': {call}", found)
    if isinstance(computation, Computation) and computation.state is not None:
        try:
            computation.state()
        except Exception as error:
            kind = getattr(computation.state, "__qualname__", computation.state)
            raise TopologyError(
                f"computation '{name}': state of a new key is {kind}(), which fails ({error}): take a type "
                "that needs no arguments (dict, int, a struct whose fields all have defaults)"
            ) from error


def _check_called(what: str, function: Any) -> None:
    kinds = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
    if any(kind(function) for kind in kinds):
        raise TopologyError(f"{what} is called, and neither awaited nor iterated: no async, no yield in it")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and value >= 1


def _check_logs(name: str, injector: Logs) -> None:
    if not isinstance(injector, Logs):
        kind = type(injector).__name__
        raise TopologyError(
            f"injector '{name}' is a {kind}: give Logs(PATHS, time=FIELD), JoinedLogs or Push"
        )
    try:
        patterns = injector.patterns
    except TypeError:
        patterns = ()
    if not all(patterns) or not (patterns or injector.listen):
        raise TopologyError(f"injector '{name}' needs paths (globs, or Path objects), or listen")
    seconds: dict[str, Any] = {"lateness_s": injector.lateness_s, "skew_max_s": injector.skew_max_s}
    for what, value in seconds.items():
        if not isinstance(value, int | float) or not 0 <= value <= _SECONDS_MAX:
            raise TopologyError(f"injector '{name}' needs a {what} of 0 or more seconds, not {value!r}")
    percentile: Any = injector.percentile
    if percentile is not None and not (
        isinstance(percentile, int | float) and 0 < percentile < 100 and injector.lateness_s > 0
    ):
        raise TopologyError(
            f"injector '{name}': a percentile is between 0 and 100 (99.9), and lateness_s the most that it "
            "waits, more than 0"
        )
    if injector.listen:
        try:
            split_address(injector.listen, f"injector '{name}': listen")
        except SettingsError as error:
            raise TopologyError(str(error)) from error
    _check_imported(name, injector)
    if injector.silent not in ("advance", "hold"):
        raise TopologyError(f"injector '{name}': silent is advance or hold, not {injector.silent!r}")
    if isinstance(injector.expected, str):
        raise TopologyError(f"injector '{name}': expected is a tuple of globs: ({injector.expected!r},)")
    if injector.unit not in get_args(Unit):
        raise TopologyError(f"injector '{name}': unit is one of {_names(get_args(Unit))}")
    _check_path(f"time of injector '{name}'", injector.time)


def _check_imported(name: str, injector: Logs) -> None:
    if not injector.imported:
        if injector.copies:
            raise TopologyError(f"injector '{name}' copies nothing: leave copies={injector.copies!r} out")
        return
    if injector.copies and not os.path.isabs(injector.copies):
        raise TopologyError(f"injector '{name}': copies={injector.copies!r} is no absolute path")
    why = {
        "some of its paths are log files: make them an injector of their own": not all(
            map(is_source, injector.patterns)
        ),
        'silent="hold" goes by the last line of each log, and these are copies: leave it out': (
            injector.silent == "hold"
        ),
        "expected files are those of logs: leave it out": injector.expected,
        "listed files are those of sinks and joined logs: leave it out": injector.listed,
    }
    for reason, given in why.items():
        if given:
            raise TopologyError(f"injector '{name}': {reason}")
    for text in injector.patterns:
        try:
            uri = parse_uri(text)
            if "source" not in known_as(text):
                raise TopologyError(f"injector '{name}': {uri.shown} can be a sink only")
        except UsageError as error:
            raise TopologyError(f"injector '{name}': {error}") from error
    if len({*injector.copied_to(Path())}) < len(injector.patterns):
        raise TopologyError(f"injector '{name}': names a source twice (options make no difference)")


def _check_input(name: str, read: Input, of_log: bool, makers: Mapping[str, str]) -> None:
    if read.stream not in makers:
        raise TopologyError(
            f"computation '{name}' reads '{read.stream}', which nobody produces; there are {_names(makers)}"
        )
    if not (read.key is None or isinstance(read.key, str) or callable(read.key)):
        raise TopologyError(
            f"computation '{name}': key of '{read.stream}' is a field's path or a function, not {read.key!r}"
        )
    _check_called(f"computation '{name}': key of '{read.stream}'", read.key)
    if not (read.value is None or isinstance(read.value, str | tuple | list)):
        raise TopologyError(
            f"computation '{name}': value of '{read.stream}' is a field's path, several, or None, not "
            f"{read.value!r}"
        )
    if of_log:
        if read.key is None:
            raise TopologyError(
                f"computation '{name}': an Input of a log needs a key (a field's path, a function)"
            )
        for path in (*([read.key] if isinstance(read.key, str) else []), *read.fields):
            _check_path(f"'{name}' of '{read.stream}'", path)
    elif isinstance(read.key, str) or read.value != WHOLE:
        raise TopologyError(
            f"computation '{name}': only lines of a log have paths; of '{read.stream}' the key is what its "
            "producer gave, or a function of the value"
        )


def _check_sink(name: str, sink: LogSink, injectors: Mapping[str, Logs]) -> None:
    if not isinstance(sink, LogSink):
        raise TopologyError(f"sink '{name}' is a {type(sink).__name__}: give LogSink(DIRECTORY)")
    if not isinstance(sink.directory, str | os.PathLike) or not os.fspath(sink.directory):
        raise TopologyError(f"sink '{name}': directory is the path of one, not {sink.directory!r}")
    if not _is_whole(sink.file_bytes_max):
        raise TopologyError(
            f"sink '{name}': file_bytes_max is a whole number, at least 1, not {sink.file_bytes_max!r}"
        )
    published: Any = sink.publish
    if not isinstance(published, str | tuple | list) or not all(
        isinstance(uri, str) for uri in sink.published_to
    ):
        raise TopologyError(f"sink '{name}': publish is a URI, or a tuple of some, not {published!r}")
    directory = Path(os.path.abspath(sink.directory))
    files = [(directory / f"{name}-0{end}").parts for end in ("-000000.jsonl", ".manifest")]
    for injector, logs in injectors.items():
        for pattern in logs.patterns:
            glob = Path(os.path.abspath(as_glob(pattern))).parts
            if Path(os.path.abspath(pattern)) == directory or any(glob_matches(glob, file) for file in files):
                raise TopologyError(
                    f"sink '{name}': directory '{sink.directory}' has its files where injector '{injector}' "
                    f"reads ({pattern}): name another one"
                )


def _check_path(what: str, path: str) -> None:
    if not isinstance(path, str):
        raise TopologyError(f"{what}: a field's path is a text ('object.field'), not {path!r}")
    try:
        parse_path(path)
    except SettingsError as error:
        raise TopologyError(f"{what}: {error}") from error


def dead_letters(topology: Topology, work: Path) -> LogSink:
    """Of a run in this work directory: as the topology says, or there."""
    return topology.sinks.get(DEAD_LETTERS) or LogSink(str(work / DEAD_LETTERS))


def load_topology(name: str) -> Topology:
    """`MODULE:NAME` -> the topology; `MODULE:FUNCTION {"argument": ...}` -> what the function returns for it.

    Modules are found in the current directory first. TopologyError.
    """
    module, colon, attribute = name.partition(":")
    attribute, _, arguments = attribute.partition(" ")
    if not colon or not module or not attribute:
        raise TopologyError(f"'{name}': write MODULE:NAME, for example clicks:TOPOLOGY of ./clicks.py")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), attribute)
        if arguments:
            found = found(**msgspec.json.decode(arguments))
    except TopologyError:
        raise
    except (Exception, SystemExit) as error:
        raise TopologyError(f"'{name}' can't be loaded: {type(error).__name__}: {error}") from error
    if not isinstance(found, Topology):
        raise TopologyError(f"'{name}' is a {type(found).__name__}, not a millwheel.Topology")
    return found


def decoder_of(kind: Any) -> Callable[[bytes], Any]:
    """Of values as they travel. TopologyError for a type that msgspec can't decode."""
    try:
        return msgspec.msgpack.Decoder(kind).decode
    except TypeError as error:
        raise TopologyError(f"{kind!r} is no type of a value: {error}") from error
