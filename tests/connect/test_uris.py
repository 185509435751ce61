"""What names a source, and what is told of a name that can't be one."""

import builtins
import sys
from importlib.metadata import EntryPoint

import pytest

from photon.connect.ports import Fields
from photon.connect.uris import is_known_source, is_source, known_as, make_source, parse_uri
from photon.core.errors import UsageError

FIELDS = Fields(("id",), "ts_us", "us")


@pytest.mark.parametrize(
    ("text", "source"),
    [
        ("kafka://h:9092/t", True),
        ("logs/*.csv", True),
        ("logs/a.csv.gz", True),
        ("logs/*.parquet", True),
        ("logs/*.jsonl.gz", False),
        ("logs/csv", False),
        ("-", False),
    ],
)
def test_sources_are_told_from_log_files(text, source):
    assert is_source(text) is source


@pytest.mark.parametrize(
    ("text", "known"),
    [
        ("kafka://h/t", True),
        ("a.csv", True),
        ("s3a://b/logs", False),
        ("gs://b/logs", False),
        ("hdfs://h/a.parquet", False),
        ("a", False),
    ],
)
def test_uris_that_others_read_are_told_from_sources(text, known):
    assert is_known_source(text) is known


def test_a_scheme_is_a_source_a_sink_or_both():
    assert known_as("kafka://h/t") == ["source", "sink"]
    assert known_as("a.csv") == ["source"]
    assert known_as("s3://b/*.csv") == ["source", "sink"]
    assert known_as("postgresql://h/d") == ["sink"]
    with pytest.raises(UsageError, match="nothing is known by 's4://'; known are kafka://, csv://"):
        known_as("s4://b")


def test_what_is_shown_has_no_password():
    uri = parse_uri("kafka://user:secret@h:9092/t?sasl.password=secret")
    assert uri.shown == "kafka://h:9092/t"
    assert uri.options == {"sasl.password": "secret"}


def test_an_unknown_scheme_is_told_with_those_known():
    with pytest.raises(UsageError, match=r"no source is known by 'kinesis://'; known are kafka://, csv://"):
        make_source("kinesis://stream", FIELDS)


def test_a_library_that_is_not_there_is_told_with_the_extra(monkeypatch):
    found = builtins.__import__

    def without(name, *arguments):
        if name.startswith("confluent_kafka"):
            raise ImportError(f"No module named '{name}'", name=name)
        return found(name, *arguments)

    for module in ("photon.connect.kafka", "photon.connect.kafka_client"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(UsageError, match=r"needs confluent_kafka: pip install 'photon-joiner\[kafka\]'"):
        make_source("kafka://h:9092/t", FIELDS)


def test_others_bring_sources_by_entry_points(monkeypatch):
    def points(group):
        return [EntryPoint("pulsar", f"{__name__}:make_theirs", group)]

    monkeypatch.setattr("importlib.metadata.entry_points", points)
    assert make_source("pulsar://h/t?a=b", FIELDS) == ("pulsar://h/t", {"a": "b"}, FIELDS)


def make_theirs(uri, fields):
    return uri.shown, uri.options, fields
