"""No run ends with joined files that are not complete, but where it says so (photon/cluster/local_cluster.py)."""

import json
import sys
from types import SimpleNamespace

import pytest

from joiner.output_files import complete_files, count_joined
from photon.cluster import local_cluster as completing
from photon.cluster import run
from photon.cluster.local_cluster import grace_s, unlisted_files
from photon.cluster.run import Completing
from photon.cluster.statuses import Sample
from photon.cluster.topology import Pipeline, Topology
from photon.core.settings import Joiner, Settings
from photon.logs import parquet
from tests.system import join, join_arguments, photon

SLOW = """
import pathlib, time
import photon.logs.parquet
from joiner.adapter import Adapter

real = photon.logs.parquet.convert

def convert(source, target, rest):
    for _ in range(5):
        time.sleep(0.4)
        rest()
    while pathlib.Path({gate!r}).exists():
        time.sleep(0.02)
    return real(source, target, rest)

photon.logs.parquet.convert = convert

class Slow(Adapter):
    def join(self, primary, foreign):
        return None
"""


class Joiners:
    """Asked one after the other; a joiner that says nothing is silent."""

    def __init__(self, told_to_stop=()):
        self.told = []
        shown = SimpleNamespace(completing=self.told.append, notice=self.told.append)
        self._completing = Completing(told_to_stop, shown)

    def are_over(self, at_s, *outputs):
        says = {
            f"joiner-{n}": out and {"output": {"progress": 0, "trouble": None, **out}}
            for n, out in enumerate(outputs)
        }
        return self._completing.is_over(Sample(at_s, says))


def test_files_are_waited_for_as_long_as_there_is_progress():
    still, joiners = run.STILL_S_MAX, Joiners()
    three, two, one = {"waiting": 3}, {"waiting": 2, "progress": 1}, {"waiting": 1}
    assert not joiners.are_over(1_000.0, three, one)
    assert not joiners.are_over(1_000.0 + still, three, one)
    assert not joiners.are_over(1_001.0 + still, {**three, "progress": 1}, one)
    assert not joiners.are_over(1_001.0 + 2 * still, two, one)
    assert joiners.are_over(1_002.0 + 3 * still, two, one)
    assert joiners.told == [4, 4, 4, 3]
    assert Joiners().are_over(5.0, {"waiting": 0}, {"waiting": 0})


def test_a_joiner_in_trouble_is_not_waited_for_and_one_that_is_restarted_is_for_a_while():
    assert Joiners().are_over(5.0, {"waiting": 2, "trouble": "no space left"}, {"waiting": 0})
    joiners = Joiners()
    assert not joiners.are_over(5.0, {"waiting": 0}, None)
    assert joiners.are_over(6.0 + run.STILL_S_MAX, {"waiting": 0}, None)


def test_who_is_told_to_stop_says_what_is_left_and_waits_no_longer():
    joiners = Joiners(told_to_stop=[2])
    assert joiners.are_over(5.0, {"waiting": 2})
    assert joiners.told[0].startswith("2 files of the joined logs are being completed")


@pytest.fixture
def east(tmp_path):
    made = tmp_path / "out" / "joined" / "east"
    made.mkdir(parents=True)
    return made


def test_files_that_no_manifest_lists_are_found_in_every_root(tmp_path, east):
    second = tmp_path / "two" / "joined" / "east"
    second.mkdir(parents=True)
    entry = {"file": "", "bytes": 1, "lines": 1, "crc32": "0", "opened_us": None, "closed_us": 0}
    listed = [
        json.dumps(entry | {"file": name}) + "\n"
        for name in ("joiner-j-000000.parquet", "joiner-j-000001.jsonl")
    ]
    (east / "joiner-j.manifest").write_text("".join(listed))
    half_removed, whole, half_made, growing, empty = (east / f"joiner-j-00000{n}.jsonl" for n in range(5))
    for path in (half_removed, whole, half_made, growing, second / "joiner-j-000007.jsonl"):
        path.write_text("x" * 100)
    empty.touch()
    for path in (half_removed, half_made, east / "joiner-j-000006.jsonl"):
        path.with_suffix(".parquet").write_text("y")
    (east / "joiner-j-000003.parquet.tmp").write_text("y")
    (east / "backfill-000000.jsonl").write_text("z")
    pipelines = [Pipeline(datacenter="east", directory="")]
    topology = Topology(
        Settings(joiner=Joiner(output_roots=(str(tmp_path / "two"),))), [], [], str(tmp_path / "out"), "", True, [], pipelines
    )  # fmt: skip
    found = unlisted_files(topology)
    assert found == [half_made, growing, east / "joiner-j-000006.parquet", second / "joiner-j-000007.jsonl"]


def test_the_time_that_joiners_get_to_end_follows_what_they_have_to_complete(tmp_path):
    for name, size in (("a", 256 << 20), ("b", 1 << 50)):
        with (tmp_path / name).open("wb") as file:
            file.truncate(min(size, 1 << 42))
    assert grace_s([]) == completing.GRACE_S
    assert grace_s([tmp_path / "a"]) == completing.GRACE_S + 64.0
    assert grace_s([tmp_path / "a", tmp_path / "b"]) == completing.GRACE_S_MAX


@pytest.fixture
def slow_run(tmp_path, monkeypatch):
    """Logs, and settings by which a file takes two seconds to be made Parquet, or until `gate` is gone."""
    pytest.importorskip("pyarrow")
    monkeypatch.setattr(parquet, "convert", parquet.convert)  # the adapter is loaded here, too
    monkeypatch.delitem(sys.modules, "slowparquet", raising=False)
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:.")
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "slowparquet.py").write_text(SLOW.format(gate=str(tmp_path / "gate")))
    (tmp_path / "photon.toml").write_text(
        "[adapter]\nuse = 'slowparquet:Slow'\n"
        "[joiner]\noutput_format = 'parquet'\noutput_file_bytes_max = 100000\n"
        "[dispatcher]\nbatch_events_max = 250\n"
    )
    done = photon("generate", "--out", tmp_path / "logs", "--seed", 3, "--queries", 2_000, "--clicks", 2_000)
    assert done.returncode == 0, done.stderr
    return tmp_path / "logs", tmp_path / "out", tmp_path / "photon.toml"


@pytest.mark.long
@pytest.mark.cluster
def test_a_drained_run_ends_when_all_its_files_are_made_parquet_however_long_it_takes(slow_run):
    logs, out, config = slow_run
    summary = join(logs, out, "--config", config)
    assert summary["unlisted_files"] == []
    east = out / "joined" / "east"
    assert {path.suffix for path in east.iterdir()} == {".parquet", ".manifest", ".lives"}
    assert len(complete_files(east)) >= 6
    assert sum(entry.lines for entry in complete_files(east).values()) == summary["joined"] > 0


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.soak
def test_files_that_are_left_are_told_and_the_next_run_completes_them(
    slow_run, tmp_path, monkeypatch, capsys
):
    logs, out, config = slow_run
    (tmp_path / "gate").touch()
    monkeypatch.setattr(run, "STILL_S_MAX", 0.5)
    for name in ("GRACE_S", "GRACE_S_MAX"):
        monkeypatch.setattr(completing, name, 0.5)
    cut_off = run.join(str(logs / "queries"), str(logs / "clicks"), out, config=config)
    east = out / "joined" / "east"
    assert cut_off["unlisted_files"] == [str(path) for path in sorted(east.glob("*.jsonl"))] != []
    assert "not complete yet" in capsys.readouterr().err
    assert complete_files(east) == {}
    (tmp_path / "gate").unlink()
    done = photon(*join_arguments(logs, out, "--config", config))
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    assert (summary["unlisted_files"], summary["joined"]) == ([], cut_off["joined"])
    assert not any(path.stat().st_size for path in east.glob("*.jsonl"))
    assert sum(e.lines for e in complete_files(east).values()) == count_joined(east) == summary["joined"]
