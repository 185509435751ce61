"""Which files are read, and which usage errors come before Spark starts."""

import os

import pytest

from photon.core.errors import UsageError
from spark.reading.paths import check_new, check_output, existing, input_paths, local_name, output_paths


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
    assert output_paths("hdfs://host/out/", "joined") == [
        "hdfs://host/out/joined/*/*.jsonl",
        "hdfs://host/out/joined/*/*.parquet",
    ]


def test_inputs_that_match_nothing_are_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="no file matches"):
        input_paths([str(tmp_path / "*.jsonl")])
    with pytest.raises(UsageError, match="no such"):
        input_paths([str(tmp_path / "nowhere" / "*.jsonl")])


@pytest.mark.parametrize("name", ["c.jsonl.zst", "_c.jsonl", "c[1] {a}?*\\\\.jsonl", "ü:c d.jsonl"])
def test_a_local_file_of_any_name_is_told_from_what_spark_must_read(tmp_path, name):
    touch(tmp_path / name)
    assert [local_name(path) for path in input_paths([str(tmp_path)])] == [str(tmp_path / name)]


@pytest.mark.parametrize(
    "uri", ["s3a://bucket/clicks.jsonl", "file:///clicks/*.jsonl", "hdfs:///clicks.jsonl"]
)
def test_what_spark_must_read_has_no_local_name(uri):
    assert local_name(uri) is None


def test_outputs_are_those_of_every_datacenter_and_one_that_is_being_made_parquet_counts_once(tmp_path):
    touch(tmp_path / "joined" / "east" / "notes.txt", tmp_path / "dead-letters" / "east" / "f-000000.jsonl")
    touch(tmp_path / "joined" / "east" / "j-000000.parquet", tmp_path / "joined" / "east" / "j-000000.jsonl")
    touch(tmp_path / "joined" / "east" / "j-000001.jsonl", tmp_path / "joined" / "west" / "j-000000.jsonl")
    names = [path.removeprefix(f"file://{tmp_path}/") for path in output_paths(str(tmp_path), "joined")]
    assert names == [
        "joined/east/j-000000.parquet",
        "joined/east/j-000001.jsonl",
        "joined/west/j-000000.jsonl",
    ]


@pytest.mark.spark
def test_patterns_of_a_file_system_become_its_files_and_may_match_none(tmp_path, session):
    touch(tmp_path / "joined" / "east" / "j-000000.jsonl", tmp_path / "joined" / "west" / "j-000000.jsonl")
    (tmp_path / "joined" / "east" / "directory.jsonl").mkdir()
    patterns = output_paths(f"file:{tmp_path}", "joined")
    local = input_paths([str(tmp_path / "joined" / "west")])
    assert existing(session, [*patterns, *local]) == [
        *local,
        f"file:{tmp_path}/joined/east/j-000000.jsonl",
        f"file:{tmp_path}/joined/west/j-000000.jsonl",
    ]
    assert existing(session, [f"file:{tmp_path}/*.none"]) == []


def test_an_output_directory_without_outputs_is_a_usage_error(tmp_path):
    with pytest.raises(UsageError, match="neither joined/ nor dead-letters/"):
        check_output(str(tmp_path))
    (tmp_path / "joined").mkdir()
    check_output(str(tmp_path))


def test_details_never_overwrite(tmp_path):
    check_new(str(tmp_path / "new"))
    with pytest.raises(UsageError, match="is there already"):
        check_new(str(tmp_path))
