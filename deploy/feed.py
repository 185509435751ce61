"""Feeds the logs of several datacenters: `photon generate` writes the first's, and all that it writes is
copied to the others, a moment later, as a log shipper would.

Each run of the generator has a directory of its own, `DIR/run-NNNNNN`, with `queries`, `clicks` and, at its
end, the ground truth. SIGTERM ends the run under way; what it has written is copied first.
"""

import argparse
import signal
import subprocess
import sys
import threading
from pathlib import Path

_LOOK_S = 0.05


class Mirror:
    """Copies what files under `source` have grown by. Files only grow there, and keep their names."""

    def __init__(self, source: Path, targets: list[Path]) -> None:
        self._source = source
        self._targets = targets
        self._copied: dict[Path, int] = {}

    def catch_up(self) -> None:
        for path in sorted(self._source.rglob("*.jsonl")):
            done = self._copied.get(path, 0)
            if path.stat().st_size <= done:
                continue
            with path.open("rb") as file:
                file.seek(done)
                grown = file.read()
            for target in self._targets:
                copy = target / path.relative_to(self._source)
                copy.parent.mkdir(parents=True, exist_ok=True)
                with copy.open("ab") as file:
                    file.write(grown)
            self._copied[path] = done + len(grown)


def next_run(root: Path) -> str:
    """Runs are never written to twice."""
    numbers = [int(path.name.removeprefix("run-")) for path in root.glob("run-[0-9]*")]
    return f"run-{max(numbers, default=-1) + 1:06d}"


def feed(roots: list[Path], arguments: list[str], told: threading.Event) -> int:
    """One run; the generator's exit status."""
    name = next_run(roots[0])
    source, targets = roots[0] / name, [root / name for root in roots[1:]]
    mirror = Mirror(source, targets)
    generator = subprocess.Popen(["photon", "generate", "--out", str(source), *arguments])
    while generator.poll() is None:
        mirror.catch_up()
        if told.wait(_LOOK_S):
            generator.terminate()
            generator.wait()
    mirror.catch_up()
    for target in targets:
        truth = source / "truth.json"
        if truth.exists():
            (target / "truth.json").write_bytes(truth.read_bytes())
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
        signal.signal(number, lambda *_: told.set())
    done = 0
    while not told.is_set() and (done < options.runs or not options.runs):
        status = feed(options.to, options.generate, told)
        if status:
            sys.exit(status)
        done += 1


if __name__ == "__main__":
    main()
