"""A report of the registry's benchmark as text: single figures as lines, rows as small tables."""

from typing import Any

_TITLES = {
    "throughput": "one shard, 3 replicas, fsync on, through gRPC from 2 client processes",
    "etcd": "beside etcd, in turn, each alone on the machine",
    "wan": "a long round trip between the replicas",
    "failover": "leader killed",
    "batching": "server-side batching (Fig. 10): 1 to 10 ids a request",
    "reshard": "resharding under load (Fig. 11)",
}


def as_text(report: dict[str, dict[str, Any]]) -> str:
    """All parts, each under its title."""
    parts = []
    for name, figures in report.items():
        title = f"{name}: {_TITLES[name]}" if name in _TITLES else name
        parts.append("\n".join([title, *_part(figures)]))
    return "\n\n".join(parts)


def _part(figures: dict[str, Any]) -> list[str]:
    lines = []
    for key, value in figures.items():
        if key.endswith("_rows"):
            lines += ["", *table(value)]
        elif isinstance(value, dict):
            lines.append(f"  {_words(key):<20} {', '.join(f'{k} {_cell(v)}' for k, v in value.items())}")
        elif isinstance(value, list):
            lines.append(f"  {_words(key):<20} {' '.join(map(_cell, value))}")
        elif isinstance(value, str) and "\n" in value:
            lines += ["", *(f"  {line}" for line in value.splitlines())]
        else:
            lines.append(f"  {_words(key):<20} {_cell(value)}")
    return lines


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Right-aligned columns under the keys' words, one above the other where a key has several."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_cell(row.get(column, "")) for column in columns] for row in rows]
    heads = [column.split("_") for column in columns]
    height = max(map(len, heads), default=0)
    heads = [[""] * (height - len(head)) + head for head in heads]
    widths = [
        max(map(len, (*head, *column))) for head, column in zip(heads, zip(*cells, strict=True), strict=True)
    ]
    lines = [[head[n] for head in heads] for n in range(height)] + cells
    return [
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    ]


def _words(key: str) -> str:
    return key.replace("_", " ")


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int) or (isinstance(value, float) and abs(value) >= 1_000):
        return f"{value:,.0f}"
    return str(value)
