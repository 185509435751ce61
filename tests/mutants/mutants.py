"""The list of mistakes, and what it means to make one.

A room's list is `tests/mutants/<room>.toml`:

    [[mutant]]
    what = "a retry loses what it has won"     # the mistake, as its author would have to own up to it
    file = "idregistry/rules/state.py"
    was = "..."                                # stands in the file exactly once
    now = "..."                                # what stands there instead
    told_by = "tests/idregistry/test_state.py::test_..."   # tests that notice, one at least
    long = true                                # where these are not among those of `make test`
"""

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
APART = "spark or long or faults or links or compose or fuzz or soak"


@dataclass(frozen=True, slots=True)
class Mutant:
    room: str
    what: str
    file: str
    was: str
    now: str
    told_by: tuple[str, ...] = ()
    long: bool = False

    def applied(self, source: str) -> str:
        """The file with the mistake. ValueError where it has changed since the mistake was thought of."""
        if (times := source.count(self.was)) != 1:
            raise ValueError(f"{self.file}: {self.what}: what it changes stands there {times} times")
        return source.replace(self.was, self.now)


def mutants(room: str = "*") -> Iterator[Mutant]:
    """All of these rooms."""
    for path in sorted(Path(__file__).parent.glob(f"{room}.toml")):
        for row in tomllib.loads(path.read_text("utf-8"))["mutant"]:
            yield Mutant(path.stem, **{**row, "told_by": tuple(row.get("told_by", "").split())})


class Copy:
    """A copy of the tree in which one mistake at a time is made."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        names = subprocess.run(listed, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, directory / name)

    def tests(self, mutant: Mutant | None, tests: tuple[str, ...], long: bool) -> tuple[int, str]:
        """The exit status of pytest with the mistake made, and the first test that failed."""
        path = self.directory / mutant.file if mutant else None
        source = path.read_text("utf-8") if path else ""
        try:
            if path and mutant:
                path.write_text(mutant.applied(source), "utf-8")
            return self._run(tests, long)
        finally:
            if path:
                path.write_text(source, "utf-8")

    def _run(self, tests: tuple[str, ...], long: bool) -> tuple[int, str]:
        chosen = [] if long else ["-m", f"not ({APART})"]
        options = ["-x", "-q", "-p", "no:cacheprovider", "--hypothesis-seed=1", "--timeout", "300"]
        done = subprocess.run(
            [sys.executable, "-m", "pytest", *options, *chosen, *tests],
            cwd=self.directory,
            env={**os.environ, "PYTHONPATH": str(self.directory), "PYTHONDONTWRITEBYTECODE": "1"},
            capture_output=True,
            text=True,
        )
        failed = [line for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
        return done.returncode, failed[0].split(" - ")[0] if failed else done.stdout[-2_000:]
