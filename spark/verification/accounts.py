"""The rules of verification (paper 3.3.3): each foreign event of the inputs against what came out.

Pure functions over Arrow tables of ROW_SCHEMA. A bucket has all rows of some ids, so that buckets are judged
one by one, on Spark or by this process (spark.verification.engines). First, if primary logs are given,
buckets by the primary's id: `against_logs`. Then buckets by the foreign event's own: `judged`.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from photon.core.fates import Fate
from spark.losses import BACKFILL
from spark.options import ALL, Span
from spark.reading.lines import batch_of, fixed_binary
from spark.verification.rules import Loser, Total, Verdict

Ask = Callable[[bytes, bytes], bytes]
"""Ids (16 x N bytes) and times (8 x N) -> those of the ids that every replica calls absent."""
Column = npt.NDArray[Any]


class Source(IntEnum):
    """Where a row is from."""

    FOREIGN = 0
    """A line of the inputs: id, key, primary (which it names), time_us, content of the line, read; no key: it
    can't be read."""
    JOINED = 1
    """A joined line: id, key, primary and content of the object inside, time_us and the foreign line if told;
    or no key."""
    LETTER = 2
    """A dead letter: id, key, time_us, fate; or no key."""
    REGISTERED = 3
    """Of the registry: key, address, incarnation, token_us."""
    WAITING = 4
    """Of a dispatcher's ledger or inbox: key."""
    LOGGED = 5
    """A primary line: primary, content."""


class Read(IntEnum):
    """How far the dispatchers have come (photon.cluster.ledgers): past a foreign line, or not."""

    NONE = 0
    SOME = 1
    ALL = 2


ROW_SCHEMA: Final = pa.schema(
    {
        "source": pa.int8(),
        "id": pa.string(),
        "key": pa.binary(),
        "primary": pa.binary(),
        "time_us": pa.int64(),
        "content": pa.binary(),
        "line": pa.binary(),
        "fate": pa.string(),
        "read": pa.int8(),
        "address": pa.string(),
        "incarnation": pa.int64(),
        "token_us": pa.int64(),
        "known": pa.bool_(),
        "same": pa.bool_(),
    }
)
"""`known`: the primary is in the logs; `same`: with that content. The ids are packed, 16 bytes."""

_FATES: Final = (
    Fate.FILTERED,
    Fate.ADAPTER_ERROR,
    Fate.EXPIRED,
    Fate.LATE,
    Fate.UNJOINABLE,
    Fate.MALFORMED,
)
_COUNTS: Final = ("events", "lines", "joined", "letters", "differing", *(fate.value for fate in _FATES))
ACCOUNT_SCHEMA: Final = pa.schema(
    {
        "id": pa.string(),
        "verdict": pa.string(),
        "time_us": pa.int64(),
        **dict.fromkeys(_COUNTS, pa.int64()),
        "registered": pa.bool_(),
        "address": pa.string(),
        "incarnation": pa.int64(),
        "token_us": pa.int64(),
    }
)
_NO_LEDGER: Final = -1
_NO_TIME: Final = np.iinfo(np.int64).min


@dataclass(frozen=True, slots=True)
class Terms:
    """By what accounts are judged.

    `adapted`: an adapter of the user's made the joined lines: it may leave the primary out and change it; one
    that is inside must still be the one named. `settled_us`: the line of a token as late, or of a running one
    of `backfills`, may be on its way. `boundary_us`: what is older the registry may have forgotten.
    `from_export`: who is absent may have been registered since. `complete`: every event was to be read and to
    have its fate. Ledgers and registry count as far as their rows are there.
    """

    span: Span = ALL
    adapted: bool = False
    settled_us: int = 0
    backfills: tuple[int, ...] = ()
    boundary_us: int = _NO_TIME
    asked: bool = False
    from_export: bool = False
    complete: bool = False


def rows_of(source: Source, count: int, nulls: int = 0, **columns: Any) -> Any:
    """Columns of so many rows, and `nulls` more in which they are null -> a record batch of ROW_SCHEMA."""
    given = {name: column for name, column in columns.items() if column is not None}
    if nulls:
        given = {name: pa.concat_arrays([one, pa.nulls(nulls, one.type)]) for name, one in given.items()}
    count += nulls
    return batch_of(ROW_SCHEMA, count, source=np.full(count, source, np.int8), **given)


def against_logs(bucket: Any) -> Any:
    """A bucket by primary ids -> its rows without the logs', with `known` and `same`."""
    is_logged = pc.equal(bucket["source"], int(Source.LOGGED))
    logged, rows = bucket.filter(is_logged), bucket.filter(pc.invert(is_logged))
    known = _is_in(rows["primary"], logged["primary"])
    same = _is_in(_pairs(rows, "primary", "content"), _pairs(logged, "primary", "content"))
    for name, column in (("known", known), ("same", same)):
        rows = rows.set_column(rows.schema.get_field_index(name), name, pa.array(column))
    return rows


def judged(bucket: Any, terms: Terms, ask: Ask | None = None) -> Any:
    """A bucket by foreign ids -> ACCOUNT_SCHEMA: a row an id with its verdict.

    One row more has the lines that can't be read, and one the ids that only the registry has. `ask` is asked
    about joined events that are not among the registered ones.

    An event joined anywhere is joined, whatever the other datacenters made of it; one that is registered was
    to be joined, whatever the dead letters say; among those the one that no later log can change comes first.
    """
    rows = _Rows(bucket, terms.span)
    lines, joined = rows.count(rows.asked), rows.count(rows.joined)
    fates = [rows.count(rows.fate == fate.value) for fate in _FATES]
    filtered, failed, expired, late, unjoinable, malformed = (count > 0 for count in fates)
    held, settling, holders = _holders(rows, terms)
    known, same = _numbers(rows.table["known"], False), _numbers(rows.table["same"], True)
    joinable = rows.any(rows.foreign & known)
    empty = rows.joined & ~_valid(rows.table["primary"])
    not_named = rows.any(rows.joined & ~empty & ~_logged(rows, "primary", "primary"))
    wrong = not_named if terms.adapted else not_named | rows.any(empty)
    altered = np.zeros(rows.ids, np.bool_) if terms.adapted else rows.any(rows.joined & ~same)
    changed = rows.any(rows.joined & _valid(rows.table["line"]) & ~_logged(rows, "line", "content"))
    waiting = _is_in(rows.keys, bucket.filter(pc.equal(bucket["source"], int(Source.WAITING)))["key"])
    read = _numbers(rows.table["read"], _NO_LEDGER)
    passed = rows.any(rows.asked & (read > Read.NONE)) & (rows.times >= terms.boundary_us)
    unread = rows.any(rows.asked & (read >= Read.NONE) & (read < Read.ALL)) & terms.complete & ~waiting
    gone = passed | terms.complete
    there, once = joined > 0, joined == 1
    missing = there & (lines > 0) & ~held & terms.asked & (rows.times >= terms.boundary_us)
    absent = missing & _absent(rows, missing, ask)
    unregistered = Verdict.NOT_IN_EXPORT if terms.from_export else Verdict.UNREGISTERED
    has_letter = filtered | failed | expired | late | unjoinable | malformed
    verdicts: list[tuple[Column, Verdict]] = [
        ((lines == 0) & there, Verdict.ALIEN),
        (lines == 0, Verdict.OTHER_INPUTS),
        (there & ~once, Verdict.JOINED_TWICE),
        (there & wrong, Verdict.WRONG_PRIMARY),
        (there & altered, Verdict.ALTERED_PRIMARY),
        (there & changed, Verdict.ALTERED_FOREIGN),
        (there & absent, unregistered),
        (unread & (there | has_letter | ~held), Verdict.UNREAD),
        (there, Verdict.JOINED),
        (held & settling, Verdict.IN_FLIGHT),
        (held, Verdict.LOST),
        (filtered, Verdict.FILTERED),
        (failed, Verdict.ADAPTER_ERROR),
        (expired, Verdict.EXPIRED),
        (late, Verdict.LATE),
        (unjoinable & joinable, Verdict.LOST_UNJOINABLE),
        (unjoinable, Verdict.UNJOINABLE),
        (malformed, Verdict.MALFORMED),
        (gone & ~waiting, Verdict.LOST_PENDING),
        (joinable, Verdict.PENDING_JOINABLE),
    ]
    names = [*(verdict.value for _, verdict in verdicts), Verdict.PENDING.value]
    which = np.select([where for where, _ in verdicts], range(len(verdicts)), len(verdicts))
    ones = np.ones(rows.ids, np.int64)
    counts = [ones, lines, joined, rows.count(rows.letter), _differing(rows), *fates]
    told = {
        "id": rows.texts(),
        "verdict": pa.array(names, pa.string()).take(pa.array(which)),
        "time_us": pa.array(rows.times, mask=rows.times == _NO_TIME),
        **{name: pa.array(count) for name, count in zip(_COUNTS, counts, strict=True)},
        "registered": pa.array(held),
        **holders,
    }
    found = pa.table(told, schema=ACCOUNT_SCHEMA)
    return pa.concat_tables([found.filter(pa.array(rows.inside)), _of_no_id(bucket, rows, terms)])


class _Rows:
    """The rows of a bucket that have an id and stand in inputs, joined logs or dead letters; the ids among
    them, and masks by row (N) and by id (`ids`)."""

    def __init__(self, bucket: Any, span: Span) -> None:
        told = pc.and_(pc.less_equal(bucket["source"], int(Source.LETTER)), pc.is_valid(bucket["key"]))
        self.table = bucket.filter(told)
        self.keys, self.rows = _encoded(self.table["key"])
        self.ids = len(self.keys)
        self.registered = bucket.filter(pc.equal(bucket["source"], int(Source.REGISTERED)))
        source = _numbers(self.table["source"], 0)
        self.foreign, self.joined, self.letter = (
            source == one for one in (Source.FOREIGN, Source.JOINED, Source.LETTER)
        )
        self.fate = np.asarray(self.table["fate"].to_numpy(zero_copy_only=False), object)
        self.time_us = _numbers(self.table["time_us"], _NO_TIME)
        # An event that stands in several lines may be asked for by one and joined by what another names.
        self.asked = self.foreign & _within(span, self.time_us)
        times = [self._latest(mask) for mask in (self.asked, self.foreign, self.time_us > _NO_TIME)]
        self.times = np.select([one > _NO_TIME for one in times], times, _NO_TIME)
        self.inside = _within(span, self.times)

    def count(self, mask: Column) -> Column:
        """How many rows of each id."""
        return np.bincount(self.rows[mask], minlength=self.ids).astype(np.int64)

    def any(self, mask: Column) -> Column:
        found = np.zeros(self.ids, np.bool_)
        found[self.rows[mask]] = True
        return found

    def texts(self) -> Any:
        """Of each id a text of it."""
        first = np.zeros(self.ids, np.int64)
        first[self.rows[::-1]] = np.arange(len(self.rows))[::-1]
        return self.table["id"].take(pa.array(first))

    def _latest(self, mask: Column) -> Column:
        found = np.full(self.ids, _NO_TIME, np.int64)
        np.maximum.at(found, self.rows[mask], self.time_us[mask])
        return found


def _within(span: Span, times: Column) -> Column:
    """Which of the times are in the span; what has none is in ALL only."""
    if span == ALL:
        return np.ones(len(times), np.bool_)
    inside: Column = (times >= span.start) & (times < span.end)
    return inside


def _logged(rows: _Rows, column: str, inputs: str) -> Column:
    """Of each row whether a line of the inputs with its id has in its column `inputs` what it has in its own
    `column`."""
    logged = rows.table.filter(pa.array(rows.foreign))
    return _is_in(_pairs(rows.table, "key", column), _pairs(logged, "key", inputs))


def _differing(rows: _Rows) -> Column:
    """How many of the lines of each id are unlike those before."""
    _, alike = _encoded(_pairs(rows.table, "key", "content").filter(pa.array(rows.asked)))
    _, first = np.unique(alike, return_index=True)
    kinds = np.bincount(rows.rows[rows.asked][first], minlength=rows.ids).astype(np.int64)
    found: Column = np.maximum(kinds - 1, 0)
    return found


def _holders(rows: _Rows, terms: Terms) -> tuple[Column, Column, dict[str, Any]]:
    """Of each id: it is registered; its line may be on its way; and who registered it, the last one if two
    did, in different shards, of whom at least one ended while it asked."""
    registered = rows.registered
    if pc.count_distinct(registered["key"]).as_py() < len(registered):
        registered = registered.sort_by([("token_us", "descending")])
    place = pc.index_in(rows.keys, value_set=_whole(registered["key"]))
    holders = {name: _whole(registered[name]).take(place) for name in ("address", "incarnation", "token_us")}
    settling = _numbers(holders["token_us"], _NO_TIME) >= terms.settled_us
    if terms.backfills:
        settling |= _is_in(holders["incarnation"], pa.array(terms.backfills, pa.int64()))
    return _valid(place), settling, holders


def _absent(rows: _Rows, missing: Column, ask: Ask | None) -> Column:
    """Which of the missing ones really are; an export can't be asked again."""
    if ask is None or not missing.any():
        return missing
    keys = b"".join(rows.keys.filter(pa.array(missing)).to_pylist())
    gone = ask(keys, rows.times[missing].astype("<i8").tobytes())
    return _is_in(rows.keys, fixed_binary(gone))


def _of_no_id(bucket: Any, rows: _Rows, terms: Terms) -> Any:
    """The account of lines that can't be read, and that of ids that stand in the registry alone."""
    sources = _numbers(bucket.filter(pc.is_null(bucket["key"]))["source"], 0)
    lines, joined, letters = (
        int((sources == one).sum()) for one in (Source.FOREIGN, Source.JOINED, Source.LETTER)
    )
    only = rows.registered["key"].filter(pa.array(~_is_in(rows.registered["key"], rows.keys)))
    others = 0 if terms.span != ALL else pc.count_distinct(only).as_py()
    counts = {
        Verdict.UNREADABLE: (int(bool(lines + joined + letters)), lines, joined, letters, 0),
        Verdict.OTHER_REGISTERED: (others, 0, 0, 0, 0),
    }
    told = [
        {"verdict": verdict.value, **dict(zip(_COUNTS, (*count, *[0] * len(_FATES)), strict=True))}
        for verdict, count in counts.items()
        if count[0]
    ]
    return pa.Table.from_pylist(told, schema=ACCOUNT_SCHEMA)


def summary(accounts: Any) -> tuple[list[Total], list[Loser]]:
    """Accounts -> those of a verdict in one; the lives of joiners that lost events or have some in flight."""
    totals = []
    for name in pc.unique(accounts["verdict"]).to_pylist():
        of_it = accounts.filter(pc.equal(accounts["verdict"], name))
        counts = {column: pc.sum(of_it[column]).as_py() for column in _COUNTS[:5]}
        differs = pc.min(of_it.filter(pc.greater(of_it["differing"], 0))["id"]).as_py()
        example = pc.min(of_it["id"]).as_py()
        totals.append(Total(Verdict(name), **counts, example=example, differs=differs))
    missing = (Verdict.LOST.value, Verdict.IN_FLIGHT.value)
    lost = accounts.filter(pc.is_in(accounts["verdict"], value_set=pa.array(missing)))
    lost = lost.group_by(["address", "incarnation", "verdict"])
    lost = lost.aggregate([("events", "sum"), ("token_us", "min"), ("token_us", "max")])
    return totals, [_loser(row) for row in lost.to_pylist()]


def _loser(row: dict[str, Any]) -> Loser:
    count, is_lost = row["events_sum"], row["verdict"] == Verdict.LOST
    return Loser(
        row["address"],
        row["incarnation"] & ((1 << 64) - 1),
        count if is_lost else 0,
        0 if is_lost else count,
        row["token_us_min"],
        row["token_us_max"],
    )


def details(accounts: Any, leases: Mapping[int, str]) -> Any:
    """Accounts -> what is kept of each id. `leases`: of incarnations (signed) that lost events."""
    kept = accounts.filter(pc.is_valid(accounts["id"]))
    numbers, which = _encoded(kept["incarnation"])
    hexes = [None if one is None else f"{one & ((1 << 64) - 1):016x}" for one in numbers.to_pylist()]
    told = [leases.get(one) for one in numbers.to_pylist()]
    rows = pa.array(which)
    columns = {name: kept[name] for name in ("id", "time_us", *_COUNTS[1:], "registered")}
    return pa.table(
        {
            **columns,
            "joiner": kept["address"],
            "incarnation": pa.array(hexes, pa.string()).take(rows),
            "token_us": kept["token_us"],
            "lease": pa.array(told, pa.string()).take(rows),
            "verdict": kept["verdict"],
        }
    )


def backfills_in(registered: Any) -> set[int]:
    """The incarnations (signed) of the backfills that registered any of the ids."""
    theirs = pc.starts_with(registered["address"], BACKFILL)
    return {*pc.unique(registered.filter(theirs)["incarnation"]).to_pylist()}


def _pairs(table: Any, first: str, second: str) -> Any:
    """Null where either is."""
    return _whole(pc.binary_join_element_wise(table[first], table[second], b""))


def _is_in(column: Any, values: Any) -> Column:
    """False for null."""
    found = pc.is_in(_whole(column), value_set=_whole(values), skip_nulls=True)
    return np.asarray(found.to_numpy(zero_copy_only=False), np.bool_)


def _encoded(column: Any) -> tuple[Any, Column]:
    """The distinct values, and of each row which it has."""
    encoded = _whole(column).dictionary_encode(null_encoding="encode")
    return encoded.dictionary, encoded.indices.to_numpy(zero_copy_only=False)


def _numbers(column: Any, null: int | bool) -> Column:
    return np.asarray(pc.fill_null(_whole(column), null).to_numpy(zero_copy_only=False))


def _valid(column: Any) -> Column:
    return np.asarray(pc.is_valid(_whole(column)).to_numpy(zero_copy_only=False), np.bool_)


def _whole(column: Any) -> Any:
    return column.combine_chunks() if isinstance(column, pa.ChunkedArray) else column
