"""A full disk under the output, or under the whole state: told as such, nothing lost, goes on by itself."""

import json
import os
import subprocess

import pytest

from tests.system import fates_add_up, join_arguments, joined_pairs, photon, start_photon
from tests.waiting import wait_until

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.skipif(os.geteuid() != 0, reason="a small file system can be mounted by root alone"),
]


@pytest.fixture
def small_disk(tmp_path):
    """A file system of 24 MiB, half of it taken by `filler`."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", disk], capture_output=True)
    if mounted.returncode != 0:
        pytest.skip(f"cannot mount a file system here: {mounted.stderr.decode().strip()}")
    yield disk
    subprocess.run(["umount", "-l", disk], check=True)


def all_but(disk, free_bytes):
    """Takes the space of `disk` but so much."""
    status = os.statvfs(disk)
    filler = disk / "filler"
    with filler.open("wb") as file:
        file.write(b"\0" * (status.f_bavail * status.f_frsize - free_bytes))
    return filler


@pytest.mark.parametrize("what", ["output", pytest.param("state", marks=pytest.mark.long)])
def test_a_full_disk_is_told_and_the_run_goes_on_when_there_is_space(tmp_path, small_disk, what):
    logs = tmp_path / "logs"
    assert (
        photon("generate", "--out", logs, "--seed", 5, "--queries", 10_000, "--clicks", 20_000).returncode
        == 0
    )
    truth = json.loads((logs / "truth.json").read_bytes())
    filler = all_but(small_disk, (2 << 20) if what == "output" else (1 << 20))
    out = small_disk / "out" if what == "output" else tmp_path / "out"
    work = tmp_path / "work" if what == "output" else small_disk / "work"
    errors = tmp_path / "errors"
    with errors.open("wb") as log:
        process = start_photon(*join_arguments(logs, out, "--work", work), stderr=log)
    try:
        wait_until(lambda: b"no space left" in errors.read_bytes(), 60)
        assert process.poll() is None
        filler.unlink()
        printed, _ = process.communicate(timeout=90)
    finally:
        process.kill()
    assert process.returncode == 0, errors.read_text()
    summary = json.loads(printed)
    assert summary["joined"] == truth["distinct_joined_pairs"]
    assert max(joined_pairs(out).values()) == 1
    assert fates_add_up(summary)
