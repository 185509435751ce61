"""`photon join` over blocks, lines and archives of both, side by side."""

import gzip
import json
from pathlib import Path

import pytest
import zstandard

from photon.app.verify_pairs import check_pairs
from tests.app.kit import fates_add_up, join, photon, read_lines

pytestmark = pytest.mark.cluster


@pytest.mark.parametrize("ids", [[], ["--opaque-ids"]], ids=["photon", "opaque"])
def test_a_run_over_blocks_joins_what_one_over_lines_would(tmp_path: Path, ids: list[str]) -> None:
    """The cache holds a quarter of the queries: most are found by log file map and short read."""
    made = tmp_path / "made"
    share = ["--duplicates", 0.05, "--early", 0.05, "--orphans", 0.02]
    assert (
        photon("generate", "--out", made, "--queries", 20000, "--clicks", 4000, *share, *ids).returncode == 0
    )
    logs = tmp_path / "logs"
    for side, flag in (("queries", "--primary"), ("clicks", "--foreign")):
        (logs / side).mkdir(parents=True)
        files = sorted((made / side).iterdir())
        files[0].rename(logs / side / files[0].name)  # one stays as it is
        assert photon("convert", *files[1:], "--out", logs / side, flag).returncode == 0
        archive = logs / side / files[1].with_suffix(".pblk").name
        archive.with_name(archive.name + ".gz").write_bytes(gzip.compress(archive.read_bytes()))
        archive.unlink()
        archive = logs / side / files[2].with_suffix(".pblk").name
        archive.with_name(archive.name + ".zst").write_bytes(zstandard.compress(archive.read_bytes()))
        archive.unlink()
    config = tmp_path / "photon.toml"
    config.write_text('[eventstore]\ncache_bytes = 1048576\n[adapter]\nfield = "primary"\n')
    summary = join(logs, tmp_path / "out", "--config", config)
    truth = json.loads((made / "truth.json").read_text())
    assert {name: summary[name] for name in truth["expected_summary"]} == truth["expected_summary"]
    report = check_pairs(tmp_path / "out" / "joined")
    assert not report.problems(truth["distinct_joined_pairs"], truth["joined_pairs_sha256"])


@pytest.mark.long
def test_a_damaged_block_is_one_malformed_event_and_the_others_are_joined(tmp_path: Path) -> None:
    logs, plain = tmp_path / "logs", tmp_path / "plain"
    plain.mkdir()
    queries = [b'{"id":"q%d"}\n' % n for n in range(3000)]
    clicks = [b'{"id":"c%d","primary_id":"q%d","ts_us":%d}\n' % (n, n, n) for n in range(3000)]
    for name, lines, flag in (("queries", queries, "--primary"), ("clicks", clicks, "--foreign")):
        (logs / name).mkdir(parents=True)
        (plain / f"{name}.jsonl").write_bytes(b"".join(lines))
        assert photon("convert", plain / f"{name}.jsonl", "--out", logs / name, flag).returncode == 0
    file = logs / "clicks" / "clicks.pblk"
    whole = file.read_bytes()
    data = bytearray(whole)
    data[len(data) // 2] ^= 1  # in the second of three blocks
    file.write_bytes(data + data[: len(data) // 2])  # and the writer was killed, in the midst of one, later
    config = tmp_path / "photon.toml"
    config.write_text('[adapter]\nfield = "query"\n')
    summary = join(logs, tmp_path / "out", "--config", config)
    assert fates_add_up(summary)
    first, last = 1024, 3000 - 2048
    assert (summary["joined"], summary["duplicate"], summary["malformed"]) == (first + last, first, 1)
    (letter,) = read_lines(tmp_path / "out" / "dead-letters")
    assert "damaged (crc)" in letter["reason"] and letter["offset"] > 0
    assert all(
        line["query"] == {"id": line["primary_id"]} for line in read_lines(tmp_path / "out" / "joined")
    )
    # The half block at the end is left, as a half line is: its writer may go on. It did; with other bytes.
    with file.open("ab") as log:
        log.write(whole)
    summary = join(logs, tmp_path / "out", "--config", config)
    assert (summary["joined"], summary["malformed"]) == (3000, 2)
    assert summary["duplicate"] == first + first + last
