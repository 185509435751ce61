"""Runs of `photon join` to be measured: their logs, their settings, and the check of what they wrote."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Self

from benchmarks.measuring import BenchError, ProcessTree, Usage
from photon.cluster.statuses import StatusReader
from photon.cluster.topology import read_topology
from photon.dev.pairs import check_pairs

SEED: Final = 7
START_S_MAX: Final = 60.0
OUTPUT_SAMPLE_S: Final = 0.05


@dataclass(frozen=True)
class Plan:
    """What all parts share. `runs`: of which the median is reported; `queries`, `clicks`: of catch-up."""

    directory: Path
    queries: int = 1_000_000
    clicks: int = 200_000
    steady_queries: int = 200_000
    steady_clicks: int = 1_500_000
    runs: int = 3
    live_seconds: float = 30.0

    @classmethod
    def of(cls, directory: Path, quick: bool, queries: int, clicks: int, **given: Any) -> Self:
        """As asked for; `quick`: a twentieth of it, once."""
        if not quick:
            return cls(directory, queries, clicks, **given)
        return cls(
            directory,
            queries // 20,
            clicks // 20,
            cls.steady_queries // 20,
            cls.steady_clicks // 20,
            runs=1,
            live_seconds=3.0,
        )


@dataclass(frozen=True, slots=True)
class Logs:
    """Generated logs with their truth."""

    directory: Path
    queries: int
    clicks: int


@dataclass(frozen=True, slots=True)
class Drain:
    """A `photon join` over logs that grow no more. `seconds`: wall, start included; `samples`: (monotonic
    seconds, bytes in the joined logs), `output_bytes` of them in the end."""

    seconds: float
    summary: dict[str, Any]
    usage: Usage
    samples: list[tuple[float, int]]
    output_bytes: int
    pairs: int

    def steady_per_s(self) -> int:
        """Joined a second between a tenth and nine tenths of the output: nothing starts or ends.

        BenchError if the run was too short to tell.
        """
        total = self.output_bytes
        middle = [(t, size) for t, size in self.samples if 0.1 * total <= size <= 0.9 * total]
        if len(middle) < 2:
            raise BenchError("the run was over before it was steady; ask for more clicks")
        share = (middle[-1][1] - middle[0][1]) / total
        return round(self.pairs * share / (middle[-1][0] - middle[0][0]))

    def cpu_us_per_click(self) -> float:
        """CPU of all processes, start included."""
        return round(sum(self.usage.cpu_s.values()) / self.pairs * 1e6, 1)


def generated(directory: Path, queries: int, clicks: int) -> Logs:
    """Logs of this size, the same for every run; made once."""
    logs = directory / f"logs-{queries}-{clicks}"
    if not (logs / "truth.json").exists():
        shutil.rmtree(logs, ignore_errors=True)
        sizes = ["--queries", str(queries), "--clicks", str(clicks)]
        command = [sys.executable, "-m", "photon.cli.main", "generate", "--out", str(logs)]
        subprocess.run([*command, "--seed", str(SEED), *sizes], check=True, stdout=sys.stderr)
    return Logs(logs, queries, clicks)


def fresh(directory: Path) -> Path:
    """The directory, empty."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    return directory


def drain(logs: Logs, out: Path, settings: str = "") -> Drain:
    """Join all of it, and check the output against the truth: BenchError. `settings`: TOML."""
    fresh(out)
    samples: list[tuple[float, int]] = []
    began = time.monotonic()
    with photon_join(logs.directory, out, settings, ["--json"]) as process:
        tree = ProcessTree(process.pid)
        while process.poll() is None:
            samples.append((time.monotonic(), output_bytes(out)))
            time.sleep(OUTPUT_SAMPLE_S)
        seconds = time.monotonic() - began
        usage = tree.stop()
        assert process.stdout is not None
        printed = process.stdout.read()
    if process.returncode != 0:
        raise BenchError(f"photon join ended with status {process.returncode}")
    pairs = check(logs.directory, out / "joined")
    return Drain(seconds, json.loads(printed), usage, samples, output_bytes(out), pairs)


@contextmanager
def photon_join(
    logs: Path, out: Path, settings: str, options: Sequence[str]
) -> Iterator[subprocess.Popen[bytes]]:
    """The running command; killed in the end if it still runs."""
    command = [sys.executable, "-m", "photon.cli.main", "join", *options]
    command += ["--primary", str(logs / "queries" / "*.jsonl"), "--foreign", str(logs / "clicks" / "*.jsonl")]
    if settings:
        config = out.with_suffix(".toml")
        config.write_text(settings, "utf-8")
        command += ["--config", str(config)]
    process = subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.PIPE)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()


@contextmanager
def following(logs: Path, out: Path) -> Iterator[int]:
    """A `photon join --follow` in which every process answers; its process id. It is drained in the end."""
    with photon_join(logs, out, "", ["--follow", "--json"]) as process:
        wait_for_start(out, process)
        yield process.pid
        process.send_signal(signal.SIGTERM)
        process.communicate()


def wait_for_start(out: Path, process: "subprocess.Popen[bytes]") -> None:
    """BenchError if it ends before it serves, or does not serve."""
    topology = out / ".photon" / "topology.json"
    deadline = time.monotonic() + START_S_MAX
    with ExitStack() as held:
        reader: StatusReader | None = None
        while time.monotonic() < deadline:
            if process.poll() is not None:
                raise BenchError(f"photon join ended with status {process.returncode} before it had started")
            if reader is None and topology.exists():
                reader = held.enter_context(closing(StatusReader(read_topology(topology))))
            if reader is not None:
                reader.read(("registry", "eventstore", "joiner", "dispatcher"))
                if not reader.silent() and reader.registry_has_quorum():
                    return
            time.sleep(0.1)
    raise BenchError(f"the system did not start within {START_S_MAX:.0f} s; see {out / '.photon' / 'logs'}")


def check(logs: Path, joined: Path) -> int:
    """The number of joined pairs, after comparing them with the truth."""
    truth = json.loads((logs / "truth.json").read_bytes())
    report = check_pairs(joined)
    problems = report.problems(truth["distinct_joined_pairs"], truth["joined_pairs_sha256"])
    if problems:
        raise BenchError(f"the output is wrong: {'; '.join(problems)}")
    return report.lines


def output_bytes(out: Path) -> int:
    """Bytes of the joined logs so far."""
    return sum(path.stat().st_size for path in (out / "joined").rglob("*.jsonl"))
