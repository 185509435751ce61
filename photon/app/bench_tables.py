"""The bench's figures as text. Pure."""

from collections.abc import Sequence
from typing import Any

Row = dict[str, Any]


def as_text(report: dict[str, Any]) -> str:
    """The machine in a line, then a table for each part."""
    machine = ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in report["machine"].items())
    parts = [f"{name}\n{table(rows)}" for name, rows in report.items() if name != "machine"]
    return "\n\n".join([machine, *parts])


def table(rows: Sequence[Row]) -> str:
    """Rows of one part. A single row is told a line a figure; several stand side by side."""
    if len(rows) == 1:
        return "\n".join(f"  {_title(key):<22}{_shown(value):>16}" for key, value in rows[0].items())
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [[_title(column) for column in columns]]
    cells += [[_shown(row.get(column, "")) for column in columns] for row in rows]
    widths = [max(len(line[at]) for line in cells) for at in range(len(columns))]
    return "\n".join(
        "  " + "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in cells
    )


def _title(key: str) -> str:
    return key.replace("_", " ")


def _shown(value: object) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f"{value:,}"
    return str(value)
