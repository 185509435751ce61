"""Objects of a store as a source: each record of each object once, whatever they are packed by."""

import gzip
import json
import signal
import urllib.request

import obstore
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from obstore.store import MemoryStore

from photon.connect import stored_objects
from photon.connect.conformance import check_source
from photon.connect.ports import Fields, State, shown
from photon.connect.stored_objects import StoredObjects
from photon.connect.uris import is_csv, make_source
from photon.core.errors import UnavailableError, UsageError
from tests.system import start_photon
from tests.waiting import wait_until

FIELDS = Fields(("id", "primary_id"), "ts", "ms")


@pytest.fixture
def store(monkeypatch):
    one = MemoryStore()
    monkeypatch.setattr(stored_objects, "store_of", lambda uri, url, given: one)
    monkeypatch.setattr(StoredObjects, "look_every_s", 0.0)
    return one


def lines(*ids):
    return b"".join(b'{"id":"%s"}\n' % str(id_).encode() for id_ in ids)


def parquet(*ids):
    sink = pa.BufferOutputStream()
    pq.write_table(pa.table({"id": list(map(str, ids))}), sink)
    return sink.getvalue().to_pybytes()


def read(text, after=None):
    """Object -> ids of its records; partition -> the number of its last one."""
    source = make_source(text, FIELDS)
    source.open(after or {}, True)
    found, last = {}, {}
    while source.state() is not State.FINISHED:
        for batch in source.read(0.0):
            ids = [json.loads(line)["id"] for line in batch.lines.splitlines()]
            assert [(batch.runs[0][1])] == [len(ids)]
            found.setdefault(shown(batch.partition), []).extend(ids)
            last[batch.partition] = sum(batch.runs[0]) - 1
    source.close()
    return found, last


def test_each_object_is_read_as_its_name_says(store):
    content = {
        "day/a.jsonl": lines(1, 2),
        "day/b.jsonl.gz": gzip.compress(lines(3)) + gzip.compress(lines(4)),
        "day/c.zst": zstandard.compress(lines(5)) + zstandard.compress(lines(6)),
        "day/d.csv": b"id,ts\n7,1\n8,2\n",
        "day/e.csv.gz": gzip.compress(b"id,ts\n9,1\n"),
        "day/f.parquet": parquet(10, 11),
        "day/g.log": lines(12) + b'{"id":"13"}',
        "day/large.jsonl": lines(*range(100_000, 200_000)),
        "day/empty": b"",
    }
    for path, data in content.items():
        obstore.put(store, path, data)
    found, last = read("s3://lake/day/*")
    large = found.pop("s3://lake/day/large.jsonl")
    assert large == list(map(str, range(100_000, 200_000)))
    assert found == {
        "s3://lake/day/a.jsonl": ["1", "2"],
        "s3://lake/day/b.jsonl.gz": ["3", "4"],
        "s3://lake/day/c.zst": ["5", "6"],
        "s3://lake/day/d.csv": ["7", "8"],
        "s3://lake/day/e.csv.gz": ["9"],
        "s3://lake/day/f.parquet": ["10", "11"],
        "s3://lake/day/g.log": ["12", "13"],
    }
    assert read("s3://lake/day/*", last)[0] == {}
    for partition in last:
        behind = {**last, partition: 0}
        assert {len(ids) for ids in read("s3://lake/day/*", behind)[0].values()} <= {1, 99_999}


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("s3://lake/logs", ["logs/a", "logs/x/b"]),
        ("s3://lake/logs/", ["logs/a", "logs/x/b"]),
        ("s3://lake/logs/a", ["logs/a"]),
        ("s3://lake/logs/*", ["logs/a"]),
        ("s3://lake/logs/**/*", ["logs/a", "logs/x/b"]),
        ("s3://lake/*/*/[ac]", []),
        ("s3://lake/l[op]gs/*/b", ["logs/x/b"]),
        ("gs://lake", ["logs/a", "logs/x/b", "logs2/c"]),
        ("az://lake/logs2/c", ["logs2/c"]),
    ],
)
def test_objects_are_named_as_files_are(store, text, named):
    for number, path in enumerate(("logs/a", "logs/x/b", "logs2/c")):
        obstore.put(store, path, lines(number))
    if not named:
        with pytest.raises(UsageError, match="no file matches"):
            read(text)
        return
    above = text.partition("lake")[0] + "lake/"
    assert list(read(text)[0]) == [above + path for path in named]


def test_what_lies_beside_what_is_named_is_not_listed(store, monkeypatch):
    """It may be millions of objects, and was asked for every 10 s."""
    listed, list_ = [], obstore.list
    monkeypatch.setattr(
        obstore, "list", lambda one, prefix, **given: listed.append(prefix) or list_(one, prefix, **given)
    )
    for path in ("logs/a", "logs/a/b", "logs/c"):
        obstore.put(store, path, lines(1))
    assert list(read("s3://lake/logs/a")[0]) == ["s3://lake/logs/a", "s3://lake/logs/a/b"]
    assert listed == ["logs/a"]


def test_another_object_of_a_name_is_read_from_its_start_and_new_ones_are_found(store):
    obstore.put(store, "a.jsonl", lines(1, 2))
    source = make_source("s3://lake/*", FIELDS)
    source.open({}, False)
    (first,) = source.read(0.0)
    assert source.read(0.0) == [] and source.state() is State.IDLE
    obstore.put(store, "a.jsonl", lines(3))
    obstore.put(store, "b.jsonl", lines(4))
    second, new = source.read(0.0)
    assert (second.lines, new.lines) == (lines(3), lines(4))
    assert shown(first.partition) == shown(second.partition) and first.partition != second.partition
    assert source.read(0.0) == []
    source.close()


def test_what_cannot_be_read_holds_up_no_other(store):
    obstore.put(store, "a.jsonl", b"BZh91AY&SY rest")
    obstore.put(store, "b.jsonl.gz", gzip.compress(lines(*range(100)))[:-10])
    obstore.put(store, "c.jsonl", lines(1))
    with pytest.raises(UsageError, match=r"s3://lake/a\.jsonl: compressed by bzip2"):
        read("s3://lake/*")
    source = make_source("s3://lake/*", FIELDS)
    source.open({}, False)
    told, found = set(), []
    for _ in range(8):
        try:
            found += source.read(0.0)
        except UnavailableError as error:
            told.add(str(error).partition(":/")[2].partition(":")[0])
    assert told == {"/lake/a.jsonl", "/lake/b.jsonl.gz"}
    assert [one.lines for one in found if "c.jsonl" in one.partition] == [lines(1)]
    for path in ("a.jsonl", "b.jsonl.gz"):
        obstore.delete(store, path)
    with pytest.raises(UnavailableError, match="is gone, though it was not read to its end"):
        source.read(0.0)
    source.close()


def test_a_new_object_waits_for_none_that_cannot_be_read(store):
    """Each of those is told by an error, after which its thread waits up to 10 s."""
    for number in range(5):
        obstore.put(store, f"bad{number}.jsonl", b"BZh91AY&SY rest")
    source = make_source("s3://lake/*", FIELDS)
    source.open({}, False)
    obstore.put(store, "c.jsonl", lines(1))
    assert [one.lines for one in source.read(0.0)] == [lines(1)]
    for number in (0, 0, 1, 2):  # told of, and tried again
        with pytest.raises(UnavailableError, match=f"bad{number}"):
            source.read(0.0)
    obstore.put(store, "d.jsonl", lines(2))
    assert [one.lines for one in source.read(0.0)] == [lines(2)]
    source.close()


def test_a_line_that_never_ends_takes_no_more_memory_than_its_bound(store, monkeypatch):
    monkeypatch.setattr("photon.connect.tables._LINE_BYTES_MAX", 1 << 20)
    obstore.put(store, "a.jsonl", bytes(9 << 20))
    with pytest.raises(UsageError, match="a line of more than 1 MiB: is it JSON, an object a line"):
        read("s3://lake/a.jsonl")


@pytest.mark.parametrize("text", ["s3://b/a.csv", "s3://b/a.csv.gz?region=x", "csv://a", "a.csv"])
def test_values_of_csv_are_texts_wherever_it_lies(text):
    assert is_csv(text) and not is_csv("s3://b/a.jsonl")


def test_a_delimiter_is_for_csv(store):
    obstore.put(store, "a.csv", b"id;ts\n1;2\n")
    assert read("s3://lake/a.csv?delimiter=;")[0] == {"s3://lake/a.csv": ["1"]}
    with pytest.raises(UsageError, match=r"write 's3://lake/a\.csv\?delimiter=;' for it"):
        read("s3://lake/a.csv")


@pytest.mark.long
def test_it_keeps_what_a_source_promises(s3):
    for number in range(5):
        s3.put(f"conforms/{number}.jsonl.gz", gzip.compress(lines(*range(number * 100))))
    checks = list(check_source(s3.uri("conforms"), FIELDS))
    assert len(checks) >= 5 and not [check for check in checks if check.failed or check.skipped]


@pytest.mark.long
def test_a_store_that_is_away_is_asked_again_and_one_that_is_not_there_is_told(s3):
    nobody = s3.uri("x").replace(s3.endpoint, "http://127.0.0.1:9")
    with pytest.raises(UnavailableError, match="tried again"):
        make_source(nobody, FIELDS).open({}, True)
    with pytest.raises(UsageError, match="nobucket"):
        make_source(s3.uri("x").replace("s3://bucket", "s3://nobucket"), FIELDS).open({}, True)


@pytest.mark.long
def test_a_listing_that_ends_at_a_name_that_cannot_be_said_is_told_with_its_mend(s3):
    """It was tried again for ever, and nothing below the prefix read."""
    for path, content in (("strange", None), ("strange/named//b.jsonl", lines(2))):
        ask = urllib.request.Request(f"{s3.endpoint}/{path}", data=content, method="PUT")
        urllib.request.urlopen(ask, timeout=5).close()
    with pytest.raises(UsageError, match=r"named//b.jsonl.*; rename that object, or name a prefix that"):
        make_source(s3.uri("named").replace("s3://bucket", "s3://strange"), FIELDS).open({}, True)


@pytest.mark.long
@pytest.mark.timeout(180)
def test_objects_are_joined_through_kills(s3, tmp_path):
    """Small ones by the hundred, and others while it runs; every process is killed twice."""
    out = tmp_path / "out"

    def put(number):
        ids = range(number * 20, number * 20 + 20)
        of_day = [f'{{"id":"q{one}","ts_us":{1_700_000_000_000_000 + one}}}\n' for one in ids]
        clicks = [
            f'{{"id":"c{one}","primary_id":"q{one}","ts_us":{1_700_000_001_000_000 + one}}}\n' for one in ids
        ]
        s3.put(f"queries/{number:04}.jsonl.gz", gzip.compress("".join(of_day).encode()))
        s3.put(f"clicks/{number:04}.jsonl", "".join(clicks).encode())

    def joined():
        return [
            json.loads(line)["id"]
            for path in out.glob("joined/*/*.jsonl*")
            for line in path.read_bytes().splitlines()
        ]

    for number in range(100):
        put(number)
    arguments = ("--primary", s3.uri("queries/*"), "--foreign", s3.uri("clicks"), "--out", out, "--follow")
    for life in range(3):
        process = start_photon("join", *arguments)
        wait_until(lambda: len(joined()) >= 200 * (life + 1), 60)
        if life < 2:
            process.send_signal(signal.SIGKILL)
            process.wait()
            for number in range(100 + life * 20, 120 + life * 20):
                put(number)
    wait_until(lambda: len(joined()) >= 2_800, 90)
    process.terminate()
    _, told = process.communicate(timeout=60)
    assert process.returncode == 0, told
    assert sorted(joined()) == sorted(f"c{one}" for one in range(2_800))
