"""`photon bench join --matrix`: logs of unlike shapes, each joined from files to files, its output checked.

A system tuned to one shape shows it here: what an event costs is fitted as a + b x KiB over all shapes, and
each says how far it is beside that line.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from benchmarks.join import SEED, Plan, drain
from benchmarks.join_peers import beside_us
from benchmarks.measuring import Row, fresh, machine_now
from photon.core.errors import UsageError
from photon.dev.generated_logs import AtOnce, DelayLimits, Mix, generate_at_once

EVENTS: Final = 200_000
"""Of both sides together, in each shape."""
_IDLE_EVENTS: Final = 60


@dataclass(frozen=True, slots=True)
class Shape:
    """Of logs. `files`: a side, each with the lines of `processes`; `line_bytes`: at least, about; `ids`: of
    generated_logs.IDS; `disorder_s`: how far lines stand behind their place; `delay_s`: nine clicks in ten
    come that soon, one in a thousand up to a day later; `early`, `duplicates`: shares of the clicks."""

    queries_a_click: float = 5.0
    files: int = 8
    processes: int = 1
    line_bytes: int = 0
    ids: str = "photon"
    disorder_s: int = 0
    delay_s: float = 60.0
    early: float = 0.0
    duplicates: float = 0.0
    cache_mib: int = 256

    def generate(self, logs: Path, events: int) -> int:
        """Write the logs and their truth; bytes of the logs. UsageError for a value that there is not."""
        clicks = max(1, round(events / (1 + self.queries_a_click + self.duplicates)))
        queries = max(1, round(clicks * self.queries_a_click))
        mix = Mix(SEED, self.files, duplicates=self.duplicates, early=self.early)
        mix = replace(mix, ids=self.ids, line_bytes=self.line_bytes)
        delays = DelayLimits(self.delay_s, max(DelayLimits().tail, 12 * self.delay_s))
        amount = AtOnce(queries, clicks, processes=self.processes, disorder_s=self.disorder_s, delays=delays)
        generate_at_once(logs, mix, amount)
        return sum(path.stat().st_size for path in logs.rglob("*.jsonl"))


SHAPES: Final = {
    "plain": Shape(),
    "servers": Shape(files=16, processes=30, line_bytes=380, ids="opaque"),
    "one-file": Shape(files=1, processes=200),
    "many-files": Shape(files=1_500),
    "wide": Shape(line_bytes=2_000),
    "uuid-shuffled": Shape(ids="uuid", disorder_s=600),
    "short-ids": Shape(ids="short", files=4, processes=50),
    "late": Shape(ids="opaque", delay_s=3_600.0, line_bytes=600, cache_mib=8),
    "few-clicks": Shape(queries_a_click=100.0, line_bytes=380),
    "many-clicks": Shape(queries_a_click=0.1),
    "repeats": Shape(duplicates=0.5, early=0.2),
}
"""Each unlike the others in what an index, a cache or a reader may rely on."""


def shape_of(text: str) -> Shape:
    """A name in SHAPES, or `KEY=VALUE,...`: what is unlike the plain one. UsageError."""
    if text in SHAPES:
        return SHAPES[text]
    kinds: dict[str, Any] = {field.name: type(field.default) for field in fields(Shape)}
    pairs = [part.partition("=")[::2] for part in text.split(",")]
    try:
        return Shape(**{key: kinds[key](value) for key, value in pairs})
    except (KeyError, ValueError) as error:
        known = f"one of {', '.join(SHAPES)}, or KEY=VALUE,... of {', '.join(kinds)}"
        raise UsageError(f"--shape {text}: give {known}") from error


def run(
    plan: Plan,
    shapes: Sequence[str],
    scale: float,
    peers: str | None,
    pythons: Sequence[str],
    tell: Callable[[str], object],
) -> dict[str, Any]:
    """The machine; a start with nothing to do; a row a shape, and of each peer beside it; the fit.

    `shapes`: as shape_of, all by default; `scale`: times EVENTS. BenchError for a wrong output of ours.
    """
    chosen = {text: shape_of(text) for text in shapes} or SHAPES
    report: dict[str, Any] = {"machine": machine_now()}
    start, _ = _measured(plan, "start", Shape(files=1), _IDLE_EVENTS, None, (), tell)
    report["start"] = [{key: start[key] for key in ("seconds", "cpu_s", "peak_mib")}]
    rows, beside = [], []
    for name, shape in chosen.items():
        row, others = _measured(plan, name, shape, round(EVENTS * scale), peers, pythons, tell)
        rows.append(row)
        beside += others
    report["matrix"] = rows
    if len({row["kib_an_event"] for row in rows}) > 2:
        report["fit"] = fit(rows)
    return report | ({"peers": beside} if beside else {})


def _measured(
    plan: Plan,
    name: str,
    shape: Shape,
    events: int,
    peers: str | None,
    pythons: Sequence[str],
    tell: Callable[[str], object],
) -> tuple[Row, list[Row]]:
    """Of the run in the middle by its CPU; and the peers' rows. The logs are deleted again."""
    tell(name)
    logs = fresh(plan.directory / "matrix-logs")
    size = shape.generate(logs, events)
    config = logs / "photon.toml"
    config.write_text(f"[eventstore]\ncache_bytes = {shape.cache_mib << 20}\n")
    runs = [drain(logs, plan.directory / "matrix", "--config", str(config)) for _ in range(plan.runs)]
    middle = sorted(runs, key=lambda run: run.usage.cpu_s)[len(runs) // 2]
    events, kib = middle.events, size / 1024
    row = {
        "shape": name,
        "events": events,
        "kib_an_event": round(kib / events, 3),
        "seconds": round(middle.seconds, 2),
        "cpu_s": round(middle.usage.cpu_s, 2),
        "peak_mib": middle.usage.peak_mib,
        "cpu_us_an_event": round(middle.usage.cpu_s / events * 1e6, 1),
        "cpu_us_a_kib": round(middle.usage.cpu_s / kib * 1e6, 1),
    }
    others = beside_us(logs, plan.directory / "peer", plan.runs, peers, pythons, tell) if peers else []
    for other in others:
        if "seconds" in other:
            other["ours_times_theirs"] = round(middle.seconds / other["seconds"], 2)
            other["cpu_us_an_event"] = round(other["cpu_s"] / events * 1e6, 1)
    fresh(logs)
    return row, [{"shape": name, **other} for other in others]


def fit(rows: Sequence[Row]) -> Row:
    """CPU us an event = a + b x KiB an event by least squares; each row gets how far it is from that."""
    kib, us = (np.array([row[key] for row in rows]) for key in ("kib_an_event", "cpu_us_an_event"))
    b, a = np.polyfit(kib, us, 1)
    for row, expected in zip(rows, (a + b * kib).tolist(), strict=True):
        row["beside_the_fit_us"] = round(row["cpu_us_an_event"] - expected, 1)
        row["times_the_fit"] = round(row["cpu_us_an_event"] / expected, 2)
    found: Row = {"a_us_an_event": round(float(a), 1), "b_us_a_kib": round(float(b), 1)}
    for key in ("times_the_fit", "cpu_us_a_kib"):
        for which, pick in (("worst", max), ("best", min)):
            row = pick(rows, key=lambda row: row[key])
            found[f"{which}_{key}"] = f"{row[key]}, {row['shape']}"
    return found
