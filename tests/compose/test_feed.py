"""deploy/feed.py: the second datacenter's logs are the first's, whatever kills the feeder."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "deploy" / "feed.py"
ROOT = SCRIPT.parents[1]
RATES = ["--rate=400", "--click-rate=200", "--seed=1"]
WAIT_S = 60.0


@pytest.fixture
def start(tmp_path: Path):
    """A feeder in a process group of its own, with `photon` where it looks for it; -> it."""
    photon = tmp_path / "bin" / "photon"
    photon.parent.mkdir()
    photon.write_text(f'#!/bin/sh\nexec {sys.executable} -m photon.cli.main "$@"\n')
    photon.chmod(0o755)
    path = {**os.environ, "PATH": f"{photon.parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
    roots = [f"--to={tmp_path / name}" for name in ("east", "west")]
    started = []

    def feeder(duration_s: float) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(SCRIPT), *roots, "--runs=1", "--", *RATES, f"--duration={duration_s}"]
        started.append(subprocess.Popen(command, env=path, start_new_session=True))
        return started[-1]

    yield feeder
    for one in started:
        if one.poll() is None:
            os.killpg(one.pid, signal.SIGKILL)
            one.wait()


def logs(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*.jsonl")}


def until_copied(root: Path) -> None:
    deadline = time.monotonic() + WAIT_S
    while not any(logs(root).values()):
        assert time.monotonic() < deadline, "nothing comes"
        time.sleep(0.05)


def test_what_was_not_copied_before_a_kill_is_copied_by_the_next_start(start, tmp_path: Path) -> None:
    east, west = tmp_path / "east", tmp_path / "west"
    feeder = start(600)
    until_copied(west)
    os.killpg(feeder.pid, signal.SIGKILL)
    feeder.wait()
    # What the generator writes between the last copy and the kill; in a file that has no copy, too.
    known = east / next(name for name, content in logs(west).items() if content)
    with known.open("ab") as file:
        file.write(b'{"id":"tail"}\n')
    (known.parent / "later.jsonl").write_bytes(b'{"id":"new"}\n')
    assert logs(west) != logs(east)

    assert start(0.5).wait(WAIT_S) == 0
    assert {name.partition("/")[0] for name in logs(east)} == {"run-000000", "run-000001"}
    assert logs(west) == logs(east)
    truth = "run-000001/truth.json"
    assert (west / truth).read_bytes() == (east / truth).read_bytes()


def test_sigterm_ends_the_run_and_copies_all_of_it(start, tmp_path: Path) -> None:
    east, west = tmp_path / "east", tmp_path / "west"
    feeder = start(600)
    until_copied(west)
    feeder.terminate()
    assert feeder.wait(WAIT_S) == 0
    assert (west / "run-000000/truth.json").exists()
    assert logs(west) == logs(east)
