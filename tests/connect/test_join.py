"""`photon join` of sources that are no log files: each event once, through kills of importer and broker."""

import json
import subprocess
import sys
import time

import pytest

from tests.connect.test_kafka import delete_before
from tests.connect.test_kafka_sink import committed
from tests.system import photon, start_photon
from tests.waiting import wait_until

COUNT = 3_000
FIRST_US = 1_700_000_000_000_000


def queries(count=COUNT):
    return [{"id": f"q{n}", "ts_us": FIRST_US + n, "text": f"words {n}"} for n in range(count)]


def clicks(count=COUNT, start=0):
    """Each fifth one names a query that there is not."""
    return [
        {"id": f"c{n}", "primary_id": f"q{n}" if n % 5 else f"none{n}", "ts_us": FIRST_US + n}
        for n in range(start, count)
    ]


def line(event):
    return json.dumps(event).encode()


def joined_ids(out):
    found = []
    for path in out.glob("joined/*/*.jsonl"):
        whole, _, _ = path.read_bytes().rpartition(b"\n")  # the next lines may be half written just now
        for one in map(json.loads, whole.splitlines()):
            assert one["primary"]["id"] == one["primary_id"]
            found.append(one["id"])
    return sorted(found)


def joinable(events):
    return sorted(one["id"] for one in events if one["primary_id"].startswith("q"))


@pytest.mark.cluster
def test_parquet_with_standard_input(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(queries()), tmp_path / "queries.parquet")
    out = tmp_path / "out"
    inputs = ("--primary", tmp_path / "*.parquet", "--foreign", "-")
    command = [sys.executable, "-m", "photon.cli.main", "join", *inputs, "--out", out, "--json"]
    piped = b"\n".join(map(line, clicks()))
    for before in (0, COUNT):
        done = subprocess.run(command, input=piped, capture_output=True, timeout=100, check=False)
        assert done.returncode == 0, done.stderr
        summary = json.loads(done.stdout)
        assert (summary["foreign_events"], summary["joined"]) == (COUNT + before, COUNT * 4 // 5)
        assert summary["primary_events"] == COUNT
    assert summary["duplicate"] == COUNT * 4 // 5, "what is piped again is told as what it is"
    assert joined_ids(out) == joinable(clicks())


@pytest.mark.cluster
def test_a_bad_row_is_complained_of_by_its_file_and_row(tmp_path, command):
    """Nobody knows the copies that it was read from."""
    (tmp_path / "q.csv").write_text("key,ts_us\n1,5\n", "utf-8")
    (tmp_path / "c.csv").write_text("id,primary_id,ts_us\nc1,1,5\nc2,1,n/a\nc3,,7\n", "utf-8")
    logs = ("--primary", tmp_path / "q.csv", "--foreign", tmp_path / "c.csv")
    checked = command("join", "--check", *logs).out
    assert f"no primary event: {tmp_path / 'q.csv'}, row 2: not a valid event" in checked
    assert f"no foreign event: {tmp_path / 'c.csv'}, row 3: " in checked
    joined = photon("join", *logs, "--out", tmp_path / "out")
    assert f"no primary event could be read: {tmp_path / 'q.csv'}, row 2: not a valid event" in joined.stderr
    shown = command("dead-letters", "show", "--out", tmp_path / "out", "--fate", "malformed").out
    assert f"  {tmp_path / 'c.csv'}, row 3\n" in shown
    assert f"  {tmp_path / 'c.csv'}, row 4\n" in shown


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.soak
def test_what_was_imported_is_verified_by_the_names_it_was_joined_by(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    pq.write_table(pa.Table.from_pylist(queries()), tmp_path / "queries.parquet")
    rows = "".join(f"{one['id']},{one['primary_id']},{one['ts_us']}\n" for one in clicks())
    (tmp_path / "clicks.csv").write_text(f"id,primary_id,ts_us\n{rows}")
    inputs = ("--primary", tmp_path / "queries.parquet", "--foreign", tmp_path / "*.csv")
    joined = photon("join", *inputs, "--out", tmp_path / "out", "--datacenters", 2)
    assert joined.returncode == 0, joined.stderr
    verified = photon("verify", *inputs, "--out", tmp_path / "out", "--complete", "--json")
    assert verified.returncode == 0, verified.stderr
    report = json.loads(verified.stdout)
    assert report["foreign_events"] == COUNT, report
    unknown = photon("verify", "--foreign", tmp_path / "other.csv", "--out", tmp_path / "out")
    assert (unknown.returncode, unknown.stderr.count("\n")) == (2, 1)
    assert "other.csv: no datacenter of this run that is on this machine imports it" in unknown.stderr


@pytest.mark.long
@pytest.mark.cluster
def test_a_topic_that_is_not_there_ends_a_join_that_does_not_follow(tmp_path, broker):
    (tmp_path / "a.jsonl").write_bytes(line(queries(1)[0]))
    inputs = ("--primary", tmp_path / "a.jsonl", "--foreign", f"kafka://{broker.address}/nope")
    done = photon("join", *inputs, "--out", tmp_path / "out")
    assert done.returncode == 2, done.stderr
    assert "there is no such topic; make it, or mend its name" in done.stderr


@pytest.mark.long
@pytest.mark.cluster
@pytest.mark.soak
def test_records_that_retention_took_are_in_the_summary_and_the_exit_status(tmp_path, broker, topic):
    (tmp_path / "q.jsonl").write_bytes(b"\n".join(map(line, queries(30))) + b"\n")
    name, found = topic(), []
    inputs = ("--primary", tmp_path / "q.jsonl", "--foreign", f"kafka://{broker.address}/{name}")
    for start, deleted in ((0, 0), (10, 15), (20, 0)):
        produce(broker, name, clicks(start + 10, start), 1)
        if deleted:
            delete_before(broker, name, deleted)
        done = photon("join", *inputs, "--out", tmp_path / "out", "--json")
        found.append((done.returncode, json.loads(done.stdout)["lost_records"]))
    assert found == [(0, 0), (1, 5), (1, 5)]
    assert joined_ids(tmp_path / "out") == joinable([*clicks(10), *clicks(30, 15)])


@pytest.mark.parametrize(
    ("primary", "foreign", "says"),
    [
        ("{}/nope*.csv", "{}/a.jsonl", "nope*.csv: no file matches"),
        ("{}/a.jsonl", "kafka://h:9092", "write kafka://HOST:PORT[,HOST:PORT]/TOPIC"),
        ("{}/a.jsonl", "s4://h/t", "no source is known by 's4://'"),
        ("-", "-", "standard input (-) can be one of the logs only"),
    ],
)
@pytest.mark.cluster
def test_what_can_not_be_read_ends_with_a_line(tmp_path, primary, foreign, says):
    (tmp_path / "a.jsonl").write_bytes(line(queries(1)[0]))
    inputs = ("--primary", primary.format(tmp_path), "--foreign", foreign.format(tmp_path))
    done = photon("join", *inputs, "--out", tmp_path / "out")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert says in done.stderr


def produce(broker, topic, events, partitions):
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": broker.address, "enable.idempotence": True})
    for number, event in enumerate(events):
        producer.produce(topic, line(event), partition=number % partitions)
        producer.poll(0)
    assert producer.flush(60) == 0


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.soak
def test_topics_are_joined_to_their_ends_and_then_on(tmp_path, broker, topic):
    primary, foreign, out = topic(3), topic(2), tmp_path / "out"
    produce(broker, primary, queries(), 3)
    produce(broker, foreign, clicks(COUNT // 2), 2)
    names = (f"kafka://{broker.address}/{primary}", f"kafka://{broker.address}/{foreign}?group=a")
    arguments = ("join", "--primary", names[0], "--foreign", names[1], "--out", out, "--json")
    for events in (clicks(COUNT // 2), clicks()):
        done = photon(*arguments, "--datacenters", 2)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["foreign_events"] == len(events)
        assert joined_ids(out) == joinable(events)
        produce(broker, foreign, clicks(COUNT, COUNT // 2), 2)


@pytest.mark.long
@pytest.mark.timeout(240)
def test_from_topics_to_a_topic_through_kills_of_joiners_and_broker(tmp_path, broker, topic):
    primary, foreign, joined, out = topic(2), topic(3), topic(2), tmp_path / "out"
    names = (f"kafka://{broker.address}/{primary}", f"kafka://{broker.address}/{foreign}")
    sink = f"kafka://{broker.address}/{joined}?key=id"
    inputs = ("--primary", names[0], "--foreign", names[1])
    arguments = ("join", *inputs, "--sink", sink, "--out", out, "--datacenters", 2, "--follow", "--json")
    process = start_photon(*arguments)
    try:
        events, rounds = [], 6
        for number in range(rounds):
            of_round = clicks((number + 1) * 500, number * 500)
            events += of_round
            produce(broker, primary, queries((number + 1) * 500)[number * 500 :], 2)
            produce(broker, foreign, of_round, 3)
            wait_until(lambda: len(joined_ids(out)) > number * 400, 60)
            if number == 3:
                broker.kill()
                broker.start()
            else:
                kill("joiner serve", out)
        wait_until(lambda: len(joined_ids(out)) >= len(joinable(events)), 90)
        assert joined_ids(out) == joinable(events)
        wait_until(lambda: len(committed(broker, joined)) >= len(joinable(events)), 90)
    finally:
        process.terminate()
        _, stderr = process.communicate(timeout=100)
    assert process.returncode == 0, stderr
    found = committed(broker, joined)
    assert sorted(key.decode() for key, _ in found) == joinable(events)
    assert set(found.values()) == {1}
    assert {value for _, value in found} == set(joined_lines(out))


@pytest.mark.long
@pytest.mark.timeout(300)
def test_two_datacenters_into_three_stores_through_kills(tmp_path, postgresql, s3, iceberg):
    """Of joiners and of the database; each store has what was joined, as DuckDB reads it, once."""
    import duckdb
    from pyiceberg.catalog import load_catalog

    primary, foreign, out = tmp_path / "queries.jsonl", tmp_path / "clicks.jsonl", tmp_path / "out"
    sinks = [
        f"{postgresql.uri}?table=stored",
        s3.uri("stored", "&format=parquet&every_s=1"),
        f"iceberg://local/ads.stored{iceberg}&every_s=1",
    ]
    options = dict(one.split("=", 1) for one in iceberg[1:].split("&"))
    arguments = ("--primary", primary, "--foreign", foreign, "--out", out, "--datacenters", 2, "--json")
    to = [part for sink in sinks for part in ("--sink", sink)]
    process = start_photon("join", *arguments, *to, "--follow")

    def at_iceberg():
        return load_catalog("local", **options).load_table("ads.stored").scan().to_arrow()

    try:
        rounds = 4
        for number in range(rounds):
            with primary.open("ab") as file:
                file.writelines(line(one) + b"\n" for one in queries((number + 1) * 500)[number * 500 :])
            with foreign.open("ab") as file:
                file.writelines(line(one) + b"\n" for one in clicks((number + 1) * 500, number * 500))
            wait_until(lambda: len(joined_ids(out)) > number * 400, 60)
            if number == 2:
                postgresql.kill()
                postgresql.start()
            kill("joiner serve", out)
        wanted = joinable(clicks(rounds * 500))
        wait_until(lambda: len(joined_ids(out)) >= len(wanted), 90)
        assert joined_ids(out) == wanted
        wait_until(lambda: len(postgresql.rows("stored")) >= len(wanted), 60)
        wait_until(lambda: at_iceberg().num_rows >= len(wanted), 90)
    finally:
        process.terminate()
        _, stderr = process.communicate(timeout=100)
    assert process.returncode == 0, stderr
    (tmp_path / "objects").mkdir()
    for number, content in enumerate(s3.objects("stored").values()):
        (tmp_path / f"objects/{number}.parquet").write_bytes(content)
    in_iceberg = at_iceberg()  # for DuckDB to see
    assert in_iceberg.num_rows
    for table in ("in_iceberg", f"read_parquet('{tmp_path}/objects/*.parquet', union_by_name=true)"):
        pairs = duckdb.sql(f'SELECT id, primary_id, "primary".id FROM {table} ORDER BY id').fetchall()
        assert [id_ for id_, _, _ in pairs] == wanted
        assert all(named == found for _, named, found in pairs)
    stored = [json.loads(event) for _, event in postgresql.rows("stored")]
    assert sorted(one["id"] for one in stored) == wanted
    assert all(one["primary"]["id"] == one["primary_id"] for one in stored)


@pytest.mark.long
@pytest.mark.timeout(180)
@pytest.mark.soak
def test_a_followed_topic_through_kills_of_importer_and_broker(tmp_path, broker, topic):
    primary, foreign, out = topic(2), topic(3), tmp_path / "out"
    names = (f"kafka://{broker.address}/{primary}", f"kafka://{broker.address}/{foreign}")
    arguments = ("join", "--primary", names[0], "--foreign", names[1], "--out", out, "--follow", "--json")
    process = start_photon(*arguments)
    try:
        rounds, events = 6, []
        for number in range(rounds):
            of_round = clicks((number + 1) * 500, number * 500)
            events += of_round
            produce(broker, primary, queries((number + 1) * 500)[number * 500 :], 2)
            produce(broker, foreign, of_round, 3)
            if number == 2:
                kill_importer(out)
            elif number == 4:
                wait_until(lambda: joined_ids(out), 60)
                broker.kill()
                time.sleep(1)  # for clients to see that it is away
                broker.start()
                kill_importer(out)
        wait_until(lambda: len(joined_ids(out)) >= len(joinable(events)), 90)
        assert joined_ids(out) == joinable(events)
        for side, wanted in (("foreign", events), ("primary", queries(rounds * 500))):
            copies = (out / ".photon/east/importer" / side).glob("*/*.jsonl")
            copied = sorted(one for path in copies for one in path.read_bytes().splitlines())
            assert copied == sorted(map(line, wanted)), f"{side}: each record once"
    finally:
        process.terminate()
        stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 0, stderr
    assert json.loads(stdout)["foreign_events"] == len(events)


def joined_lines(out):
    return [one for path in out.glob("joined/*/*.jsonl") for one in path.read_bytes().splitlines()]


def kill_importer(out):
    kill("importer serve", out)


def kill(command, out):
    import psutil

    def found_now():
        found = []
        for one in psutil.process_iter(["cmdline", "pid"]):
            told = " ".join(one.info["cmdline"] or ())
            if command in told and str(out) in told:
                found.append(one)
        return found

    wait_until(found_now, 30)
    for one in found_now():
        one.kill()
