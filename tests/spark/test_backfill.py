"""Whole backfills: real Spark, a real registry, logs with everything in them that logs have."""

import gzip
import json
import shutil
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace

import pytest

from idregistry.client import RegistryAt, RegistryClient
from joiner.output_files import complete_files, count_joined, read_lives
from photon.cli.main import main
from photon.core.errors import FencedError, SettingsMismatchError, UsageError
from photon.core.fates import Fate
from photon.core.ids import Token
from photon.core.settings import parse_settings
from photon.dev.generated_logs import AtOnce, Mix, generate_at_once
from photon.dev.pairs import check_pairs
from tests.spark.kit import RealRegistry
from tests.system import read_lines, write_lines
from tests.waiting import wait_until

pytest.importorskip("pyspark")
pytestmark = pytest.mark.spark

FATES = ("foreign_events", *Fate)


@pytest.fixture
def registry(tmp_path):
    made = RealRegistry(tmp_path / "registry", shards=2)
    yield made
    made.close()


@pytest.fixture
def order(tmp_path, registry):
    from spark.backfill.job import Place
    from spark.backfill.run import Order

    logs = tmp_path / "logs"
    return Order(
        (str(logs / "queries"),),
        (str(logs / "clicks"),),
        Place(tmp_path / "out", "old"),
        "jsonl",
        registry.at,
        parse_settings({"registry": {"lease_s": 2.0}}),
    )


@pytest.fixture
def run(session):
    from spark.backfill.run import backfill

    def run(order, checkpoint=lambda _: None, notices=None):
        tell = (lambda _: None) if notices is None else notices.append
        return backfill(order, lambda: nullcontext(session), tell, checkpoint)

    return run


def fates(summary):
    return {name: summary[name] for name in FATES if summary[name]}


def write_logs(tmp_path, clicks, queries=("q",), name="a"):
    write_lines(tmp_path / f"logs/queries/{name}.jsonl", [{"id": q, "ts_us": 1} for q in queries])
    write_lines(
        tmp_path / f"logs/clicks/{name}.jsonl", [c if isinstance(c, bytes) else click(*c) for c in clicks]
    )


def click(name, query="q"):
    return {"id": name, "primary_id": query, "ts_us": 1_700_000_000_000_000}


def joined_ids(order):
    return Counter(event["id"] for event in read_lines(order.place.out / "joined"))


@pytest.mark.parametrize("opaque", [False, True])
def test_it_joins_the_pairs_of_the_truth_and_each_once(run, order, tmp_path, opaque):
    shares = {"duplicates": 0.03, "orphans": 0.05, "malformed": 0.02, "duplicate_queries": 0.02}
    mix = Mix(ids="opaque" if opaque else "photon", files=3, malformed_queries=0.01, early=0.1, **shares)
    truth = generate_at_once(tmp_path / "logs", mix, AtOnce(3000, 1500)).document()
    summary = run(order)
    assert {name: summary[name] for name in FATES} == truth["expected_summary"]
    assert (summary["primary_events"], summary["primary_malformed"]) == (
        truth["primary_rows"] - truth["primary_malformed"],
        truth["primary_malformed"],
    )
    report = check_pairs(order.place.out / "joined")
    assert report.problems(truth["distinct_joined_pairs"], truth["joined_pairs_sha256"]) == []
    letters = Counter(e["fate"] for e in read_lines(order.place.letters))
    assert letters["unjoinable"] == summary["unjoinable"]
    assert letters["malformed"] == summary["malformed"] + summary["primary_malformed"]
    assert set(complete_files(order.place.joined)) == set(summary["files"])
    assert count_joined(order.place.joined) == summary["joined"]
    assert not order.place.staging.exists()


def test_a_dead_letter_names_the_line_that_it_was(run, order, tmp_path):
    write_logs(tmp_path, [("a", "q"), b"no event\n", ("c", "none")])
    run(order)
    path = tmp_path / "logs/clicks/a.jsonl"
    found = {e["fate"]: e for e in read_lines(order.place.letters)}
    data = path.read_bytes()
    for fate, line in (("malformed", b"no event"), ("unjoinable", json.dumps(click("c", "none")).encode())):
        assert found[fate]["file"] == str(path)
        assert data[found[fate]["offset"] :].startswith(line)
    assert found["malformed"]["event"] == "no event"
    assert found["unjoinable"]["event"] == click("c", "none")


def test_a_backfill_that_makes_other_ids_than_the_registrys_founder_registers_nothing(run, order, tmp_path):
    write_logs(tmp_path, [("a",), ("b",)])
    run(order)
    place = replace(order.place, out=tmp_path / "other")
    for table in ({"ids": {"key": "another"}}, {"foreign": {"time_unit": "ms"}}):
        with pytest.raises(SettingsMismatchError, match="founded with others"):
            run(replace(order, place=place, settings=parse_settings(table)))
        shutil.rmtree(place.out)
    assert run(replace(order, place=place))["duplicate"] == 2


def test_a_backfill_that_is_done_is_not_missed_when_its_lease_runs_out(run, order, tmp_path, monkeypatch):
    dismissed = []
    monkeypatch.setattr(RegistryClient, "dismiss", lambda _, lives: dismissed.extend(lives))
    write_logs(tmp_path, [("a",)])
    run(order)
    assert dismissed == [*read_lives(order.place.joined)]


def test_a_backfill_that_is_done_is_not_done_again_until_its_logs_grow(run, order, tmp_path):
    write_logs(tmp_path, [("a",), ("b",)])
    first, notices = run(order), []
    again = run(replace(order, registry=RegistryAt(("127.0.0.1:1",))), notices=notices)  # nobody is asked
    assert (first["joined_per_s"] > 0, again["joined_per_s"]) == (True, 0)
    assert fates(first) == fates(again) == {"foreign_events": 2, "joined": 2}
    assert "done already" in notices[0]
    write_logs(tmp_path, [("c",)], name="b")
    third = run(order)
    assert fates(third) == {"foreign_events": 3, "joined": 1, "duplicate": 2}
    assert joined_ids(order) == {"a": 1, "b": 1, "c": 1}
    assert not set(first["files"]) & set(third["files"])


def test_a_further_backfill_of_grown_logs_leaves_each_dead_letter_once(run, order, tmp_path):
    write_logs(tmp_path, [("a",), ("b", "none"), b"no event\n"])
    run(order)
    write_logs(tmp_path, [("a",), ("b", "none"), b"no event\n", ("c", "none")])
    assert fates(run(order)) == {"foreign_events": 4, "duplicate": 1, "unjoinable": 2, "malformed": 1}
    letters = Counter((e["file"], e["offset"], e["fate"]) for e in read_lines(order.place.letters))
    assert Counter(fate for _, _, fate in letters) == {"unjoinable": 2, "malformed": 1}
    assert set(letters.values()) == {1}


def test_packed_logs_and_a_last_line_without_its_newline_are_read(run, order, tmp_path):
    zstandard = pytest.importorskip("zstandard")
    write_logs(tmp_path, [("a",)])
    clicks = tmp_path / "logs/clicks"
    with gzip.open(clicks / "b.jsonl.gz", "wb") as file:
        file.write(json.dumps(click("b")).encode() + b"\n")
    packed = zstandard.compress(json.dumps(click("c")).encode() + b"\n")
    (clicks / "c.jsonl.zst").write_bytes(packed)
    (clicks / "d.jsonl").write_bytes(json.dumps(click("d")).encode())
    (clicks / "e.jsonl").write_bytes(json.dumps(click("e")).encode()[:-5])
    assert fates(run(order)) == {"foreign_events": 4, "joined": 4}
    assert joined_ids(order) == dict.fromkeys("abcd", 1)


def test_logs_behind_uris_are_joined_as_local_ones(run, order, tmp_path):
    write_logs(tmp_path, [(f"c{n}", f"q{n % 3}") for n in range(30)], ["q0", "q1", "unnamed"])
    write_logs(tmp_path, [("d", "q1"), b"malformed\n", ("c1", "q1")], ["q3", "q4"], name="b {1}")
    (tmp_path / "logs/clicks/e.jsonl.gz").write_bytes(gzip.compress(json.dumps(click("e", "q3")).encode()))
    uri = f"file:{tmp_path}/logs"
    remote = replace(order, foreign=(f"{uri}/clicks/*",), primary=(f"{uri}/queries",))
    expected = {"foreign_events": 34, "joined": 22, "duplicate": 1, "unjoinable": 10, "malformed": 1}
    summary = run(remote)
    assert fates(summary) == expected
    assert summary["primary_events"] == 5
    assert set(joined_ids(order).values()) == {1}
    bad = next(e for e in read_lines(order.place.letters) if e["fate"] == "malformed")
    assert bad["file"].endswith("clicks/b {1}.jsonl") or bad["file"].endswith("clicks/b%20%7B1%7D.jsonl")
    notices = []
    assert fates(run(remote, notices=notices)) == expected
    assert "done already" in notices[0]


def test_parquet_holds_the_same_events_and_is_listed(run, order, tmp_path):
    import pyarrow.parquet as pq

    write_logs(tmp_path, [(f"c{n}", f"q{n % 3}") for n in range(50)], [f"q{n}" for n in range(3)])
    summary = run(replace(order, output_format="parquet"))
    assert summary["joined"] == count_joined(order.place.joined) == 50
    rows = [row for name in summary["files"] for row in pq.read_table(order.place.joined / name).to_pylist()]
    assert {(row["id"], row["primary"]["id"]) for row in rows} == {(f"c{n}", f"q{n % 3}") for n in range(50)}
    assert set(complete_files(order.place.joined)) == set(summary["files"])
    assert not list(order.place.joined.glob("*.jsonl"))


def test_events_older_than_the_registry_remembers_expire(run, order, tmp_path):
    forgetful = RealRegistry(tmp_path / "forgetful", retention_days=1)
    two_days_on = 1_700_000_000_000_000 + 2 * 86_400_000_000  # the boundary follows the newest event
    try:
        forgetful.commit(["later"], Token("elsewhere:1", 1, 1), two_days_on)
        write_logs(tmp_path, [("a",), ("a",), ("b", "none")])
        summary = run(replace(order, registry=forgetful.at))
    finally:
        forgetful.close()
    assert fates(summary) == {"foreign_events": 3, "expired": 3}
    assert [e["fate"] for e in read_lines(order.place.letters)] == ["expired"] * 3


def test_its_incarnation_is_noted_in_the_output_before_it_registers_anything(
    run, order, tmp_path, monkeypatch
):
    import spark.backfill.run as module

    noted = []
    monkeypatch.setattr(
        module, "join_buckets", lambda *_: noted.append(read_lives(order.place.joined)) or 1 / 0
    )
    write_logs(tmp_path, [("a",)])
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            run(order)
    incarnation = order.place.load().incarnation
    assert [[*lives] for lives in noted] == [[incarnation]] * 2
    assert noted[0][incarnation].address == "backfill/old"


# --- attempts


class Interrupted(BaseException):
    """As a signal that ends the driver."""


@pytest.fixture
def half_done(run, order, tmp_path, monkeypatch):
    """All is registered, the driver was never told: it died."""
    import spark.backfill.run as module

    write_logs(tmp_path, [(f"c{n}", f"q{n % 7}") for n in range(100)], [f"q{n}" for n in range(7)])
    real = module.results_of

    def run_and_die(*arguments):
        real(*arguments)
        raise Interrupted

    with monkeypatch.context() as patch:
        patch.setattr(module, "results_of", run_and_die)
        with pytest.raises(Interrupted):
            run(order)
    assert not order.place.joined.exists() or not list(order.place.joined.glob("backfill-0*"))


@pytest.mark.usefixtures("half_done")
def test_the_next_run_wins_again_what_a_driver_that_died_had_registered(run, order):
    notices = []
    assert fates(run(order, notices=notices)) == {"foreign_events": 100, "joined": 100}
    assert "going on" in notices[0]
    assert joined_ids(order) == {f"c{n}": 1 for n in range(100)}


@pytest.mark.usefixtures("half_done")
def test_the_next_run_reads_the_same_bytes_whatever_the_logs_gained(run, order, tmp_path):
    with (tmp_path / "logs/clicks/a.jsonl").open("a") as file:
        file.write(json.dumps(click("new")) + "\n")
    write_logs(tmp_path, [("newer",)], name="b")
    assert fates(run(order)) == {"foreign_events": 100, "joined": 100}
    assert fates(run(order)) == {"foreign_events": 102, "joined": 2, "duplicate": 100}
    assert set(joined_ids(order).values()) == {1}


@pytest.mark.usefixtures("half_done")
def test_an_unfinished_backfill_goes_on_as_it_was_begun_or_not_at_all(run, order, tmp_path):
    others = (
        replace(order, output_format="parquet"),
        replace(order, foreign=(str(tmp_path / "logs/clicks/*"),)),
        replace(order, settings=parse_settings({"adapter": {"field": "query"}})),
        replace(order, settings=parse_settings({"foreign": {"id": "ts_us", "time": "id"}})),
    )
    for other in others:
        with pytest.raises(UsageError, match="--abandon"):
            run(other)
    path = tmp_path / "logs/queries/a.jsonl"
    kept = path.read_bytes()
    path.write_bytes(b" " * len(kept))
    with pytest.raises(UsageError, match="not the log"):
        run(order)
    path.write_bytes(kept)
    assert run(order)["joined"] == 100


@pytest.mark.usefixtures("half_done")
def test_after_abandoning_it_a_new_backfill_joins_all(run, order, registry, capfd):
    incarnation = order.place.load().incarnation
    wait_until(lambda: registry.client.fence(incarnation).fenced)
    with pytest.raises(FencedError, match="--abandon"):
        run(order)
    where = ["--primary", *order.primary, "--foreign", *order.foreign, "--out", str(order.place.out)]
    which = ["--datacenter", "old", "--registry", registry.address, "--abandon", "--json"]
    with pytest.raises(SystemExit) as end:
        main(["backfill", *where, *which])
    assert end.value.code == 0
    assert json.loads(capfd.readouterr().out) == {"released": 100, "published_buckets": 0}
    assert fates(run(order)) == {"foreign_events": 100, "joined": 100}
    assert joined_ids(order) == {f"c{n}": 1 for n in range(100)}


def test_a_log_that_is_replaced_while_it_is_read_ends_the_job(run, order, tmp_path, monkeypatch):
    import spark.backfill.run as module

    write_logs(tmp_path, [("a",)])
    real = module.results_of

    def run_and_replace(*arguments):
        results = real(*arguments)
        write_logs(tmp_path, [("b",)])
        return results

    monkeypatch.setattr(module, "results_of", run_and_replace)
    with pytest.raises(UsageError, match="not the log"):
        run(order)
    assert not joined_ids(order)
