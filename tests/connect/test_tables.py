"""CSV and Parquet: each row of a whole file is an event, once, with the values that it has."""

import contextlib
import datetime
import decimal
import errno
import gzip
import json
import os
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from photon.connect.local_files import LocalFiles
from photon.connect.ports import Fields, State, shown
from photon.connect.sample import sampled
from photon.connect.uris import make_source
from photon.core.errors import UnavailableError, UsageError
from tests.waiting import wait_until

FIELDS = Fields(("id", "primary_id"), "ts", "ms")


def read(text, after=None, drain=True, fields=FIELDS):
    """Partition -> its events, and the last number of each."""
    source = make_source(str(text), fields)
    source.open(after or {}, drain)
    events, last = {}, {}
    while source.state() is not (State.FINISHED if drain else State.IDLE):
        for batch in source.read(0.0):
            found = [json.loads(line) for line in batch.lines.splitlines()]
            assert len(found) == sum(count for _, count in batch.runs)
            events.setdefault(shown(batch.partition), []).extend(found)
            last[shown(batch.partition)] = batch.runs[-1][0] + batch.runs[-1][1] - 1
    source.close()
    return events, last


def test_csv_keeps_its_text_and_makes_numbers_of_times_alone(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text('id,primary_id,ts,note\n007,0042,1700000000123,"a ""q"",\nb"\n8,9,1.5,\n', "utf-8")
    events, last = read(path)
    assert events == {
        str(path): [
            {"id": "007", "primary_id": "0042", "ts": 1700000000123.0, "note": 'a "q",\nb'},
            {"id": "8", "primary_id": "9", "ts": 1.5, "note": None},
        ]
    }
    assert last == {str(path): 1}


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-be", "utf-8-sig"])
def test_csv_may_have_a_byte_order_mark(tmp_path, encoding):
    """As spreadsheets write it."""
    rows = [{"id": "é", "ts": number} for number in range(70_000)]
    text = "id,ts\n" + "".join(f"{row['id']},{row['ts']}\n" for row in rows)
    mark = "\ufeff" if encoding.endswith("be") else ""
    with gzip.open(tmp_path / "a.csv.gz", "wb") as file:
        file.write((mark + text).encode(encoding))
    assert read(tmp_path / "a.csv.gz")[0] == {str(tmp_path / "a.csv.gz"): rows}


def test_a_time_that_is_text_stays_so(tmp_path):
    path = tmp_path / "a.csv"
    path.write_text("id,ts\n1,2024-05-01T12:00:00Z\n", "utf-8")
    assert read(path)[0][str(path)] == [{"id": "1", "ts": "2024-05-01T12:00:00Z"}]
    of_text = Fields(("id",), "ts", "rfc3339")
    path.write_text("id,ts\n1,20240501\n", "utf-8")
    assert read(path, fields=of_text)[0][str(path)] == [{"id": "1", "ts": "20240501"}]


def test_a_time_that_is_none_changes_no_other_row(tmp_path):
    path = tmp_path / "a.csv"
    times = [str(1_764_400_000_123_456_700 + row) for row in range(1_000)]
    given = {3: "n/a", 500: "1764400000.5", 501: "", 999: "99999999999999999999"}
    lines = [f"{row},{given.get(row, time)}\n" for row, time in enumerate(times)]
    path.write_text("id,ts\n" + "".join(lines), "utf-8")
    events, last = read(path)
    assert last == {str(path): 999}
    wanted = {**dict(enumerate(map(int, times))), 3: "n/a", 500: 1764400000.5, 501: None, 999: 1e20}
    assert [event["ts"] for event in events[str(path)]] == list(wanted.values())
    assert [event["id"] for event in events[str(path)]] == list(map(str, range(1_000)))


def test_a_file_that_is_none_holds_up_no_other(tmp_path):
    (tmp_path / "a.csv").write_text("id,ts\n1,2\n3\n")
    source = make_source(str(tmp_path / "*.csv"), FIELDS)
    source.open({}, drain=False)
    with pytest.raises(UnavailableError, match=r"a\.csv"):
        source.read(0.0)
    (tmp_path / "b.csv").write_text("id,ts\n4,5\n")
    found = []

    def came():
        with contextlib.suppress(UnavailableError):
            found.extend(line for batch in source.read(0.1) for line in batch.lines.splitlines())
        return found

    wait_until(came, 10.0)
    assert [json.loads(line) for line in found] == [{"id": "4", "ts": 5}]
    (tmp_path / "a.csv").unlink()
    told = []
    while source.state() is not State.IDLE:
        with pytest.raises(UnavailableError) as error:
            source.read(0.0)
        told.append(str(error.value))
    assert "a.csv is gone" in told[-1]
    assert source.read(0.0) == [] and source.state() is State.IDLE
    source.close()


def test_files_are_known_up_to_the_last_look_once_all_are_read(tmp_path):
    (tmp_path / "a.csv").write_text("id,ts\n1,2\n")
    (tmp_path / "b.csv").write_text("id,ts\n3\n")
    began = time.time_ns() // 1_000
    source = make_source(str(tmp_path / "*.csv"), FIELDS)
    source.open({}, drain=False)
    for _ in range(3):
        with contextlib.suppress(UnavailableError):
            source.read(0.0)
        assert source.known_to() == 0  # one can't be read
    (tmp_path / "b.csv").write_text("id,ts\n3,4\n")

    def known():
        with contextlib.suppress(UnavailableError):
            source.read(0.05)
        return source.known_to()

    wait_until(known, 30.0)
    assert began <= source.known_to() <= time.time_ns() // 1_000
    source.close()


def test_csv_may_be_packed_and_have_another_delimiter(tmp_path):
    with gzip.open(tmp_path / "a.csv.gz", "wt") as file:
        file.write("id;ts\n1;2\n")
    (events,) = read(f"csv://{tmp_path}/*.csv.gz?delimiter=;")[0].values()
    assert events == [{"id": "1", "ts": 2}]
    with pytest.raises(UsageError, match="a delimiter is one character"):
        make_source("csv://a.csv?delimiter=ab", FIELDS)


def test_parquet_keeps_its_types_and_gives_times_a_zone(tmp_path):
    at = datetime.datetime(2024, 5, 1, 12, 0, 0, 250_000)  # noqa: DTZ001
    row = {"id": 17, "ts": at, "price": decimal.Decimal("1.10"), "nested": {"list": [1, None]}, "raw": b"\0a"}
    path = tmp_path / "a.parquet"
    pq.write_table(pa.Table.from_pylist([row]), path)
    (events,) = read(path)[0].values()
    assert events == [
        {
            "id": 17,
            "ts": "2024-05-01T12:00:00.250000Z",
            "price": "1.10",
            "nested": {"list": [1, None]},
            "raw": "AGE=",
        }
    ]


def test_times_within_structs_lists_and_maps_get_a_zone_too_and_nanoseconds_stop_no_file(tmp_path):
    at, ns = pa.timestamp("us"), pa.timestamp("ns")
    first = datetime.datetime(2024, 5, 1, 12, 0, 0, 250_000)  # noqa: DTZ001
    columns = {
        "in": pa.array([{"at": first, "n": 1}, None], pa.struct([("at", at), ("n", pa.int64())])),
        "list": pa.array([[first, None], None], pa.list_(at)),
        "large": pa.array([[{"at": first}], []], pa.large_list(pa.struct([("at", at)]))),
        "fixed": pa.array([[first], None], pa.list_(at, 1)),
        "map": pa.array([[("k", first)], None], pa.map_(pa.string(), at)),
        "zoned": pa.array([[first], None], pa.list_(pa.timestamp("us", "Asia/Tokyo"))),
        "ns": pa.array([1_714_564_800_123_456_789, None], ns),
    }
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table(columns), path)
    (events,) = read(path)[0].values()
    text = "2024-05-01T12:00:00.250000Z"
    assert events[0] == {
        "in": {"at": text, "n": 1},
        "list": [text, None],
        "large": [{"at": text}],
        "fixed": [text],
        "map": [["k", text]],
        "zoned": ["2024-05-01T21:00:00.250000+09:00"],
        "ns": "2024-05-01T12:00:00.123456Z",
    }
    assert events[1] == {**dict.fromkeys(columns), "large": []}


def test_a_directory_that_cannot_be_listed_is_told_once_and_holds_up_no_other(tmp_path, monkeypatch):
    for name in ("closed", "open"):
        (tmp_path / name).mkdir()
    (tmp_path / "open" / "a.csv").write_text("id\n1\n", "utf-8")
    listing = os.listdir

    def refusing(path):
        if os.fspath(path) == str(tmp_path / "closed"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return listing(path)

    monkeypatch.setattr(os, "listdir", refusing)
    with pytest.raises(
        UsageError, match=r"closed cannot be read \(Permission denied\); see to its permissions"
    ):
        read(tmp_path / "*" / "*.csv")
    monkeypatch.setattr(LocalFiles, "look_every_s", 0.0)
    source = make_source(str(tmp_path / "*" / "*.csv"), FIELDS)
    source.open({}, drain=False)
    with pytest.raises(UnavailableError, match="closed cannot be read"):
        source.read(0.0)
    for _ in range(3):
        assert [batch.lines for batch in source.read(0.0)] in ([b'{"id":"1"}\n'], [])
    assert source.state() is State.IDLE
    source.close()


def test_reading_goes_on_behind_the_last_row(tmp_path):
    rows = [{"id": number} for number in range(40_000)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    pq.write_table(pa.Table.from_pylist(rows[:3]), tmp_path / "b.parquet")
    a, b = str(tmp_path / "a.parquet"), str(tmp_path / "b.parquet")
    whole = make_source(b, FIELDS)
    whole.open({}, True)
    (read_before,) = whole.read(0.0)

    def name(path):
        status = os.stat(path)
        return f"{path}\0{status.st_size}-{status.st_mtime_ns}"

    assert read_before.partition == name(b)
    for after in (-1, 0, 16_383, 16_384, 39_998):
        events, last = read(tmp_path / "*.parquet", {name(a): after, name(b): 2})
        assert events == {a: rows[after + 1 :]}
        assert last == {a: 39_999}
    assert read(tmp_path / "*.parquet", {name(a): 39_999, name(b): 2})[0] == {}


@pytest.mark.parametrize("followed", [False, True])
def test_a_file_that_was_replaced_is_read_from_its_start(tmp_path, monkeypatch, followed):
    monkeypatch.setattr(LocalFiles, "look_every_s", 0.0)
    path = tmp_path / "a.csv"
    path.write_text("id\n1\n2\n")
    source = make_source(str(tmp_path / "*.csv"), FIELDS)
    source.open({}, drain=not followed)
    (first,) = source.read(0.0)
    assert (source.read(0.0), source.read(0.0)) == ([], [])
    path.write_text("id\n3\n4\n5\n")
    if followed:
        assert source.read(0.0) == [], "it may not be whole yet"
        os.utime(path, (1, 1))
    else:
        source.open({first.partition: 1}, drain=True)
    (second,) = source.read(0.0)
    assert second.lines == b'{"id":"3"}\n{"id":"4"}\n{"id":"5"}\n'
    assert (second.runs, first.runs) == (((0, 3),), ((0, 2),))
    assert shown(first.partition) == shown(second.partition) == str(path)
    assert first.partition != second.partition
    assert (source.read(0.0), source.read(0.0)) == ([], []), "once"
    source.close()


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16"])
@pytest.mark.parametrize("open_", [open, gzip.open])
def test_a_quote_that_is_never_closed_swallows_no_rows(tmp_path, encoding, open_):
    """All rows behind it were one value, of an event that was read as well as any."""
    name = tmp_path / ("a.csv" if open_ is open else "a.csv.gz")
    for text, whole in (('id,note\n1,"x\n2,y\n', False), ('id,note\n1,"x\n2,y"""\n3,', True)):
        with open_(name, "wt", encoding=encoding) as file:
            file.write(text)
        if whole:
            assert read(name)[0] == {str(name): [{"id": "1", "note": 'x\n2,y"'}, {"id": "3", "note": None}]}
        else:
            with pytest.raises(UsageError, match=r"begins with a quote does not end with one; is it whole\?"):
                read(name)


@pytest.mark.parametrize("name", ["a.csv", "a.parquet"])
def test_a_file_that_is_not_whole(tmp_path, name):
    (tmp_path / name).write_bytes(b"")
    with pytest.raises(UsageError, match=rf"{name}: .*is it whole\?"):
        read(tmp_path / name)
    source = make_source(str(tmp_path / name), FIELDS)
    source.open({}, False)
    for _ in range(2):  # it stays the next one to be read
        with pytest.raises(UnavailableError, match="write it under another name and rename it"):
            source.read(0.0)
    pq.write_table(pa.table({"id": [1]}), tmp_path / "whole")
    (tmp_path / name).write_bytes((tmp_path / "whole").read_bytes() if "parquet" in name else b"id\n1\n")
    assert [json.loads(batch.lines)["id"] in (1, "1") for batch in source.read(0.0)] == [True]


@pytest.mark.parametrize(
    ("data", "told"),
    [
        ("id,note\n1,caf\xe9\n", r"a\.csv: not UTF-8: convert the file, as by iconv"),
        ("id,caf\xe9\n1,2\n", r"a\.csv: not UTF-8: convert the file, as by iconv"),
        ("id,n,id,\n1,2,3,\n", r"a\.csv: column 'id' stands there twice"),
    ],
    ids=["Latin-1", "Latin-1 in its header", "a name twice"],
)
def test_what_cannot_be_read_as_it_is_meant_is_told_with_the_mend(tmp_path, data, told):
    (tmp_path / "a.csv").write_text(data, "latin-1")
    with pytest.raises(UsageError, match=told) as error:
        read(tmp_path / "a.csv")
    assert "whole" not in str(error.value)
    source = make_source(str(tmp_path / "*.csv"), FIELDS)
    source.open({}, False)
    with pytest.raises(UnavailableError, match=told):
        source.read(0.0)


def test_rows_that_do_not_fit_their_header_are_told(tmp_path):
    (tmp_path / "a.csv").write_text("id,ts\n1,2\n3\n", "utf-8")
    with pytest.raises(UsageError, match=r"a\.csv: .*Expected 2 columns, got 1"):
        read(tmp_path / "a.csv")


def test_new_files_are_found_while_it_is_followed(tmp_path):
    source = make_source(str(tmp_path / "*.csv"), FIELDS)
    source.open({}, False)
    assert source.state() is State.IDLE
    (tmp_path / "a.csv").write_text("id\n1\n", "utf-8")
    found = []
    while not found:
        found = source.read(2.0)
    assert found[0].lines == b'{"id":"1"}\n'


def test_a_pattern_without_files_is_refused_where_nothing_can_come(tmp_path):
    with pytest.raises(UsageError, match=r"nope\*\.csv: no file matches"):
        read(tmp_path / "nope*.csv")


def test_a_sample_is_of_the_first_records_of_each_source(tmp_path):
    rows = [{"id": number} for number in range(40_000)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    texts = [str(tmp_path / "*.parquet"), "/logs/*.jsonl"]
    for records, whole in ((10, False), (32_000, False), (40_000, True)):
        with sampled(texts, FIELDS, records) as found:
            copy, other = found.patterns
            lines = Path(copy).read_bytes().splitlines()
            assert (other, found.whole) == ("/logs/*.jsonl", whole)
            assert [json.loads(line) for line in lines] == rows[: len(lines)]
            assert len(lines) >= min(records, len(rows))
    assert not Path(copy).exists()
