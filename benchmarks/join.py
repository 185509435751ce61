"""`photon bench join`: the whole system measured, part by part, from files to files, every output checked."""

import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, Self

import msgspec
import psutil

from benchmarks.join_peers import beside_us, figures
from benchmarks.measuring import BenchError, ProcessTree, Row, Tail, Usage, fresh, machine_now, percentiles
from photon.cluster.statuses import StatusReader
from photon.cluster.topology import read_topology
from photon.core.fates import Fate
from photon.dev.feeder import Fed, Feed
from photon.dev.generated_logs import AtOnce, Mix, generate_at_once
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
        few, some = cls.steady_queries // 20, cls.steady_clicks // 20
        return cls(directory, queries // 20, clicks // 20, few, some, runs=1, live_seconds=3.0)


@dataclass(frozen=True, slots=True)
class Drain:
    """A `photon join` over logs that grow no more. `seconds`: wall, start included; `samples`: (monotonic
    seconds, bytes in the joined logs), the last when all was joined; `events`: lines of both sides."""

    seconds: float
    summary: dict[str, Any]
    usage: Usage
    samples: list[tuple[float, int]]
    pairs: int
    events: int

    def steady_per_s(self) -> int:
        """Joined a second between a tenth and nine tenths of the output: nothing starts or ends.

        BenchError if the run was too short to tell.
        """
        total = self.samples[-1][1]
        middle = [(t, size) for t, size in self.samples if 0.1 * total <= size <= 0.9 * total]
        if len(middle) < 2:
            raise BenchError("the run was over before it was steady; ask for more clicks")
        share = (middle[-1][1] - middle[0][1]) / total
        return round(self.pairs * share / (middle[-1][0] - middle[0][0]))

    def cpu_us_per_click(self) -> float:
        """CPU of all processes, start included."""
        return round(self.usage.cpu_s / self.pairs * 1e6, 1)


def generated(directory: Path, queries: int, clicks: int) -> Path:
    """Logs of this size and their truth, the same for every run; made once."""
    logs = directory / f"logs-{queries}-{clicks}"
    if not (logs / "truth.json").exists():
        generate_at_once(fresh(logs), Mix(SEED), AtOnce(queries, clicks))
    return logs


def drain(logs: Path, out: Path, *options: str) -> Drain:
    """Join all of it, and check the pairs and the fates against the truth: BenchError."""
    fresh(out)
    samples: list[tuple[float, int]] = []
    began = time.monotonic()
    with photon_join(logs, out, *options) as process:
        tree = ProcessTree(process.pid)
        while process.poll() is None:
            samples.append((time.monotonic(), output_bytes(out)))
            time.sleep(OUTPUT_SAMPLE_S)
        seconds = time.monotonic() - began
        usage = tree.stop(ended=True)
        printed, _ = process.communicate()
    samples.append((time.monotonic(), output_bytes(out)))
    if process.returncode != 0:
        raise BenchError(f"photon join ended with status {process.returncode}")
    truth = json.loads((logs / "truth.json").read_bytes())
    pairs = check(out / "joined", truth["distinct_joined_pairs"], truth["joined_pairs_sha256"])
    summary, due = json.loads(printed), truth["expected_summary"]
    if wrong := {fate: summary[fate] for fate in Fate if summary[fate] != due[fate]}:
        raise BenchError(f"the fates are wrong: {wrong} of {due}")
    events = truth["primary_rows"] + truth["foreign_rows"]
    return Drain(seconds, summary, usage, samples, pairs, events)


@contextmanager
def photon_join(
    logs: Path, out: Path, *options: str, under: Sequence[str] = ()
) -> Iterator[subprocess.Popen[bytes]]:
    """The running command, `under` another one that runs it; killed in the end if it still runs."""
    command = [*under, sys.executable, "-m", "photon.cli.main", "join", "--json", *options, "--out", str(out)]
    command += ["--primary", str(logs / "queries" / "*.jsonl"), "--foreign", str(logs / "clicks" / "*.jsonl")]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            if under:  # it leaves what it ran alone
                with suppress(psutil.Error):
                    for one in psutil.Process(process.pid).children():
                        one.kill()
            process.kill()


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
                sample = reader.read()
                if not sample.silent() and sample.has_quorum():
                    return
            time.sleep(0.1)
    raise BenchError(f"the system did not start within {START_S_MAX:.0f} s; see {out / '.photon' / 'logs'}")


def check(joined: Path, pairs: int, sha256: str | None = None) -> int:
    """So many pairs are joined, each once with the query it names; those of this digest, if given."""
    report = check_pairs(joined)
    if problems := report.problems(pairs, sha256 or report.sha256):
        raise BenchError(f"the output is wrong: {'; '.join(problems)}")
    return report.lines


def output_bytes(out: Path) -> int:
    """Bytes of the joined logs so far."""
    return sum(path.stat().st_size for path in (out / "joined").rglob("*.jsonl"))


# --- live: latency from a click's line written to its joined line readable, as a reader sees it

WARM_UP_S: Final = 5.0
LOOK_S: Final = 0.001
CATCH_UP_S_MAX: Final = 120.0


class _Click(msgspec.Struct, gc=False):
    ts_us: int


_CLICKS: Final = msgspec.json.Decoder(_Click)


def live(plan: Plan, queries_per_s: float, clicks_per_s: float) -> list[Row]:
    """Feed a running system at this rate; latencies of the clicks after a warm-up. Its output is checked.

    The latency counts from the event's own time, taken before its line is written. BenchError if a click
    was lost or joined twice, or if the feeder could not keep the rate.
    """
    logs, out = fresh(plan.directory / "live-logs"), fresh(plan.directory / "live")
    for name in ("queries", "clicks"):
        (logs / name).mkdir()
    with photon_join(logs, out, "--follow") as process:
        wait_for_start(out, process)
        feed = Feed([str(logs)], queries_per_s, clicks_per_s, seed=1, seconds=plan.live_seconds + WARM_UP_S)
        tree = ProcessTree(process.pid)
        warm_us = time.time_ns() // 1_000 + round(WARM_UP_S * 1e6)
        command = [sys.executable, "-m", "photon.dev.feeder", json.dumps(asdict(feed))]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as feeder:
            fed, latencies_ms = _watch(out / "joined", warm_us, feeder)
        usage = tree.stop()
        process.send_signal(signal.SIGTERM)
        process.communicate()
    check(out / "joined", fed.clicks)
    if not latencies_ms:
        raise BenchError("nothing was joined live after the warm-up")
    row = {
        "queries_per_s": round(fed.queries / fed.seconds),
        "clicks_per_s": round(fed.clicks / fed.seconds),
        "joined": fed.clicks,
        **percentiles(latencies_ms, (50, 90, 99)),
        "max_ms": round(max(latencies_ms), 2),
        "feeder_late_ms": fed.late_ms,
        "cpu_cores": round(usage.cpu_s / fed.seconds, 2),
    }
    return [row]


def _watch(joined: Path, from_us: int, feeder: "subprocess.Popen[bytes]") -> tuple[Fed, list[float]]:
    """What was fed, and how many ms after its time each click from `from_us` on stood in the joined logs,
    which are read as they grow. BenchError if clicks do not come."""
    latencies_ms: list[float] = []
    fed, seen, deadline = None, 0, math.inf
    with closing(Tail(joined, "*.jsonl")) as logs:
        while fed is None or seen < fed.clicks:
            time.sleep(LOOK_S)
            if (now := time.monotonic()) >= deadline:
                raise BenchError(f"{seen:,} clicks joined {CATCH_UP_S_MAX:.0f} s after the last was written")
            if fed is None and feeder.poll() is not None:
                if feeder.returncode != 0:
                    raise BenchError(f"the feeder ended with status {feeder.returncode}")
                fed, deadline = Fed(**json.loads(feeder.communicate()[0])), now + CATCH_UP_S_MAX
            for whole in logs.read():
                now_us = time.time_ns() // 1_000
                times = [click.ts_us for click in _CLICKS.decode_lines(whole)]
                latencies_ms += [(now_us - t) / 1_000 for t in times if t >= from_us]
                seen += len(times)
    return fed, latencies_ms


# --- the parts

LIVE_QUERIES_PER_S: Final = 2_000.0
LIVE_CLICKS_PER_S: Final = 400.0  # far below what the machine can


def catch_up(plan: Plan) -> list[Row]:
    """`photon join` over existing logs: wall seconds, start included; the median run and the spread."""
    row, middle = _median(plan, "catch-up", plan.queries, plan.clicks, "seconds", lambda run: run.seconds)
    rate = round(middle.pairs / middle.seconds)
    return [row | {"clicks_per_s": rate, "wasted_joins": middle.summary["wasted_joins"]}]


def steady(plan: Plan) -> list[Row]:
    """Joined a second while nothing starts or ends: between a tenth and nine tenths of the output."""
    sizes = (plan.steady_queries, plan.steady_clicks)
    return [_median(plan, "steady", *sizes, "joined_per_s", Drain.steady_per_s)[0]]


def _median(
    plan: Plan, part: str, queries: int, clicks: int, figure: str, value: Callable[[Drain], float]
) -> tuple[Row, Drain]:
    """Several runs over the same logs: the figure of the middle one and the spread, its cost; that run."""
    logs = generated(plan.directory, queries, clicks)
    runs = sorted((drain(logs, plan.directory / part) for _ in range(plan.runs)), key=value)
    middle = runs[len(runs) // 2]
    row: Row = {"queries": queries, "clicks": clicks}
    for which, run in (("", middle), ("_min", runs[0]), ("_max", runs[-1])):
        row[figure + which] = round(value(run), 2)
    cost = {"cpu_us_per_click": middle.cpu_us_per_click(), "peak_mib": middle.usage.peak_mib}
    return {**row, "runs": len(runs), **cost}, middle


def half_load(plan: Plan, measured: Row) -> list[Row]:
    """Live at half of the steady rate, with the steady run's share of queries."""
    clicks_per_s = (measured.get("steady") or steady(plan))[0]["joined_per_s"] / 2
    return live(plan, clicks_per_s * plan.steady_queries / plan.steady_clicks, clicks_per_s)


PARTS: Final[dict[str, Callable[[Plan, Row], list[Row]]]] = {
    "catch-up": lambda plan, _: catch_up(plan),
    "steady": lambda plan, _: steady(plan),
    "live": lambda plan, _: live(plan, LIVE_QUERIES_PER_S, LIVE_CLICKS_PER_S),
    "half-load": half_load,
}
"""Each takes the plan and what the parts before it measured."""


def run(
    plan: Plan, only: Sequence[str], peers: str | None, pythons: Sequence[str], tell: Callable[[str], object]
) -> dict[str, Any]:
    """The machine and the rows of each part. BenchError for a wrong output."""
    report: dict[str, Any] = {"machine": machine_now()}
    for name, part in PARTS.items():
        if name in only or not (only or peers):
            tell(name)
            report[name] = part(plan, report)
    if peers:
        tell("photon")
        logs = generated(plan.directory, plan.queries, plan.clicks)
        runs = [drain(logs, plan.directory / "catch-up") for _ in range(plan.runs)]
        ours = min(runs, key=lambda run: run.seconds)
        row = figures("Photon, fsync, 3 Raft replicas", ours.seconds, ours.usage, ours.pairs)
        report["peers"] = [row | {"lost": 0, "repeated": 0, "remark": ""}]
        report["peers"] += beside_us(logs, plan.directory / "peer", plan.runs, peers, pythons, tell)
    return report
