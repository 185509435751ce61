"""The figures as SVG, drawn from what was measured."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from photon.app.summary import percentiles_ms

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE: Final = (7.0, 3.2)
_COLORS: Final = {"east": "#1f6fb4", "west": "#d2691e"}
_WINDOW: Final = 5
"""Rows of which a percentile is taken together."""

Rows = Sequence[Mapping[str, Any]]


def draw(data: Mapping[str, Any], directory: Path) -> None:
    """fig07.svg to fig13.svg for what `data` has."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "photon"  # the same figures give the same file
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
        if part in data:
            _save(directory / f"{name}.svg", drawn, data[part])


def _save(path: Path, drawn: Any, part: Mapping[str, Any]) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=_SIZE, layout="constrained")
    drawn(axes, part)
    if axes.get_yscale() != "log":
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def series(rows: Rows, datacenter: str, key: str) -> tuple[list[float], list[float]]:
    """Seconds, and the value of each row that has it; NaN between two that are apart (it was down)."""
    at, values = [], []
    for row in rows:
        found = row["datacenters"].get(datacenter, {})
        at.append(row["at_s"])
        values.append(found[key] if key in found else float("nan"))
    return at, values


def p90_ms(rows: Rows, datacenter: str | None = None) -> tuple[list[float], list[float]]:
    """Seconds, and the 90th percentile of the last _WINDOW rows; of all datacenters together by default."""
    at, values = [], []
    for end in range(_WINDOW, len(rows) + 1):
        histograms = [
            found["latency"]
            for row in rows[end - _WINDOW : end]
            for name, found in row["datacenters"].items()
            if "latency" in found and datacenter in (None, name)
        ]
        at.append(rows[end - 1]["at_s"])
        value = percentiles_ms(histograms)["p90"] if histograms else None
        values.append(float("nan") if value is None else value)
    return at, values


def _mark_outage(axes: "Axes", outage: Mapping[str, Any]) -> None:
    axes.axvspan(outage["down_at_s"], outage["up_at_s"], color="0.9", label=f"{outage['down']} is down")
    axes.set_xlabel("seconds")


def _latency(axes: "Axes", outage: Mapping[str, Any]) -> None:
    _mark_outage(axes, outage)
    for name, color in _COLORS.items():
        axes.plot(*p90_ms(outage["rows"], name), color=color, label=f"{name}, p90")
    axes.set_yscale("log")
    axes.set_ylabel("line read to joined line, ms")


def _lookups(axes: "Axes", outage: Mapping[str, Any]) -> None:
    _mark_outage(axes, outage)
    rows = outage["rows"]
    axes.plot(*series(rows, "west", "cache_hits_per_s"), color="#2e8b57", label="west: from the cache")
    axes.plot(*series(rows, "west", "logs_hits_per_s"), color="#8b1a1a", label="west: from the logs")
    axes.set_ylabel("lookups found a second")


def _outage(axes: "Axes", outage: Mapping[str, Any]) -> None:
    _mark_outage(axes, outage)
    for name, color in _COLORS.items():
        axes.plot(*series(outage["rows"], name, "joined_per_s"), color=color, label=f"joined by {name}")
    axes.set_ylabel("joined events a second")


def _catching_up(axes: "Axes", outage: Mapping[str, Any]) -> None:
    _mark_outage(axes, outage)
    rows, down = outage["rows"], outage["down"]
    axes.plot(*series(rows, down, "read_per_s"), color="0.4", label=f"{down}: read")
    axes.plot(
        *series(rows, down, "skipped_per_s"),
        color="#2e8b57",
        label=f"{down}: known to the IdRegistry, not sent",
    )
    axes.plot(*series(rows, down, "joined_per_s"), color=_COLORS["east"], label=f"{down}: joined")
    axes.set_yscale("symlog", linthresh=100)
    axes.set_ylabel("events a second")


def _batching(axes: "Axes", batching: Mapping[str, Any]) -> None:
    for (name, rows), color in zip(batching["series"].items(), ("#8b1a1a", "#1f6fb4"), strict=False):
        at = [row["at_s"] for row in rows]
        axes.plot(
            at, [row["requests_per_s"] for row in rows], color=color, ls="--", label=f"requests, {name}"
        )
        axes.plot(at, [row["commits_per_s"] for row in rows], color=color, label=f"Raft commits, {name}")
    axes.set_xlabel("seconds")
    axes.set_ylabel("a second")


def _upsharding(axes: "Axes", sharding: Mapping[str, Any]) -> None:
    hours = [row["at_h"] for row in sharding["rows"]]
    for shard, ids in enumerate(zip(*(row["ids"] for row in sharding["rows"]), strict=True)):
        axes.plot(hours, ids, label=f"shard {shard}")
    axes.axvline(sharding["resharded_at_h"], color="0.4", ls=":", label="1 shard becomes 3")
    axes.set_xlabel("hours of event time")
    axes.set_ylabel("ids held")


def _wasted(axes: "Axes", wasted: Mapping[str, Any]) -> None:
    for (name, run), color in zip(wasted["runs"].items(), ("#2e8b57", "#4a6fa5", "#8b1a1a"), strict=False):
        axes.plot(*wasted_percent(run["rows"]), color=color, label=name)
    axes.set_xlabel("seconds")
    axes.set_ylabel("wasted joins, % of events joined")


def wasted_percent(rows: Rows) -> tuple[list[float], list[float]]:
    """Seconds, and the events joined in vain, of those joined, in percent, over the last _WINDOW rows."""
    at, values = [], []
    for end in range(_WINDOW, len(rows) + 1):
        found = list(
            itertools.chain.from_iterable(r["datacenters"].values() for r in rows[end - _WINDOW : end])
        )
        joined = sum(one.get("joined_per_s", 0.0) for one in found)
        vain = sum(one.get("wasted_per_s", 0.0) for one in found)
        at.append(rows[end - 1]["at_s"])
        values.append(100.0 * vain / joined if joined else float("nan"))
    return at, values
