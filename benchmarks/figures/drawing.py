"""The figures as small pictures, drawn from what was measured."""

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from photon.cluster.summary import percentiles_ms

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_SIZE: Final = (7.0, 3.2)
_DPI: Final = 100
_EAST, _WEST, _GREEN, _RED = "#1f6fb4", "#d2691e", "#2e8b57", "#8b1a1a"
_WINDOW: Final = 5
"""Rows of which a percentile is taken together."""

Rows = Sequence[Mapping[str, Any]]
Series = tuple[list[float], list[float]]


def draw(data: Mapping[str, Any], directory: Path) -> None:
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


def p90_ms(rows: Rows, datacenter: str | None = None) -> Series:
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


def wasted_percent(rows: Rows) -> Series:
    """Seconds, and the share of events whose join was wasted, of those joined, over the last _WINDOW rows."""
    at, values = [], []
    for end in range(_WINDOW, len(rows) + 1):
        found = list(
            itertools.chain.from_iterable(r["datacenters"].values() for r in rows[end - _WINDOW : end])
        )
        joined = sum(one.get("joined_per_s", 0.0) for one in found)
        wasted = sum(one.get("wasted_per_s", 0.0) for one in found)
        at.append(rows[end - 1]["at_s"])
        values.append(100.0 * wasted / joined if joined else float("nan"))
    return at, values


def _mark_outage(axes: "Axes", outage: Mapping[str, Any], what: str) -> Rows:
    axes.axvspan(outage["down_at_s"], outage["up_at_s"], color="0.9", label=f"{outage['down']} is down")
    axes.set_ylabel(what)
    rows: Rows = outage["rows"]
    return rows


def _latency(axes: "Axes", outage: Mapping[str, Any]) -> None:
    rows = _mark_outage(axes, outage, "line read to joined line, ms")
    for name, color in (("east", _EAST), ("west", _WEST)):
        axes.plot(*p90_ms(rows, name), color=color, label=f"{name}, p90")
    axes.set_yscale("log")


def _lookups(axes: "Axes", outage: Mapping[str, Any]) -> None:
    rows = _mark_outage(axes, outage, "lookups found a second")
    for tier, color in (("cache", _GREEN), ("logs", _RED)):
        axes.plot(*series(rows, "west", f"{tier}_hits_per_s"), color=color, label=f"west: from the {tier}")


def _outage(axes: "Axes", outage: Mapping[str, Any]) -> None:
    rows = _mark_outage(axes, outage, "joined events a second")
    for name, color in (("east", _EAST), ("west", _WEST)):
        axes.plot(*series(rows, name, "joined_per_s"), color=color, label=f"joined by {name}")


def _catching_up(axes: "Axes", outage: Mapping[str, Any]) -> None:
    rows, down = _mark_outage(axes, outage, "events a second"), outage["down"]
    known = "known to the IdRegistry, not sent"
    for key, what, color in (
        ("read", "read", "0.4"),
        ("skipped", known, _GREEN),
        ("joined", "joined", _EAST),
    ):
        axes.plot(*series(rows, down, f"{key}_per_s"), color=color, label=f"{down}: {what}")
    axes.set_yscale("symlog", linthresh=100)


def _batching(axes: "Axes", batching: Mapping[str, Any]) -> None:
    for (name, rows), color in zip(batching["series"].items(), (_RED, _EAST), strict=False):
        for key, style, what in (("requests", "--", "requests"), ("commits", "-", "Raft commits")):
            at, values = [row["at_s"] for row in rows], [row[f"{key}_per_s"] for row in rows]
            axes.plot(at, values, color=color, ls=style, label=f"{what}, {name}")
    axes.set_ylabel("a second")


def _upsharding(axes: "Axes", sharding: Mapping[str, Any]) -> None:
    hours = [row["at_h"] for row in sharding["rows"]]
    for shard, ids in enumerate(zip(*(row["ids"] for row in sharding["rows"]), strict=True)):
        axes.plot(hours, ids, label=f"shard {shard}")
    axes.axvline(sharding["resharded_at_h"], color="0.4", ls=":", label="1 shard becomes 3")
    axes.set_xlabel("hours of event time")
    axes.set_ylabel("ids held")


def _wasted(axes: "Axes", wasted: Mapping[str, Any]) -> None:
    for (name, run), color in zip(wasted["runs"].items(), (_GREEN, "#4a6fa5", _RED), strict=False):
        axes.plot(*wasted_percent(run["rows"]), color=color, label=name)
    axes.set_ylabel("wasted joins, % of events joined")
