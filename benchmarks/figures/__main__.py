"""Measure, draw and write docs/results.md: `python -m benchmarks.figures [--quick] [--only outage,...]`.

Needs matplotlib and a toxiproxy server (`make results` sees to both); some ten minutes.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import click

from benchmarks.figures import registry, system
from benchmarks.figures.drawing import draw
from benchmarks.figures.page import page
from benchmarks.machine import describe_machine
from tests.faults.kit.toxiproxy import ToxiproxyError

PARTS: Final[dict[str, Callable[[Path, bool], dict[str, Any]]]] = {
    "outage": system.outage,
    "wasted": system.wasted,
    "batching": registry.batching,
    "upsharding": registry.upsharding,
}


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
    measured: dict[str, Any] = {"machine": describe_machine()}
    try:
        with tempfile.TemporaryDirectory(prefix="photon-figures-") as scratch:
            for part in chosen:
                began = time.monotonic()
                measured[part] = PARTS[part](Path(scratch) / part, quick)
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
