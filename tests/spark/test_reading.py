"""Log lines with their places against what Photon's own readers find."""

import gzip
import os
from functools import partial

import pytest
import zstandard

from photon.core.columns import split_ids, unpack_times
from photon.core.errors import StorageError
from photon.core.ids import IdPacker
from photon.core.settings import Foreign, Logs, Primary, Settings
from photon.logs.formats import JsonLines
from spark.reading.lines import Range, chunks_of, local_file
from spark.reading.paths import escaped
from tests.spark.test_spark_sources import LINES

pytestmark = pytest.mark.spark


def spark_paths(*paths):
    from spark.reading.paths import input_paths

    return input_paths([str(path) for path in paths])


SCHEMA = "path string, start long, length int, id binary, primary_id binary, time_us long, line binary, "
SCHEMA += "reason string"


def places_and_facts(settings, foreign=True):
    """A row for each line: where it stands, and what the parser makes of it."""
    import pyarrow as pa

    from spark.reading.lines import ChunkParser

    parser = ChunkParser(settings)
    types = {"string": pa.string(), "long": pa.int64(), "int": pa.int32(), "binary": pa.binary()}
    schema = pa.schema([(name, types[kind]) for name, kind in map(str.split, SCHEMA.split(", "))])

    def rows(name, path, chunk):
        batch = (parser.foreign if foreign else parser.primary)(path, chunk)
        lines = [
            {"start": int(start), "id": key, "line": line, "reason": None}
            for start, key, line in zip(batch.starts, split_ids(batch.ids), batch.lines, strict=True)
        ]
        if foreign:
            times = unpack_times(batch.times).tolist()
            for row, primary, time_us in zip(lines, split_ids(batch.primary_ids), times, strict=True):
                row |= {"primary_id": primary, "time_us": time_us}
        lines += [{"start": bad.start, "line": bad.line, "reason": bad.reason} for bad in batch.malformed]
        for row in lines:
            row |= {"path": name, "start": row["start"] + chunk.start, "length": len(row["line"])}
        yield pa.RecordBatch.from_pylist(lines, schema=schema)

    return rows


def frame_of(session, paths, settings=None, foreign=True, unended=False):
    from spark.reading.events import parsed
    from spark.reading.lines import LogSet

    settings = settings or Settings()
    logs = LogSet(paths, settings, partial(places_and_facts, settings, foreign), unended)
    return parsed(session, logs, SCHEMA)


def read(session, *paths, **more):
    rows = frame_of(session, spark_paths(*paths), **more).collect()
    return sorted(rows, key=lambda row: (row.path, row.start))


@pytest.fixture
def small_splits(session):
    session.conf.set("spark.sql.files.maxPartitionBytes", "100b")
    yield
    session.conf.unset("spark.sql.files.maxPartitionBytes")


def check_against_parser(rows, data):
    batch = JsonLines(Primary(), Foreign(), IdPacker()).parse_foreign(data)
    events = [row for row in rows if row.reason is None]
    assert b"".join(bytes(row.id) for row in events) == batch.ids
    assert b"".join(bytes(row.primary_id) for row in events) == batch.primary_ids
    assert b"".join(row.time_us.to_bytes(8, "little", signed=True) for row in events) == batch.times
    assert [bytes(row.line) for row in events] == batch.lines
    assert [row.start for row in events] == batch.starts.tolist()
    assert [data[row.start : row.start + row.length] for row in events] == batch.lines
    bad = [(row.start, bytes(row.line), row.reason) for row in rows if row.reason is not None]
    assert bad == [(one.start, one.line, one.reason) for one in batch.malformed]


def as_uri(path):
    """As a user names what Spark is to read: with a glob of Spark's own."""
    return f"file://{path.parent}/{escaped(path.name[:-1])}[{path.name[-1]}]"


def clicks(count, first=0):
    return [
        b'{"id":"c%d","primary_id":"p%d","ts_us":%d}' % (n, n % 7, n) for n in range(first, first + count)
    ]


def check_both_ways(session, path, data, **more):
    """Read by Python and by Spark: what the parser makes of `data`."""
    for uri in [*spark_paths(path), as_uri(path)]:
        rows = frame_of(session, [uri], **more).collect()
        rows.sort(key=lambda row: row.start)
        check_against_parser(rows, data)
        assert all(row.path.endswith(str(path)) for row in rows)


@pytest.mark.parametrize("split", ["128m", "100b"])
def test_every_line_is_what_the_parser_makes_of_it_and_where_it_stands_in_one_split_and_in_many(
    session, tmp_path, split
):
    path = tmp_path / "clicks {1} 1%.jsonl"
    data = b"\n".join(LINES) + b"\n"
    path.write_bytes(data)
    session.conf.set("spark.sql.files.maxPartitionBytes", split)
    try:
        check_both_ways(session, path, data)
        assert (frame_of(session, spark_paths(path)).rdd.getNumPartitions() > 10) == (split == "100b")
    finally:
        session.conf.unset("spark.sql.files.maxPartitionBytes")


@pytest.mark.parametrize("tail", [b'{"id":"last","primary_id":"p","ts_us":9}', b'{"id":"torn'])
def test_an_unended_last_line_is_left_or_counts_if_it_is_an_object(session, tmp_path, tail):
    path, whole = tmp_path / "clicks.jsonl", b"\n".join(clicks(3)) + b"\n"
    path.write_bytes(whole + tail)
    check_both_ways(session, path, whole)
    check_both_ways(session, path, whole + (tail if tail.endswith(b"}") else b""), unended=True)


def test_archives_are_unpacked_and_a_split_never_cuts_them(session, tmp_path, small_splits):
    data = b"\n".join([*clicks(50), b"{torn"])[:-6]
    packed = tmp_path / "clicks.jsonl.gz"
    packed.write_bytes(gzip.compress(data))
    check_both_ways(session, packed, data)
    packed = tmp_path / "clicks.jsonl.zst"
    packed.write_bytes(zstandard.compress(data))
    check_both_ways(session, packed, data)


def test_a_damaged_archive_fails_the_job_and_is_named(session, tmp_path):
    from spark.session import SparkFailedError, spark_failures

    packed = tmp_path / "clicks.jsonl.gz"
    packed.write_bytes(gzip.compress(b"\n".join(clicks(50)))[:-9])
    with pytest.raises(SparkFailedError) as failure, spark_failures():
        read(session, packed)
    assert "clicks.jsonl.gz: not a whole archive" in str(failure.value)
    assert "\n" not in str(failure.value)


def test_a_line_beyond_the_bound_is_malformed_and_the_rest_goes_on(session, tmp_path):
    settings = Settings(logs=Logs(line_bytes_max=1024, chunk_bytes=4096))
    long = b'{"id":"long","primary_id":"p","ts_us":1,"x":"' + b"x" * 9000 + b'"}'
    path = tmp_path / "clicks.jsonl"
    path.write_bytes(b"\n".join([*clicks(2), long, *clicks(100, first=2), long]) + b"\n")
    for uri in [*spark_paths(path), as_uri(path)]:
        rows = frame_of(session, [uri], settings).collect()
        assert sorted(bytes(row.line) for row in rows if row.reason is None) == sorted(clicks(102))
        bad = [row for row in rows if row.reason]
        assert len(bad) == 2
        assert all(bytes(row.line) == long[:1024] and "line_bytes_max" in row.reason for row in bad)


def test_what_a_log_gained_since_it_was_listed_is_not_read(session, tmp_path):
    path = tmp_path / "clicks.jsonl"
    whole = b"\n".join(clicks(3)) + b"\n"
    path.write_bytes(whole + b'{"id":"begun"')
    frame = frame_of(session, spark_paths(path), unended=True)
    with path.open("ab") as log:
        log.write(b',"primary_id":"p","ts_us":1}\n' + clicks(1)[0] + b"\n")
    assert sorted(bytes(row.line) for row in frame.collect()) == clicks(3)


def test_primaries_have_an_id_and_no_time(session, tmp_path):
    path = tmp_path / "queries.jsonl"
    path.write_bytes(b'{"id":"10.0.0.1:7:1700000000000000"}\n{"id":"q"}\n\n{"id":null}\n')
    rows = read(session, path, foreign=False)
    assert rows[0].id == IdPacker().pack(["10.0.0.1:7:1700000000000000"])
    assert [row.start for row in rows] == [0, 37, 49]
    assert rows[2].id is None and rows[2].reason


def lines_of(file):
    found = chunks_of(Range(file, 0, file.size), Settings().logs, unended=False)
    return sum(chunk.data.count(b"\n") for _, chunk in found)


def test_a_file_that_is_shorter_where_it_is_read_than_where_it_was_listed_is_an_error(tmp_path):
    """Cut meanwhile, or an old state of it on another machine: its missing lines would seem lost."""
    path = tmp_path / "joined.jsonl"
    path.write_bytes(b'{"id":"a"}\n' * 100)
    listed = local_file(str(path))
    assert lines_of(listed) == 100
    os.truncate(path, 11 * 40)
    with pytest.raises(StorageError, match="holds 440 bytes where 1100 were listed"):
        lines_of(listed)


def test_a_range_is_of_one_file_whatever_is_rotated_while_it_is_read(tmp_path):
    path = tmp_path / "queries.jsonl"
    path.write_bytes(b'{"id":"a"}\n' * 100)
    file = local_file(str(path))
    chunks = chunks_of(Range(file, 0, file.size), Logs(chunk_bytes=110), unended=False)
    found = next(chunks)[1].data
    path.rename(tmp_path / "queries.jsonl.1")
    path.write_bytes(b'{"id":"b"}\n' * 200)
    assert found + b"".join(chunk.data for _, chunk in chunks) == b'{"id":"a"}\n' * 100


def test_a_log_that_is_rotated_once_it_is_listed_is_read_under_its_new_name_or_told_to_be_gone(tmp_path):
    path = tmp_path / "clicks.jsonl"
    path.write_bytes(b'{"id":"a"}\n' * 100)
    listed = local_file(str(path))
    rotated = path.rename(tmp_path / "clicks.jsonl.1")
    path.write_bytes(b'{"id":"b"}\n' * 200)
    found = chunks_of(Range(listed, 0, listed.size), Logs(), unended=False)
    assert b"".join(chunk.data for _, chunk in found) == b'{"id":"a"}\n' * 100
    rotated.unlink()
    with pytest.raises(StorageError, match="replaced, or packed, meanwhile"):
        lines_of(listed)
