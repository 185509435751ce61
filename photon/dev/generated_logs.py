"""Generated queries and clicks: how many, what they look like, the files they go to, the truth beside them.

`generate_at_once` writes a whole set: all columns are drawn by numpy, lines are formatted by the chunk.
photon.dev.feeder makes a stream of the same lines.
"""

import json
import math
import os
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from photon.core.disk import storage_errors, write_all
from photon.core.errors import UsageError
from photon.core.fates import Fate
from photon.dev.pairs import pairs_sha256

QUERIES, CLICKS = SIDES = range(2)
EVENTS_MAX: Final = 1_000_000_000
FILES_MAX: Final = 50_000
RATE_MAX: Final = 200_000.0

IDS: Final[dict[str, Callable[[str], str]]] = {
    "photon": str,
    "opaque": str,
    "uuid": lambda digits: "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:])),
    "short": lambda digits: digits[:16],
}
"""Kinds of ids -> how one is made of 32 random hex digits; a Photon id is `ip:pid:timestamp` instead."""


@dataclass(frozen=True, slots=True)
class Mix:
    """What both ways of generating share. Shares are parts of one: 0.01 is one in a hundred.

    `early`, `orphans`: of the clicks; `duplicates`, `malformed`: lines more, as a share of the clicks;
    `duplicate_queries`, `malformed_queries`: the same of the queries. `files`: logs a side, each of a server
    process. `ids`: one of IDS. `line_bytes`: shorter lines are padded to about so many; 0: they are not.
    """

    seed: int = 1
    files: int = 8
    file_bytes_max: int = 64 << 20
    ids: str = "photon"
    line_bytes: int = 0
    duplicates: float = 0.0
    early: float = 0.0
    orphans: float = 0.0
    malformed: float = 0.0
    duplicate_queries: float = 0.0
    malformed_queries: float = 0.0

    def __post_init__(self) -> None:
        _within("seed", self.seed, 0, 2**63 - 1)
        _within("files", self.files, 1, FILES_MAX)
        _within("rotate-bytes", self.file_bytes_max, 1024, 1 << 40)
        _within("line-bytes", self.line_bytes, 0, 1 << 16)
        if self.ids not in IDS:
            raise UsageError(f"--ids must be one of {', '.join(IDS)}, not {self.ids}")
        for field in fields(self):
            if field.type is float:
                _within(field.name.replace("_", "-"), getattr(self, field.name), 0.0, 1.0)
        if self.early + self.orphans > 1.0:
            raise UsageError("--early and --orphans are shares of the same clicks: together at most 1")

    def more_lines(self, side: int) -> tuple[float, float]:
        """Repeated and malformed lines of a side, as shares of its events."""
        if side == QUERIES:
            return self.duplicate_queries, self.malformed_queries
        return self.duplicates, self.malformed


@dataclass(frozen=True, slots=True)
class DelayLimits:
    """Seconds from query to click: 90 % come before `body`, 99.9 % before `tail`, all before `longest`."""

    body: float = 60.0
    tail: float = 3_600.0
    longest: float = 86_400.0


@dataclass(frozen=True, slots=True)
class AtOnce:
    """So many events, as fast as can be; queries spread over `span_s` seconds from `start_us` on.
    `processes`: of each log, line by line; `disorder_s`: how far behind its place a line stands, at most."""

    queries: int = 100_000
    clicks: int = 20_000
    start_us: int = 1_700_000_000_000_000
    span_s: float = 3_600.0
    processes: int = 1
    disorder_s: int = 0
    delays: DelayLimits = DelayLimits()

    def __post_init__(self) -> None:
        _within("queries", self.queries, 1, EVENTS_MAX)
        _within("clicks", self.clicks, 0, EVENTS_MAX)
        _within("start-us", self.start_us, 0, 10**17)
        _within("span", self.span_s, 1.0, 1e9)
        _within("processes", self.processes, 1, 1_000)
        _within("disorder", self.disorder_s, 0, 86_400)


@dataclass(frozen=True, slots=True)
class Stream:
    """So many events a second, in real time, for so many seconds."""

    rate: float
    click_rate: float
    duration_s: float = 60.0

    def __post_init__(self) -> None:
        _within("rate", self.rate, 0.001, RATE_MAX)
        _within("click-rate", self.click_rate, 0.0, RATE_MAX)
        _within("duration", self.duration_s, 0.01, 1e9)


def _within(name: str, value: float, low: float, high: float) -> None:
    if not low <= value <= high or math.isnan(value):
        raise UsageError(f"--{name} must be from {low} to {high}, not {value}")


Ints = npt.NDArray[np.int64]

PAYLOADS: Final = 4096
"""Different payload texts; events draw from them."""
USERS: Final = 50_000_000

_PROCESSES_A_SERVER: Final = 2
_QUERY: Final = '{"id":"%s","ts_us":%d,"payload":{"user":"u%08d",%s}}\n'
_CLICK: Final = '{"id":"%s","primary_id":"%s","ts_us":%d,"payload":{%s}}\n'
_AROUND_PAYLOAD: Final = (105, 120)
"""Bytes of a query's line and of a click's outside the payload, about."""
_TEXT: Final = (
    "cheap flights hotel near station running shoes size 42 weather tomorrow best pizza naïve bayes "
    "café ouvert dimanche Straßenbahn fahrplan 東京 天気 купить велосипед garden chairs second hand laptop "
    'repair "open late" how to fix a\\b path guitar chords lyrics ticket price museum opening hours 🚲 rental'
)
_COUNTRIES: Final = ("US", "DE", "JP", "FR", "BR", "IN", "PT", "GB", "MX", "NL")
_DEVICES: Final = ("mobile", "desktop", "tablet")


def delays_us(rng: np.random.Generator, count: int, limits: DelayLimits) -> Ints:
    """Delays with a long tail: 10 % beyond `body`, 0.1 % beyond `tail`, none beyond `longest`."""
    share, place = rng.random(count), rng.random(count)
    mean = limits.body / 6
    body = -mean * np.log1p(-place * (1 - np.exp(-6.0)))
    tail = limits.body * (limits.tail / limits.body) ** place
    far = limits.tail * (limits.longest / limits.tail) ** place
    seconds = np.where(share < 0.9, body, np.where(share < 0.999, tail, far))
    return (seconds * 1e6).astype(np.int64) + 1


def heads(side: int, processes: int) -> list[str]:
    """`ip:pid` of so many server processes: 10.0.x.y for queries (side 0), 10.1.x.y for clicks (side 1)."""
    servers = [divmod(number + _PROCESSES_A_SERVER, _PROCESSES_A_SERVER) for number in range(processes)]
    return [f"10.{side}.{s >> 8}.{s & 255}:{1000 + s % 9000 + 10_000 * p}" for s, p in servers]


def photon_ids(servers: Sequence[str], process: Ints, times: Ints) -> list[str]:
    return list(
        map("%s:%d".__mod__, zip(map(servers.__getitem__, process.tolist()), times.tolist(), strict=True))
    )


def opaque_ids(raw: bytes, kind: str = "opaque") -> list[str]:
    """16 x N bytes -> N ids, of a kind in IDS that has no time in it."""
    text = raw.hex()
    return list(map(IDS[kind], (text[at : at + 32] for at in range(0, len(text), 32))))


def payloads(seed: int, line_bytes: int = 0) -> tuple[list[str], list[str]]:
    """The inside of the payload objects of queries (without the user) and of clicks; what their lines lack of
    `line_bytes` is a field of ASCII text."""
    queries, clicks, rng = (random.Random(f"{what} {seed}") for what in ("queries", "clicks", "pages"))
    texts = (
        [_query_payload(queries) for _ in range(PAYLOADS)],
        [_click_payload(clicks) for _ in range(PAYLOADS)],
    )
    words = [word for word in _TEXT.split() if word.isalnum() and word.isascii()]
    page = " ".join(rng.choices(words, k=1 << 15)) if line_bytes else ""

    def padded(inside: str, around: int) -> str:
        size = max(0, line_bytes - around - len(inside.encode()))
        start = rng.randrange(len(page) - size)
        return f'{inside},"page":"{page[start : start + size]}"'

    if line_bytes:
        for some, around in zip(texts, _AROUND_PAYLOAD, strict=True):
            some[:] = [padded(one, around) for one in some]
    return texts


def _query_payload(rng: random.Random) -> str:
    return _inside(
        {
            "query": " ".join(rng.choices(_TEXT.split(), k=rng.randrange(2, 6))),
            "country": rng.choice(_COUNTRIES),
            "device": rng.choice(_DEVICES),
            "results": rng.randrange(2_000_000),
            "latency_ms": round(rng.lognormvariate(3.5, 0.6), 2),
            "ads": [f"a{rng.randrange(10**6)}" for _ in range(rng.randrange(1, 4))],
        }
    )


def _click_payload(rng: random.Random) -> str:
    return _inside(
        {
            "ad": f"a{rng.randrange(10**6)}",
            "position": rng.randrange(1, 9),
            "cost_micros": rng.randrange(10**6),
        }
    )


def _inside(payload: dict[str, object]) -> str:
    return json.dumps(payload, ensure_ascii=False, separators=(",", ":"))[1:-1]


def query_lines(
    ids: Iterable[str], times: Iterable[int], users: Iterable[int], payloads: Iterable[str]
) -> list[bytes]:
    """One JSON object a line, newline included."""
    return list(map(str.encode, map(_QUERY.__mod__, zip(ids, times, users, payloads, strict=True))))


def click_lines(
    ids: Iterable[str], primary_ids: Iterable[str], times: Iterable[int], payloads: Iterable[str]
) -> list[bytes]:
    return list(map(str.encode, map(_CLICK.__mod__, zip(ids, primary_ids, times, payloads, strict=True))))


def pair_lines(primary_ids: Iterable[str], foreign_ids: Iterable[str]) -> list[bytes]:
    """Lines of the truth's digest (photon.dev.pairs)."""
    return list(map(str.encode, map("%s\t%s\n".__mod__, zip(primary_ids, foreign_ids, strict=True))))


def _with_payload(start: bytes) -> Callable[[bytes], bytes]:
    return lambda line: line.replace(b'"payload":{', b'"payload":{' + start, 1)


_SPOILERS: Final[tuple[Callable[[bytes], bytes], ...]] = (
    lambda line: line[: len(line) // 2] + b"\n",  # cut off
    _with_payload(b'"name":"\xff\xfe",'),  # not UTF-8
    lambda line: b"{" + line.partition(b",")[2],  # no id
    lambda line: b'{"id":null,' + line.partition(b",")[2],
    lambda line: b"[" + line[:-1] + b"]\n",  # no object
    _with_payload(b'"name":"\x01",'),  # a bare control character
    lambda line: line[:-1] + line,  # two events in a line
    lambda line: b"# " + line,
)
SPOILINGS: Final = len(_SPOILERS)


def spoil(line: bytes, how: int) -> bytes:
    """A malformed line made of a good one, newline included; `how` is from 0 to SPOILINGS - 1."""
    return _SPOILERS[how](line)


@dataclass(frozen=True, slots=True)
class GeneratedTruth:
    """What is in generated logs, and what joining them must come to. Counts are of lines, or say distinct.

    `foreign_rows` = joinable clicks (`distinct_joined_pairs`) + `orphans` + `duplicates` + `malformed`;
    orphans are all distinct and name queries that were never logged; duplicates repeat a joinable click byte
    for byte; `early` ones are older than their query or, in a stream, logged before it. The digest is that
    of photon.dev.pairs.
    """

    mode: str
    seed: int
    ids: str
    primary_rows: int
    primary_distinct_ids: int
    primary_duplicates: int
    primary_malformed: int
    foreign_rows: int
    foreign_distinct_ids: int
    distinct_joined_pairs: int
    orphans: int
    duplicates: int
    early: int
    malformed: int
    joined_pairs_sha256: str

    def expected_summary(self) -> dict[str, int]:
        """The fates that `photon join` must report once it has drained the logs."""
        counts = {
            Fate.JOINED: self.distinct_joined_pairs,
            Fate.DUPLICATE: self.duplicates,
            Fate.UNJOINABLE: self.orphans,
            Fate.MALFORMED: self.malformed,
        }
        return {"foreign_events": self.foreign_rows} | {fate: counts.get(fate, 0) for fate in Fate}

    def document(self) -> dict[str, Any]:
        return asdict(self) | {"expected_summary": self.expected_summary()}


@dataclass(slots=True)
class Counts:
    """Lines of one side: distinct events, repeats of them, malformed lines."""

    distinct: int = 0
    repeated: int = 0
    malformed: int = 0

    @property
    def rows(self) -> int:
        return self.distinct + self.repeated + self.malformed


def truth_of(
    mode: str, mix: Mix, counts: Sequence[Counts], orphans: int, early: int, pairs: list[bytes]
) -> GeneratedTruth:
    """`counts`: of queries, of clicks; `pairs`: those that must be joined."""
    queries, clicks = counts
    return GeneratedTruth(
        mode=mode,
        seed=mix.seed,
        ids=mix.ids,
        primary_rows=queries.rows,
        primary_distinct_ids=queries.distinct,
        primary_duplicates=queries.repeated,
        primary_malformed=queries.malformed,
        foreign_rows=clicks.rows,
        foreign_distinct_ids=clicks.distinct,
        distinct_joined_pairs=len(pairs),
        orphans=orphans,
        duplicates=clicks.repeated,
        early=early,
        malformed=clicks.malformed,
        joined_pairs_sha256=pairs_sha256(pairs),
    )


class ServerLog:
    """The log of one server process, `<directory>/<ip>-<pid>-NNNNNN.jsonl`, rotated at `file_bytes_max`.

    Nothing is kept open or synced: there may be thousands, and what is lost is generated again.
    """

    def __init__(self, directory: Path, head: str, file_bytes_max: int) -> None:
        self._stem = str(directory / head.replace(":", "-"))
        self._file_bytes_max = file_bytes_max
        self._number = 0
        self._size = 0

    def write(self, lines: Sequence[bytes]) -> None:
        """Append whole lines, each with its newline; a line longer than the maximum has a file of its own.
        StorageError."""
        first = 0
        for at, line in enumerate(lines):
            if self._size and self._size + len(line) > self._file_bytes_max:
                self._append(lines[first:at])
                first, self._number, self._size = at, self._number + 1, 0
            self._size += len(line)
        self._append(lines[first:])

    def _append(self, lines: Sequence[bytes]) -> None:
        if lines:
            path = Path(f"{self._stem}-{self._number:06d}.jsonl")
            with storage_errors(path), path.open("ab", buffering=0) as file:
                write_all(file.fileno(), b"".join(lines))


def server_logs(out: Path, side: int, mix: Mix, processes: int = 1) -> list[ServerLog]:
    """The logs of a side, each named after the first of its `processes`."""
    directory = out / ("queries", "clicks")[side]
    first = heads(side, mix.files * processes)[::processes]
    return [ServerLog(directory, head, mix.file_bytes_max) for head in first]


def prepare_directory(out: Path) -> None:
    """Make OUT/queries and OUT/clicks. UsageError if there are logs already or they can't be made."""
    for name in ("queries", "clicks"):
        try:
            (out / name).mkdir(parents=True, exist_ok=True)
            full = next((out / name).iterdir(), None)
        except OSError as error:
            raise UsageError(
                f"{error.filename}: {error.strerror}; name a directory that can be written"
            ) from error
        if full is not None:
            raise UsageError(f"{out / name} already holds {full.name}; name another directory or delete it")


def write_truth(out: Path, truth: GeneratedTruth) -> None:
    """OUT/truth.json, last of all: where it is, the logs are whole."""
    partial = out / "truth.json.partial"
    partial.write_text(json.dumps(truth.document(), indent=1) + "\n", "utf-8")
    os.replace(partial, out / "truth.json")


_LINES_A_CHUNK: Final = 32_768
_EARLY_S: Final = 30.0
_REPEATED_WITHIN_S: Final = 60.0
_GOOD: Final = -1


@dataclass(frozen=True, slots=True)
class _Side:
    """One side's distinct events by process and time: server process, time, raw opaque id, inside of the
    payload (a number of `texts`)."""

    heads: list[str]
    process: Ints
    times: Ints
    kind: str
    raw_ids: npt.NDArray[np.void] | None
    payload: Ints
    texts: list[str]

    def ids(self, rows: Ints) -> list[str]:
        if self.raw_ids is not None:
            return opaque_ids(self.raw_ids[rows].tobytes(), self.kind)
        return photon_ids(self.heads, self.process[rows], self.times[rows])

    def times_and_payloads(self, rows: Ints) -> tuple[list[int], Iterable[str]]:
        return self.times[rows].tolist(), map(self.texts.__getitem__, self.payload[rows].tolist())


def generate_at_once(out: Path, mix: Mix, amount: AtOnce) -> GeneratedTruth:
    """Write OUT/queries, OUT/clicks and OUT/truth.json. The same seed gives the same bytes.

    UsageError if OUT already holds logs; StorageError if they can't be written.
    """
    prepare_directory(out)
    rng, texts = np.random.default_rng(mix.seed), payloads(mix.seed, mix.line_bytes)
    # Orphans name queries that are made like all the others and never written.
    orphans = round(amount.clicks * mix.orphans)
    made = amount.queries + orphans
    times = amount.start_us + rng.integers(0, round(amount.span_s * 1e6), made)
    queries, _ = _side(rng, QUERIES, mix, amount, times, texts[QUERIES])
    hidden = np.zeros(made, np.bool_)
    hidden[rng.permutation(made)[:orphans]] = True
    written = np.flatnonzero(~hidden)
    users = rng.integers(0, USERS, made)

    lost = rng.choice(np.flatnonzero(hidden), orphans) if orphans else np.empty(0, np.int64)
    clicked = np.concatenate([lost, rng.choice(written, amount.clicks - orphans)])
    early = np.zeros(amount.clicks, np.bool_)
    early[orphans : orphans + round(amount.clicks * mix.early)] = True
    delays = delays_us(rng, amount.clicks, amount.delays)
    ahead = rng.integers(1_000, round(_EARLY_S * 1e6), amount.clicks)
    times = np.maximum(queries.times[clicked] + np.where(early, -ahead, delays), 0)
    clicks, order = _side(rng, CLICKS, mix, amount, times, texts[CLICKS])
    clicked = clicked[order]
    joinable = np.flatnonzero(~hidden[clicked])

    def query(rows: Ints) -> list[bytes]:
        its, inside = queries.times_and_payloads(rows)
        return query_lines(queries.ids(rows), its, users[rows].tolist(), inside)

    def click(rows: Ints) -> list[bytes]:
        its, inside = clicks.times_and_payloads(rows)
        return click_lines(clicks.ids(rows), queries.ids(clicked[rows]), its, inside)

    every = np.arange(amount.clicks)
    counts = (
        _write(out, rng, mix, amount, QUERIES, queries, written, written, query),
        _write(out, rng, mix, amount, CLICKS, clicks, every, joinable, click),
    )
    older = int((clicks.times < queries.times[clicked])[joinable].sum())
    pairs = pair_lines(queries.ids(clicked[joinable]), clicks.ids(joinable))
    truth = truth_of("at once", mix, counts, amount.clicks - len(joinable), older, pairs)
    write_truth(out, truth)
    return truth


def _side(
    rng: np.random.Generator, side: int, mix: Mix, amount: AtOnce, times: Ints, texts: list[str]
) -> tuple[_Side, npt.NDArray[np.intp]]:
    """Events with these times on random server processes, sorted by both, and how they were reordered."""
    count, processes = len(times), mix.files * amount.processes
    process = rng.integers(0, processes, count)
    order = np.lexsort((times, process))
    process = process[order]
    raw = np.frombuffer(rng.bytes(16 * count), "V16") if mix.ids != "photon" and count else None
    payload = rng.integers(0, PAYLOADS, count)
    times = _increasing(process, times[order])
    return _Side(heads(side, processes), process, times, mix.ids, raw, payload, texts), order


def _increasing(process: Ints, times: Ints) -> Ints:
    """Times sorted by process -> the same, moved by so few us that no two of a process are equal."""
    if not len(times):
        return times
    row = np.arange(len(times))
    stride = int(np.ptp(times)) + len(times) + 1
    base = process * stride - row
    increasing: Ints = np.maximum.accumulate(times - times.min() + base) - base + times.min()
    return increasing


def _write(
    out: Path,
    rng: np.random.Generator,
    mix: Mix,
    amount: AtOnce,
    number: int,
    side: _Side,
    rows: Ints,
    repeatable: Ints,
    text: Callable[[Ints], list[bytes]],
) -> Counts:
    """The logs of a side: every event of `rows` once, repeats somewhat later and maybe in another log,
    malformed lines anywhere; each log by time, but for `disorder_s`. `text`: makes the lines of rows."""
    duplicates, malformed = mix.more_lines(number)
    repeats = round(len(rows) * duplicates) if len(repeatable) else 0
    spoilt = round(len(rows) * malformed)
    again = rng.choice(repeatable, repeats) if repeats else np.empty(0, np.int64)
    models = rng.choice(rows, spoilt) if spoilt else np.empty(0, np.int64)
    later = rng.integers(1, round(_REPEATED_WITHIN_S * 1e6), repeats)
    times = np.concatenate([side.times[rows], side.times[again] + later, side.times[models]])
    elsewhere = rng.integers(0, mix.files, repeats + spoilt)
    file = np.concatenate([side.process[rows] // amount.processes, elsewhere])
    source = np.concatenate([rows, again, models])
    how = np.concatenate([np.full(len(rows) + repeats, _GOOD), np.arange(spoilt) % SPOILINGS])
    if amount.disorder_s:
        times = times + rng.integers(0, round(amount.disorder_s * 1e6), len(times))
    order = np.lexsort((source, times, file))
    file, source, how = file[order], source[order], how[order]
    logs = server_logs(out, number, mix, amount.processes)
    edges = np.searchsorted(file, np.arange(len(logs) + 1)).tolist()
    for log, start, end in zip(logs, edges, edges[1:], strict=False):
        for low in range(start, end, _LINES_A_CHUNK):
            chunk = slice(low, min(low + _LINES_A_CHUNK, end))
            made = text(source[chunk])
            for row in np.flatnonzero(how[chunk] != _GOOD).tolist():
                made[row] = spoil(made[row], int(how[low + row]))
            log.write(made)
    return Counts(len(rows), repeats, spoilt)
