"""Measure, draw and write docs/results.md: `python -m benchmarks.figures [--quick] [--only outage,...]`.

The page is results.md.in with what was measured here in it, and its small pictures. Needs matplotlib and a
toxiproxy server (`make results` sees to both); some twenty minutes.
"""

import json
import math
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from benchmarks import figures_measured, matrix
from benchmarks.join import Plan
from benchmarks.measuring import Row, describe_machine
from photon.cluster.statuses import percentiles_ms
from photon.core.settings import Dispatcher
from tests.faults.kit.toxiproxy import ToxiproxyError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE: Final = (7.0, 3.2)
_DPI: Final = 100
_EAST, _WEST, _GREEN, _RED = "#1f6fb4", "#d2691e", "#2e8b57", "#8b1a1a"
_WINDOW: Final = 5
"""Rows of which a percentile is taken together."""

Figures = Mapping[str, Any]
Rows = Sequence[Figures]
Series = tuple[list[float], list[float]]


def draw(data: Figures, directory: Path) -> None:
    """fig07.png to fig13.png for what `data` has."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    directory.mkdir(parents=True, exist_ok=True)
    for name, part, drawn in (
        ("fig07", "outage", _latency),
        ("fig08", "outage", _lookups),
        ("fig09", "outage", _outage),
        ("fig10", "batching", _batching),
        ("fig11", "upsharding", _upsharding),
        ("fig12", "wasted", _wasted),
        ("fig13", "outage", _catching_up),
    ):
        if part not in data:
            continue
        figure, axes = pyplot.subplots(figsize=_SIZE, layout="constrained")
        axes.set_xlabel("seconds")
        drawn(axes, data[part])
        if axes.get_yscale() != "log":
            axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
        # Without its version the same figures give the same file.
        figure.savefig(directory / f"{name}.png", dpi=_DPI, metadata={"Software": None})
        pyplot.close(figure)


def series(rows: Rows, datacenter: str, key: str) -> Series:
    """Seconds, and the value of each row that has it; NaN between two that are apart (it was down)."""
    found = [row["datacenters"].get(datacenter, {}).get(key, float("nan")) for row in rows]
    return [row["at_s"] for row in rows], found


def _windows(rows: Rows, value: Callable[[list[Figures]], float | None]) -> Series:
    """Seconds, and `value` of what the datacenters (all, unless rows hold one) had in the last few rows."""
    at, values = [], []
    for end in range(_WINDOW, len(rows) + 1):
        found = value([one for row in rows[end - _WINDOW : end] for one in row["datacenters"].values()])
        at.append(rows[end - 1]["at_s"])
        values.append(math.nan if found is None else found)
    return at, values


def p90_ms(rows: Rows, datacenter: str | None = None) -> Series:
    """Seconds, and the 90th percentile of the last _WINDOW rows; of all datacenters together by default."""
    if datacenter is not None:
        own = ({datacenter: row["datacenters"].get(datacenter, {})} for row in rows)
        rows = [{**row, "datacenters": one} for row, one in zip(rows, own, strict=True)]
    return _windows(rows, lambda found: percentiles_ms(o["latency"] for o in found if "latency" in o)["p90"])


def wasted_percent(rows: Rows) -> Series:
    """Seconds, and the share of events whose join was wasted, of those joined, over the last _WINDOW rows."""

    def percent(found: list[Figures]) -> float | None:
        joined, wasted = (sum(one.get(f"{key}_per_s", 0.0) for one in found) for key in ("joined", "wasted"))
        return 100.0 * wasted / joined if joined else None

    return _windows(rows, percent)


def _mark_outage(axes: "Axes", outage: Figures, what: str) -> Rows:
    axes.axvspan(outage["down_at_s"], outage["up_at_s"], color="0.9", label=f"{outage['down']} is down")
    axes.set_ylabel(what)
    rows: Rows = outage["rows"]
    return rows


def _latency(axes: "Axes", outage: Figures) -> None:
    rows = _mark_outage(axes, outage, "line read to joined line, ms")
    for name, color in (("east", _EAST), ("west", _WEST)):
        axes.plot(*p90_ms(rows, name), color=color, label=f"{name}, p90")
    axes.set_yscale("log")


def _lookups(axes: "Axes", outage: Figures) -> None:
    rows = _mark_outage(axes, outage, "lookups found a second")
    for tier, color in (("cache", _GREEN), ("logs", _RED)):
        axes.plot(*series(rows, "west", f"{tier}_hits_per_s"), color=color, label=f"west: from the {tier}")


def _outage(axes: "Axes", outage: Figures) -> None:
    rows = _mark_outage(axes, outage, "joined events a second")
    for name, color in (("east", _EAST), ("west", _WEST)):
        axes.plot(*series(rows, name, "joined_per_s"), color=color, label=f"joined by {name}")


def _catching_up(axes: "Axes", outage: Figures) -> None:
    rows, down = _mark_outage(axes, outage, "events a second"), outage["down"]
    known = "known to the IdRegistry, not sent"
    for key, what, color in (
        ("read", "read", "0.4"),
        ("skipped", known, _GREEN),
        ("joined", "joined", _EAST),
    ):
        axes.plot(*series(rows, down, f"{key}_per_s"), color=color, label=f"{down}: {what}")
    axes.set_yscale("symlog", linthresh=100)


def _batching(axes: "Axes", batching: Figures) -> None:
    for (name, rows), color in zip(batching["series"].items(), (_RED, _EAST), strict=False):
        for key, style, what in (("requests", "--", "requests"), ("commits", "-", "Raft commits")):
            at, values = [row["at_s"] for row in rows], [row[f"{key}_per_s"] for row in rows]
            axes.plot(at, values, color=color, ls=style, label=f"{what}, {name}")
    axes.set_ylabel("a second")


def _upsharding(axes: "Axes", sharding: Figures) -> None:
    hours = [row["at_h"] for row in sharding["rows"]]
    for shard, ids in enumerate(zip(*(row["ids"] for row in sharding["rows"]), strict=True)):
        axes.plot(hours, ids, label=f"shard {shard}")
    axes.axvline(sharding["resharded_at_h"], color="0.4", ls=":", label="1 shard becomes 3")
    axes.set_xlabel("hours of event time")
    axes.set_ylabel("ids held")


def _wasted(axes: "Axes", wasted: Figures) -> None:
    for (name, run), color in zip(wasted["runs"].items(), (_GREEN, "#4a6fa5", _RED), strict=False):
        axes.plot(*wasted_percent(run["rows"]), color=color, label=name)
    axes.set_ylabel("wasted joins, % of events joined")


# --- the page

_TEMPLATE: Final = Path(__file__).with_name("results.md.in")
_WIDTH: Final = 115
_SETTLED_S: Final = 5.0
"""After a kill: who was with the dead one's replica looks for another."""


def page(data: Figures) -> str:
    """The whole page, of the parts that `data` has."""
    head, *sections = _TEMPLATE.read_text("utf-8").split("=== ")
    written = [head.format(**data["machine"])]
    for section in sections:
        name, _, text = section.partition("\n")
        if name in data:
            written.append(text.format(**data[name], **PARTS[name][1](data[name])))
    paragraphs = "\n\n".join(text.strip() for text in written).split("\n\n")
    return "\n\n".join(one if one.lstrip()[0] in "#|!" else _filled(one) for one in paragraphs) + "\n"


def _filled(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _outage_said(outage: Figures) -> dict[str, Any]:
    rows, down, down_at, up_at = (outage[key] for key in ("rows", "down", "down_at_s", "up_at_s"))
    well = [row for row in rows if row["at_s"] < down_at]
    during = [row for row in rows if down_at + _SETTLED_S < row["at_s"] < up_at]
    after = [row["datacenters"].get(down, {}) for row in rows if up_at < row["at_s"]]
    cache, logs = (_mean(series(well, "west", f"{tier}_hits_per_s")[1]) for tier in ("cache", "logs"))
    read = max((row["read_per_s"] for row in after if "read_per_s" in row), default=math.nan)
    best = [row["skipped_per_s"] for row in after if row.get("read_per_s") == read]
    found = [one for row in well for one in row["datacenters"].values()]
    half_ms = percentiles_ms(one["latency"] for one in found if "latency" in one)["p50"]
    since = [row for row in rows if down_at < row["at_s"]]
    worst_ms, worst_at_s = max(
        ((ms, at_s) for at_s, ms in zip(*p90_ms(since, "west"), strict=True) if not math.isnan(ms)),
        key=lambda found: found[0],
        default=(math.nan, math.nan),
    )
    return {
        "down_s": up_at - down_at,
        "before_ms": _mean(p90_ms(well)[1]),
        "half_ms": math.nan if half_ms is None else half_ms,
        "worst_ms": worst_ms,
        "worst_at_s": worst_at_s,
        "arrival_s": figures_measured.ARRIVAL_S,
        "hedge_s": Dispatcher().home_hedge_ms / 1000,
        "hit_percent": 100.0 * cache / (cache + logs) if cache + logs else math.nan,
        "east": _mean(series(well, "east", "joined_per_s")[1]),
        "west": _mean(series(well, "west", "joined_per_s")[1]),
        "alone": _mean(series(during, "west", "joined_per_s")[1]),
        "read": read,
        "skipped": 100.0 * _mean(best) / read,
    }


def _wasted_said(wasted: Figures) -> dict[str, Any]:
    arrival_s = figures_measured.ARRIVAL_S
    percent = [_mean(wasted_percent(run["rows"])[1]) for run in wasted["runs"].values()]
    return {"percent": percent, "arrival_s": arrival_s, "far_s": 5 * arrival_s}


def _batching_said(batching: Figures) -> dict[str, Any]:
    steps = batching["series"].values()
    return {"means": [{key: _mean([row[key] for row in rows]) for key in rows[0]} for rows in steps]}


def _upsharding_said(sharding: Figures) -> dict[str, Any]:
    rows = sharding["rows"]
    before = max(row["ids"][0] for row in rows if row["at_h"] <= sharding["resharded_at_h"])
    return {"before": before, "last": ", ".join(f"{ids:,}" for ids in rows[-1]["ids"])}


def _known(values: Sequence[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _mean(values: Sequence[float]) -> float:
    known = _known(values)
    return sum(known) / len(known) if known else math.nan


def _matrix(directory: Path, quick: bool) -> Row:
    plan = Plan(directory, runs=1)
    return matrix.run(plan, (), 0.02 if quick else 1.0, "duckdb,pathway", (), lambda _: None)


def _matrix_said(report: Figures) -> dict[str, Any]:
    """A line a shape, with the peers' beside ours: seconds, and CPU us an event."""
    rows, ours = report["matrix"], ("kib_an_event", "seconds", "cpu_s", "cpu_us_an_event", "cpu_us_a_kib")
    peers = {(row["shape"], row["engine"]): row for row in report.get("peers", ()) if "seconds" in row}
    engines = list(dict.fromkeys(engine for _, engine in peers))
    heads = ["shape", "KiB an event", "seconds", "CPU s", "us an event", "us a KiB", "beside the line, us"]
    heads += [f"{engine.split(',')[0]}: seconds, us an event" for engine in engines]
    lines = ["|".join(heads), "|".join("---" for _ in heads)]
    for row in rows:
        cells = [row["shape"], *(row[key] for key in ours), f"{row['beside_the_fit_us']:+}"]
        for engine in engines:
            peer = peers.get((row["shape"], engine), {})
            cells.append(f"{peer['seconds']}, {peer['cpu_us_an_event']}" if peer else "failed")
        lines.append("|".join(map(str, cells)))
    events = max(row["events"] for row in rows)
    start_us = 1e6 * report["start"][0]["cpu_s"] / events
    table = "\n".join(f"| {line.replace('|', ' | ')} |" for line in lines)
    return {"table": table, "start_us": start_us, "events": round(events, -3)}


# --- all of it

PARTS: Final[dict[str, tuple[Callable[[Path, bool], Row], Callable[[Figures], Row]]]] = {
    "outage": (figures_measured.outage, _outage_said),
    "wasted": (figures_measured.wasted, _wasted_said),
    "batching": (figures_measured.batching, _batching_said),
    "upsharding": (figures_measured.upsharding, _upsharding_said),
    "matrix": (_matrix, _matrix_said),
}
"""What measures a part, and what the page says of it."""


@click.command()
@click.option("--quick", is_flag=True, help="Seconds instead of minutes, to see that it works.")
@click.option("--only", default=",".join(PARTS), show_default=True, help="Parts to measure anew.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("docs"), help="Where results.md goes.")
def main(quick: bool, only: str, out: Path) -> None:
    """Measure the parts anew; the others keep what was measured before."""
    chosen = only.split(",")
    unknown = set(chosen) - set(PARTS)
    if unknown:
        raise click.UsageError(f"no part {', '.join(sorted(unknown))}; there are: {', '.join(PARTS)}")
    measured: dict[str, Any] = {} if chosen == ["matrix"] else {"machine": describe_machine()}
    try:
        with tempfile.TemporaryDirectory(prefix="photon-figures-") as scratch:
            for part in chosen:
                began = time.monotonic()
                measured[part] = PARTS[part][0](Path(scratch) / part, quick)
                sys.stderr.write(f"{part}: measured in {time.monotonic() - began:.0f} s\n")
    except ToxiproxyError as error:
        raise click.ClickException(str(error)) from error
    kept = out / "results" / "data.json"
    data = {**(json.loads(kept.read_text("utf-8")) if kept.exists() else {}), **measured}
    kept.parent.mkdir(parents=True, exist_ok=True)
    kept.write_text(json.dumps(data, separators=(",", ":")) + "\n", "utf-8")
    draw(data, kept.parent)
    (out / "results.md").write_text(page(data), "utf-8")


if __name__ == "__main__":
    main()
