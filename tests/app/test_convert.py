"""`photon convert`: there and back again, and what is told of what is no event."""

import gzip
import json
import os
import subprocess
import sys
from pathlib import Path

import click.testing
import pytest
import zstandard

from photon.app import convert_reading
from photon.app.cli import photon
from photon.core.errors import StorageError, UsageError
from photon.core.formats import Formats
from photon.core.framing import BLOCKS
from photon.core.ids import IdPacker
from photon.core.settings import Foreign, Primary


def lines(count: int, payload: str = "é") -> bytes:
    events = [{"id": f"c{n}", "primary_id": f"q{n}", "ts_us": n, "text": payload} for n in range(count)]
    return b"".join(
        json.dumps(event, ensure_ascii=n % 2 == 0).encode() + b"\n" for n, event in enumerate(events)
    )


def run(*arguments: object) -> click.testing.Result:
    return click.testing.CliRunner().invoke(photon, ["convert", *map(str, arguments)])


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "clicks.jsonl"
    path.write_bytes(lines(5000))
    return path


def formats() -> Formats:
    return Formats(Primary(), Foreign(), IdPacker())


@pytest.mark.parametrize("side", ["--primary", "--foreign"])
def test_lines_become_blocks_and_the_same_lines_again(log: Path, tmp_path: Path, side: str) -> None:
    assert run(log, "--out", tmp_path / "x.pblk", side).exit_code == 0
    data = (tmp_path / "x.pblk").read_bytes()
    assert BLOCKS.whole(data) == len(data)
    if side == "--foreign":
        blocks, plain = formats().blocks.parse_foreign(data), formats().lines.parse_foreign(log.read_bytes())
        assert (blocks.ids, blocks.primary_ids, blocks.times) == (plain.ids, plain.primary_ids, plain.times)
    assert run(tmp_path / "x.pblk", "--out", tmp_path / "again.jsonl").exit_code == 0
    assert (tmp_path / "again.jsonl").read_bytes() == log.read_bytes()


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_sources_may_be_compressed_in_several_frames(log: Path, tmp_path: Path, suffix: str) -> None:
    pack = gzip.compress if suffix == ".gz" else zstandard.compress
    packed = tmp_path / f"packed.jsonl{suffix}"
    packed.write_bytes(pack(lines(3)) + pack(lines(5000)))
    (tmp_path / "out").mkdir()
    result = run(packed, log, "--out", tmp_path / "out", "--foreign", "--json")
    assert result.exit_code == 0
    assert sorted(os.listdir(tmp_path / "out")) == ["clicks.pblk", "packed.pblk"]
    files = json.loads(result.output)["files"]
    assert [(one["events"], one["malformed"]) for one in files] == [(5003, 0), (5000, 0)]
    assert files[1]["source_bytes"] == log.stat().st_size


def test_what_is_no_event_is_left_out_counted_told_and_kept(tmp_path: Path) -> None:
    source = tmp_path / "a.log"
    source.write_bytes(lines(2) + b"# no event\n" + b"\n" + lines(1) + b'{"id":"x"')
    result = run(source, "--out", tmp_path / "a.pblk", "--foreign")
    assert result.exit_code == 1
    assert f"{source}:{len(lines(2))}: not a valid event" in result.stderr
    assert f"2 are no events; they are kept in {tmp_path / 'a.pblk.rejected'}" in result.stderr
    assert (tmp_path / "a.pblk.rejected").read_bytes() == b'# no event\n{"id":"x"\n'
    assert len(formats().blocks.parse_foreign((tmp_path / "a.pblk").read_bytes()).lines) == 3


def test_of_many_bad_lines_the_first_are_told_and_all_are_kept(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_bytes(b"bad\n" * 1000)
    (one,) = json.loads(run(tmp_path / "a.log", "--out", tmp_path / "a.pblk", "--primary", "--json").output)[
        "files"
    ]
    assert (one["malformed"], len(one["told"]), one["events"]) == (1000, 10, 0)
    assert Path(one["rejected"]).read_bytes() == b"bad\n" * 1000


def test_an_unended_last_line_is_taken_over_and_a_longer_one_than_allowed_is_not(tmp_path: Path) -> None:
    config = tmp_path / "photon.toml"
    config.write_text("[logs]\nline_bytes_max = 4096\n")
    big = lines(1, "x" * 3_000_000)
    source = tmp_path / "a.log"
    source.write_bytes(lines(1) + big + lines(2) + lines(1).rstrip())
    result = run(source, "--out", tmp_path / "a.pblk", "--foreign", "--config", config, "--json")
    (one,) = json.loads(result.output)["files"]
    assert (one["events"], one["malformed"], result.exit_code) == (4, 1, 1)
    assert f"a line of {len(big)} bytes is longer than 'logs.line_bytes_max' (4096)" in one["told"][0]
    assert f":{len(lines(1))}:" in one["told"][0]
    assert one["source_bytes"] == source.stat().st_size


def test_records_are_read_whole_in_steps_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "a.log"
    source.write_bytes(lines(100))
    for step in (1, 7, 100, 1 << 20):
        monkeypatch.setattr(convert_reading, "_STEP_BYTES", step)
        read = list(convert_reading.read_records(source, 4096))
        assert b"".join(records.data for records in read) == lines(100)
        assert all(records.data.endswith(b"\n") and not records.oversized for records in read)


def test_fields_and_key_come_from_the_settings(tmp_path: Path) -> None:
    config = tmp_path / "photon.toml"
    config.write_text('[foreign]\nid = "a.b"\nprimary_id = "q"\ntime_unit = "s"\n[ids]\nkey = "secret"\n')
    source = tmp_path / "a.log"
    source.write_bytes(b'{"a":{"b":1},"q":2,"ts_us":3}\n')
    assert run(source, "--out", tmp_path / "a.pblk", "--foreign", "--config", config).exit_code == 0
    own = Formats(
        Primary(), Foreign(id="a.b", primary_id="q", time_unit="s"), IdPacker(b"secret")
    ).blocks.parse_foreign((tmp_path / "a.pblk").read_bytes())
    assert own.ids == IdPacker(b"secret").pack(["1"]) and not own.malformed
    (bad,) = formats().blocks.parse_foreign((tmp_path / "a.pblk").read_bytes()).malformed
    assert "ids.key" in bad.reason
    # For the lines alone no key is needed: that is how a log is brought to another key.
    assert run(tmp_path / "a.pblk", "--out", tmp_path / "again.jsonl").exit_code == 0
    assert (tmp_path / "again.jsonl").read_bytes() == source.read_bytes()


def test_a_damaged_archive_leaves_no_target(log: Path, tmp_path: Path) -> None:
    for name, data in (
        ("a.jsonl.gz", gzip.compress(lines(9000))[:-20]),
        ("b.jsonl.zst", zstandard.compress(lines(9000))[:-20]),
        ("c.jsonl.gz", b"no archive"),
    ):
        (tmp_path / name).write_bytes(data)
        before = sorted(os.listdir(tmp_path))
        result = run(tmp_path / name, "--out", tmp_path / "x.pblk", "--foreign")
        assert isinstance(result.exception, StorageError)
        assert "not a whole archive" in str(result.exception)
        assert sorted(os.listdir(tmp_path)) == before


def test_a_damaged_block_is_told_and_its_neighbours_are_taken_over(log: Path, tmp_path: Path) -> None:
    run(log, "--out", tmp_path / "x.pblk", "--foreign")
    data = bytearray((tmp_path / "x.pblk").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "x.pblk").write_bytes(data)
    result = run(tmp_path / "x.pblk", "--out", tmp_path / "y.jsonl")
    assert result.exit_code == 1 and "damaged (crc)" in result.stderr
    kept = (tmp_path / "y.jsonl").read_bytes().splitlines()
    assert 3000 < len(kept) < 5000 and set(kept) < set(log.read_bytes().splitlines())


@pytest.mark.parametrize(
    ("out", "options", "message"),
    [
        ("x.pblk", [], "say which events these are"),
        ("x.jsonl", ["--foreign"], "both of one format"),
        ("x.pblk.gz", ["--foreign"], "compress it then"),
        ("there.pblk", ["--foreign"], "is there already"),
        ("nowhere/x.pblk", ["--foreign"], "no directory"),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_is_written(
    log: Path, tmp_path: Path, out: str, options: list[str], message: str
) -> None:
    (tmp_path / "there.pblk").write_bytes(b"old")
    before = sorted(os.listdir(tmp_path))
    result = run(log, "--out", tmp_path / out, *options)
    assert isinstance(result.exception, UsageError) and message in str(result.exception)
    assert sorted(os.listdir(tmp_path)) == before
    assert (tmp_path / "there.pblk").read_bytes() == b"old"


def test_two_sources_of_one_name_are_refused(log: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    other = tmp_path / "clicks.jsonl.gz"
    other.write_bytes(gzip.compress(lines(1)))
    result = run(log, other, "--out", tmp_path / "out", "--foreign")
    assert "would both become" in str(result.exception)


def test_force_replaces_a_target_and_what_was_rejected_then(log: Path, tmp_path: Path) -> None:
    (tmp_path / "x.pblk").write_bytes(b"old")
    (tmp_path / "x.pblk.rejected").write_bytes(b"old")
    assert run(log, "--out", tmp_path / "x.pblk", "--foreign", "--force").exit_code == 0
    assert not (tmp_path / "x.pblk.rejected").exists()
    assert len(formats().blocks.parse_foreign((tmp_path / "x.pblk").read_bytes()).lines) == 5000


def test_a_kill_leaves_nothing_that_a_glob_of_logs_finds(tmp_path: Path) -> None:
    """The source is a pipe, so that the command is surely in its midst."""
    os.mkfifo(tmp_path / "pipe.log")
    script = (
        "from pathlib import Path; from photon.app.convert import convert; from photon.core.settings import Settings;"
        f"d = Path({str(tmp_path)!r}); convert(d / 'pipe.log', d / 'x.pblk', 'foreign', Settings())"
    )
    child = subprocess.Popen([sys.executable, "-c", script], cwd=Path(__file__).parents[2])
    with (tmp_path / "pipe.log").open("wb") as pipe:  # opens when the child reads
        pipe.write(lines(20_000))
        pipe.flush()
        child.kill()
        child.wait()
    assert {path.name for path in tmp_path.glob("*")} - {"pipe.log"} <= {".x.pblk.partial"} | {
        ".x.pblk.rejected.partial"
    }
    assert not list(tmp_path.glob("*.pblk"))
