"""Generated logs, written at once: all columns are drawn by numpy, lines are formatted by the chunk."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from photon.app.generate_events import (
    PAYLOADS,
    SPOILINGS,
    USERS,
    DelayLimits,
    Ints,
    click_lines,
    click_payloads,
    delays_us,
    heads,
    opaque_ids,
    pair_lines,
    photon_ids,
    query_lines,
    query_payloads,
    spoil,
)
from photon.app.generate_files import GeneratedTruth, prepare_directory, server_logs, write_truth
from photon.app.generate_options import AtOnce, Mix
from photon.app.verify_pairs import pairs_sha256

_LINES_A_CHUNK: Final = 32_768
_EARLY_S: Final = 30.0
_REPEATED_WITHIN_S: Final = 60.0
_GOOD: Final = -1


@dataclass(frozen=True, slots=True)
class _Side:
    """One side's distinct events in file order: server process, time, raw opaque id, payload number."""

    heads: list[str]
    process: Ints
    times: Ints
    raw_ids: npt.NDArray[np.void] | None
    payload: Ints

    def ids(self, rows: Ints) -> list[str]:
        if self.raw_ids is not None:
            return opaque_ids(self.raw_ids[rows].tobytes())
        return photon_ids(self.heads, self.process[rows], self.times[rows])


@dataclass(frozen=True, slots=True)
class _Lines:
    """The lines of one side in file order: whose log, which event, and how it is spoilt (-1: not)."""

    process: Ints
    source: Ints
    spoilt: Ints

    @property
    def malformed(self) -> int:
        return int((self.spoilt != _GOOD).sum())


@dataclass(frozen=True, slots=True)
class _Drawn:
    """All that is drawn: queries (those `hidden` are never written), their users, and clicks on them.

    `clicked` holds the row of each click's query; `joinable` the rows of the clicks on written queries.
    """

    queries: _Side
    users: Ints
    hidden: npt.NDArray[np.bool_]
    clicks: _Side
    clicked: Ints
    joinable: Ints

    def pairs_sha256(self) -> str:
        rows = self.joinable
        return pairs_sha256(pair_lines(self.queries.ids(self.clicked[rows]), self.clicks.ids(rows)))

    def early(self) -> int:
        older = self.clicks.times < self.queries.times[self.clicked]
        return int(older[self.joinable].sum())


def generate_at_once(out: Path, mix: Mix, amount: AtOnce) -> GeneratedTruth:
    """Write OUT/queries, OUT/clicks and OUT/truth.json. The same seed gives the same bytes.

    UsageError if OUT already holds logs; StorageError if they can't be written.
    """
    prepare_directory(out)
    rng = np.random.default_rng(mix.seed)
    drawn = _draw(rng, mix, amount)
    written, every_click = np.flatnonzero(~drawn.hidden), np.arange(amount.clicks)
    queries = _plan(rng, mix, drawn.queries, written, written, mix.duplicate_queries, mix.malformed_queries)
    clicks = _plan(rng, mix, drawn.clicks, every_click, drawn.joinable, mix.duplicates, mix.malformed)
    _write(out / "queries", mix, drawn.queries.heads, queries, _query_format(drawn, mix.seed))
    _write(out / "clicks", mix, drawn.clicks.heads, clicks, _click_format(drawn, mix.seed))
    truth = GeneratedTruth(
        mode="at once",
        seed=mix.seed,
        ids="opaque" if mix.opaque_ids else "photon",
        primary_rows=len(queries.source),
        primary_distinct_ids=amount.queries,
        primary_malformed=queries.malformed,
        primary_duplicates=len(queries.source) - queries.malformed - amount.queries,
        foreign_rows=len(clicks.source),
        foreign_distinct_ids=amount.clicks,
        distinct_joined_pairs=len(drawn.joinable),
        orphans=amount.clicks - len(drawn.joinable),
        duplicates=len(clicks.source) - clicks.malformed - amount.clicks,
        early=drawn.early(),
        malformed=clicks.malformed,
        joined_pairs_sha256=drawn.pairs_sha256(),
    )
    write_truth(out, truth)
    return truth


def _draw(rng: np.random.Generator, mix: Mix, amount: AtOnce) -> _Drawn:
    # Orphans name queries that are made like all the others and never written.
    orphans = round(amount.clicks * mix.orphans)
    made = amount.queries + orphans
    times = amount.start_us + rng.integers(0, round(amount.span_s * 1e6), made)
    queries, _ = _side(rng, 0, mix, times)
    hidden = np.zeros(made, np.bool_)
    hidden[rng.permutation(made)[:orphans]] = True
    users = rng.integers(0, USERS, made)

    clicked = np.concatenate(
        [
            rng.choice(np.flatnonzero(hidden), orphans) if orphans else np.empty(0, np.int64),
            rng.choice(np.flatnonzero(~hidden), amount.clicks - orphans),
        ]
    )
    early = np.zeros(amount.clicks, np.bool_)
    early[orphans : orphans + round(amount.clicks * mix.early)] = True
    delays = delays_us(rng, amount.clicks, DelayLimits())
    ahead = rng.integers(1_000, round(_EARLY_S * 1e6), amount.clicks)
    times = np.maximum(queries.times[clicked] + np.where(early, -ahead, delays), 0)
    clicks, order = _side(rng, 1, mix, times)
    clicked = clicked[order]
    return _Drawn(queries, users, hidden, clicks, clicked, np.flatnonzero(~hidden[clicked]))


def _query_format(drawn: _Drawn, seed: int) -> Callable[[Ints], list[bytes]]:
    queries, texts = drawn.queries, query_payloads(seed)

    def lines(rows: Ints) -> list[bytes]:
        payloads = map(texts.__getitem__, queries.payload[rows].tolist())
        return query_lines(
            queries.ids(rows), queries.times[rows].tolist(), drawn.users[rows].tolist(), payloads
        )

    return lines


def _click_format(drawn: _Drawn, seed: int) -> Callable[[Ints], list[bytes]]:
    clicks, texts = drawn.clicks, click_payloads(seed)

    def lines(rows: Ints) -> list[bytes]:
        payloads = map(texts.__getitem__, clicks.payload[rows].tolist())
        primary_ids = drawn.queries.ids(drawn.clicked[rows])
        return click_lines(clicks.ids(rows), primary_ids, clicks.times[rows].tolist(), payloads)

    return lines


def _side(rng: np.random.Generator, side: int, mix: Mix, times: Ints) -> tuple[_Side, npt.NDArray[np.intp]]:
    """Events with these times on random server processes, in file order, and how they were reordered."""
    count = len(times)
    process = rng.integers(0, mix.files, count)
    order = np.lexsort((times, process))
    process = process[order]
    raw = np.frombuffer(rng.bytes(16 * count), "V16") if mix.opaque_ids and count else None
    payload = rng.integers(0, PAYLOADS, count)
    return _Side(heads(side, mix.files), process, _increasing(process, times[order]), raw, payload), order


def _increasing(process: Ints, times: Ints) -> Ints:
    """Times sorted by process -> the same, moved by so few us that no two of a process are equal."""
    if not len(times):
        return times
    row = np.arange(len(times))
    stride = int(np.ptp(times)) + len(times) + 1
    base = process * stride - row
    increasing: Ints = np.maximum.accumulate(times - times.min() + base) - base + times.min()
    return increasing


def _plan(
    rng: np.random.Generator,
    mix: Mix,
    side: _Side,
    rows: Ints,
    repeatable: Ints,
    duplicates: float,
    malformed: float,
) -> _Lines:
    """Every event once, repeats somewhat later and maybe in another log, malformed lines anywhere."""
    repeats = round(len(rows) * duplicates) if len(repeatable) else 0
    spoilt = round(len(rows) * malformed)
    again = rng.choice(repeatable, repeats) if repeats else np.empty(0, np.int64)
    models = rng.choice(rows, spoilt) if spoilt else np.empty(0, np.int64)
    later = rng.integers(1, round(_REPEATED_WITHIN_S * 1e6), repeats)
    times = np.concatenate([side.times[rows], side.times[again] + later, side.times[models]])
    elsewhere = rng.integers(0, mix.files, repeats + spoilt)
    process = np.concatenate([side.process[rows], elsewhere])
    source = np.concatenate([rows, again, models])
    how = np.concatenate([np.full(len(rows) + repeats, _GOOD), np.arange(spoilt) % SPOILINGS])
    order = np.lexsort((source, times, process))
    return _Lines(process[order], source[order], how[order])


def _write(
    directory: Path, mix: Mix, names: Sequence[str], lines: _Lines, text: Callable[[Ints], list[bytes]]
) -> None:
    logs = server_logs(directory, names, mix.file_bytes_max)
    edges = np.searchsorted(lines.process, np.arange(mix.files + 1)).tolist()
    for log, start, end in zip(logs, edges, edges[1:], strict=False):
        for low in range(start, end, _LINES_A_CHUNK):
            chunk = slice(low, min(low + _LINES_A_CHUNK, end))
            made = text(lines.source[chunk])
            for row in np.flatnonzero(lines.spoilt[chunk] != _GOOD).tolist():
                made[row] = spoil(made[row], int(lines.spoilt[low + row]))
            log.write(made)
