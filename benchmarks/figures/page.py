"""docs/results.md: results.md.in, with what was measured here in it."""

import math
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from benchmarks.figures.drawing import p90_ms, series, wasted_percent
from benchmarks.figures.system import ARRIVAL_S

_TEMPLATE: Final = Path(__file__).with_name("results.md.in")
_WIDTH: Final = 115
_SETTLED_S: Final = 5.0
"""After a kill: who was with the dead one's replica looks for another."""

Figures = Mapping[str, Any]


def page(data: Figures) -> str:
    """The whole page, of the parts that `data` has."""
    head, *sections = _TEMPLATE.read_text("utf-8").split("=== ")
    written = [head.format(**data["machine"])]
    for section in sections:
        name, _, text = section.partition("\n")
        if name in data:
            written.append(text.format(**data[name], **_FIGURES[name](data[name])))
    paragraphs = "\n\n".join(text.strip() for text in written).split("\n\n")
    return "\n\n".join(one if one.lstrip()[0] in "#|!" else _filled(one) for one in paragraphs) + "\n"


def _filled(text: str) -> str:
    return textwrap.fill(text, _WIDTH, break_long_words=False, break_on_hyphens=False)


def _outage(outage: Figures) -> dict[str, Any]:
    rows, down, down_at, up_at = (outage[key] for key in ("rows", "down", "down_at_s", "up_at_s"))
    well = [row for row in rows if row["at_s"] < down_at]
    during = [row for row in rows if down_at + _SETTLED_S < row["at_s"] < up_at]
    after = [row["datacenters"].get(down, {}) for row in rows if up_at < row["at_s"]]
    cache, logs = (_mean(series(well, "west", f"{tier}_hits_per_s")[1]) for tier in ("cache", "logs"))
    read = max((row["read_per_s"] for row in after if "read_per_s" in row), default=math.nan)
    best = [row["skipped_per_s"] for row in after if row.get("read_per_s") == read]
    return {
        "down_s": up_at - down_at,
        "before_ms": _mean(p90_ms(well)[1]),
        "worst_ms": max(
            _known(p90_ms([row for row in rows if down_at < row["at_s"]], "west")[1]), default=math.nan
        ),
        "hit_percent": 100.0 * cache / (cache + logs) if cache + logs else math.nan,
        "east": _mean(series(well, "east", "joined_per_s")[1]),
        "west": _mean(series(well, "west", "joined_per_s")[1]),
        "alone": _mean(series(during, "west", "joined_per_s")[1]),
        "read": read,
        "skipped": 100.0 * _mean(best) / read,
    }


def _wasted(wasted: Figures) -> dict[str, Any]:
    percent = [_mean(wasted_percent(run["rows"])[1]) for run in wasted["runs"].values()]
    return {"percent": percent, "arrival_s": ARRIVAL_S, "far_s": 5 * ARRIVAL_S}


def _batching(batching: Figures) -> dict[str, Any]:
    return {
        "means": [
            {key: _mean([row[key] for row in rows]) for key in rows[0]}
            for rows in batching["series"].values()
        ]
    }


def _upsharding(sharding: Figures) -> dict[str, Any]:
    rows = sharding["rows"]
    before = max(row["ids"][0] for row in rows if row["at_h"] <= sharding["resharded_at_h"])
    return {"before": before, "last": ", ".join(f"{ids:,}" for ids in rows[-1]["ids"])}


_FIGURES: Final[dict[str, Callable[[Figures], dict[str, Any]]]] = {
    "outage": _outage,
    "wasted": _wasted,
    "batching": _batching,
    "upsharding": _upsharding,
}


def _known(values: Sequence[float]) -> list[float]:
    return [value for value in values if not math.isnan(value)]


def _mean(values: Sequence[float]) -> float:
    known = _known(values)
    return sum(known) / len(known) if known else math.nan
