"""What verification takes from logs of every kind, against what Photon reads."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from photon.core.ids import IdPacker
from photon.core.settings import Adapter, Foreign, Logs, Primary, Settings
from photon.logs.files import Chunk
from photon.logs.formats import JsonLines
from photon.logs.parquet import convert
from tests.spark.kit import foreign, joined, letter, primary

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


def rows_of(source, session, *paths, settings=None):
    """Rows of one of the functions of spark.verification.facts, read by Spark, or here (None)."""
    from spark.reading.lines import log_files, rows_of_parquet, rows_of_ranges, tasks_of
    from spark.reading.paths import input_paths
    from spark.verification import facts as sources

    logs = getattr(sources, source)(input_paths([str(path) for path in paths]), settings or Settings())
    if session is not None:
        from spark.reading.events import parsed
        from spark.verification.on_spark import ROW

        return parsed(session, logs, ROW).collect()
    lines, tables = logs.apart()
    batches = [batch for file in log_files(tables.paths)[0] for batch in rows_of_parquet(tables, file.name)]
    for ranges in tasks_of(log_files(lines.paths)[0], 1 << 20):
        batches += rows_of_ranges(lines, ranges)
    return [SimpleNamespace(**row) for batch in batches for row in batch.to_pylist()]


def packed(*ids):
    return [IdPacker().pack([id_]) for id_ in ids]


def lines_of(*events):
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


def test_a_line_is_an_event_if_and_only_if_it_is_one_to_photon(place, tmp_path):
    path = tmp_path / "clicks.jsonl"
    path.write_bytes(b"\n".join(LINES) + b"\n")
    rows = rows_of("foreign_logs", place, path)
    packer = IdPacker()
    batch = JsonLines(Primary(), Foreign(), packer).parse_foreign(b"\n".join(LINES))
    events = [row for row in rows if row.id is not None]
    assert packer.pack([row.id for row in events]) == batch.ids
    assert b"".join(row.key for row in events) == batch.ids
    assert b"".join(row.primary for row in events) == batch.primary_ids
    assert len(rows) - len(events) == len(batch.malformed)
    assert len(events) > 8
    assert len(batch.malformed) > 20


def test_field_names_may_hold_anything_that_settings_allow(place, tmp_path):
    names = Foreign(id="a..b c", primary_id="it's `ü`]", time="$")
    settings = Settings(foreign=names, primary=Primary(id="[0]"))
    event = {"a.b c": 1, names.primary_id: 2**70, names.time: 3, "b c": "no"}
    path = tmp_path / "x.jsonl"
    path.write_text(json.dumps({**event, "primary": {"[0]": 2**70}}) + "\n")
    (row,) = rows_of("foreign_logs", place, path, settings=settings)
    assert (row.id, row.time_us, [row.key, row.primary]) == ("1", 3, packed("1", str(2**70)))
    (row,) = rows_of("joined_logs", place, path, settings=settings)
    assert (row.id, row.primary) == ("1", packed(str(2**70))[0])


def test_fields_may_lie_in_objects_and_the_primary_event_in_any_field(place, tmp_path):
    settings = Settings(
        primary=Primary(id="who.id"),
        foreign=Foreign(id="ctx.click.id", primary_id="ctx.query"),
        adapter=Adapter(field="user"),
    )
    event = {"ctx": {"click": {"id": 2**70}, "query": "q"}, "user": {"who": {"id": 5}}, "ts_us": 1}
    path = tmp_path / "x.jsonl"
    path.write_bytes(lines_of(event, {"ctx": {"click": 1}}))
    found = [(row.id, row.primary) for row in rows_of("foreign_logs", place, path, settings=settings)]
    assert found == [(str(2**70), packed("q")[0]), (None, None)]
    row = rows_of("joined_logs", place, path, settings=settings)[0]
    assert (row.id, row.primary) == (str(2**70), packed("5")[0])
    path.write_bytes(lines_of({"fate": "unjoinable", "event": event}))
    assert rows_of("dead_letters", place, path, settings=settings)[0].id == str(2**70)


def test_joined_lines_tell_whose_primary_they_hold_and_what_cannot_be_read(place, tmp_path):
    path = tmp_path / "joined.jsonl"
    path.write_bytes(
        joined(foreign("a", "q"), primary("q"))
        + b"\n"
        + lines_of(foreign("b", "q"), {"id": "c", "primary": None})
        + lines_of({"id": "d", "primary": "text"}, {"primary": primary("q")})
        + b'no json\n{"id":"still being writ'
    )
    found = [(row.id, row.primary, row.time_us) for row in rows_of("joined_logs", place, path)]
    q = packed("q")[0]
    assert found == [
        *[("a", q, 2), ("b", None, 2), ("c", None, None), ("d", None, None)],
        *[(None, None, None), (None, None, None)],
    ]


def test_dead_letters_tell_their_fate_and_those_of_primary_events_are_left_out(place, tmp_path):
    path = tmp_path / "foreign-000000.jsonl"
    whole = json.dumps(foreign("long", "q"))
    path.write_bytes(
        lines_of(letter("unjoinable", foreign("a", "q")), letter("malformed", "no json"))
        + lines_of(letter("filtered", {"no": "id"}), letter("expired", foreign(7, "q")), letter("odd", {}))
        + lines_of(letter("malformed", whole), {**letter("malformed", ""), "event_base64": "/w=="})
        + b"{\n"
    )
    (tmp_path / "primary-000000.jsonl").write_bytes(lines_of(letter("malformed", whole)))
    found = [(row.id, row.fate) for row in rows_of("dead_letters", place, tmp_path)]
    told = [(id_, fate) for id_, fate in found if id_ is not None]
    assert sorted(told) == [("7", "expired"), ("a", "unjoinable"), ("long", "malformed")]
    assert len(found) - len(told) == 3


def test_each_dead_letter_keeps_its_fate_where_others_tell_no_time_or_no_id():
    from spark.verification.facts import LetterFacts

    letters = [
        letter("unjoinable", foreign("a", "q", ts_us="noon")),
        letter("expired", foreign("b", "q")),
        letter("filtered", {"no": "id"}),
        letter("filtered", foreign("c", "q", ts_us="noon")),
        letter("unjoinable", 12),
        letter("expired", foreign("d", "q")),
    ]
    rows = LetterFacts(Settings()).rows(lines_of(*letters)).select(["id", "fate"]).to_pylist()
    told = {row["id"]: row["fate"] for row in rows if row["id"] is not None}
    assert told == {"a": "unjoinable", "b": "expired", "c": "filtered", "d": "expired"}
    assert len(rows) == len(letters)


def test_the_letter_of_a_duplicate_that_differs_says_nothing_of_its_id_and_is_readable():
    from spark.verification.facts import LetterFacts

    assert len(LetterFacts(Settings()).rows(lines_of(letter("duplicate", foreign("a", "q"))))) == 0


def test_joined_lines_stand_in_their_order_whatever_they_tell():
    from spark.verification.accounts import Source
    from spark.verification.facts import JoinedFacts

    chunk = (
        b"\n"
        + lines_of(foreign("a", "q", ts_us="noon"), {"no": "id"}, foreign("b", "q"))
        + b"\xef\xbb\xbf\xef\xbb\xbf\n\nno json\n"
        + lines_of(foreign("c", "q", ts_us="noon"))
    )
    rows = JoinedFacts(Settings()).rows(chunk).to_pylist()
    assert [(row["id"], row["time_us"]) for row in rows] == [
        *[("a", None), (None, None), ("b", 2), (None, None), (None, None), ("c", None)]
    ]
    none = JoinedFacts(Settings()).rows(b"{\n{\n").to_pylist()
    assert [set(row.values()) for row in none] == [{None, Source.JOINED}] * 2


def test_a_line_that_is_longer_than_the_settings_allow_is_no_event(place, tmp_path):
    path = tmp_path / "clicks.jsonl"
    path.write_bytes(lines_of(foreign("a", "q"), foreign("b", "q", pad="x" * 5000), foreign("c", "q")))
    settings = Settings(logs=Logs(line_bytes_max=1024, chunk_bytes=4096))
    rows = rows_of("foreign_logs", place, path, settings=settings)
    assert sorted(str(row.id) for row in rows) == ["None", "a", "c"]


@pytest.mark.parametrize("mixed", [False, True])
def test_joined_logs_as_parquet_tell_what_their_lines_told(place, tmp_path, mixed):
    from spark.verification import facts as sources

    lines = (joined(foreign(f"c{n}", f"q{n}"), primary(f"q{n}", gap=None, n=float(n))) for n in range(40))
    events = [json.loads(line) for line in lines]
    if mixed:
        events[3]["ts_us"] = "text"  # no column holds both: the file has one of lines
    lines = tmp_path / "j-000000.jsonl"
    lines.write_bytes(lines_of(*events))
    convert(lines, Path(tmp_path / "j-000000.parquet"))
    rows = rows_of("joined_logs", place, tmp_path / "j-000000.parquet")
    plain = rows_of("joined_logs", place, lines)
    facts = [(row.id, row.key, row.primary, row.time_us) for row in plain]
    assert [(row.id, row.key, row.primary, row.time_us) for row in rows] == facts
    assert [row.time_us for row in rows].count(None) == mixed
    (tmp_path / "q.log").write_bytes(lines_of(*(event["primary"] for event in events)))
    logged = sources.primary_logs([f"file://{tmp_path}/q.log"], Settings(), loosely=True).make()
    data = (tmp_path / "q.log").read_bytes()
    (both,) = logged("", "", Chunk(0, len(data), data))
    contents = both.column("content").to_pylist()
    assert [[row.content for row in found] for found in (plain, rows)] == [contents[:40], contents[40:]]


def test_the_content_of_an_event_is_the_same_whatever_its_white_space_and_order():
    from spark.verification.facts import canonical

    one = canonical(b'{"id":"q","x":{"a":1,"b":[1.5,"\\u00fc"]}}', loosely=False)
    assert canonical('{ "x" : {"b":[1.50, "ü"], "a":1}, "id":"q"}'.encode(), loosely=False) == one
    assert canonical('{"id":"q","x":{"a":2,"b":[1.5,"ü"]}}'.encode(), loosely=False) != one


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        (b'{"a":null,"b":1}', b'{"b":1.0}', True),
        (b'{"a":{"x":null}}', b'{"a":{}}', True),
        (b'{"a":1}', b'{"a":2}', False),
        (b'{"a":"1"}', b'{"a":1}', False),
        (b'{"a":[1,null]}', b'{"a":[1]}', False),
    ],
)
def test_what_parquet_does_not_tell_apart_is_alike_only_to_parquet(one, other, alike):
    from spark.verification.facts import canonical

    assert (canonical(one, loosely=True) == canonical(other, loosely=True)) is alike
    assert canonical(one, loosely=False) != canonical(other, loosely=False)
