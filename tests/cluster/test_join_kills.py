"""SIGKILL of any process in the middle of a run, and of the command itself: the same pairs, none twice."""

import itertools
import json
import os
import random
import signal
import time

import psutil
import pytest

from tests.system import (
    children_of,
    fates_add_up,
    join,
    join_arguments,
    joined_pairs,
    photon,
    start_photon,
    state_of,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.cluster


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    logs = tmp_path_factory.mktemp("logs")
    done = photon(
        "generate", "--out", logs, "--seed", 3, "--queries", 100_000, "--clicks", 60_000, "--duplicates", 0.02,
        "--orphans", 0.01, "--malformed", 0.005,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return logs, json.loads((logs / "truth.json").read_bytes())


def lines_joined(out):
    return sum(path.read_bytes().count(b"\n") for path in (out / "joined").rglob("*.jsonl"))


def assert_exact(out, truth, summary):
    pairs = joined_pairs(out)
    assert max(pairs.values()) == 1
    assert len(pairs) == truth["distinct_joined_pairs"]
    assert summary["joined"] == truth["distinct_joined_pairs"]
    assert summary["malformed"] == truth["malformed"]
    assert summary["unjoinable"] == truth["orphans"]
    assert summary["pending"] == 0
    assert fates_add_up(summary)


@pytest.mark.parametrize(
    "kinds",
    [("registry", "dispatcher"), pytest.param(("eventstore", "joiner"), marks=pytest.mark.long)],
    ids="-".join,
)
def test_killed_processes_change_nothing_in_what_is_joined(generated, tmp_path, kinds):
    logs, truth = generated
    rng = random.Random(kinds[0])
    killed = set()
    process = start_photon(*join_arguments(logs, tmp_path / "out", "--datacenters", 2))
    try:
        for share, kind in zip((0.02, 0.15, 0.3, 0.45, 0.6), itertools.cycle(kinds), strict=False):
            wait_until(
                lambda share=share: (
                    lines_joined(tmp_path / "out") > share * 60_000 or process.poll() is not None
                )
            )
            victims = [pid for name, pid in children_of(process.pid).items() if name.startswith(kind)]
            if victims and process.poll() is None:
                os.kill(rng.choice(victims), signal.SIGKILL)
                killed.add(kind)
        printed, errors = process.communicate(timeout=100)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    summary = json.loads(printed)
    assert killed == {*kinds}
    assert summary["restarts"] >= 2
    assert_exact(tmp_path / "out", truth, summary)


@pytest.mark.long
def test_a_killed_command_leaves_no_process_behind_and_the_next_run_takes_up_what_was_left(
    generated, tmp_path
):
    logs, truth = generated
    out = tmp_path / "out"
    for share in (0.1, 0.5):
        process = start_photon(*join_arguments(logs, out))
        wait_until(lambda share=share: lines_joined(out) > share * 60_000)
        children = children_of(process.pid)
        assert len(children) == 6
        process.send_signal(signal.SIGKILL)
        process.communicate()
        deadline = time.monotonic() + 60
        while any(state_of(pid) != psutil.STATUS_ZOMBIE for pid in children.values()):
            assert time.monotonic() < deadline, "a process outlived the command"
            time.sleep(0.02)
    assert_exact(out, truth, join(logs, out))


@pytest.mark.long
def test_ctrl_c_stops_everything_and_the_next_run_takes_up_what_was_left(generated, tmp_path):
    logs, truth = generated
    out = tmp_path / "out"
    process = start_photon(*join_arguments(logs, out))
    wait_until(lambda: lines_joined(out) > 5_000)
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    stopped = json.loads(printed)
    assert fates_add_up(stopped)
    assert stopped["joined"] == lines_joined(out)
    assert_exact(out, truth, join(logs, out))
