"""What a hostile user found: state that went missing between two runs, logs that are the output itself."""

import json
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from photon.cluster.preflight import RegistryMemory, check_apart, check_sinks
from photon.core.errors import CorruptStateError, UsageError
from photon.logs.files import glob_matches
from tests.system import join, join_arguments, joined_pairs, photon, write_lines, write_logs

EVENTS = 200
Refusal = Callable[[Path], str]


@pytest.fixture(scope="module")
def done_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with logs and the output of a run over them, not to be changed."""
    directory = tmp_path_factory.mktemp("attacked")
    join(write_logs(directory / "logs", EVENTS), directory / "out")
    return directory


@pytest.fixture
def attacked(done_run: Path, tmp_path: Path) -> Path:
    """A copy of it, with a log more to join."""
    copy = tmp_path / "run"
    shutil.copytree(done_run, copy)
    more = [{"id": f"d{n}", "primary_id": f"q{n}", "ts_us": n} for n in range(10)]
    write_lines(copy / "logs" / "clicks" / "d.jsonl", more)
    return copy


@pytest.fixture
def refusal(command: Any) -> Refusal:
    """What a run says that must fail, in one line, and write nothing."""

    def told(directory: Path) -> str:
        before = joined_pairs(directory / "out")
        run = command(*join_arguments(directory / "logs", directory / "out"))
        assert (run.out, run.err.count("\n")) == ("", 1) and run.status in (1, 2)
        assert joined_pairs(directory / "out") == before
        return str(run.err)

    return told


@pytest.mark.parametrize("lost", [["r0", "r1"], ["r0", "r1", "r2"]])
def test_a_registry_that_lost_most_replicas_is_not_asked_what_was_joined(
    refusal: Refusal, attacked: Path, lost: list[str]
) -> None:
    for name in lost:
        shutil.rmtree(attacked / "out" / ".photon" / "registry" / name)
    shutil.rmtree(attacked / "out" / ".photon" / "east" / "dispatcher")
    assert "would be joined again" in refusal(attacked)


@pytest.mark.long
@pytest.mark.parametrize(
    ("cut", "told"),
    [
        pytest.param("group-0001", "remembers 0 ids, but 200 joined lines", id="a shard's"),
        pytest.param(
            "group-*", "which was founded anew and knows nothing of what is joined", id="the directory's too"
        ),
    ],
)
def test_a_registry_whose_journals_were_cut_short_is_found_to_have_forgotten(
    refusal: Refusal, attacked: Path, cut: str, told: str
) -> None:
    journals = list((attacked / "out" / ".photon" / "registry").glob(f"r*/{cut}/journal-*.log"))
    assert len(journals) >= 3
    for journal in journals:
        os.truncate(journal, 100)
    assert told in refusal(attacked)


def test_output_of_a_run_that_the_work_directory_knows_nothing_of_is_refused(
    refusal: Refusal, attacked: Path
) -> None:
    shutil.rmtree(attacked / "out" / ".photon")
    assert "knows nothing of" in refusal(attacked)


def test_facts_of_the_registry_that_are_no_facts_are_told_in_a_line(refusal: Refusal, attacked: Path) -> None:
    (attacked / "out" / ".photon" / "run.json").write_text("[]")
    assert "run.json: cannot be read" in refusal(attacked)


def test_an_output_that_is_empty_though_the_run_has_written_to_it_stops_the_start(
    refusal: Refusal, attacked: Path
) -> None:
    """Its disk is not mounted, perhaps: what is written below the mount is hidden later."""
    shutil.rmtree(attacked / "out" / "joined")
    told = refusal(attacked)
    assert "nothing of it is there; mount the disk" in told
    assert refusal(attacked) == told
    known = told.split(" delete ")[1].strip()
    assert known == str(attacked / "out" / ".photon" / "east" / "joiner" / "roots")
    Path(known).unlink()
    assert join(attacked / "logs", attacked / "out")["joined_this_run"] == 10


def test_joined_lines_that_are_there_no_more_are_told(attacked: Path) -> None:
    for path in (attacked / "out" / "joined").glob("*/*.jsonl"):
        path.unlink()
    run = photon(*join_arguments(attacked / "logs", attacked / "out"))
    assert run.returncode == 0
    assert "200 joined lines are not in" in run.stderr
    summary = json.loads(run.stdout)
    assert (summary["joined"], summary["joined_this_run"]) == (210, 10)


def test_fields_by_other_names_are_told_of_with_the_setting_that_names_them(tmp_path: Path) -> None:
    write_lines(tmp_path / "queries" / "q.jsonl", [{"query_id": "q1", "ts_us": 1}])
    write_lines(tmp_path / "clicks" / "c.jsonl", [{"id": "c1", "query": "q1", "ts_us": 2}])
    run = photon(*join_arguments(tmp_path, tmp_path / "out"))
    assert run.returncode == 1
    assert "nothing was joined" in run.stderr
    assert json.loads(run.stdout)["primary_malformed"] == json.loads(run.stdout)["malformed"] == 1
    for side, file, field in (("primary", "q.jsonl", "`id`"), ("foreign", "c.jsonl", "`primary_id`")):
        (told,) = [line for line in run.stderr.splitlines() if f"no {side} event could be read" in line]
        assert f"{file} at 0: " in told
        assert field in told
        assert f"[{side}]" in told


def test_logs_in_utf_16_are_told_of_with_the_mend_and_not_as_fields_by_other_names(tmp_path: Path) -> None:
    write_lines(tmp_path / "queries" / "q.jsonl", [{"id": "q1", "ts_us": 1}])
    (tmp_path / "clicks").mkdir()
    (tmp_path / "clicks" / "c.jsonl").write_text('{"id": "c1", "primary_id": "q1", "ts_us": 2}\n', "utf-16")
    run = photon(*join_arguments(tmp_path, tmp_path / "out"))
    (told,) = [line for line in run.stderr.splitlines() if "no foreign event could be read" in line]
    assert told.endswith("c.jsonl at 0: UTF-16, not UTF-8: convert the file, as by iconv -f UTF-16 -t UTF-8")


def test_arguments_that_would_harm_a_run_are_refused_in_a_line(refused: Any, tmp_path: Path) -> None:
    logs = write_logs(tmp_path / "logs", EVENTS)
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/x\xff")
    os.mkdir(odd)
    for more, told in (
        (("--foreign", tmp_path / "**" / "*.jsonl"), "matches what this run writes"),
        (("--primary", ""), "a pattern is empty"),  # not the current directory
        (("--foreign", ""), "a pattern is empty"),
        (("--foreign", odd), "not UTF-8"),
        (("--work", odd), "not UTF-8"),
    ):
        assert told in refused(*join_arguments(logs, tmp_path / "out", *more))


@pytest.mark.parametrize(
    "place", ["joined", "joined/more", "../out/joined", "../link/joined/x?format=parquet"]
)
def test_a_sink_in_the_joined_logs_is_refused(place: str, tmp_path: Path) -> None:
    out = tmp_path / "out"
    (out / "joined").mkdir(parents=True)
    (tmp_path / "link").symlink_to(out)
    check_sinks([f"file://{out}/published", "kafka://h:1/joined"], [out])
    with pytest.raises(UsageError, match="the joined logs stand there"):
        check_sinks([f"file://{out}/{place}"], [tmp_path / "more", out])


def test_a_pattern_that_reaches_into_the_output_is_refused_and_one_next_to_it_is_not(tmp_path: Path) -> None:
    (tmp_path / "real" / "joined" / "east").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")

    def check(*patterns: str, out: str = "real") -> None:
        check_apart([f"{tmp_path}/{one}" for one in patterns], tmp_path / out, tmp_path / "w", ["east"])

    check("*.jsonl", "real/*/*.jsonl")
    for pattern in ("real/joined/east", "real/**", "real/*/*/foreign-*.jsonl", "w/logs/*", "link/**/*.jsonl"):
        with pytest.raises(UsageError, match=r"matches what this run writes .*narrow the pattern"):
            check(pattern)
    with pytest.raises(UsageError, match="matches what this run writes"):
        check("real/**/*.jsonl", out="link")


def test_hidden_directories_are_found_by_their_name_alone() -> None:
    assert not glob_matches(["**"], [".photon", "x"])
    assert not glob_matches(["*", "x"], [".photon", "x"])
    assert glob_matches([".photon", "**"], [".photon", "a", "x"])


def shard(
    ids: int, leads: bool = True, applied: int = 9, number: int = 0, expected: Sequence[int] = (0,)
) -> dict[str, Any]:
    state = {"is_leader": leads, "has_quorum": True, "applied_index": applied, "commit_index": 9, "term": 1}
    return {"shards": [{"shard": number, "ids": ids, **state}], "shards_expected": list(expected)}


def test_a_registry_is_given_time_to_read_its_journal(tmp_path: Path) -> None:
    memory = RegistryMemory(100, tmp_path)
    assert not memory.is_whole([], 0.0)
    assert not memory.is_whole([shard(5, leads=False)], 50.0)
    assert not memory.is_whole([shard(50, applied=4)], 60.0)
    assert not memory.is_whole([shard(60)], 61.0)
    assert not memory.is_whole([shard(99)], 63.9)
    assert memory.is_whole([shard(100)], 66.0)


def test_a_registry_that_comes_to_rest_with_too_few_ids_has_forgotten(tmp_path: Path) -> None:
    memory = RegistryMemory(100, tmp_path)
    assert not memory.is_whole([shard(99)], 1.0)
    with pytest.raises(CorruptStateError, match="remembers 99 ids, but 100"):
        memory.is_whole([shard(99)], 4.1)


def test_a_registry_is_not_judged_before_all_its_shards_are_there(tmp_path: Path) -> None:
    memory = RegistryMemory(100, tmp_path)
    assert not memory.is_whole([shard(99, expected=(0, 1))], 1.0)
    assert not memory.is_whole([shard(99, expected=(0, 1))], 50.0)


def test_a_work_directory_goes_with_its_own_output_alone(refused: Any, attacked: Path) -> None:
    other = attacked / "other"
    work = attacked / "out" / ".photon"
    assert "belongs to the output" in refused(*join_arguments(attacked / "logs", other, "--work", work))
    assert joined_pairs(other) == {}


def test_primary_logs_that_are_not_there_end_a_run_before_it_gives_up_every_event(
    refused: Any, tmp_path: Path
) -> None:
    logs = write_logs(tmp_path / "logs", EVENTS)
    (logs / "queries" / "q.jsonl").unlink()
    assert "no primary log matches" in refused(*join_arguments(logs, tmp_path / "out"))
