"""Ours keep what `photon connect test` asks for, against real servers; and what is special of each."""

import json
import os
import random
import signal
import socket

import pyarrow as pa
import pyarrow.parquet
import pytest

from photon.cluster import preflight
from photon.connect.conformance import check_sink, check_source
from photon.connect.ports import Fields, Reached
from photon.connect.uris import make_sink, make_source
from photon.core.errors import UnavailableError, UsageError
from photon.logs.writer import LogPosition
from tests.connect.test_kafka_sink import committed

FIELDS = Fields(("id", "primary_id"), "ts_us", "us")


def conforms(checks):
    found = [*checks]
    assert len(found) >= 4
    assert not [check for check in found if check.failed or check.skipped]


def sink_conforms(uri, read):
    conforms(check_sink(uri, read, random.Random(5)))


def rows_of(table):
    return [json.dumps(row).encode() for row in table.to_pylist()]


def lines(*events):
    return b"".join(json.dumps(event).encode() + b"\n" for event in events)


def test_a_directory_of_json_lines(tmp_path):
    sink_conforms(
        f"file://{tmp_path}/out",
        lambda: [line for path in tmp_path.glob("out/*/*.jsonl") for line in path.read_bytes().splitlines()],
    )


def test_a_directory_of_parquet(tmp_path):
    sink_conforms(
        f"file://{tmp_path}/out?format=parquet",
        lambda: [
            row
            for path in tmp_path.glob("out/*/*.parquet")
            for row in rows_of(pyarrow.parquet.read_table(path))
        ],
    )


@pytest.mark.long
def test_s3(s3):
    sink_conforms(
        s3.uri("joined"), lambda: [line for one in s3.objects("joined").values() for line in one.splitlines()]
    )


@pytest.mark.long
def test_parquet_in_s3(s3):
    sink_conforms(
        s3.uri("rows", "&format=parquet"),
        lambda: [
            row
            for one in s3.objects("rows").values()
            for row in rows_of(pyarrow.parquet.read_table(pa.BufferReader(one)))
        ],
    )


@pytest.mark.long
def test_a_bucket_that_is_not_there_is_told_in_a_line_that_stays_the_same(s3):
    uri = s3.uri("joined").replace("bucket", "nobucket", 1)
    for ask in (lambda one: one.open(), lambda one: one.write(b"{}\n", LogPosition(0, 0), LogPosition(0, 3))):
        said = set()
        for _ in range(2):
            with pytest.raises(UsageError, match="404 Not Found: NoSuchBucket The specified bucket") as told:
                ask(make_sink(uri, "w"))
            said.add(str(told.value))
        assert len(said) == 1 and "\n" not in said.pop()
    with pytest.raises(UsageError, match="404 Not Found: NoSuchBucket The specified bucket"):
        make_source(uri, FIELDS).open({}, True)


@pytest.mark.long
def test_postgresql(postgresql):
    sink_conforms(postgresql.uri, lambda: [event.encode() for _, event in postgresql.rows()])


@pytest.mark.long
@pytest.mark.timeout(300)
def test_iceberg(iceberg):
    from pyiceberg.catalog import load_catalog

    options = dict(one.split("=", 1) for one in iceberg[1:].split("&"))
    sink_conforms(
        f"iceberg://local/ads.joined{iceberg}",
        lambda: rows_of(load_catalog("local", **options).load_table("ads.joined").scan().to_arrow()),
    )


@pytest.mark.long
@pytest.mark.timeout(300)
def test_kafka(broker, topic):
    name = topic(3)
    uri = f"kafka://{broker.address}/{name}"
    sink_conforms(uri, lambda: [line for _, line in committed(broker, name).elements()])
    conforms(check_source(uri, FIELDS))


def test_a_table_as_source(tmp_path):
    rows = "".join(f"c{n},q{n % 7},{n}\n" for n in range(50_000))
    (tmp_path / "a.csv").write_text(f"id,primary_id,ts_us\n{rows}")
    (tmp_path / "b.csv").write_text("id,primary_id,ts_us\nx,y,1\n")
    conforms(check_source(f"{tmp_path}/*.csv", FIELDS))


def test_object_names_begin_where_their_lines_stand_in_the_joined_log(tmp_path):
    one = make_sink(f"file://{tmp_path}/out", "east-0.ab")
    assert one.open() is None
    one.write(lines({"id": "a"}), LogPosition(7, 0), LogPosition(7, 12))
    one.write(lines({"id": "b"}), LogPosition(7, 12), LogPosition(7, 24))
    assert sorted(os.listdir(tmp_path / "out/east-0.ab")) == [
        "000007-000000000000.jsonl", "000007-000000000012.jsonl",
    ]  # fmt: skip
    (tmp_path / "out/east-0.ab/readme.txt").write_text("not of ours")
    assert one.open() == LogPosition(7, 24)
    with pytest.raises(UnavailableError, match=r"000007-000000000012\.jsonl: it is there already"):
        one.write(lines({"id": "b"}), LogPosition(7, 12), LogPosition(7, 24))


def test_another_format_at_the_same_place_is_another_sink(tmp_path):
    plain, rows = (make_sink(f"file://{tmp_path}/out{more}", "w") for more in ("", "?format=parquet"))
    assert plain.open() is rows.open() is None
    plain.write(lines({"id": "a"}), LogPosition(0, 0), LogPosition(0, 12))
    assert rows.open() is None
    rows.write(lines({"id": "a"}), LogPosition(0, 0), LogPosition(0, 12))
    plain.write(lines({"id": "b"}), LogPosition(0, 12), LogPosition(0, 24))
    assert (plain.open(), rows.open()) == (LogPosition(0, 24), LogPosition(0, 12))


def test_a_sink_that_is_named_twice_is_refused(tmp_path):
    for one, other in (
        ("s3://b/p", "s3://b/p/?format=parquet"),
        ("iceberg://c/n.t?mib=1", "iceberg://c/n.t"),
        ("postgresql://u@h/d", "postgresql://u:secret@h/d?key=x"),
    ):
        with pytest.raises(UsageError, match="named twice as a sink"):
            preflight.check_sinks([one, other], [tmp_path])
    different = ["postgresql://h/d", "postgresql://h/d?table=other", "s3://b/p", "s3://b/q", "gs://b/p"]
    preflight.check_sinks(different, [tmp_path])


def test_parquet_tells_where_it_ends_or_that_it_is_not_ours(tmp_path):
    one = make_sink(f"file://{tmp_path}/out?format=parquet", "w")
    one.open()
    one.write(lines({"id": "a", "n": 1}), LogPosition(0, 0), LogPosition(0, 99))
    assert one.open() == LogPosition(0, 99)
    pyarrow.parquet.write_table(pa.table({"x": [1]}), tmp_path / "out/w/000000-000000000099.parquet")
    with pytest.raises(UsageError, match=r"000000-000000000099.parquet: no object of Photon's"):
        one.open()


@pytest.mark.parametrize(
    ("uri", "says"),
    [
        ("file:///tmp/x?format=avro", "format is one of jsonl, parquet, not 'avro'"),
        ("file:///tmp/x?nope=1", "unknown option 'nope'"),
        ("s3://b/p?every_s=0", "every_s is a number above 0 up to 86400, not '0'"),
        ("s3://b/p?mib=x", "mib is a number above 0 up to 1024, not 'x'"),
        ("s3://b/p?nope=1", "'nope' is not valid for store 'S3'"),
        ("iceberg://catalog/table", "write iceberg://CATALOG/NAMESPACE.TABLE"),
        ("kafka://h:1/t?security.protocl=SSL", 'No such configuration property: "security.protocl"'),
        ("postgresql://h/d?nope=1", 'invalid connection option "nope"; known are key, table'),
    ],
)
def test_what_can_not_be_is_told_with_the_mend(uri, says):
    with pytest.raises(UsageError) as told:
        make_sink(uri, "w")
    assert says in str(told.value)


@pytest.mark.parametrize(
    "place", ["iceberg://catalog/table", "kafka://h:1", "otlp://h:1/path", "s3://b/p", "s3://b/p?alone&x=1"]
)
def test_what_is_secret_in_the_options_is_not_told(place):
    with pytest.raises(UsageError) as told:
        make_sink(f"{place}{'&' if '?' in place else '?'}nope.password=geheim", "w")
    assert "geheim" not in str(told.value)


def test_an_iceberg_catalog_that_is_not_there_is_told_before_a_run_that_would_wait_for_it(
    tmp_path, refused, monkeypatch, iceberg
):
    (tmp_path / "q.jsonl").write_bytes(lines({"id": "q"}))
    (tmp_path / "c.jsonl").write_bytes(lines({"id": "c", "primary_id": "q", "ts_us": 1}))
    logs = ("--primary", tmp_path / "q.jsonl", "--foreign", tmp_path / "c.jsonl", "--out", tmp_path / "out")
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        monkeypatch.setattr(preflight, "REACH_S", 0.1)
        said = refused("join", *logs, "--sink", f"iceberg://local/ads.joined?type=rest&uri={uri}")
        assert "the catalog 'local' can't be reached; see to `uri`" in said
        assert "no answer within 0.1 s" in said
    monkeypatch.undo()
    said = refused("join", *logs, "--sink", f"iceberg://local/ads.joined?type=rest&uri={uri}")
    assert "see to `uri` and `type` among the sink's options" in said
    assert not (tmp_path / "out").exists()
    sink = make_sink(f"iceberg://local/ads.joined{iceberg}", "w")
    assert isinstance(sink, Reached)
    sink.reach(preflight.REACH_S)


@pytest.mark.long
def test_a_table_of_postgresql_keeps_a_key_once(postgresql):
    """What recovery joins again, under another writer's name, is there already."""
    uri = f"{postgresql.uri}?table=twice&key=click.id"
    event = {"click": {"id": 5}, "text": "\0"}
    for writer in ("a", "b"):
        one = make_sink(uri, writer)
        assert one.open() is None
        one.write(lines(event), LogPosition(0, 0), LogPosition(0, 50))
        assert one.open() == LogPosition(0, 50)
    assert [(key, json.loads(text)) for key, text in postgresql.rows("twice")] == [("5", event)]
    with pytest.raises(UsageError, match="has no key; name its field by key=FIELD"):
        one.write(lines({"id": "x"}), LogPosition(0, 50), LogPosition(0, 60))


@pytest.mark.long
def test_rows_of_postgresql_are_known_by_several_fields_and_what_these_do_not_tell_apart_is_told(postgresql):
    counts = [{"key": "ann", "end_us": end} for end in (1, 2)]
    for key, rows, refused in (
        ("key,end_us", [('["ann",1]', counts[0]), ('["ann",2]', counts[1])], 0),
        ("key", [("ann", counts[0])], 1),
    ):
        table = key.replace(",", "_")
        one = make_sink(f"{postgresql.uri}?table=by_{table}&key={key}", "w")
        one.open()
        one.write(lines(*counts), LogPosition(0, 0), LogPosition(0, 50))
        assert [(key, json.loads(text)) for key, text in postgresql.rows(f"by_{table}")] == rows
        assert sum(one.refused.values()) == refused
        with pytest.raises(
            UsageError, match=r"the line at byte 52 has no key; .* or several by key=FIELD,FIELD"
        ):
            one.write(b"5\n", LogPosition(0, 52), LogPosition(0, 54))
        one.close()


@pytest.mark.long
@pytest.mark.parametrize("opened", [True, False])
def test_a_table_of_postgresql_that_was_dropped_gets_all_again(postgresql, opened):
    import psycopg

    one = make_sink(f"{postgresql.uri}?table=dropped", "w")
    one.open()
    one.write(lines({"id": "a"}), LogPosition(0, 0), LogPosition(0, 9))
    if not opened:
        one.close()
    with psycopg.connect(postgresql.uri) as connection:
        connection.execute("DROP TABLE dropped")
        connection.execute("CREATE TABLE dropped (id text PRIMARY KEY, event json NOT NULL)")
    if opened:
        with pytest.raises(UnavailableError, match="or made the table anew"):
            one.write(lines({"id": "b"}), LogPosition(0, 9), LogPosition(0, 18))
    assert one.open() is None
    one.write(lines({"id": "a"}, {"id": "b"}), LogPosition(0, 0), LogPosition(0, 18))
    assert one.open() == LogPosition(0, 18)
    assert [key for key, _ in postgresql.rows("dropped")] == ["a", "b"]
    one.close()
    with psycopg.connect(postgresql.uri) as connection:
        connection.execute("DROP TABLE dropped")


@pytest.mark.long
def test_a_table_of_postgresql_may_be_the_users_own(postgresql):
    import psycopg

    with psycopg.connect(postgresql.uri) as connection:
        connection.execute(
            "CREATE SCHEMA ads CREATE TABLE clicks (id text PRIMARY KEY, event jsonb NOT NULL, "
            "cost numeric GENERATED ALWAYS AS ((event->>'cost')::numeric) STORED)"
        )
    one = make_sink(f"{postgresql.uri}?table=ads.clicks", "w")
    one.open()
    one.write(lines({"id": "a", "cost": 1.5}), LogPosition(0, 0), LogPosition(0, 9))
    with psycopg.connect(postgresql.uri) as connection:
        assert [*map(float, *connection.execute("SELECT cost FROM ads.clicks").fetchall())] == [1.5]
        connection.execute("CREATE TABLE strange (n int)")
    with pytest.raises(UsageError, match='column "id" of relation "strange" does not exist'):
        two = make_sink(f"{postgresql.uri}?table=strange", "w")
        two.open()
        two.write(lines({"id": "a"}), LogPosition(0, 0), LogPosition(0, 9))


@pytest.mark.long
def test_a_role_of_postgresql_that_may_make_no_tables_publishes_to_those_that_are_there(postgresql):
    import psycopg

    make_sink(f"{postgresql.uri}?table=granted", "w").open()
    with psycopg.connect(postgresql.uri) as connection:
        connection.execute("CREATE ROLE small LOGIN")
        connection.execute("GRANT SELECT, INSERT ON granted TO small")
        connection.execute("GRANT SELECT, INSERT, UPDATE, DELETE ON photon_places TO small")
    uri = postgresql.uri.replace("photon@", "small@")
    one = make_sink(f"{uri}?table=granted", "w")
    assert one.open() is None
    for n, start in enumerate((0, 10)):
        one.write(lines({"id": f"{n}"}), LogPosition(0, start), LogPosition(0, start + 10))
    assert one.open() == LogPosition(0, 20)
    assert [key for key, _ in postgresql.rows("granted")] == ["0", "1"]
    one.close()
    with pytest.raises(UsageError, match="permission denied for schema public"):
        make_sink(f"{uri}?table=lacking", "w").open()


@pytest.mark.long
def test_lines_that_a_trigger_of_postgresql_leaves_out_are_told_as_that(postgresql):
    import psycopg

    one = make_sink(f"{postgresql.uri}?table=triggered", "w")
    one.open()
    with psycopg.connect(postgresql.uri) as connection:
        connection.execute(
            "CREATE FUNCTION left_out() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';"
            "CREATE TRIGGER left_out BEFORE INSERT ON triggered FOR EACH ROW EXECUTE FUNCTION left_out()"
        )
    one.write(lines({"id": "a"}), LogPosition(0, 0), LogPosition(0, 11))
    ((why, count),) = one.refused.items()
    assert "a trigger or a rule left the lines out" in why
    assert (count, postgresql.rows("triggered")) == (1, [])
    one.close()


@pytest.mark.long
def test_a_row_that_postgresql_refuses_is_told_with_the_servers_detail(postgresql):
    import psycopg

    with psycopg.connect(postgresql.uri) as connection:
        connection.execute("CREATE TABLE picky (id text PRIMARY KEY CHECK (id <> 'b'), event jsonb NOT NULL)")
    one = make_sink(f"{postgresql.uri}?table=picky", "w")
    one.open()
    with pytest.raises(UnavailableError, match=r"violates check .*\(Failing row contains \(b, "):
        one.write(lines({"id": "a"}, {"id": "b"}), LogPosition(0, 0), LogPosition(0, 24))
    nul = lines({"id": "c", "x": "\0"})
    with pytest.raises(UnavailableError, match=r"\(\\u0000 cannot be converted to text\.\)"):
        one.write(nul, LogPosition(0, 0), LogPosition(0, len(nul)))
    with pytest.raises(UsageError, match="the line at byte 112 has no key; name its field"):
        one.write(lines({"id": "a"}, {"no": "b"}), LogPosition(0, 100), LogPosition(0, 124))
    one.close()


@pytest.mark.long
def test_postgresql_that_stands_still_is_given_up(postgresql, monkeypatch):
    from photon.connect import postgresql as of_sink

    one = make_sink(f"{postgresql.uri}?table=still", "w")
    one.open()
    monkeypatch.setattr(of_sink, "ANSWER_S", 0.2)
    postgresql.signal(signal.SIGSTOP)
    try:
        with pytest.raises(UnavailableError):
            one.write(lines({"id": "a"}), LogPosition(0, 0), LogPosition(0, 9))
    finally:
        postgresql.signal(signal.SIGCONT)
    monkeypatch.undo()
    assert one.open() in (None, LogPosition(0, 9))


@pytest.mark.long
def test_postgresql_killed_at_random_moments(postgresql):
    dice, at, failures = random.Random(3), None, 0
    one = make_sink(f"{postgresql.uri}?table=killed", "w")
    wanted = [f"n{number:03}" for number in range(300)]
    column = [lines({"id": name}) for name in wanted]
    ends = [LogPosition(0, sum(map(len, column[: n + 1]))) for n in range(len(column))]
    opened = False
    while at != ends[-1]:
        if dice.random() < 0.1:
            postgresql.kill()
            postgresql.start()
        try:
            if not opened:
                at, opened = one.open(), True
            done = 0 if at is None else ends.index(at) + 1
            upto = min(len(wanted), done + dice.randint(1, 9))
            one.write(b"".join(column[done:upto]), at or LogPosition(0, 0), ends[upto - 1])
            at = ends[upto - 1]
        except UnavailableError:
            failures += 1
            opened = False
    assert failures > 2
    assert [name for name, _ in postgresql.rows("killed")] == wanted


@pytest.mark.long
def test_an_iceberg_table_gets_columns_and_keeps_types(iceberg):
    from pyiceberg.catalog import load_catalog

    options = dict(one.split("=", 1) for one in iceberg[1:].split("&"))
    one = make_sink(f"iceberg://local/ads.joined{iceberg}", "w")
    assert one.open() is None
    first = {
        "id": "a",
        "n": 1,
        "at": "2026-01-02T03:04:05Z",
        "tags": ["x"],
        "none": None,
        "primary": {"id": "q"},
    }
    then = {"id": "b", "n": 2, "tags": [], "none": 1.5, "primary": {"id": "p", "text": "é"}}
    one.write(lines(first), LogPosition(0, 0), LogPosition(0, 5))
    one.write(lines(then), LogPosition(0, 5), LogPosition(0, 9))
    assert one.open() == LogPosition(0, 9)
    rows = (
        load_catalog("local", **options).load_table("ads.joined").scan().to_arrow().sort_by("id").to_pylist()
    )
    assert rows[0] == {**first, "primary": {"id": "q", "text": None}}
    assert rows[1] == {**then, "at": None}
    with pytest.raises(UsageError, match=r"Column\(/n\) changed from number to string"):
        one.write(lines({"id": "c", "n": "many"}), LogPosition(0, 9), LogPosition(0, 12))
    assert one.open() == LogPosition(0, 9)


@pytest.mark.long
def test_what_a_column_of_iceberg_can_not_hold_is_named_and_changes_nothing(iceberg):
    """Nor does it make columns optional that the table requires."""
    from pyiceberg.catalog import load_catalog
    from pyiceberg.schema import Schema
    from pyiceberg.types import DoubleType, FloatType, ListType, LongType, NestedField, StringType

    catalog = load_catalog("local", **dict(one.split("=", 1) for one in iceberg[1:].split("&")))
    catalog.create_namespace("ads")
    fields = (
        NestedField(1, "id", StringType(), required=True),
        NestedField(2, "n", LongType()),
        NestedField(3, "x", DoubleType()),
        NestedField(4, "small", FloatType()),
        NestedField(5, "list", ListType(6, DoubleType())),
    )
    catalog.create_table("ads.joined", Schema(*fields, identifier_field_ids=[1]))
    one = make_sink(f"iceberg://local/ads.joined{iceberg}", "w")
    one.open()
    good = {"id": "a", "n": 1, "x": 1e300, "small": 0.1, "list": [1.5, 9007199254740992], "new": "text"}
    for bad, says in (
        (
            {"id": "b", "n": 1.5},
            "column 'n' \\(int64\\): Failed to convert JSON to int64, couldn't parse:1.5",
        ),
        ({"id": "b", "x": 9007199254740993}, "column 'x' .*: 9007199254740993 would become 9007199254740992"),
        ({"id": "b", "list": [9007199254740993]}, r"column 'list' .*: \[9007199254740993\] would become"),
        ({"id": "b", "small": 1e300}, r"column 'small' \(float\): 1e\+300 would become inf"),
        ({"id": None}, "column 'id' .*: .*null"),
        ({"n": 1}, "column 'id' .*: .*required field was absent"),
        ({"id": "b", "new": 5}, "new.* from string to number"),
    ):
        batch = lines(good, bad)
        at = 100 + len(lines(good))
        with pytest.raises(UsageError, match=f"the line at byte {at} does not fit: .*{says}") as told:
            one.write(batch, LogPosition(0, 100), LogPosition(0, 100 + len(batch)))
        assert "have an adapter write the value in another way" in str(told.value)
        assert one.open() is None
    one.write(lines(good), LogPosition(0, 0), LogPosition(0, 9))
    table = catalog.load_table("ads.joined")
    (row,) = table.scan().to_arrow().to_pylist()
    assert row == {**good, "small": pytest.approx(0.1)}
    assert [field.required for field in table.schema().fields] == [True] + [False] * 5


@pytest.mark.parametrize("odd", [b"null\n", b"5\n", b'"a"\n', b"[1]\n"])
def test_a_line_that_is_no_object_is_told_by_iceberg(iceberg, odd):
    one = make_sink(f"iceberg://local/ads.joined{iceberg}", "w")
    one.open()
    good = lines({"id": "a"})
    for batch, at in ((good + odd, 100 + len(good)), (odd + good, 100)):
        with pytest.raises(UsageError, match=f"the line at byte {at} does not fit: a line is no JSON object"):
            one.write(batch, LogPosition(0, 100), LogPosition(0, 100 + len(batch)))
    assert one.open() is None


@pytest.mark.parametrize("empty", [{}, {"a": None}])
def test_lines_without_any_value_make_no_iceberg_table(iceberg, empty):
    one = make_sink(f"iceberg://local/ads.joined{iceberg}", "w")
    one.open()
    with pytest.raises(UsageError, match="the line at byte 0 does not fit: no line has a value"):
        one.write(lines(empty), LogPosition(0, 0), LogPosition(0, 9))
    assert one.open() is None
    one.write(lines(empty, {"a": 1}), LogPosition(0, 0), LogPosition(0, 9))
    one.open()
    assert one._table.scan().to_arrow().to_pylist() == [{"a": None}, {"a": 1}]


@pytest.mark.long
def test_an_iceberg_table_is_made_of_a_first_batch_with_lists_of_nothing(iceberg):
    one = make_sink(f"iceberg://local/ads.joined{iceberg}", "w")
    one.open()
    empty = {"a": [{"b": None}], "c": [[]], "d": [{}], "e": [None], "f": [[{"g": []}]]}
    one.write(lines({"id": "a", **empty}), LogPosition(0, 0), LogPosition(0, 9))
    one.write(lines({"id": "b", "a": [{"b": 1}]}), LogPosition(0, 9), LogPosition(0, 18))
    assert one.open() == LogPosition(0, 18)


@pytest.mark.long
def test_an_iceberg_commit_that_failed_leaves_no_data_file(iceberg, tmp_path):
    one, other = (make_sink(f"iceberg://local/ads.joined{iceberg}", "w") for _ in range(2))
    one.open()
    one.write(lines({"id": "a"}), LogPosition(0, 0), LogPosition(0, 9))
    other.open()
    one.write(lines({"id": "b"}), LogPosition(0, 9), LogPosition(0, 18))
    there = set(tmp_path.glob("warehouse/**/*.parquet"))
    with pytest.raises(UnavailableError):
        other.write(lines({"id": "b"}), LogPosition(0, 9), LogPosition(0, 18))
    assert set(tmp_path.glob("warehouse/**/*.parquet")) == there and len(there) == 2
