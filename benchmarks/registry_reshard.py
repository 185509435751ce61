"""Throughput of each shard over time while their number goes from 2 to 6 to 3 under load (as Fig. 11)."""

import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from benchmarks.registry_cluster import Cluster, connect
from benchmarks.registry_load import Clients
from benchmarks.registry_parts import Plan
from benchmarks.registry_processes import BenchmarkError, percentiles
from idregistry.client import Resharded

NUMBERS: Final = (2, 6, 3)
# Clocks of one machine do not differ: the default would have each step wait a minute.
SETTINGS: Final = {"shards": NUMBERS[0], "clock_skew_s": 0.5}
_IDS: Final = 600
_CALLS_PER_S: Final = 60.0
_IN_FLIGHT: Final = 16
_SPAN_S: Final = 36.0
_SPAN_QUICK_S: Final = 9.0
_BINS: Final = 60
_BARS: Final = " ▁▂▃▄▅▆▇█"
_RESHARD_S: Final = 30.0


@dataclass
class Samples:
    """Ids a shard holds, looked at again and again. Times by the wall clock: event times are."""

    at: list[float] = field(default_factory=list)
    ids: list[list[int]] = field(default_factory=list)

    def rates(self) -> list[tuple[float, list[float]]]:
        """(end of the interval, ids a second of each shard)."""
        rates = []
        for n in range(1, len(self.at)):
            seconds = self.at[n] - self.at[n - 1]
            rates.append(
                (
                    self.at[n],
                    [(b - a) / seconds for a, b in zip(self.ids[n - 1], self.ids[n], strict=True)],
                )
            )
        return rates


def reshard(plan: Plan) -> dict[str, Any]:
    """Also writes reshard.csv into the plan's directory: seconds, then ids a second of each shard."""
    span_s = _SPAN_QUICK_S if plan.quick else _SPAN_S
    steps: list[Resharded] = []
    failures: list[BaseException] = []
    with Cluster(plan.directory, settings=SETTINGS) as cluster, Clients(cluster.addresses, 2) as clients:
        begin, end = clients.begin(span_s, ids=_IDS, in_flight=_IN_FLIGHT, calls_per_s=_CALLS_PER_S)
        stepping = threading.Thread(
            target=_step, args=(cluster.addresses, begin, span_s, steps, failures), daemon=True
        )
        stepping.start()
        samples = _sample(cluster, begin, end, span_s / _BINS)
        seen = clients.finish()
        stepping.join()
    if failures:
        raise BenchmarkError(f"the shards were not changed: {failures[0]}") from failures[0]
    start = samples.at[0]
    starts = [step.start_us / 1e6 - start for step in steps]
    rates = [(at - start, row) for at, row in samples.rates()]
    path = _write(plan.directory / "reshard.csv", rates)
    return {
        "asked_ids_per_s": round(_IDS * _CALLS_PER_S),
        "calls": sum(len(one["latencies_ms"]) for one in seen),
        "failures": sum(sum(one["failures"].values()) for one in seen),
        **percentiles([ms for one in seen for ms in one["latencies_ms"]]),
        "new_number_holds_from_s": [round(at, 1) for at in starts],
        "phase_rows": _phases(rates, starts),
        "chart": chart(rates, starts),
        "csv": str(path),
    }


def _step(
    addresses: list[str], begin: float, span_s: float, steps: list[Resharded], failures: list[BaseException]
) -> None:
    """Ask for each next number of shards at its part of the time."""
    client = connect(addresses, _RESHARD_S)
    try:
        for n, shards in enumerate(NUMBERS[1:], 1):
            time.sleep(max(0.0, begin + span_s * n / len(NUMBERS) - 1.0 - time.monotonic()))
            done = client.reshard(shards)
            if not done.adopted:
                raise BenchmarkError(f"{shards} shards were not adopted: {done.why}")
            steps.append(done)
    except Exception as error:
        failures.append(error)
    finally:
        client.close()


def _sample(cluster: Cluster, begin: float, end: float, every_s: float) -> Samples:
    node = cluster.leader()
    samples = Samples()
    number = 0
    while (due := begin + number * every_s) <= end:
        time.sleep(max(0.0, due - time.monotonic()))
        number += 1
        held = {shard["shard"]: shard["ids"] for shard in cluster.shards(node)}
        if held:
            samples.at.append(time.time())
            samples.ids.append([held.get(shard, 0) for shard in range(max(NUMBERS))])
    return samples


def _write(path: Path, rates: list[tuple[float, list[float]]]) -> Path:
    head = ",".join(["second", *(f"shard_{n}" for n in range(max(NUMBERS)))])
    lines = [",".join([f"{at:.2f}", *(f"{rate:.0f}" for rate in row)]) for at, row in rates]
    path.write_text("\n".join([head, *lines]) + "\n", "utf-8")
    return path


def _phases(rates: list[tuple[float, list[float]]], starts: list[float]) -> list[dict[str, Any]]:
    """Between two steps, half a second left out on both sides: what each shard in use took."""
    borders = [0.0, *starts, float("inf")]
    rows = []
    for n, shards in enumerate(NUMBERS):
        within = [row for at, row in rates if borders[n] + 1.0 <= at <= borders[n + 1] - 0.5]
        if not within:
            continue
        means = [sum(column) / len(within) for column in zip(*within, strict=True)]
        rows.append(
            {
                "shards": shards,
                "ids_per_s": round(sum(means)),
                "least_of_a_shard": round(min(means[:shards])),
                "most_of_a_shard": round(max(means[:shards])),
                "of_the_others": round(sum(means[shards:])),
            }
        )
    return rows


def chart(rates: list[tuple[float, list[float]]], starts: list[float]) -> str:
    """A line of bars a shard, all to the same scale, and the moments from which a new number holds."""
    top = max((max(row) for _, row in rates), default=0.0) or 1.0
    width = len(rates)
    lines = [f"each shard's ids/s over {rates[-1][0]:.0f} s, full height {top:,.0f}" if rates else "nothing"]
    for shard in range(max(NUMBERS)):
        bars = "".join(_BARS[round(row[shard] / top * (len(_BARS) - 1))] for _, row in rates)
        lines.append(f"shard {shard} |{bars}|")
    marks = [" "] * width
    for start in starts:
        at = next((n for n, (end, _) in enumerate(rates) if end >= start), None)
        if at is not None:
            marks[at] = "^"
    return "\n".join([*lines, "         " + "".join(marks).rstrip()])
