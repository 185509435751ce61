"""Which fields of sample lines are ids, references and times: a guess, and how sure it is. Pure.

The primary id and the field that names it are found together: of all pairs of fields the one where most of
what the foreign lines name is in the primary lines. Their names decide between what the values leave open.
"""

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import numpy as np

from photon.logs.formats import RFC3339, time_type

DEPTH_MAX: Final = 4
"""Of objects in objects."""
MOSTLY: Final = 0.98
"""Of the lines have the field."""
DISTINCT: Final = 0.9
"""Of an id's values: copies of a line, as retries leave them, are few."""
_NAMES_MIN: Final = 0.05
"""Less of what the foreign lines name was found: it may be chance."""
_SURE: Final = 0.5
_UNITS_FROM: Final = (("ns", 1e17), ("us", 1e14), ("ms", 1e11), ("s", 1e8))
"""From which size on a number is a time of this unit: from 1973 on, for a thousand times as long."""
_ID_NAME: Final = re.compile(r"(^|[^a-z])(u?u?id|guid|key)$|[a-z]I[dD]$", re.IGNORECASE)
_TIME_NAME: Final = re.compile(r"time|date|ts|_at$|when|stamp", re.IGNORECASE)
_NUMBER: Final = re.compile(r"\s*\+?\d+(\.\d*)?\s*", re.ASCII)
_AWARE: Final = time_type(RFC3339)

Values = dict[str, list[Any]]
"""Path -> its values, of the lines that have it."""


@dataclass(frozen=True, slots=True)
class Found:
    """A field, and why it is thought to be the one. `sure`: nothing else fits nearly as well."""

    path: str
    why: str
    sure: bool = True
    unit: str = ""
    """Of a time."""


@dataclass(frozen=True, slots=True)
class Guess:
    """What is found of each setting; None where nothing fits."""

    primary_id: Found | None = None
    primary_time: Found | None = None
    foreign_id: Found | None = None
    foreign_primary_id: Found | None = None
    foreign_time: Found | None = None
    fields: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Side -> the fields that its lines have."""


def values_of(events: Sequence[Mapping[str, Any]]) -> Values:
    """The fields of JSON objects, by their paths as settings write them; one that is null is as good as not
    there."""
    found: Values = {}
    for event in events:
        for path, value in _fields(event, "", DEPTH_MAX):
            found.setdefault(path, []).append(value)
    return found


def _fields(event: Mapping[str, Any], before: str, depth: int) -> Iterator[tuple[str, Any]]:
    for name, value in event.items():
        path = before + name.replace(".", "..")
        if isinstance(value, dict) and depth > 1:
            yield from _fields(value, f"{path}.", depth - 1)
        elif name and value is not None:
            yield path, value


def guess(
    primary: Sequence[Mapping[str, Any]],
    foreign: Sequence[Mapping[str, Any]],
    texts: Collection[str] = (),
) -> Guess:
    """Of sample lines of both sides, decoded. `texts`: sides whose times may be numbers written as text."""
    ours, theirs = values_of(primary), values_of(foreign)
    our_times, their_times = (
        {path: unit for path, values in of.items() if (unit := _times(values, side in texts))}
        for of, side in ((ours, "primary"), (theirs, "foreign"))
    )
    ids = {path: {*_ids_in(values)} for path, values in ours.items() if _is_id(values, len(primary))}
    named = {path: {*found} for path, values in theirs.items() if (found := _ids_in(values))}
    pairs = sorted(
        (
            (len(values & known) / len(values), _alike(path, of), path, of, len(values & known), len(values))
            for of, known in ids.items()
            for path, values in named.items()
        ),
        key=lambda pair: (-round(pair[0], 1), -pair[1], -pair[0], pair[2], pair[3]),
    )
    primary_id = reference = None
    if pairs and pairs[0][0] >= _NAMES_MIN:
        share, _, path, of, hits, count = pairs[0]
        sure = share >= _SURE and not any(one[:2] == pairs[0][:2] for one in pairs[1:2])
        primary_id = Found(of, _repeats(ours[of]), sure)
        reference = Found(path, f"{hits:,} of {count:,} values are a primary event's {of}", sure)
    return Guess(
        primary_id,
        _time(ours, our_times, len(primary)),
        _own_id(theirs, their_times, len(foreign), reference.path if reference else ""),
        reference,
        _time(theirs, their_times, len(foreign)),
        {"primary": [*ours], "foreign": [*theirs]},
    )


def _ids_in(values: Sequence[Any]) -> list[Any]:
    """Those that can be ids; none if that is not all, but for a bad one here and there."""
    good = [
        value
        for value in values
        if (isinstance(value, str) and value) or (isinstance(value, int) and not isinstance(value, bool))
    ]
    return good if len(good) >= MOSTLY * len(values) else []


def _is_id(values: Sequence[Any], lines: int) -> bool:
    found = _ids_in(values)
    return bool(found) and len(values) >= MOSTLY * lines and len({*found}) >= DISTINCT * len(found)


def _repeats(values: Sequence[Any]) -> str:
    found = _ids_in(values)
    distinct = len({*found})
    if distinct == len(found):
        return f"each value once in {distinct:,} lines"
    return f"{distinct:,} values in {len(found):,} lines"


def _alike(path: str, of: str) -> int:
    """How much the names say that one is the other's: `ad_id` and `ad.id`; hardly `id` and `id`."""
    name, other = (re.sub(r"[^a-z0-9]", "", one.lower()) for one in (path, of))
    last = of.rpartition(".")[2].lower()
    if name == other:
        return 0 if last in ("id", "uuid", "key") else 3
    if len(other) > 2 and (other in name or name in other):
        return 2
    return 1 if _ID_NAME.search(path) or "primary" in name else 0


def _own_id(theirs: Values, times: Mapping[str, str], lines: int, reference: str) -> Found | None:
    fit = [path for path, values in theirs.items() if path != reference and _is_id(values, lines)]
    fit = [path for path in fit if not (path in times and not _ID_NAME.search(path))]
    fit.sort(key=lambda path: (not _ID_NAME.search(path), path.count("."), len(path)))
    if not fit:
        return None
    others = [path for path in fit[1:] if bool(_ID_NAME.search(path)) == bool(_ID_NAME.search(fit[0]))]
    why = _repeats(theirs[fit[0]]) + (f"; or {', '.join(others[:3])}" if others else "")
    return Found(fit[0], why, bool(_ID_NAME.search(fit[0])) and not others)


def _time(fields: Values, times: Mapping[str, str], lines: int) -> Found | None:
    fit = {path: unit for path, unit in times.items() if len(fields[path]) >= MOSTLY * lines}
    by_name = sorted(fit, key=lambda path: (not _TIME_NAME.search(path), path.count("."), len(path)))
    if not by_name:
        return None
    path, others = by_name[0], by_name[1:]
    why = f"times in {fit[path]}" + (f"; or {', '.join(others[:3])}" if others else "")
    return Found(path, why, bool(_TIME_NAME.search(path)) and not others, fit[path])


def _times(values: Sequence[Any], in_text: bool) -> str:
    """Their unit, if they can be times, but for a bad one here and there; else empty."""
    enough = MOSTLY * len(values)
    if sum(map(_is_aware, values)) >= enough:
        return RFC3339
    numbers = [one for one in values if isinstance(one, int | float) and not isinstance(one, bool)]
    if in_text:
        numbers += [float(one) for one in values if isinstance(one, str) and _NUMBER.fullmatch(one)]
    if not numbers or len(numbers) < enough:
        return ""
    middle = float(np.median(np.array(numbers, np.float64)))
    return next((unit for unit, least in _UNITS_FROM if least <= middle < least * 1_000), "")


def _is_aware(value: Any) -> bool:
    try:
        return isinstance(value, str) and bool(msgspec.convert(value, _AWARE))
    except msgspec.ValidationError:
        return False
