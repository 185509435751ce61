"""Running the photon command and systems of it as a user does, and reading what they left behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from photon.cluster.nursery import Nursery

PHOTON = [sys.executable, "-m", "photon.cli.main"]
ENDS_S = 60  # a machine that is busy takes its time


def photon(
    *arguments: object, timeout: float = 100.0, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PHOTON, *map(str, arguments)], capture_output=True, text=True, timeout=timeout, check=False, cwd=cwd
    )


def start_photon(*arguments: object, stderr: Any = subprocess.PIPE) -> subprocess.Popen[str]:
    return subprocess.Popen([*PHOTON, *map(str, arguments)], stdout=subprocess.PIPE, stderr=stderr, text=True)


def join_arguments(logs: Path, out: Path, *more: object) -> list[object]:
    inputs = ("--primary", logs / "queries", "--foreign", logs / "clicks")
    return ["join", *inputs, "--out", out, "--json", *more]


def join(logs: Path, out: Path, *more: object) -> dict[str, Any]:
    """A `photon join` that must succeed; its summary."""
    done = photon(*join_arguments(logs, out, *more))
    assert done.returncode == 0, done.stderr
    summary: dict[str, Any] = json.loads(done.stdout)
    return summary


@contextlib.contextmanager
def following(logs: Path, out: Path, *more: object, stderr: Any = subprocess.PIPE) -> Iterator[Any]:
    """A `photon join --follow` meanwhile. What it said last is in its `said`, on stdout and stderr."""
    process: Any = start_photon(*join_arguments(logs, out, "--follow", *more), stderr=stderr)
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.said = process.communicate(timeout=100)
        finally:
            process.kill()


def write_lines(path: Path, events: Iterable[Mapping[str, Any] | bytes]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        for event in events:
            file.write(event if isinstance(event, bytes) else json.dumps(event).encode() + b"\n")


def write_logs(directory: Path, count: int) -> Path:
    """Queries q0, q1, ... and a click on each, c0, c1, ...; the directory."""
    write_lines(directory / "queries" / "q.jsonl", ({"id": f"q{n}"} for n in range(count)))
    clicks = ({"id": f"c{n}", "primary_id": f"q{n}", "ts_us": n} for n in range(count))
    write_lines(directory / "clicks" / "c.jsonl", clicks)
    return directory


def read_lines(directory: Path, growing: bool = False) -> list[dict[str, Any]]:
    """The lines of all files below it; while they are `growing`, without one that is half written."""
    if not directory.exists():
        return []
    return [
        json.loads(line)
        for path in sorted(directory.rglob("*.jsonl"))
        for line in path.read_bytes().splitlines(keepends=True)
        if line.endswith(b"\n") or not growing
    ]


def joined_pairs(out: Path, growing: bool = False) -> Counter[tuple[str, str]]:
    """(primary id, foreign id) -> times, over the joined logs of all datacenters."""
    return Counter((str(e["primary"]["id"]), str(e["id"])) for e in read_lines(out / "joined", growing))


def fates_add_up(summary: Mapping[str, Any]) -> bool:
    fates = (
        "joined",
        "duplicate",
        "unjoinable",
        "filtered",
        "adapter_error",
        "expired",
        "malformed",
        "pending",
    )
    return summary["foreign_events"] == sum(summary[fate] for fate in fates)


def shared_data() -> Path | None:
    """The folder of real data sets, where there is one."""
    candidates = [os.environ.get("PHOTON_SHARED_DATA"), Path(__file__).parents[2] / "shared" / "data"]
    return next((Path(c) for c in candidates if c and Path(c).is_dir()), None)


def children_of(pid: int) -> dict[str, int]:
    """Name (role-name) -> process id of the processes that a `photon join` started."""
    import psutil

    found = {}
    for child in psutil.Process(pid).children(recursive=True):
        try:
            words = child.cmdline()
        except psutil.Error:
            continue
        if "serve" in words:
            found[f"{words[words.index('serve') - 1]}-{words[words.index('--name') + 1]}"] = child.pid
    return found


def state_of(pid: int) -> str:
    """psutil's word for it; a process that is gone, or about to be, counts as a zombie."""
    import psutil

    try:
        return psutil.Process(pid).status()
    except psutil.NoSuchProcess:
        return psutil.STATUS_ZOMBIE


def environment() -> dict[str, str]:
    """Of a process that is started elsewhere, and ends with the tests, however those end."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *sys.path])
    more = {"PHOTON_PARENT": str(os.getpid()), "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1"}
    return os.environ | more


@cache
def _nursery() -> Nursery:
    """One for all tests; it ends with them."""
    return Nursery()


class Processes:
    """Those of one system, each by its name (one word or several), with a log of its own."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._processes: dict[Any, Any] = {}

    def launch(self, who: Any, command: Sequence[str]) -> None:
        with self.log(who).open("ab") as log:
            self._processes[who] = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=self.directory,
                env=environment(),
            )

    def fork(self, who: Any, role: str, config: Path, name: str) -> None:
        """Starts `photon <role> serve` as a fork, as those of a run are."""
        words = [role, "serve", "--config", str(config), "--name", name]
        self._processes[who] = _nursery().launch(words, self.log(who))

    def log(self, who: Any) -> Path:
        name = who if isinstance(who, str) else "-".join(who)
        return self.directory / f"{name.replace('/', '-')}.log"

    def said(self, who: Any) -> str:
        """All that it logged."""
        return self.log(who).read_text()

    def told(self) -> str:
        """The end of all logs, for the message of a failed check."""
        return "\n".join(f"--- {who}\n{self.said(who)[-2000:]}" for who in self._processes)

    def process(self, who: Any) -> Any:
        return self._processes[who]

    @property
    def running(self) -> list[Any]:
        return [who for who, process in self._processes.items() if process.poll() is None]

    def signal(self, number: int, *those: Any) -> None:
        for who in those:
            process = self._processes[who]
            if process.poll() is None:
                os.kill(process.pid, number)

    def pause(self, *those: Any) -> None:
        """SIGSTOP: alive for the kernel, dead for everybody else."""
        self.signal(signal.SIGSTOP, *those)

    def resume(self, *those: Any) -> None:
        self.signal(signal.SIGCONT, *those)

    def kill(self, *those: Any) -> None:
        """SIGKILL to these, or to all."""
        for who in those or list(self._processes):
            self._processes[who].kill()
            self._processes[who].wait()

    def terminate(self, *those: Any) -> list[int]:
        """SIGTERM to all of them at once; their exit statuses."""
        self.signal(signal.SIGTERM, *those)
        return [self.ended(who) for who in those]

    def ended(self, who: Any) -> int:
        """The exit status of a process that is to end by itself."""
        process = self._processes[who]
        try:
            return process.wait(ENDS_S)
        except subprocess.TimeoutExpired:
            self.signal(signal.SIGABRT, who)  # its log tells then where it stands
            process.wait()
            raise AssertionError(f"{who} does not end:\n{self.said(who)[-6000:]}") from None
