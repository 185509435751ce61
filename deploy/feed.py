"""Feeds the logs of several datacenters: `photon generate` writes the first's, and all that it writes is
copied to the others, a moment later, as a log shipper would.

Each run of the generator has a directory of its own, `DIR/run-NNNNNN`, with `queries`, `clicks` and, at its
end, the ground truth. SIGTERM ends the run under way; what it has written is copied first. After a kill, what
the last run has written is copied at the next start.
"""

import argparse
import signal
import subprocess
import sys
import threading
from pathlib import Path

_LOOK_S = 0.05


def last_run(root: Path) -> int:
    """The number of the run begun last; -1: there is none."""
    return max((int(path.name.removeprefix("run-")) for path in root.glob("run-[0-9]*")), default=-1)


def copy_grown(source: Path, target: Path) -> None:
    """What the logs under `source` have and their copies have not. They only grow, and keep their names."""
    for path in sorted(source.rglob("*.jsonl")):
        copy = target / path.relative_to(source)
        done = copy.stat().st_size if copy.exists() else 0
        if path.stat().st_size <= done:
            continue
        copy.parent.mkdir(parents=True, exist_ok=True)
        with path.open("rb") as file, copy.open("ab") as copied:
            file.seek(done)
            copied.write(file.read())


def _places(roots: list[Path], run: int) -> tuple[Path, list[Path]]:
    """Where it is written, and where it is copied to."""
    source, *targets = [root / f"run-{run:06d}" for root in roots]
    return source, targets


def _finish(source: Path, targets: list[Path]) -> None:
    """A run that nobody writes to any more."""
    truth = source / "truth.json"
    for target in targets:
        copy_grown(source, target)
        if truth.exists():
            (target / truth.name).write_bytes(truth.read_bytes())


def feed(roots: list[Path], arguments: list[str], told: threading.Event) -> int:
    """One run, never written to twice; the generator's exit status."""
    last = last_run(roots[0])
    if last >= 0:
        _finish(*_places(roots, last))
    source, targets = _places(roots, last + 1)
    generator = subprocess.Popen(["photon", "generate", "--out", str(source), *arguments])
    while generator.poll() is None:
        for target in targets:
            copy_grown(source, target)
        if told.wait(_LOOK_S):
            generator.terminate()
            generator.wait()
    _finish(source, targets)
    return generator.returncode


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--to", type=Path, action="append", required=True, help="logs of a datacenter; repeatable"
    )
    parser.add_argument("--runs", type=int, default=0, help="0: without end")
    parser.add_argument("generate", nargs="*", help="options of `photon generate`, after --")
    options = parser.parse_args()
    told = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        # In a thread: the handler interrupts this one, which may hold the event's lock.
        signal.signal(number, lambda *_: threading.Thread(target=told.set).start())
    done = 0
    while not told.is_set() and (done < options.runs or not options.runs):
        status = feed(options.to, options.generate, told)
        if status:
            sys.exit(status)
        done += 1


if __name__ == "__main__":
    main()
