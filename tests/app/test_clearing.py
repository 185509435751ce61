"""Tokens of a running `photon join`: the registry keeps those of the growing files alone (paper 3.3.3)."""

import json
import os
import signal

import pytest

from joiner.output_files import complete_files
from photon.core.ids import IdPacker
from tests.app.kit import children_of, join_arguments, joined_pairs, photon, start_photon, write_lines
from tests.app.test_join import wait_for

pytestmark = pytest.mark.cluster

EVENTS = 3_000


@pytest.fixture
def system(tmp_path):
    """Logs, and a way to follow them in files of 20 events or so."""
    (tmp_path / "photon.toml").write_text(
        "[joiner]\noutput_file_bytes_max = 4000\n[dispatcher]\nbatch_events_max = 20\n"
    )
    write_lines(tmp_path / "queries" / "q.jsonl", ({"id": f"q{n}", "ts_us": n} for n in range(EVENTS)))
    (tmp_path / "clicks").mkdir()
    started = []

    def follow():
        process = start_photon(
            *join_arguments(tmp_path, tmp_path / "out", "--follow", "--config", tmp_path / "photon.toml")
        )
        started.append(process)
        return process

    yield tmp_path, follow
    for process in started:
        process.kill()
        process.communicate()


def click(root, numbers):
    with (root / "clicks" / "c.jsonl").open("ab") as file:
        for n in numbers:
            file.write(json.dumps({"id": f"c{n}", "primary_id": f"q{n}", "ts_us": n}).encode() + b"\n")


def joined(root):
    return sum(joined_pairs(root / "out").values())


def ids_of(paths):
    lines = [line for path in paths for line in path.read_bytes().splitlines()]
    return {IdPacker().pack([json.loads(line)["id"]]).hex() for line in lines}


def where_they_stand(root):
    """Ids in listed files, and in the file that grows."""
    (directory,) = {path.parent for path in (root / "out" / "joined").rglob("*.manifest")}
    listed = {directory / name for name in complete_files(directory)}
    return ids_of(listed), ids_of({*directory.glob("*.jsonl")} - listed)


def scanned(root):
    """Ids without a token, and with one, as the registry's leader has them."""
    done = photon("registry", "scan", 0, "--fresh", "--work", root / "out" / ".photon")
    if done.returncode:
        return set(), set()
    rows = [line.split() for line in done.stdout.splitlines()]
    return {row[0] for row in rows if row[2] == "-"}, {row[0] for row in rows if row[2] != "-"}


def wait_until_cleared(root, count):
    """All of so many events are joined, and those in listed files, and no others, have no token."""

    def is_so():
        if joined(root) < count:
            return False
        listed, growing = where_they_stand(root)
        return len(listed) + len(growing) == count and listed and scanned(root) == (listed, growing)

    wait_for(is_so, 60)


def stop(process):
    process.send_signal(signal.SIGINT)
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors
    return json.loads(printed)


def joiner_status(root):
    done = photon("status", "--work", root / "out" / ".photon", "--json")
    return next((s for name, s in json.loads(done.stdout).items() if name.startswith("joiner") and s), None)


@pytest.mark.long
def test_only_events_in_growing_files_have_tokens_and_a_restart_goes_on(system):
    root, follow = system
    click(root, range(1_000))
    process = follow()
    wait_until_cleared(root, 1_000)
    assert joiner_status(root)["clearing"]["cleared"] > 900
    assert "tokens cleared" in photon("status", "--work", root / "out" / ".photon").stdout
    stop(process)
    process = follow()
    click(root, range(1_000, 1_500))
    wait_until_cleared(root, 1_500)
    assert joiner_status(root)["clearing"]["cleared"] < 700, "what the life before cleared is not read again"
    stop(process)
    assert max(joined_pairs(root / "out").values()) == 1
    assert len(joined_pairs(root / "out")) == 1_500


@pytest.mark.long
def test_a_joiner_killed_in_the_midst_of_clearing_loses_and_doubles_nothing(system):
    root, follow = system
    text = (root / "photon.toml").read_text()
    (root / "photon.toml").write_text(text.replace("[joiner]\n", "[joiner]\nclear_ids_per_s = 500\n"))
    click(root, range(EVENTS))
    process = follow()
    for share in (0.2, 0.6):
        wait_for(lambda share=share: joined(root) and len(scanned(root)[0]) > share * EVENTS)
        (pid,) = (pid for name, pid in children_of(process.pid).items() if name.startswith("joiner"))
        os.kill(pid, signal.SIGKILL)
    wait_until_cleared(root, EVENTS)
    assert stop(process)["restarts"] == 2
    pairs = joined_pairs(root / "out")
    assert (len(pairs), max(pairs.values())) == (EVENTS, 1)
