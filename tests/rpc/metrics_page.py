"""docs/metrics.md, made of what the code serves: python -m tests.rpc.metrics_page writes it."""

from pathlib import Path

from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily

from photon.rpc.metrics import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
HEAD = """# Metrics

What each process serves with `[metrics] serve = true`, beside the standard ones of a Python process. Every
one has the label `process`. Which to watch, and why: [operating](operating.md#metrics). This page is made of
the code.
"""
ENDINGS = {CounterMetricFamily: "_total", HistogramMetricFamily: "_bucket"}


def page():
    parts = [HEAD]
    for room, families in FAMILIES.items():
        parts.append(f"\n## {room}\n\n| metric | labels | what |\n|---|---|---|\n")
        for family in families:
            ending = ENDINGS.get(family.kind, "")
            name = f"`photon_{room}_{family.name}{ending}`"
            label = f"`{family.label}`" if family.label else ""
            parts.append(f"| {name} | {label} | {family.help} |\n")
    return "".join(parts)


if __name__ == "__main__":
    PAGE.write_text(page())
