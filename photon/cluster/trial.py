"""What a join would make of a sample, before anything is made: which of the first foreign events have their
primary events in the logs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from photon.connect.importer import fields_of, side_of_stdin
from photon.connect.rows import place_of
from photon.connect.sample import sampled
from photon.core.columns import split_ids
from photon.core.settings import Settings
from photon.logs.formats import Malformed, json_lines
from photon.logs.sample import files_of, first_lines, pieces

EVENTS_MAX: Final = 1_000
BYTES_MAX: Final = 4 << 30
RECORDS_MAX: Final = 1_000_000
PAIRS: Final = 3


@dataclass(slots=True)
class Trial:
    """`foreign`, `found`: events of the sample, and those whose primary event was read; `malformed`: a reason
    of each side that has any, and where; `whole`: all primary logs were read."""

    foreign: int = 0
    found: int = 0
    primary: int = 0
    pairs: list[tuple[bytes, bytes]] = field(default_factory=list)
    malformed: dict[str, str] = field(default_factory=dict)
    whole: bool = True


def try_join(settings: Settings, primary: Sequence[str], foreign: Sequence[str]) -> Trial:
    """Reads up to BYTES_MAX of the primary logs, or RECORDS_MAX of each source.

    UsageError where a side has no file; UnavailableError, StorageError.
    """
    side_of_stdin({"primary": primary, "foreign": foreign})
    fields = fields_of(settings, "primary"), fields_of(settings, "foreign")
    with sampled(primary, fields[0], RECORDS_MAX) as first, sampled(foreign, fields[1], EVENTS_MAX) as second:
        trial = _try(settings, first.patterns, second.patterns)
        trial.whole &= first.whole
        return trial


def _try(settings: Settings, primary: Sequence[str], foreign: Sequence[str]) -> Trial:
    parser, trial = json_lines(settings), Trial()
    wanted: dict[bytes, list[bytes]] = {}
    files, of_primary = files_of(foreign), files_of(primary)
    for path, lines in first_lines(files, EVENTS_MAX):
        batch = parser.parse_foreign(b"\n".join(lines))
        _note(trial, "foreign", path, 0, batch.malformed)
        for primary_id, line in zip(split_ids(batch.primary_ids), batch.lines, strict=True):
            wanted.setdefault(primary_id, []).append(line)
        trial.foreign += len(batch.lines)
    _look(trial, settings, of_primary, wanted)
    return trial


def _look(trial: Trial, settings: Settings, paths: Sequence[str], wanted: dict[bytes, list[bytes]]) -> None:
    parser, size = json_lines(settings), 0
    for path in paths:
        start = 0
        for piece in pieces(path):
            if not wanted:
                return
            if size >= BYTES_MAX:
                trial.whole = False
                return
            size += len(piece)
            batch = parser.parse_primary(piece)
            _note(trial, "primary", path, start, batch.malformed)
            start += len(piece)
            trial.primary += len(batch.lines)
            ids = split_ids(batch.ids)
            for primary_id in wanted.keys() & set(ids):
                named = wanted.pop(primary_id)
                trial.found += len(named)
                if len(trial.pairs) < PAIRS:
                    trial.pairs.append((named[0], batch.lines[ids.index(primary_id)]))


def _note(trial: Trial, side: str, path: str, start: int, malformed: Sequence[Malformed]) -> None:
    """`start`: where in the file the chunk of these lines stands."""
    if malformed and side not in trial.malformed:
        trial.malformed[side] = f"{place_of(path, start + malformed[0].start)}: {malformed[0].reason}"
