"""Which files are read, and which usage errors come before Spark starts."""

import os

import pytest

from photon.core.errors import UsageError
from spark.paths import check_details, check_output, input_paths, output_paths


def touch(*paths):
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


def test_globs_and_directories_mean_their_files_and_each_file_once(tmp_path):
    touch(tmp_path / "a" / "1.jsonl", tmp_path / "a" / "deep" / "2.jsonl")
    os.link(tmp_path / "a" / "1.jsonl", tmp_path / "a" / "same.jsonl")
    first, second = f"file://{tmp_path}/a/1.jsonl", f"file://{tmp_path}/a/deep/2.jsonl"
    assert input_paths([str(tmp_path / "a"), str(tmp_path / "a" / "1.jsonl")]) == [first]
    assert input_paths([str(tmp_path / "**" / "*.jsonl")]) == [first, second]


def test_uris_are_left_to_spark(tmp_path):
    assert input_paths(["s3a://bucket/clicks/*.gz"]) == ["s3a://bucket/clicks/*.gz"]
    assert output_paths("hdfs://host/out/", "joined") == ["hdfs://host/out/joined/*/*.jsonl"]


def test_inputs_that_match_nothing_are_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="no file matches"):
        input_paths([str(tmp_path / "*.jsonl")])
    with pytest.raises(UsageError, match="no such"):
        input_paths([str(tmp_path / "nowhere" / "*.jsonl")])


@pytest.mark.parametrize("name", ["c.pblk", "c.pblk.gz", "c.jsonl.zst"])
def test_a_log_that_spark_can_not_read_as_lines_is_a_usage_error(tmp_path, name):
    touch(tmp_path / name)
    with pytest.raises(UsageError, match=name):
        input_paths([str(tmp_path / name)])


def test_joined_logs_as_parquet_are_a_usage_error(tmp_path):
    touch(tmp_path / "joined" / "east" / "joiner-east-000000.parquet")
    with pytest.raises(UsageError, match="Parquet"):
        output_paths(str(tmp_path), "joined")


@pytest.mark.parametrize("name", ["_clicks.jsonl", ".clicks.jsonl"])
def test_a_file_that_spark_would_leave_out_in_silence_is_a_usage_error(tmp_path, name):
    touch(tmp_path / name)
    with pytest.raises(UsageError, match="begin with _ or"):
        input_paths([str(tmp_path / name)])


def test_an_output_directory_without_outputs_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="neither joined/ nor dead-letters/"):
        check_output(str(tmp_path))
    (tmp_path / "joined").mkdir()
    check_output(str(tmp_path))


def test_details_never_overwrite(tmp_path):
    check_details(str(tmp_path / "new"))
    with pytest.raises(UsageError, match="is there already"):
        check_details(str(tmp_path))


def test_outputs_are_those_of_every_datacenter(tmp_path):
    touch(tmp_path / "joined" / "dc2" / "j-000001.jsonl", tmp_path / "joined" / "dc1" / "j-000000.jsonl")
    touch(
        tmp_path / "joined" / "dc1" / "notes.txt", tmp_path / "dead-letters" / "dc1" / "foreign-000000.jsonl"
    )
    names = [path.removeprefix(f"file://{tmp_path}/") for path in output_paths(str(tmp_path), "joined")]
    assert names == ["joined/dc1/j-000000.jsonl", "joined/dc2/j-000001.jsonl"]
