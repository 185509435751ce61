"""The user's code between the two events (paper 3.3.1): join them, change the joined event, or skip it.

    from joiner.adapter import Adapter, Event, Result, Skip

    class OnlyPaid(Adapter):
        def join(self, primary: Event, foreign: Event) -> Result:
            if not primary.data["paid"]:
                return Skip("not paid")
            return None  # the default joined line

The guide is docs/adapters.md.
"""

import faulthandler
import importlib
import math
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Final

import msgspec

from photon.core.columns import join_lines, split_ids, split_lines
from photon.core.disk import storage_errors
from photon.core.errors import AdapterError, UsageError
from photon.core.ids import ID_BYTES
from photon.core.suspects import DEATHS_MAX, Suspects

DEFAULT_FIELD: Final = "primary"
_CLOSE: Final = b"}\n"
_RAISED: Final = (Exception, SystemExit)
"""What users' code may raise while it is loaded; `sys.exit()` would end the process without a word."""

_OUR_CODE: Final = os.path.dirname(os.path.abspath(__file__)) + os.sep


class Event:
    """One event. `raw` is its line, the bytes of a JSON object; `data` is parsed when first asked for."""

    __slots__ = ("_data", "raw")

    def __init__(self, raw: bytes) -> None:
        self.raw = raw
        self._data: dict[str, Any] | None = None

    @property
    def data(self) -> dict[str, Any]:
        """The object as a dict, this event's own: changing it changes no line."""
        if self._data is None:
            self._data = msgspec.json.decode(self.raw, type=dict[str, Any])
        return self._data

    def __repr__(self) -> str:
        return f"Event({self.raw!r})"


@dataclass(frozen=True, slots=True)
class Skip:
    """Do not join this event: its fate is `filtered`, for this reason."""

    reason: str


Result = Mapping[str, Any] | bytes | Skip | None
"""What `Adapter.join` returns: None for the default joined line, a mapping to encode as JSON, the bytes of
one JSON object, or a Skip."""


class Adapter:
    """Base of all adapters. One instance a process, made without arguments; `join` is called by one thread at
    a time. An exception in `join` ends that event alone."""

    splice_field: str = DEFAULT_FIELD
    """The field of the default joined line that holds the primary event; `[adapter] field` sets it."""

    def join(self, primary: Event, foreign: Event) -> Result:
        """The joined event: a function of the two events, for it may run again for the same pair (after a
        failure, in another datacenter). A line without the foreign event's id and time, unchanged, where the
        settings say, can be neither verified nor recovered."""
        return None


def keeps_default_line(adapter: Adapter) -> bool:
    """Whether all its joined lines are the default ones: it has no `join` of its own."""
    return type(adapter).join is Adapter.join


def splice(primary: Event, foreign: Event, field: str = DEFAULT_FIELD) -> bytes:
    """The default joined line of a pair; an adapter gives its own `splice_field`."""
    return splice_column([primary.raw], foreign.raw + b"\n", field)[:-1]


def splice_column(primaries: Sequence[bytes], foreign: bytes, field: str = DEFAULT_FIELD) -> bytes:
    """N primary lines and N foreign lines (each closed by a newline) -> N joined lines, likewise.

    Foreign lines are JSON objects with a field at least, and end in `}`; ValueError if they don't.
    """
    heads = foreign.split(_CLOSE)
    if heads.pop() or len(heads) != len(primaries):
        raise ValueError(
            f"expected {len(primaries)} foreign events, each a JSON object without space around it"
        )
    pieces = [b"", b",%b:" % msgspec.json.encode(field), b"", _CLOSE] * len(heads)
    pieces[0::4] = heads
    pieces[2::4] = primaries
    return b"".join(pieces)


def load_adapter(use: str, field: str = DEFAULT_FIELD) -> Adapter:
    """`module:Class` -> an instance; the default for "". AdapterError says what is wrong with it.

    The module may lie in the current directory. `field` becomes its `splice_field`.
    """
    adapter = _make(use) if use else Adapter()
    try:
        adapter.splice_field = field
    except _RAISED as error:
        raise AdapterError(f"adapter.use = '{use}': setting splice_field raised {describe(error)}") from error
    return adapter


def _make(use: str) -> Adapter:
    where = f"adapter.use = '{use}'"
    module_name, colon, class_name = use.partition(":")
    if not (module_name and colon and class_name):
        raise AdapterError(f"{where}: not of the form 'module:Class'; write it as in 'my_adapters:OnlyPaid'")
    found = getattr(_import(module_name, where), class_name, None)
    if found is None:
        raise AdapterError(f"{where}: module '{module_name}' has no '{class_name}'; check the class's name")
    if not (isinstance(found, type) and issubclass(found, Adapter)):
        raise AdapterError(f"{where}: '{class_name}' is no adapter; make it a subclass of photon.Adapter")
    try:
        return found()
    except _RAISED as error:
        raise AdapterError(
            f"{where}: {class_name}() raised {describe(error)}; it must be constructible without arguments"
        ) from error


def describe(error: BaseException) -> str:
    """An exception in a line, as the end of a traceback tells it, and the place it came from."""
    if isinstance(error, SyntaxError):
        return " ".join(f"{type(error).__name__}: {error}".split())  # says the place itself
    # An exception's own str may raise; the traceback module copes with that.
    text = " ".join("".join(traceback.format_exception_only(error)).split()).rstrip(": ")
    place = _place(error)
    return f"{text} ({place})" if place else text


def _place(error: BaseException) -> str:
    """`file:line` in the user's code; and where it was raised, if that is in a library it called."""
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<", _OUR_CODE)) and frame.filename != importlib.__file__
    ]
    if not frames:
        return ""
    own = [frame for frame in frames if frame.filename == frames[0].filename][-1]
    place = f"{os.path.basename(own.filename)}:{own.lineno}"
    if own is frames[-1]:
        return place
    return f"{place}, in {os.path.basename(frames[-1].filename)}:{frames[-1].lineno}"


def _import(module_name: str, where: str) -> ModuleType:
    here = os.getcwd()
    if here not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        missing = error.name or ""
        if module_name == missing or module_name.startswith(f"{missing}."):
            raise AdapterError(
                f"{where}: no module '{missing}' in {here} or on PYTHONPATH; check its name or add its path"
            ) from error
        raise AdapterError(
            f"{where}: importing '{module_name}' raised {describe(error)}; install it"
        ) from error
    except _RAISED as error:
        raise AdapterError(f"{where}: importing '{module_name}' raised {describe(error)}; mend it") from error


_NOBODY: Final = bytes(ID_BYTES)


class Guard:
    """What kills or stops a joiner inside its adapter is found out, and isolated: one event, not its batch.

    The user's code may end the process, or run for ever (one regular expression is enough, and holds the
    interpreter's lock meanwhile). So a watchdog, a thread of C that needs no lock, ends a process whose
    adapter does not return, and an event at which its joiner ended DEATHS_MAX times is answered without
    asking the adapter. Around the calls of one process's adapter; one batch at a time.
    """

    def __init__(self, directory: Path, timeout_s: float) -> None:
        """`directory`: the joiner's own, whose earlier lives' deaths are counted. StorageError."""
        self._timeout_s = timeout_s
        self._arm_every_s = timeout_s / 10
        self._armed_s = -math.inf
        self._ids: Sequence[bytes] = ()
        self._suspects = Suspects(directory, "adapter", ID_BYTES)
        self._mark, self._deaths = self._suspects.mark, self._suspects.deaths
        trace = directory / "adapter.trace"
        with storage_errors(trace):
            self._trace: IO[Any] = trace.open("a+b", buffering=0)
            self.found = self._told()
            """What is to be told of the life before."""

    def close(self) -> None:
        """No batch follows."""
        self._suspects.close()
        self._trace.close()

    @contextmanager
    def batch(self, ids: Sequence[bytes]) -> Iterator[None]:
        """Around the calls for the events of a batch, each of which `enter`s. StorageError."""
        self._ids, self._armed_s = ids, -math.inf
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()
            self._mark[:] = _NOBODY
        # Who was adapted is suspected no more, and whoever was refused is: the adapter may be mended.
        self._suspects.clear(ids)

    def enter(self, row: int) -> str | None:
        """The adapter is about to be called for the event in this row of the batch: or why it must not be.

        It has its whole time, and up to a tenth more: to set the watchdog is too dear for each event.
        """
        now_s = time.monotonic()
        if now_s - self._armed_s >= self._arm_every_s:
            self._armed_s = now_s
            after_s = self._timeout_s + self._arm_every_s
            faulthandler.dump_traceback_later(after_s, exit=True, file=self._trace)
        id_ = self._ids[row]
        if self._deaths and self._deaths.get(id_, 0) >= DEATHS_MAX:
            return (
                f"its joiner ended {DEATHS_MAX} times while the adapter worked on this event: killed, out of "
                f"memory, or not back within {self._timeout_s:g} s (adapter.timeout_s)"
            )
        self._mark[:] = id_
        return None

    def _told(self) -> str | None:
        """Of the life before, if it ended in the adapter."""
        if self._suspects.found is None:
            return None
        deaths = self._deaths[self._suspects.found]
        self._trace.seek(0)
        hung = _frames(self._trace.read().decode("utf-8", "replace"))
        self._trace.truncate(0)
        why = f"it was not back within {self._timeout_s:g} s ({hung})" if hung else "the process was killed"
        return f"the joiner ended while its adapter worked on an event ({deaths} of {DEATHS_MAX}): {why}"


def _frames(trace: str) -> str:
    """Where the adapter's thread was: the two innermost frames."""
    threads = [thread for thread in trace.split("\n\n") if "join_one" in thread]
    frames = [line.strip() for line in (threads or [trace])[0].splitlines() if "File " in line]
    return ", ".join(frames[:2])


REASON_CHARS_MAX: Final = 500
_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Adapted:
    """`lines`: K joined lines, each closed by a newline; `rows` (K): which events they are of, None for all.

    The other rows, and why: `skipped` as the adapter wished, `failed` against its wish; `again`: for want of
    memory, which says nothing of the event.
    """

    lines: bytes
    rows: list[int] | None = None
    skipped: dict[int, str] = field(default_factory=dict)
    failed: dict[int, str] = field(default_factory=dict)
    again: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Fault:
    """The adapter raised, or returned what is no joined line. `passing`: for want of memory."""

    reason: str
    passing: bool = False


class BatchAdapter:
    """Joins batches with the user's adapter. For many threads at once; the adapter sees one at a time."""

    def __init__(self, adapter: Adapter, guard: Guard | None = None) -> None:
        """`guard`: None where an adapter that hangs or kills the process may do so."""
        self._adapter = adapter
        self._guard = guard
        self._field = adapter.splice_field
        self._only_splices = keeps_default_line(adapter)
        self._one_at_a_time = threading.Lock()

    def join(self, primaries: Sequence[bytes], foreign: bytes, ids: bytes = b"") -> Adapted:
        """N primary lines, a column of N foreign lines, and with a guard their 16 x N ids. StorageError."""
        if self._only_splices:
            try:
                return Adapted(splice_column(primaries, foreign, self._field))
            except ValueError as error:
                raise UsageError(f"events: {error}") from error
        events = split_lines(foreign)
        with self._one_at_a_time:
            if self._guard is None:
                return _adapted(map(self.join_one, primaries, events), len(events))
            with self._guard.batch(split_ids(ids)):
                return _adapted(self._guarded(self._guard, primaries, events), len(events))

    def _guarded(
        self, guard: Guard, primaries: Sequence[bytes], events: Sequence[bytes]
    ) -> Iterator[bytes | Skip | Fault]:
        for row, (primary, event) in enumerate(zip(primaries, events, strict=True)):
            refused = guard.enter(row)
            yield self.join_one(primary, event) if refused is None else Fault(refused)

    def join_one(self, primary: bytes, foreign: bytes) -> bytes | Skip | Fault:
        """One pair's joined line, or why there is none. Whatever the adapter does stays this pair's."""
        try:
            return self._line_of(self._adapter.join(Event(primary), Event(foreign)), primary, foreign)
        except MemoryError as error:
            return Fault(_line(f"adapter raised {describe(error)}"), passing=True)
        except BaseException as error:  # KeyboardInterrupt too: no person interrupts a joiner's threads
            return Fault(_line(f"adapter raised {describe(error)}"))

    def _line_of(self, result: Result, primary: bytes, foreign: bytes) -> bytes | Skip | Fault:
        if result is None:
            return splice_column([primary], foreign + b"\n", self._field)[:-1]
        if isinstance(result, bytes):
            return _checked(result)
        if isinstance(result, Mapping):
            return _encoded(result)
        if isinstance(result, Skip):
            return Skip(_line(result.reason))
        return Fault(_line(f"adapter returned {type(result).__name__}, not None, a mapping, bytes or a Skip"))


def _adapted(joined: Iterable[bytes | Skip | Fault], count: int) -> Adapted:
    lines: list[bytes] = []
    rows: list[int] = []
    adapted = Adapted(b"", rows)
    for row, one in enumerate(joined):
        if isinstance(one, bytes):
            lines.append(one)
            rows.append(row)
        elif isinstance(one, Skip):
            adapted.skipped[row] = one.reason
        elif one.passing:
            adapted.again.append(row)
        else:
            adapted.failed[row] = one.reason
    return replace(adapted, lines=join_lines(lines), rows=None if len(rows) == count else rows)


def _line(reason: object) -> str:
    """One line that can be encoded: of lone surrogates the escapes."""
    line = " ".join(str(reason).split())[:REASON_CHARS_MAX]
    return line.encode("utf-8", "backslashreplace").decode()[:REASON_CHARS_MAX]


def _encoded(joined: Mapping[str, Any]) -> bytes | Fault:
    try:
        return msgspec.json.encode(dict(joined))
    except Exception as error:
        return Fault(_line(f"adapter returned a mapping that is no JSON: {describe(error)}"))


def _checked(line: bytes) -> bytes | Fault:
    """A line that the adapter made must be one line that holds one JSON object."""
    line = line.strip()
    if b"\n" in line:
        return Fault("adapter returned bytes of several lines")
    try:
        _OBJECT.decode(line)
        line.decode("utf-8")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return Fault(_line(f"adapter returned bytes that are no JSON object: {error}"))
    return line
