"""`photon bench`: catch-up, steady rate and live latency of the whole system, printed with the machine."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import click
import numpy as np

from photon.app.bench_registry import command as registry
from photon.app.machine import MemoryPeak, describe_machine
from photon.core.errors import PhotonError

SEED: Final = 7
WARM_UP_S: Final = 5.0


class BenchError(PhotonError):
    """A measured run went wrong: its figures would mean nothing."""


@click.group("bench", invoke_without_command=True)
@click.option(
    "--dir", "directory", type=click.Path(path_type=Path), default=Path("bench-out"), show_default=True
)
@click.option("--queries", type=int, default=1_000_000, show_default=True, help="Catch-up: primary events.")
@click.option("--clicks", type=int, default=200_000, show_default=True, help="Catch-up: foreign events.")
@click.option("--runs", type=int, default=3, show_default=True, help="Catch-up runs; the median is told.")
@click.option("--live-seconds", type=int, default=30, show_default=True)
@click.option("--only", type=click.Choice(["catch-up", "steady", "live"]), help="Measure one thing.")
@click.option("--json", "as_json", is_flag=True)
@click.pass_context
def command(
    context: click.Context,
    directory: Path,
    queries: int,
    clicks: int,
    runs: int,
    live_seconds: int,
    only: str | None,
    as_json: bool,
) -> None:
    """Measure this machine: the whole system, or one of the commands below.

    The whole system on generated logs: files to files, start included; every run's output is checked.

    catch-up: `photon join` over existing logs. steady: the middle 80 % of a run with few primaries and many
    foreign events. live: from a click's line written to its joined line readable, 2,000 queries/s and
    400 clicks/s.
    """
    if context.invoked_subcommand is not None:
        return
    figures: dict[str, Any] = {"machine": describe_machine()}
    if only in (None, "catch-up"):
        figures["catch_up"] = _median([catch_up(directory, queries, clicks) for _ in range(runs)])
    if only in (None, "steady"):
        figures["steady"] = steady(directory)
    if only in (None, "live"):
        figures["live"] = live(directory, live_seconds)
    if as_json:
        click.echo(json.dumps(figures))
        return
    for name, values in figures.items():
        click.echo(name.replace("_", " "))
        for key, value in values.items():
            click.echo(
                f"  {key.replace('_', ' '):<22}{value:>16,}" if _is_number(value) else f"  {key:<22}{value}"
            )


command.add_command(registry)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def catch_up(directory: Path, queries: int, clicks: int) -> dict[str, Any]:
    """One `photon join` over existing logs: wall seconds, start included, and memory of all processes."""
    logs = _generated(directory / f"logs-{queries}-{clicks}", queries, clicks)
    out = _fresh(directory / "catch-up")
    began = time.monotonic()
    with _photon_join(logs, out, "--json") as process:
        memory = MemoryPeak(process.pid)
        printed, _ = process.communicate()
        seconds = time.monotonic() - began
        peak = memory.stop()
    if process.returncode != 0:
        raise BenchError(f"photon join ended with status {process.returncode}")
    pairs = _check(logs, out)
    return {
        "queries": queries,
        "clicks": clicks,
        "pairs": pairs,
        "seconds": round(seconds, 2),
        "clicks_per_s": round(clicks / seconds),
        "peak_memory_mib": peak >> 20,
        "wasted_joins": json.loads(printed)["wasted_joins"],
    }


def steady(directory: Path, queries: int = 200_000, clicks: int = 1_500_000) -> dict[str, Any]:
    """Joined a second while nothing starts or ends: between a tenth and nine tenths of the output."""
    logs = _generated(directory / f"logs-{queries}-{clicks}", queries, clicks)
    out = _fresh(directory / "steady")
    samples: list[tuple[float, int]] = []
    with _photon_join(logs, out, "--json") as process:
        memory = MemoryPeak(process.pid)
        while process.poll() is None:
            samples.append((time.monotonic(), _output_bytes(out)))
            time.sleep(0.05)
        peak = memory.stop()
    if process.returncode != 0:
        raise BenchError(f"photon join ended with status {process.returncode}")
    pairs = _check(logs, out)
    total = _output_bytes(out)
    middle = [(t, size) for t, size in samples if 0.1 * total <= size <= 0.9 * total]
    if len(middle) < 2:
        raise BenchError("the run was over before it was steady; ask for more clicks")
    share = (middle[-1][1] - middle[0][1]) / total
    return {
        "queries": queries,
        "clicks": clicks,
        "joined_per_s": round(pairs * share / (middle[-1][0] - middle[0][0])),
        "peak_memory_mib": peak >> 20,
    }


def live(directory: Path, seconds: int, rate: int = 2_000, click_rate: int = 400) -> dict[str, Any]:
    """From a click's line written to its joined line readable, as a reader of the joined log sees it."""
    logs = _fresh(directory / "live-logs")
    out = _fresh(directory / "live")
    for name in ("queries", "clicks"):
        (logs / name).mkdir(parents=True)
    generate = [sys.executable, "-m", "photon.app.cli", "generate", "--out", str(logs), "--seed", str(SEED)]
    generate += ["--rate", str(rate), "--click-rate", str(click_rate), "--duration", str(seconds + WARM_UP_S)]
    with _photon_join(logs, out, "--follow", "--json") as join:
        _wait_for_start(out)
        began = time.time_ns() // 1_000
        with subprocess.Popen(generate, stdout=subprocess.DEVNULL) as generator:
            latencies = _tail_latencies(out, generator, began + round(WARM_UP_S * 1e6))
        join.send_signal(signal.SIGTERM)
        join.communicate()
    if not latencies:
        raise BenchError("nothing was joined live")
    at = np.percentile(np.array(latencies), [50, 90, 99, 100]) / 1_000
    names = ("p50_ms", "p90_ms", "p99_ms", "max_ms")
    measured = {name: round(float(value), 1) for name, value in zip(names, at, strict=True)}
    return {"queries_per_s": rate, "clicks_per_s": click_rate, "joined": len(latencies), **measured}


def _tail_latencies(out: Path, generator: subprocess.Popen[bytes], from_us: int) -> list[int]:
    """Reads the joined logs as they grow; now - the click's time, for each click from `from_us` on."""
    latencies: list[int] = []
    offsets: dict[Path, int] = {}
    quiet_since = time.monotonic()
    while generator.poll() is None or time.monotonic() - quiet_since < 2.0:
        for path in (out / "joined").rglob("*.jsonl"):
            lines = _new_lines(path, offsets)
            now = time.time_ns() // 1_000
            if lines:
                quiet_since = time.monotonic()
            times = [json.loads(line)["ts_us"] for line in lines]
            latencies += [now - t for t in times if t >= from_us]
        time.sleep(0.002)
    return latencies


def _new_lines(path: Path, offsets: dict[Path, int]) -> Sequence[bytes]:
    with path.open("rb") as file:
        file.seek(offsets.get(path, 0))
        data = file.read()
    whole = data.rfind(b"\n") + 1
    offsets[path] = offsets.get(path, 0) + whole
    return data[:whole].splitlines()


def _wait_for_start(out: Path) -> None:
    """Until every process of the run answers."""
    from photon.app.statuses import StatusReader
    from photon.app.topology import read_topology

    topology = out / ".photon" / "topology.json"
    deadline = time.monotonic() + 60.0
    reader: StatusReader | None = None
    while time.monotonic() < deadline:
        if reader is None and topology.exists():
            reader = StatusReader(read_topology(topology))
        if reader is not None:
            reader.read(("registry", "eventstore", "joiner", "dispatcher"))
            if not reader.silent() and reader.registry_has_quorum():
                return
        time.sleep(0.1)
    raise BenchError("the system did not start within a minute")


@contextmanager
def _photon_join(logs: Path, out: Path, *options: str) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "photon.app.cli", "join", *options]
    command += ["--primary", str(logs / "queries" / "*.jsonl"), "--foreign", str(logs / "clicks" / "*.jsonl")]
    process = subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


def _generated(logs: Path, queries: int, clicks: int) -> Path:
    """Logs of this size with their truth, made once."""
    if not (logs / "truth.json").exists():
        shutil.rmtree(logs, ignore_errors=True)
        command = [
            sys.executable,
            "-m",
            "photon.app.cli",
            "generate",
            "--out",
            str(logs),
            "--seed",
            str(SEED),
        ]
        subprocess.run(
            [*command, "--queries", str(queries), "--clicks", str(clicks)], check=True, stdout=sys.stderr
        )
    return logs


def _fresh(directory: Path) -> Path:
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def _check(logs: Path, out: Path) -> int:
    """The number of joined pairs, after comparing them with the truth."""
    from photon.app.verify_pairs import check_pairs

    truth = json.loads((logs / "truth.json").read_bytes())
    report = check_pairs(out / "joined")
    problems = report.problems(truth["distinct_joined_pairs"], truth["joined_pairs_sha256"])
    if problems:
        raise BenchError(f"the output is wrong: {'; '.join(problems)}")
    return report.lines


def _output_bytes(out: Path) -> int:
    return sum(os.stat(path).st_size for path in (out / "joined").rglob("*.jsonl"))


def _median(figures: list[dict[str, Any]]) -> dict[str, Any]:
    """The run with the median time, and the spread beside it."""
    ordered = sorted(figures, key=lambda f: f["seconds"])
    return {
        **ordered[len(ordered) // 2],
        "runs": len(ordered),
        "seconds_min": ordered[0]["seconds"],
        "seconds_max": ordered[-1]["seconds"],
    }
