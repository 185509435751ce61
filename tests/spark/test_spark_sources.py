"""Lines as Spark reads them against lines as Photon reads them."""

import gzip
import json

import pytest

from photon.core.formats import JsonLines
from photon.core.ids import IdPacker
from photon.core.settings import Foreign, Primary

pytestmark = pytest.mark.spark

LINES = [
    b'{"id":"a","primary_id":"p","ts_us":1}',
    b'  {"id":"spaces","primary_id":"p","ts_us":1}\t\r',
    b'{"ts_us":1,\r"id":"return inside","primary_id":"p"}',
    b"",
    b" \t\r",
    b'{"id":7,"primary_id":-8,"ts_us":1}',
    b'{"id":18446744073709551616,"primary_id":340282366920938463463374607431768211455,"ts_us":1}',
    b'{"id":"twice","id":"last","primary_id":"p","ts_us":1}',
    '{"id":"ü\\u00fc😀\\ud83d\\ude00","primary_id":"p","ts_us":1}'.encode(),
    b'{"id":"\\u0000","primary_id":"p","ts_us":1}',
    b'{"id":"","primary_id":"p","ts_us":1}',
    b'{"id":"deep","primary_id":"p","ts_us":1,"x":' + b"[" * 200 + b"]" * 200 + b"}",
    b'{"id":"f","primary_id":1.0,"ts_us":1}',
    b'{"id":1e3,"primary_id":"p","ts_us":1}',
    b'{"id":12345678901234567890.0,"primary_id":"p","ts_us":1}',
    b'{"id":true,"primary_id":"p","ts_us":1}',
    b'{"id":null,"primary_id":"p","ts_us":1}',
    b'{"id":{"id":"x"},"primary_id":"p","ts_us":1}',
    b'{"id":["x"],"primary_id":"p","ts_us":1}',
    b'{"primary_id":"no id","ts_us":1}',
    b'{"id":"no primary id","ts_us":1}',
    b'{"id":"trailing","primary_id":"p","ts_us":1} x',
    b'{"id":"two","primary_id":"p","ts_us":1}{"id":"objects","primary_id":"p","ts_us":1}',
    b'{"id":"two","primary_id":"p","ts_us":1},{"id":"objects","primary_id":"p","ts_us":1}',
    b'{"id":"close","primary_id":"p","ts_us":1}],[{"id":"open","primary_id":"p","ts_us":1}',
    b'[{"id":"array","primary_id":"p","ts_us":1}]',
    b'"text"',
    b"12",
    b"null",
    b"{",
    b'{"id":"torn","prim',
    b"{'id':'quotes','primary_id':'p','ts_us':1}",
    b'{"id":"comma","primary_id":"p","ts_us":1,}',
    b'{"id":"nan","primary_id":"p","ts_us":1,"x":NaN}',
    b'{"id":"zero","primary_id":"p","ts_us":1,"x":01}',
    b'{"id":"tab\there","primary_id":"p","ts_us":1}',
    b'{"id":"latin \xfc","primary_id":"p","ts_us":1}',
    b'{"id":"surrogate \xed\xa0\x80","primary_id":"p","ts_us":1}',
    b'{"id":"escape \\x","primary_id":"p","ts_us":1}',
    b"not json at all",
    b'\xef\xbb\xbf {"id":"after a byte order mark","primary_id":"p","ts_us":1}',
    b"\xef\xbb\xbf",
    b'\xef\xbb\xbf\xef\xbb\xbf{"id":"after two","primary_id":"p","ts_us":1}',
]


def read(session, *paths):
    from spark.paths import input_paths
    from spark.sources import read_lines

    return read_lines(session, input_paths([str(path) for path in paths]))


def test_a_line_is_an_event_to_spark_if_and_only_if_it_is_one_to_photon(session, tmp_path):
    from spark.sources import foreign_events

    path = tmp_path / "clicks.jsonl"
    path.write_bytes(b"\n".join(LINES))
    rows = foreign_events(read(session, path), Foreign()).collect()
    packer = IdPacker()
    batch = JsonLines(Primary(), Foreign(), packer).parse_foreign(b"\n".join(LINES))
    events = [row for row in rows if row.id is not None]
    assert packer.pack([row.id for row in events]) == batch.ids
    assert packer.pack([row.primary_id for row in events]) == batch.primary_ids
    assert len(rows) - len(events) == len(batch.malformed)
    assert len(events) > 8
    assert len(batch.malformed) > 20


def test_field_names_may_hold_anything_that_settings_allow(session, tmp_path):
    from spark.sources import foreign_events, joined_events

    names = Foreign(id="a..b c", primary_id="it's `ü`]", time="$")
    event = {"a.b c": 1, names.primary_id: 2**70, names.time: 3, "b c": "no"}
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({**event, "primary": {"[0]": 2**70}}) + "\n")
    lines = read(session, path)
    assert [tuple(row) for row in foreign_events(lines, names).collect()] == [("1", str(2**70))]
    row = joined_events(lines, names, Primary(id="[0]"), "primary").first()
    assert (row.id, row.primary_id) == ("1", str(2**70))


def test_fields_may_lie_in_objects_and_the_primary_event_in_any_field(session, tmp_path):
    from spark.sources import dead_letters, foreign_events, joined_events

    names = Foreign(id="ctx.click.id", primary_id="ctx.query")
    event = {"ctx": {"click": {"id": 2**70}, "query": "q"}, "user": {"who": {"id": 5}}}
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps(event) + "\n" + json.dumps({"ctx": {"click": 1}}) + "\n")
    lines = read(session, path)
    assert [tuple(row) for row in foreign_events(lines, names).collect()] == [(str(2**70), "q"), (None, None)]
    row = joined_events(lines, names, Primary(id="who.id"), "user").first()
    assert (row.id, row.primary_id) == (str(2**70), "5")
    path.write_text(json.dumps({"fate": "unjoinable", "event": event}) + "\n")
    assert dead_letters(read(session, path), names).first().id == str(2**70)


def test_the_content_of_an_event_is_the_same_whatever_its_white_space_and_order(session, tmp_path):
    from spark.sources import primary_events

    path = tmp_path / "queries.jsonl"
    path.write_text(
        '{"id":"q","x":{"a":1,"b":[1.5,"\\u00fc"]}}\n'
        '{ "x" : {"b":[1.50, "ü"], "a":1}, "id":"q"}\n'
        '{"id":"q","x":{"a":2,"b":[1.5,"ü"]}}\n'
    )
    contents = [row.content for row in primary_events(read(session, path), Primary()).collect()]
    assert contents[0] == contents[1] != contents[2]


@pytest.mark.parametrize(
    "name", ["10.0.0.1:42-0.jsonl", "a b[1]{x,y}.jsonl", "p%20q#?*\\.jsonl", "ü.jsonl.gz"]
)
def test_files_with_awkward_names_are_read(session, tmp_path, name):
    content = b'{"id":1}\n\n{"id":2}\n'
    (tmp_path / name).write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    assert sorted(row.line for row in read(session, tmp_path).collect()) == ['{"id":1}', '{"id":2}']


def test_a_damaged_file_fails_in_one_line_that_names_it(session, tmp_path):
    from spark.session import SparkFailedError, spark_failures

    (tmp_path / "clicks.jsonl.gz").write_bytes(gzip.compress(b'{"id":1}\n' * 10_000)[:-20])
    with pytest.raises(SparkFailedError) as failure, spark_failures():
        read(session, tmp_path).count()
    assert "clicks.jsonl.gz" in str(failure.value)
    assert "\n" not in str(failure.value)
