"""Runs an adapter over a batch: a joined line an event, or the reason why there is none."""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from joiner.adapter import Adapter, Event, Skip, describe, keeps_default_line, splice_column
from photon.core.columns import join_lines, split_lines
from photon.core.errors import UsageError

REASON_CHARS_MAX: Final = 500
_OBJECT: Final = msgspec.json.Decoder(dict[str, msgspec.Raw])


@dataclass(frozen=True, slots=True)
class Adapted:
    """`lines`: K joined lines, each closed by a newline; `rows` (K): which events they are of, None for all.

    `reasons`: the other rows, and why they are filtered.
    """

    lines: bytes
    rows: list[int] | None
    reasons: dict[int, str]


@dataclass(frozen=True, slots=True)
class Fault:
    """The adapter raised, or returned what is no joined line: the event is filtered, for this reason."""

    reason: str


class BatchAdapter:
    """Joins batches with the user's adapter. For many threads at once; the adapter sees one at a time."""

    def __init__(self, adapter: Adapter) -> None:
        self._adapter = adapter
        self._field = adapter.splice_field
        self._only_splices = keeps_default_line(adapter)
        self._one_at_a_time = threading.Lock()

    def join(self, primaries: Sequence[bytes], foreign: bytes) -> Adapted:
        """N primary lines and a column of N foreign lines."""
        if self._only_splices:
            try:
                return Adapted(splice_column(primaries, foreign, self._field), None, {})
            except ValueError as error:
                raise UsageError(f"events: {error}") from error
        lines: list[bytes] = []
        rows: list[int] = []
        reasons: dict[int, str] = {}
        with self._one_at_a_time:
            for row, (primary, event) in enumerate(zip(primaries, split_lines(foreign), strict=True)):
                joined = self.join_one(primary, event)
                if isinstance(joined, bytes):
                    lines.append(joined)
                    rows.append(row)
                else:
                    reasons[row] = joined.reason
        return Adapted(join_lines(lines), rows if reasons else None, reasons)

    def join_one(self, primary: bytes, foreign: bytes) -> bytes | Skip | Fault:
        """One pair's joined line, or why there is none. Whatever the adapter does stays this pair's."""
        try:
            result = self._adapter.join(Event(primary), Event(foreign))
            if result is None:
                return splice_column([primary], foreign + b"\n", self._field)[:-1]
            if isinstance(result, bytes):
                return _checked(result)
            if isinstance(result, Mapping):
                return _encoded(result)
            if isinstance(result, Skip):
                return Skip(_line(result.reason))
            kind = type(result).__name__
        except BaseException as error:  # KeyboardInterrupt too: no person interrupts a joiner's threads
            return Fault(_line(f"adapter raised {describe(error)}"))
        return Fault(_line(f"adapter returned {kind}, not None, a mapping, bytes or a Skip"))


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
