"""What an operator asks of a running system: status, metrics, explain; several processes of each role."""

import json
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from photon.cluster.told import fates_line, line_of
from photon.core.disk import DirectoryLock
from photon.rpc.metrics import FAMILIES
from tests.system import (
    fates_add_up,
    following,
    join_arguments,
    joined_pairs,
    photon,
    read_lines,
    write_lines,
    write_logs,
)
from tests.waiting import wait_until

SETTINGS = """
[eventstore]
processes = 2
[joiner]
processes = 2
[dispatcher]
workers = 2
absent_delay_ms_max = 200
[registry]
lease_s = 1.5
[metrics]
serve = true
"""
LABELS = {"process", "shard", "fate", "kind", "tier", "le", "joiner", "dispatcher", "peer"}
OF_SOME = {"photon_registry_gone_joiner_events", "photon_registry_hold_seconds"}
"""Of joiners that are gone, and of dispatchers that keep the boundary back: there may be none."""
# Here all is log files, and no sink.
OF_SOME |= {f"photon_importer_{family.name}" for family in FAMILIES["importer"]}
OF_SOME |= {"photon_joiner_published_events", "photon_joiner_publishing_behind"}
OF_SOME |= {"photon_joiner_publishing_failing"}
PROCESSES = {
    "registry-r0", "registry-r1", "registry-r2", "eventstore-east", "eventstore-east-1", "joiner-east",
    "joiner-east-1", "dispatcher-east", "dispatcher-east-1",
}  # fmt: skip


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    """A run that follows: 40 clicks joined, one malformed, one whose query is not there."""
    home = tmp_path_factory.mktemp("running")
    logs, out = home / "logs", home / "out"
    write_lines(logs / "queries" / "q.jsonl", [{"id": f"q{n}", "ts_us": n} for n in range(20)])
    for file in range(4):
        clicks = [{"id": f"c{file}-{n}", "primary_id": f"q{n}", "ts_us": n} for n in range(10)]
        write_lines(logs / "clicks" / f"c{file}.jsonl", clicks)
    early = {"id": "early", "primary_id": "q-late", "ts_us": 1}
    write_lines(logs / "clicks" / "odd.jsonl", [early, b"not json\n"])
    (home / "photon.toml").write_text(SETTINGS)
    with following(logs, out, "--config", home / "photon.toml") as process:
        wait_until(
            lambda: (
                len(joined_pairs(out, growing=True)) == 40 and read_lines(out / "dead-letters", growing=True)
            ),
            60,
        )
        # A dispatcher notes the fates of what was joined in its next checkpoint.
        counted = ["status", "--work", out / ".photon", "--json"]
        wait_until(
            lambda: json.loads(photon(*counted).stdout)["fates"]["east"]["foreign_events"] == 42,
            what="all events counted",
        )
        yield process, logs, out
    assert process.returncode == 0


@pytest.mark.cluster
def test_every_process_of_every_role_runs_and_the_fates_of_the_whole_add_up(running, command):
    _, _, out = running
    shown = json.loads(command("status", "--work", out / ".photon", "--json").out)
    assert shown.keys() == PROCESSES | {"fates"}
    assert all(shown.values())
    row = shown["fates"]["east"]
    assert (row["foreign_events"], row["adds_up"]) == (42, True)
    assert (row["fates"]["joined"], row["fates"]["malformed"], row["fates"]["pending"]) == (40, 1, 1)
    text = command("status", "--work", out).out  # the run's OUT does as well
    assert "42 foreign events = joined 40 + malformed 1 + pending 1" in text
    assert "cache: " in text
    # Of an event store that a busy machine kept silent for some seconds, the other one may not count as one.
    both = "one of 2 that serve"
    wait_until(lambda: command("status", "--work", out).out.count(both) == 2, what="both stores serve")


def test_a_dispatchers_line_tells_how_far_behind_it_is_and_how_long_events_took():
    status = {
        "backlog": {"bytes": 12_000_000, "events": 60_000, "seconds": 41.25},
        "event_latency_us": {"edges": [1_000_000, 2_000_000, 21_000_000_000], "counts": [6, 3, 1, 0]},
    }
    behind = "60,000 events to read, 41.2 s behind"
    assert line_of(status) == f"{behind}, event to joined: p50 1 s p90 2 s p99 21,000 s"
    nothing = {"bytes": 0, "events": 0, "seconds": 0.0}
    assert line_of({"backlog": nothing, "event_latency_us": {"edges": [1], "counts": [0, 0]}}) == ""


@pytest.mark.cluster
def test_every_process_answers_a_scrape_with_the_families_of_its_room(running):
    _, _, out = running
    addresses = json.loads((out / ".photon" / "topology.json").read_bytes())["metrics"]
    assert addresses.keys() == PROCESSES
    seen = {}
    for process, address in addresses.items():
        text = urllib.request.urlopen(f"http://{address}/metrics", timeout=10).read().decode()
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                if family.name.startswith("photon_"):
                    assert sample.labels["process"] == process
                    # Never an id.
                    assert sample.labels.keys() <= LABELS
                    seen.setdefault(family.name, []).append(sample.value)
    assert sum(seen["photon_dispatcher_events"]) == 42  # the workers of a datacenter together
    assert sum(seen["photon_joiner_joined_events"]) == 40
    missing = {
        f"photon_{room}_{family.name}" for room, families in FAMILIES.items() for family in families
    } - seen.keys()
    assert missing <= OF_SOME


@pytest.mark.cluster
def test_explain_says_where_an_event_is_and_why_it_waits(running, command):
    _, logs, out = running

    def explain(event, *more):
        done = command("explain", event, "--work", out / ".photon", "--json", *more)
        assert done.status == 0, done.err
        return json.loads(done.out)

    found = explain("c1-3")
    (line,) = found["joined"]
    assert json.loads(line["line"])["id"] == "c1-3"
    assert (
        found["registry"]["joiner"]
        in json.loads((out / ".photon" / "topology.json").read_bytes())["pipelines"][0]["joiners"]
    )
    assert found["primary"]["datacenters"]["east"] == {"outcome": "found", "line": '{"id": "q3", "ts_us": 3}'}
    assert found["pending"] == {"east": None}
    waits = explain("early")
    assert (waits["joined"], waits["registry"]) == ([], None)
    assert waits["pending"]["east"]["file"] == str(logs / "clicks" / "odd.jsonl")
    assert waits["pending"]["east"]["tries"] >= 1
    assert waits["primary"]["datacenters"]["east"]["outcome"] == "absent"
    text = command("explain", "early", "--work", out / ".photon").out
    assert text.startswith("early: waits to be tried again\n")
    assert "tries" in text
    nowhere = command("explain", "nobody", "--work", out / ".photon")
    assert nowhere.out.startswith("nobody: not seen")
    write_lines(logs / "queries" / "late.jsonl", [{"id": "q-late", "ts_us": 1}])
    wait_until(lambda: ("q-late", "early") in joined_pairs(out, growing=True))


def test_a_lease_is_told_of_only_while_something_is_wrong_with_it():
    lease = {"incarnation": "ab", "seconds_left": 8.0, "fenced": False, "trouble": None}
    assert line_of({"joined": 3, "lease": lease}) == "joined 3"
    failing = {**lease, "trouble": "no leader"}
    assert line_of({"lease": failing}) == "lease not renewed (no leader), 8.0 s left"
    assert line_of({"lease": {**failing, "seconds_left": -1.0}}).startswith("NO LEASE (no leader)")
    assert line_of({"lease": {**lease, "fenced": True}}).startswith("FENCED")


def test_a_run_that_follows_its_logs_is_not_called_undrained():
    assert line_of({"joined": 3, "drained": False}) == "joined 3"
    assert line_of({"joined": 3, "drained": True}) == "joined 3, drained"


def test_fates_that_do_not_add_up_stand_out():
    row = {"foreign_events": 5, "fates": {"joined": 3, "pending": 1}, "adds_up": False}
    assert fates_line(row) == "5 foreign events != (DOES NOT ADD UP) joined 3 + pending 1"


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.soak
def test_a_run_whose_ports_are_anothers_by_now_neither_sees_nor_changes_it(running, tmp_path, command):
    _, _, out = running
    work = tmp_path / "work"
    work.mkdir()
    topology = json.loads((out / ".photon" / "topology.json").read_bytes())
    (work / "topology.json").write_text(json.dumps({**topology, "run": "0123456789abcdef"}))
    with DirectoryLock(work):  # it is on, and each of its processes has just been killed
        shown = command("status", "--work", work)
        verdict, *processes = shown.out.splitlines()
        assert (shown.status, verdict.startswith("NOT WELL"), len(processes)) == (1, True, 9)
        assert all("does not answer" in one and "another run's by now" in one for one in processes)
        resharded = command("reshard", 2, "--work", work)
        assert (resharded.status, resharded.out) == (1, "")
        assert "another run's by now" in resharded.err
    registry = json.loads(command("status", "--work", out, "--json").out)["registry-r0"]
    assert (registry["version"], registry["directory"]["resharding"]) == (1, None)


@pytest.mark.cluster
@pytest.mark.long
def test_of_a_run_that_has_ended_its_files_tell(tmp_path, command):
    logs, out = write_logs(tmp_path / "logs", 20), tmp_path / "out"
    write_lines(logs / "clicks" / "d.jsonl", [{"id": "early", "primary_id": "late", "ts_us": 1}])
    with following(logs, out):
        wait_until(lambda: len(joined_pairs(out, growing=True)) == 20)
        tried = ["explain", "early", "--work", out, "--json"]
        wait_until(lambda: json.loads(command(*tried).out or "{}").get("pending", {}).get("east"))
        # All is in a checkpoint: on a machine that is busy the dispatcher may be ended before its last one.
        counted = ["status", "--work", out, "--json"]
        wait_until(lambda: json.loads(command(*counted).out)["fates"]["east"]["foreign_events"] == 21)
    shown = command("status", "--work", out)
    ended, fates = shown.out.splitlines()
    assert (shown.status, shown.err) == (1, "") and "has ended" in ended
    assert fates.endswith("21 foreign events = joined 20 + pending 1")
    told = json.loads(command("status", "--work", out, "--json").out)
    assert told["ended"] and told["fates"]["east"]["adds_up"] and told["joiner-east"] is None
    waits = json.loads(command(*tried).out)
    assert waits["pending"]["east"]["file"] == str(logs / "clicks" / "d.jsonl")
    assert (waits["registry"], waits["joined"]) == (None, [])
    joined = command("explain", "c3", "--work", out)
    assert joined.out.startswith("c3: joined\n  registry       registered in shard 0 by joiner-east")
    assert joined.err.count("\n") == 1 and "has ended" in joined.err
    refused = command("reshard", 2, "--work", out)
    assert (refused.status, refused.out) == (1, "") and "the run has ended" in refused.err
    assert command("registry", "scan", 0, "--work", out).out.count("\n") == 20
    missing = command("registry", "scan", 9, "--work", out)
    assert (missing.status, missing.err) == (2, "photon: there is no shard 9; there are: 0\n")


@pytest.mark.cluster
def test_dead_letters_of_a_system_are_found_by_its_settings(running, tmp_path, command):
    """As in a deployment: with a photon.toml, and without a topology.json."""
    _, _, out = running
    config = tmp_path / "photon.toml"
    place = '[datacenters.east]\neventstores = ["h:1"]\njoiners = ["h:2"]\ndispatchers = ["h:3"]\nprimary = ["q"]\nforeign = ["c"]\n'
    system = f'[system]\nwork = "{out / ".photon"}"\nout = "{out}"\n'
    config.write_text(f'{system}[replicas.r0]\ndatacenter = "east"\ngrpc = "h:4"\nraft = "h:5"\n{place}')
    (listed,) = json.loads(command("dead-letters", "list", "--config", config, "--json").out)
    assert (listed["datacenter"], listed["fate"], listed["count"]) == ("east", "malformed", 1)
    replayed = command("dead-letters", "replay", "--config", config, "--fate", "unjoinable", "--json")
    assert json.loads(replayed.out) == {"east": 0}, replayed.err
    config.write_text(config.read_text().replace('photon"', 'photon-elsewhere"'))
    done = command("dead-letters", "replay", "--config", config)
    assert (done.status, done.out) == (2, "") and "run elsewhere" in done.err
    assert command("dead-letters", "list").status == 2


@pytest.mark.cluster
@pytest.mark.long
def test_dead_letters_are_listed_shown_and_replayed_into_the_next_run(tmp_path, command):
    logs, out = tmp_path / "logs", tmp_path / "out"
    write_lines(logs / "queries" / "q.jsonl", [{"id": "q", "ts_us": 1}])
    orphans = [{"id": f"o{n}", "primary_id": "p", "ts_us": n} for n in range(3)]
    write_lines(logs / "clicks" / "c.jsonl", [*orphans, b"[]\n", {"id": "c", "primary_id": "q", "ts_us": 2}])
    first = json.loads(photon(*join_arguments(logs, out)).stdout)
    assert (first["joined"], first["unjoinable"], first["malformed"]) == (1, 3, 1)
    listed = json.loads(command("dead-letters", "list", "--out", out, "--json").out)
    assert {(row["fate"], row["count"], row["datacenter"]) for row in listed} == {
        ("unjoinable", 3, "east"),
        ("malformed", 1, "east"),
    }
    shown = command("dead-letters", "show", "--out", out, "--id", "o1", "--json").out
    assert json.loads(shown)["event"]["id"] == "o1"
    assert "unjoinable" in command("explain", "o2", "--work", out / ".photon").out.splitlines()[0]
    write_lines(logs / "queries" / "late.jsonl", [{"id": "p", "ts_us": 1}])
    replayed = command("dead-letters", "replay", "--out", out, "--json")
    assert json.loads(replayed.out) == {"east": 3}, replayed.err
    assert json.loads(command("dead-letters", "replay", "--out", out, "--json").out) == {"east": 0}
    second = json.loads(photon(*join_arguments(logs, out)).stdout)
    assert (second["joined"], second["joined_this_run"], second["pending"]) == (4, 3, 0)
    assert fates_add_up(second)
    assert joined_pairs(out) == {("q", "c"): 1, ("p", "o0"): 1, ("p", "o1"): 1, ("p", "o2"): 1}
    assert not list((out / ".photon" / "east" / "dispatcher" / "inbox").glob("*.jsonl"))
