"""Reports as text. Pure."""

from collections.abc import Sequence
from typing import Any, Final

Row = dict[str, Any]
"""A row of a table: column -> value."""

_TITLES: Final = {
    "throughput": "one shard, 3 replicas, fsync on, through gRPC from 2 client processes",
    "etcd": "beside etcd, in turn, each alone on the machine",
    "wan": "a long round trip between the replicas",
    "failover": "leader killed",
    "batching": "server-side batching (Fig. 10): 1 to 10 ids a request",
}


def join_text(report: dict[str, Any]) -> str:
    """The machine in a line, then a table for each part."""
    machine = ", ".join(f"{_words(key)} {value}" for key, value in report["machine"].items())
    parts = [f"{name}\n{join_table(rows)}" for name, rows in report.items() if name != "machine"]
    return "\n\n".join([machine, *parts])


def join_table(rows: Sequence[Row]) -> str:
    """Rows of one part. A single row has a line for each figure; several stand side by side."""
    if len(rows) == 1:
        return "\n".join(f"  {_words(key):<22}{_figure(value):>16}" for key, value in rows[0].items())
    columns = _columns(rows)
    cells = [[_figure(row.get(column, "")) for column in columns] for row in rows]
    return "\n".join(_aligned([[_words(column) for column in columns], *cells]))


def registry_text(report: dict[str, dict[str, Any]]) -> str:
    """All parts, each under its title: single figures as lines, rows as small tables."""
    return "\n\n".join(
        "\n".join([f"{name}: {_TITLES[name]}" if name in _TITLES else name, *_part(figures)])
        for name, figures in report.items()
    )


def _part(figures: dict[str, Any]) -> list[str]:
    lines = []
    for key, value in figures.items():
        if key.endswith("_rows"):
            lines += ["", *registry_table(value)]
        elif isinstance(value, dict):
            lines.append(f"  {_words(key):<20} {', '.join(f'{k} {_cell(v)}' for k, v in value.items())}")
        elif isinstance(value, list):
            lines.append(f"  {_words(key):<20} {' '.join(map(_cell, value))}")
        else:
            lines.append(f"  {_words(key):<20} {_cell(value)}")
    return lines


def registry_table(rows: Sequence[Row]) -> list[str]:
    """Right-aligned columns under the keys' words, one above the other where a key has several."""
    columns = _columns(rows)
    heads = [column.split("_") for column in columns]
    height = max(map(len, heads), default=0)
    heads = [[""] * (height - len(head)) + head for head in heads]
    cells = [[_cell(row.get(column, "")) for column in columns] for row in rows]
    return _aligned([[head[n] for head in heads] for n in range(height)] + cells)


def _columns(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def _words(key: str) -> str:
    return key.replace("_", " ")


def _figure(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) or (isinstance(value, float) and abs(value) >= 1_000):
        return f"{value:,.0f}"
    return str(value)
