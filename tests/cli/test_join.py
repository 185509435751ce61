"""`photon join` as a user runs it: real processes, files to files."""

import gzip
import json
import os
from pathlib import Path

import pytest
import zstandard

from dispatcher.workers import fix_workers
from tests.system import (
    fates_add_up,
    following,
    join,
    join_arguments,
    joined_pairs,
    photon,
    read_lines,
    write_lines,
)
from tests.waiting import wait_until

pytestmark = pytest.mark.cluster

T0 = 1_700_000_000_000_000


@pytest.fixture
def generated(tmp_path, command):
    """Logs, and the truth of them."""

    def make(*options):
        logs = tmp_path / "logs"
        assert command("generate", "--out", logs, "--seed", 11, *options).status == 0
        return logs, json.loads((logs / "truth.json").read_bytes())

    return make


@pytest.mark.parametrize("datacenters", [pytest.param(1, marks=pytest.mark.long), 2])
def test_every_joinable_click_is_joined_once_and_every_other_one_has_its_fate(
    generated, tmp_path, datacenters
):
    logs, truth = generated(
        "--queries", 20_000, "--clicks", 6_000, "--duplicates", 0.02, "--early", 0.05, "--orphans", 0.01,
        "--malformed", 0.01,
    )  # fmt: skip
    out = tmp_path / "out"
    summary = join(logs, out, "--datacenters", datacenters)
    pairs = joined_pairs(out)
    assert max(pairs.values()) == 1
    assert len(pairs) == summary["joined"] == truth["distinct_joined_pairs"]
    assert summary["malformed"] == truth["malformed"]
    assert summary["unjoinable"] == truth["orphans"]
    assert summary["pending"] == summary["filtered"] == summary["expired"] == 0
    assert fates_add_up(summary)
    for datacenter in ("east", "west")[:datacenters]:
        letters = read_lines(out / "dead-letters" / datacenter)
        fates = [letter["fate"] for letter in letters]
        assert fates.count("malformed") == truth["malformed"]
        assert fates.count("unjoinable") == truth["orphans"]
        assert all(letter["reason"] for letter in letters)


def test_other_field_names_units_numeric_ids_and_compressed_logs_larger_than_the_cache(tmp_path):
    logs = tmp_path / "logs"
    pad = "x" * 700
    queries = [{"qid": n, "at": 1_700_000_000.25 + n, "pad": pad} for n in range(3_000)]
    clicks = [{"cid": f"c{n}", "ref": n * 7 % 3_600, "at": -5_000 + n} for n in range(1_800)]
    for kind, events in (("queries", queries), ("clicks", clicks)):
        (logs / kind).mkdir(parents=True)
        for half, (suffix, pack) in enumerate((("gz", gzip.compress), ("zst", zstandard.compress))):
            lines = b"".join(json.dumps(event).encode() + b"\n" for event in events[half::2])
            (logs / kind / f"{half}.jsonl.{suffix}").write_bytes(pack(lines))
    config = tmp_path / "photon.toml"
    config.write_text(
        '[primary]\nid = "qid"\ntime = "at"\ntime_unit = "s"\n'
        '[foreign]\nid = "cid"\nprimary_id = "ref"\ntime = "at"\ntime_unit = "ms"\n'
        "[eventstore]\ncache_bytes = 1_048_576\n"
    )
    summary = join(logs, tmp_path / "out", "--config", config)
    joinable = [c for c in clicks if c["ref"] < 3_000]
    assert summary["joined"] == len(joinable)
    assert summary["unjoinable"] == len(clicks) - len(joinable)
    got = {(e["primary"]["qid"], e["cid"]) for e in read_lines(tmp_path / "out" / "joined")}
    assert got == {(c["ref"], c["cid"]) for c in joinable}


def test_bad_lines_are_kept_with_their_reason_and_the_rest_goes_on(tmp_path):
    logs = tmp_path / "logs"
    write_lines(
        logs / "queries" / "q.jsonl",
        [{"id": "q", "ts_us": 1}, b"not json\n", {"ts_us": 3}, {"id": "r", "ts_us": 4}],
    )
    bad = [
        b'{"id":"c2","primary_id"\n',
        b'{"id":"c3","ts_us":1}\n',
        b'{"id":"c4","primary_id":"q","ts_us":1,"x":"\xff"}\n',
        b"[1,2]\n",
    ]
    good = [{"id": f"g{n}", "primary_id": "q" if n % 2 else "r", "ts_us": n} for n in range(4)]
    write_lines(
        logs / "clicks" / "c.jsonl", [good[0], bad[0], b"\n", good[1], bad[1], bad[2], good[2], bad[3]]
    )
    write_lines(logs / "clicks" / "empty.jsonl", [])
    with (logs / "clicks" / "c.jsonl").open("ab") as file:
        file.write(json.dumps(good[3]).encode())  # whole, but its newline is missing
    summary = join(logs, tmp_path / "out")
    assert summary["joined"] == 4
    assert summary["malformed"] == 4
    assert summary["primary_malformed"] == 2
    assert fates_add_up(summary)
    letters = [
        e for e in read_lines(tmp_path / "out" / "dead-letters" / "east") if e["file"].endswith("c.jsonl")
    ]
    assert len(letters) == 4
    assert "primary_id" in letters[1]["reason"]
    assert "UTF-8" in letters[2]["reason"]
    assert letters[0]["event"] == bad[0].decode().rstrip("\n")


def test_following_joins_what_is_written_ends_cleanly_when_told_and_can_not_be_changed(tmp_path, refused):
    """Neither by a second run beside it, nor by another number of shards after it."""
    logs, out = tmp_path / "logs", tmp_path / "out"
    for name in ("queries", "clicks"):
        (logs / name).mkdir(parents=True)
    with following(logs, out) as process:
        clicks = (logs / "clicks" / "c.jsonl").open("ab", buffering=0)
        clicks.write(b'{"id":"early","primary_id":"q1","ts_us":1}\n{"id":"torn","prim')
        wait_until(lambda: (out / ".photon" / "topology.json").exists())
        second = photon(*join_arguments(logs, out, "--follow"))
        assert second.returncode != 0 and "another photon runs" in second.stderr
        (logs / "queries" / "q.jsonl").write_bytes(b'{"id":"q1","ts_us":1}\n')
        wait_until(lambda: ("q1", "early") in joined_pairs(out, growing=True))
        clicks.write(b'ary_id":"q1","ts_us":2}\n')
        wait_until(lambda: ("q1", "torn") in joined_pairs(out, growing=True))
    assert process.returncode == 0, process.said
    summary = json.loads(process.said[0])
    assert (summary["joined"], summary["malformed"], summary["pending"]) == (2, 0, 0)
    (tmp_path / "photon.toml").write_text("[registry]\nshards = 2\n")
    assert "registry.shards was 1" in refused(
        *join_arguments(logs, out, "--config", tmp_path / "photon.toml")
    )


@pytest.mark.long
def test_a_file_that_shrinks_is_read_again_and_said_so_and_nothing_is_doubled(tmp_path):
    logs, out = tmp_path / "logs", tmp_path / "out"
    write_lines(logs / "queries" / "q.jsonl", [{"id": "q", "ts_us": 1}])
    clicks = [{"id": f"c{n}", "primary_id": "q", "ts_us": n} for n in range(10)]
    write_lines(logs / "clicks" / "c.jsonl", clicks)
    join(logs, out)
    write_lines(logs / "clicks" / "c.jsonl", [clicks[3], {"id": "new", "primary_id": "q", "ts_us": 1}])
    done = photon(*join_arguments(logs, out))
    assert done.returncode == 0, done.stderr
    assert "shrank" in done.stderr
    summary = json.loads(done.stdout)
    assert summary["joined"] == 11
    assert summary["duplicate"] == 1
    assert max(joined_pairs(out).values()) == 1


@pytest.mark.long
def test_what_a_backfill_wrote_into_the_same_output_is_not_counted_as_the_runs(tmp_path):
    write_lines(tmp_path / "queries" / "q.jsonl", [{"id": "q1"}])
    clicks = [{"id": f"c{n}", "primary_id": "q1", "ts_us": T0} for n in range(20)]
    write_lines(tmp_path / "clicks" / "c.jsonl", clicks)
    out = tmp_path / "out"
    others = [{**click, "id": f"b{n}", "primary": {"id": "q1"}} for n, click in enumerate(clicks)]
    for datacenter in ("backfill", "east"):
        write_lines(out / "joined" / datacenter / "backfill-000000.jsonl", others)
    for joined in (20, 0):
        summary = join(tmp_path, out)
        assert (summary["joined"], summary["foreign_events"], summary["pending"]) == (20, 20, 0)
        assert (summary["joined_this_run"], summary["joined_by_datacenter"]) == (joined, {"east": 20})


def test_another_number_of_dispatcher_workers_than_before_is_refused_in_one_line(tmp_path, refused):
    logs, out = tmp_path / "logs", tmp_path / "out"
    write_lines(logs / "queries" / "a.jsonl", [])
    write_lines(logs / "clicks" / "a.jsonl", [])
    fix_workers(out / ".photon" / "east" / "dispatcher", 2)
    line = refused(*join_arguments(logs, out))
    assert "was begun with 2 dispatcher workers, not 1; set 'dispatcher.workers'" in line


@pytest.mark.long
def test_a_start_that_is_refused_changes_nothing(tmp_path, refused):
    logs, out = tmp_path / "logs", tmp_path / "out"
    write_lines(logs / "queries" / "a.jsonl", [{"id": "q", "ts_us": T0}])
    write_lines(logs / "clicks" / "a.jsonl", [{"id": "c", "primary_id": "q", "ts_us": T0}])
    assert photon(*join_arguments(logs, out)).returncode == 0
    (tmp_path / "other.toml").write_text("[dispatcher]\nworkers = 2\n[joiner]\nprocesses = 2\n")
    for more in (("--datacenters", 2), ()):
        refused(*join_arguments(logs, out), "--config", tmp_path / "other.toml", *more)
    assert photon(*join_arguments(logs, out)).returncode == 0


def test_standard_input_that_is_closed_is_no_log(tmp_path, monkeypatch, refused):
    write_lines(tmp_path / "queries" / "a.jsonl", [{"id": "q", "ts_us": T0}])
    monkeypatch.setattr("sys.stdin", None)
    assert "standard input (-) is closed" in refused(
        *("join", "--primary", tmp_path / "queries", "--foreign", "-", "--out", tmp_path / "out")
    )


@pytest.mark.long
def test_a_joined_line_is_the_foreign_one_byte_for_byte_whatever_its_logs_are_named(tmp_path):
    """The primary object is added at its end. Logs beside it that can't be read are named."""
    query = b'{ "id" : "q-1", "ts_us": 5, "text": "caf\\u00e9 \xc3\xa9", "n": 1.50 }'
    click = b'{"zeta":1e3,"id":"c-1","primary_id":"q-1","ts_us":7,"list":[1, 2]}'
    logs, out = tmp_path / "logs", tmp_path / "out"
    for kind, line in (("queries", query), ("clicks", click)):
        (logs / kind).mkdir(parents=True)
        cut_off = gzip.compress(b'{"id":"d","primary_id":"q-1","ts_us":1}\n' * 99)[:-20]
        for name, data in (
            (b"/bad\xff.jsonl", line + b"\n"),
            (b"/d\xe9.jsonl.gz", cut_off),
            (b"/e\xe9.jsonl", b'{"id":"e","prim'),
        ):
            Path(os.fsdecode(os.fsencode(logs / kind) + name)).write_bytes(data)
    done = photon(*join_arguments(logs, out))
    assert done.returncode == 1 and "started again" not in done.stderr
    unread = [rf"{logs}/{kind}/d\xe9.jsonl.gz" for kind in ("clicks", "queries")]
    assert all(f"{log} was not read" in done.stderr for log in unread)
    summary = json.loads(done.stdout)
    assert (summary["joined"], sorted(summary["unread_files"])) == (1, unread)
    (file,) = (out / "joined" / "east").glob("*.jsonl")
    assert file.read_bytes() == click[:-1] + b',"primary":' + query + b"}\n"
    for kind in ("clicks", "queries"):
        for name in os.listdir(os.fsencode(logs / kind)):
            if not name.startswith(b"bad"):
                os.unlink(os.path.join(os.fsencode(logs / kind), name))
    done = photon(*join_arguments(logs, out))
    assert (done.returncode, json.loads(done.stdout)["lost_bytes"]) == (1, 2 * len(b'{"id":"e","prim'))
    assert r"e\xe9.jsonl was deleted before it was read: 15 bytes of it are lost" in done.stderr


def test_logs_without_a_line_of_events_do_not_look_like_a_job_done(tmp_path, refused):
    """A mistyped path, and one array without a newline."""
    logs, out = tmp_path / "logs", tmp_path / "out"
    write_lines(logs / "queries" / "q.jsonl", [{"id": "q", "ts_us": T0}])
    (logs / "clicks").mkdir()
    assert f"no foreign log matches '{logs / 'clicks'}'" in refused(*join_arguments(logs, out))
    (logs / "clicks" / "c.json").write_text('[{"id": "c", "primary_id": "q", "ts_us": 1}]')
    done = photon(*join_arguments(logs, out))
    summary = json.loads(done.stdout)
    assert (done.returncode, summary["foreign_events"], summary["joined"]) == (1, 0, 0)
    assert summary["unended_files"] == [f"{logs}/clicks/c.json"]
    assert "no foreign event was read" in done.stderr
