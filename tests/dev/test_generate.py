"""`photon generate`: what the truth says is what the logs hold, and the logs are what Photon reads."""

import dataclasses
import hashlib
import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from photon.cli.generate import command, run
from photon.core.clock import ManualClock
from photon.core.columns import split_ids
from photon.core.errors import UsageError
from photon.core.ids import IdPacker, opaque_mask
from photon.core.settings import Foreign, Primary
from photon.dev.feeder import generate_stream
from photon.dev.generated_logs import (
    IDS,
    SPOILINGS,
    AtOnce,
    DelayLimits,
    GeneratedTruth,
    Mix,
    ServerLog,
    Stream,
    delays_us,
    generate_at_once,
    spoil,
)
from photon.dev.pairs import pairs_sha256
from photon.logs.formats import ForeignBatch, JsonLines, PrimaryBatch
from tests.system import start_photon
from tests.waiting import wait_until

MESSY = Mix(
    seed=7, files=5, duplicates=0.03, early=0.1, orphans=0.02, malformed=0.02, duplicate_queries=0.01,
    malformed_queries=0.02,
)  # fmt: skip
FEW = AtOnce(queries=4_000, clicks=2_000)


def parse(out: Path) -> tuple[PrimaryBatch, ForeignBatch]:
    logs = JsonLines(Primary(), Foreign(), IdPacker())
    read = {
        n: b"".join(p.read_bytes() for p in sorted((out / n).glob("*.jsonl"))) for n in ("queries", "clicks")
    }
    return logs.parse_primary(read["queries"]), logs.parse_foreign(read["clicks"])


def assert_truth_holds(out: Path, truth: GeneratedTruth) -> None:
    """Count everything again, from the files, with nothing of the generator's."""
    primary, foreign = parse(out)
    queries = [json.loads(line) for line in primary.lines]
    clicks = [json.loads(line) for line in foreign.lines]
    times = {q["id"]: q["ts_us"] for q in queries}
    distinct = {c["id"]: c for c in clicks}
    pairs = {(c["primary_id"], c["id"]) for c in clicks if c["primary_id"] in times}
    repeats = Counter(foreign.lines)
    assert truth.primary_rows == len(queries) + len(primary.malformed)
    assert truth.primary_malformed == len(primary.malformed)
    assert truth.primary_distinct_ids == len(times)
    assert truth.primary_duplicates == len(queries) - len(times)
    assert truth.foreign_rows == len(clicks) + len(foreign.malformed)
    assert truth.malformed == len(foreign.malformed)
    assert truth.foreign_distinct_ids == len(distinct) == len(repeats)
    assert truth.duplicates == len(clicks) - len(distinct)
    assert truth.distinct_joined_pairs == len(pairs)
    assert truth.orphans == len(distinct) - len(pairs)
    if truth.mode == "at once":  # in a stream it is the order of writing that counts
        assert truth.early == sum(distinct[c]["ts_us"] < times[q] for q, c in pairs)
    assert truth.joined_pairs_sha256 == pairs_sha256(f"{q}\t{c}\n".encode() for q, c in pairs)
    assert sum(truth.expected_summary().values()) == 2 * truth.foreign_rows  # the fates add up to the events
    stored = json.loads((out / "truth.json").read_bytes())
    assert stored == truth.document()


@pytest.mark.parametrize("ids", IDS)
def test_the_truth_is_what_the_logs_hold(tmp_path: Path, ids: str) -> None:
    truth = generate_at_once(tmp_path, dataclasses.replace(MESSY, ids=ids), FEW)
    assert_truth_holds(tmp_path, truth)
    assert (truth.orphans, truth.duplicates, truth.malformed) == (40, 60, 40)
    assert (truth.primary_duplicates, truth.primary_malformed) == (40, 80)
    assert 190 <= truth.early <= 200
    primary, foreign = parse(tmp_path)
    assert opaque_mask(primary.ids).all() == opaque_mask(foreign.ids).any() == (ids != "photon")


def logs_sha256(out: Path) -> str:
    """One digest of all generated files, names included."""
    digest = hashlib.sha256()
    for path in sorted(out.rglob("*.jsonl")):
        digest.update(f"{path.relative_to(out)}\n".encode() + path.read_bytes())
    return digest.hexdigest()


def test_the_same_seed_gives_the_same_bytes_and_another_one_others(tmp_path: Path) -> None:
    for name, seed in (("a", 7), ("b", 7), ("c", 8)):
        generate_at_once(tmp_path / name, dataclasses.replace(MESSY, seed=seed), FEW)
    assert logs_sha256(tmp_path / "a") == logs_sha256(tmp_path / "b") != logs_sha256(tmp_path / "c")


def test_each_log_is_one_server_process_and_in_the_order_of_time(tmp_path: Path) -> None:
    generate_at_once(tmp_path, Mix(files=5), FEW)
    for path in tmp_path.glob("*/*.jsonl"):
        ids = [json.loads(line)["id"].rpartition(":") for line in path.read_bytes().splitlines()]
        assert {head for head, _, _ in ids} == {path.stem.rpartition("-")[0].replace("-", ":")}
        times = [int(time) for _, _, time in ids]
        assert times == sorted(set(times))


def test_lines_are_as_long_as_real_ones_or_padded_and_keep_what_they_hold(tmp_path: Path) -> None:
    for line_bytes, lengths in ((0, [(200, 260), (140, 180)]), (2_000, [(1_950, 2_050)] * 2)):
        out = tmp_path / str(line_bytes)
        mix = dataclasses.replace(MESSY, line_bytes=line_bytes)
        assert_truth_holds(out, generate_at_once(out, mix, FEW))
        for batch, (low, high) in zip(parse(out), lengths, strict=True):
            assert low <= np.mean([len(line) for line in batch.lines]) <= high


def test_lines_of_several_processes_stand_between_each_others_in_a_log(tmp_path: Path) -> None:
    amount = dataclasses.replace(FEW, processes=30)
    assert_truth_holds(tmp_path, generate_at_once(tmp_path, Mix(files=2), amount))
    paths = sorted((tmp_path / "queries").iterdir())
    assert len(paths) == 2
    for path in paths:
        ids = [json.loads(line)["id"].rpartition(":") for line in path.read_bytes().splitlines()]
        assert len({head for head, _, _ in ids}) == 30
        assert sum(a[0] != b[0] for a, b in pairwise(ids)) > len(ids) / 2
        times = [int(time) for _, _, time in ids]
        assert times == sorted(times)


def test_lines_out_of_order_stand_near_their_place(tmp_path: Path) -> None:
    amount = dataclasses.replace(FEW, disorder_s=60)
    assert_truth_holds(tmp_path, generate_at_once(tmp_path, Mix(files=1), amount))
    (path,) = (tmp_path / "queries").iterdir()
    times = np.array([json.loads(line)["ts_us"] for line in path.read_bytes().splitlines()])
    behind = np.maximum.accumulate(times) - times
    assert 30e6 < behind.max() <= 60e6


def test_clicks_come_as_late_as_asked_for(tmp_path: Path) -> None:
    late = DelayLimits(body=3_600.0, tail=43_200.0)
    for name, limits in (("soon", DelayLimits()), ("late", late)):
        generate_at_once(tmp_path / name, Mix(), dataclasses.replace(FEW, delays=limits))
    times = {
        name: [json.loads(line)["ts_us"] for line in parse(tmp_path / name)[1].lines]
        for name in ("soon", "late")
    }
    assert np.mean(times["late"]) > np.mean(times["soon"]) + 300e6


def test_dense_events_of_one_process_still_have_ids_of_their_own(tmp_path: Path) -> None:
    truth = generate_at_once(tmp_path, Mix(files=1), AtOnce(queries=100_000, clicks=10, span_s=1.0))
    primary, _ = parse(tmp_path)
    assert len(set(split_ids(primary.ids))) == truth.primary_distinct_ids == 100_000


def test_thousands_of_files_and_small_rotated_ones(tmp_path: Path) -> None:
    truth = generate_at_once(tmp_path / "many", dataclasses.replace(MESSY, files=1_500), FEW)
    assert len(list((tmp_path / "many" / "queries").iterdir())) > 1_200
    assert_truth_holds(tmp_path / "many", truth)
    rotated = dataclasses.replace(MESSY, file_bytes_max=10_000)
    truth = generate_at_once(tmp_path / "rotated", rotated, FEW)
    assert all(path.stat().st_size <= 10_000 for path in (tmp_path / "rotated").glob("*/*.jsonl"))
    assert len(list((tmp_path / "rotated" / "queries").iterdir())) > 80
    assert_truth_holds(tmp_path / "rotated", truth)


@pytest.mark.parametrize("limit", [1, 30, 31, 60, 1000])
def test_a_log_rotates_at_the_ends_of_lines_and_loses_none(tmp_path: Path, limit: int) -> None:
    log = ServerLog(tmp_path, "10.0.0.1:7", limit)
    lines = [b"%d%s\n" % (n, b"x" * n) for n in range(40)]
    for at in range(0, 40, 7):
        log.write(lines[at : at + 7])
    files = sorted(tmp_path.iterdir())
    assert b"".join(path.read_bytes() for path in files) == b"".join(lines)
    for path in files:
        assert path.read_bytes().endswith(b"\n")
        assert path.stat().st_size <= limit or path.read_bytes().count(b"\n") == 1


def test_one_delay_in_ten_is_over_a_minute_and_one_in_a_thousand_over_an_hour() -> None:
    delays = delays_us(np.random.default_rng(1), 400_000, DelayLimits()) / 1e6
    assert 0.098 < np.mean(delays > 60) < 0.102
    assert 0.0007 < np.mean(delays > 3_600) < 0.0013
    assert 80_000 < delays.max() <= 86_401
    assert delays.min() > 0


@pytest.mark.parametrize("how", range(SPOILINGS))
def test_every_spoilt_line_is_one_malformed_line(how: int) -> None:
    logs = JsonLines(Primary(), Foreign(), IdPacker())
    line = b'{"id":"10.0.0.1:1:5","primary_id":"10.0.0.1:1:4","ts_us":5,"payload":{"x":"caf\xc3\xa9"}}\n'
    spoilt = spoil(line, how)
    assert spoilt.count(b"\n") == 1 and spoilt.endswith(b"\n")
    for batch in (logs.parse_primary(line + spoilt + line), logs.parse_foreign(line + spoilt + line)):
        assert len(batch.lines) == 2 and len(batch.malformed) == 1


def test_no_clicks_all_of_them_joinable_and_all_orphans_are_allowed(tmp_path: Path) -> None:
    truth = generate_at_once(tmp_path / "good", Mix(), FEW)
    assert_truth_holds(tmp_path / "good", truth)
    assert truth.distinct_joined_pairs == truth.foreign_rows == 2_000
    assert_truth_holds(tmp_path / "0", generate_at_once(tmp_path / "0", MESSY, AtOnce(10, 0)))
    lost = Mix(orphans=1.0, duplicates=0.5)
    truth = generate_at_once(tmp_path / "1", lost, AtOnce(10, 100))
    assert_truth_holds(tmp_path / "1", truth)
    assert truth.orphans == truth.foreign_rows == 100


def stream_with_a_manual_clock(
    out: Path, mix: Mix, stream: Stream, stop_after_s: float = 1e9
) -> GeneratedTruth:
    clock = ManualClock()
    return generate_stream(out, mix, stream, clock, clock.advance, lambda: clock.monotonic() >= stop_after_s)


@pytest.mark.parametrize("opaque", [False, True])
def test_the_truth_of_a_stream_is_what_its_logs_hold(tmp_path: Path, opaque: bool) -> None:
    mix = dataclasses.replace(MESSY, ids="opaque" if opaque else "photon")
    truth = stream_with_a_manual_clock(tmp_path, mix, Stream(2_000, 400, 10.0))
    assert_truth_holds(tmp_path, truth)
    assert truth.foreign_distinct_ids == 4_000
    assert 20_000 <= truth.primary_distinct_ids <= 20_600
    assert truth.orphans and truth.early and truth.duplicates and truth.malformed


def test_a_stream_writes_whole_lines_as_they_happen(tmp_path: Path) -> None:
    clock = ManualClock()
    sizes, last_times = [], []

    def sleep(seconds: float) -> None:
        assert 0 <= seconds <= 0.005 + 1e-6
        data = b"".join(p.read_bytes() for p in (tmp_path / "clicks").glob("*.jsonl"))
        assert data == b"" or data.endswith(b"\n")
        sizes.append(data.count(b"\n"))
        last_times.append(max((json.loads(x)["ts_us"] for x in data.splitlines()), default=clock.now_us()))
        assert clock.now_us() - last_times[-1] <= 20_000
        clock.advance(seconds)

    generate_stream(tmp_path, Mix(files=2), Stream(500, 100, 1.0), clock, sleep)
    assert len(sizes) >= 190
    assert abs(sizes[len(sizes) // 2] - 50) <= 2


def test_an_early_click_is_logged_before_its_query(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[dict] = []
    monkeypatch.setattr(ServerLog, "write", lambda _, lines: written.extend(map(json.loads, lines)))
    truth = stream_with_a_manual_clock(tmp_path, Mix(files=1, early=0.5), Stream(100, 50, 1.0))
    place = {event["id"]: at for at, event in enumerate(written)}
    clicks = [event for event in written if "primary_id" in event]
    assert sum(place[c["id"]] < place[c["primary_id"]] for c in clicks) == truth.early > 10


def test_a_stopped_stream_still_has_its_truth(tmp_path: Path) -> None:
    truth = stream_with_a_manual_clock(tmp_path, MESSY, Stream(2_000, 400, 3_600.0), stop_after_s=1.0)
    assert_truth_holds(tmp_path, truth)
    assert 390 <= truth.foreign_distinct_ids <= 401


def test_a_live_stream_ends_on_sigterm_with_its_truth(tmp_path: Path) -> None:
    rates = ("--rate", 2000, "--click-rate", 400, "--duration", 50)
    process = start_photon("generate", "--out", tmp_path, *rates, "--json")
    wait_until(lambda: any(p.stat().st_size for p in tmp_path.glob("clicks/*.jsonl")))
    process.terminate()
    printed, _ = process.communicate(timeout=100)
    assert process.returncode == 0
    document = json.loads(printed)
    document.pop("expected_summary")
    assert_truth_holds(tmp_path, GeneratedTruth(**document))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--queries", "0"], "--queries must be from 1 to"),
        (["--clicks", "-1"], "--clicks must be from 0 to"),
        (["--duplicates", "1.5"], "--duplicates must be from 0.0 to 1.0, not 1.5"),
        (["--malformed", "nan"], "--malformed must be from 0.0 to 1.0, not nan"),
        (["--early", "0.6", "--orphans", "0.6"], "together at most 1"),
        (["--rate", "0"], "--rate must be from"),
        (["--files", "0"], "--files must be from 1 to"),
        (["--rotate-bytes", "5"], "--rotate-bytes must be from 1024"),
        (["--seed", "-1"], "--seed must be from 0"),
        (["--rate", "5", "--queries", "5"], "--queries is for logs written at once, without --rate"),
        (["--click-rate", "5"], "--click-rate is for a stream: give --rate too"),
        (["--duration", "5"], "--duration is for a stream: give --rate too"),
    ],
)
def test_options_that_make_no_sense_are_told_in_one_line(
    tmp_path: Path, arguments: list[str], said: str
) -> None:
    result = CliRunner().invoke(command, ["--out", str(tmp_path / "logs"), *arguments])
    assert isinstance(result.exception, UsageError) and result.exception.exit_status == 2
    assert said in str(result.exception) and "\n" not in str(result.exception)
    assert not (tmp_path / "logs").exists()


def test_logs_are_never_mixed_with_those_that_are_there(tmp_path: Path) -> None:
    run(tmp_path, {"queries": 10})
    with pytest.raises(UsageError, match=r"already holds .*; name another directory"):
        run(tmp_path, {"queries": 10})
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match="Not a directory"):
        run(tmp_path / "file", {"queries": 10})


def test_the_command_prints_what_it_made(tmp_path: Path) -> None:
    result = CliRunner().invoke(command, ["--out", str(tmp_path / "a"), "--queries", "1000"])
    assert result.exit_code == 0
    assert "1,000 query lines, 200 click lines" in result.output
    result = CliRunner().invoke(command, ["--out", str(tmp_path / "b"), "--queries", "1000", "--json"])
    assert json.loads(result.output) == json.loads((tmp_path / "b" / "truth.json").read_bytes())
