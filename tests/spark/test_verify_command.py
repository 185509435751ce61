"""`photon verify` as a person calls it."""

import gzip
import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dispatcher.ledger import LedgerFile
from idregistry.client import RegistryAt
from photon.cluster.ledgers import known_to
from photon.cluster.topology import read_topology
from spark.verification.rules import make_report
from spark.verification.verify import Question, verify
from tests import system
from tests.spark.kit import WrittenLogs, copy_of, engine, foreign, joined, letter, primary
from tests.waiting import wait_until


@pytest.fixture
def logs(tmp_path):
    logs = WrittenLogs(tmp_path)
    logs.primary(primary("q"))
    logs.foreign(foreign("a", "q"), foreign("b", "gone"), foreign("c", "q"))
    logs.joined("dc1", joined(foreign("a", "q"), primary("q")))
    logs.letters("dc1", letter("unjoinable", foreign("b", "gone")))
    return logs


def test_a_sound_run_ends_with_0_and_a_json_report_and_nothing_else(logs, photon):
    arguments = ["--foreign", logs.directory / "clicks", "--out", logs.out, "--json"]
    status, said, errors = photon("verify", *arguments, "--primary", logs.directory / "queries")
    assert (status, errors) == (0, "")
    report = json.loads(said)
    assert report.pop("seconds") > 0
    assert {name: value for name, value in report.items() if value} == {
        "foreign_events": 3,
        "joined": 1,
        "unjoinable": 1,
        "pending_joinable": 1,
        "ok": True,
        "registry": "not asked",
    }


EVENTS = 40


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    """A run over 40 clicks with fields of its own, which has ended."""
    logs = WrittenLogs(tmp_path_factory.mktemp("ended"))
    logs.primary(primary("q"))
    clicks = [{"click": f"c{n}", "query": "q", "ts_us": 2} for n in range(EVENTS)]
    logs.foreign(*clicks[:20], name="a.jsonl")
    logs.foreign(*clicks[20:], name="b.jsonl")
    config = logs.directory / "photon.toml"
    config.write_text('[foreign]\nid = "click"\nprimary_id = "query"\n')
    system.join(logs.directory, logs.directory / "run", "--config", config)
    return logs


def damaged_line(run):
    (path,) = (run / "joined").glob("*/*.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:7] + lines[8:]))
    return "lost", json.loads(lines[7])["click"]


def doubled_line(run):
    (path,) = (run / "joined").glob("*/*.jsonl")
    line = path.read_bytes().splitlines(keepends=True)[7]
    path.write_bytes(path.read_bytes() + line)
    return "joined_twice", json.loads(line)["click"]


def truncated_file(run):
    (path,) = (run / "joined").glob("*/*.jsonl")
    data = path.read_bytes()
    path.write_bytes(data[:-20])
    return "lost", json.loads(data.splitlines()[-1])["click"]


def ledger_set_back(run):
    """To where only one of the files had been read."""
    (ledger,) = (run / ".photon").glob("*/dispatcher/worker-0")
    file = LedgerFile(ledger, 1 << 30)
    with file.write() as rows:
        back = next(state for state in rows.files() if state.path.endswith("b.jsonl"))
        rows.put_file(replace(back, offset=0))
    file.close()
    return "unread", "c20"


def skipped_event(run):
    """Its line was read, and neither joined nor kept: what a dispatcher that loses a chunk leaves."""
    (path,) = (run.parent / "clicks").glob("a.jsonl")
    (ledger,) = (run / ".photon").glob("*/dispatcher/worker-0")
    line = b'{"click":"late","query":"q","ts_us":2}\n'
    path.write_bytes(path.read_bytes() + line)
    file = LedgerFile(ledger, 1 << 30)
    with file.write() as rows:
        state = next(state for state in rows.files() if state.path.endswith("a.jsonl"))
        rows.put_file(replace(state, offset=state.offset + len(line)))
    file.close()
    return "lost_pending", "late"


def rotated(run):
    """No damage: one log has another name since, another is packed, and of one there is a copy."""
    clicks = run.parent / "clicks"
    (clicks / "a.jsonl").rename(clicks / "a.jsonl.1")
    (clicks / "b.jsonl.gz").write_bytes(gzip.compress((clicks / "b.jsonl").read_bytes()))
    (clicks / "b.jsonl").rename(run / "b.jsonl")
    shutil.copy(clicks / "a.jsonl.1", clicks / "b.jsonl")
    return "", ""


@pytest.mark.parametrize(
    "damage", [None, rotated, damaged_line, doubled_line, truncated_file, ledger_set_back, skipped_event]
)
def test_a_run_that_ended_is_held_against_its_own_registry_and_ledgers(ended, photon, tmp_path, damage):
    """By its own settings, without Java. What was damaged by hand is told, with the event."""
    run = copy_of(ended.directory / "run", tmp_path / "run")
    clicks = tmp_path / "clicks"
    shutil.copytree(ended.directory / "clicks", clicks, copy_function=os.link)  # the ledger knows the inodes
    logs = {path: path.read_bytes() for path in (ended.directory / "clicks").iterdir()}
    try:
        broken, example = damage(run) if damage else ("", "")
        status, said, errors = photon(
            "verify", "--foreign", clicks, "--out", run, "--json", "--details", tmp_path / "d"
        )
    finally:
        for path, data in logs.items():
            path.write_bytes(data)
    report = json.loads(said)
    assert (status, report["registry"], errors) == (1 if broken else 0, "asked", "")
    assert report["broken"] == ([broken] if broken else [])
    assert report["examples"] == ({broken: example} if broken else {})
    assert report["joined"] == EVENTS - {"": 0, "unread": 20, "lost_pending": 0}.get(broken, 1)
    if broken == "lost":
        # A lease outlives its joiner: how long ago the run ended is this machine's matter.
        assert report["lost_by"][0]["lease"] in ("runs", "over")
    if broken:
        assert (tmp_path / "d" / f"verdict={broken}").is_dir()


def test_lines_that_a_dispatcher_cannot_have_read_are_pending_wherever_they_stand(tmp_path, photon):
    """In a log that was cut since, whose inode has another one's lines; and in one that was rotated while
    the registry and the outputs were read."""
    logs = WrittenLogs(tmp_path)
    logs.primary(primary("q"))
    cut, rotated = (
        Path(logs.foreign(*(foreign(f"{name}{n}", "q") for n in range(20)), name=f"{name}.jsonl"))
        for name in ("cut", "rotated")
    )
    with system.following(tmp_path, logs.out):
        wait_until(lambda: len(system.read_lines(logs.out / "joined", growing=True)) == 40)
    shutil.copy(cut, cut.with_name("cut.jsonl.1"))
    logs.foreign(foreign("new0", "q"), name="cut.jsonl")
    status, said, _ = photon("verify", "--foreign", tmp_path / "clicks", "--out", logs.out, "--json")
    assert (status, json.loads(said)["pending"], json.loads(said)["joined"]) == (0, 1, 40)
    work = logs.out / ".photon"
    topology = read_topology(work / "topology.json")
    question = known_to(Question((str(tmp_path / "clicks"),), (str(logs.out),)), topology, work)
    rotated.rename(rotated.with_name("rotated.jsonl.1"))
    logs.foreign(foreign("new1", "q"), name="rotated.jsonl")
    with engine(None, tmp_path) as here:
        report = verify(here, question, topology.settings)
    assert (report.broken, report.counts["pending"], report.counts["joined"]) == ([], 2, 40)


def test_what_waits_in_an_inbox_is_pending_and_settings_of_another_run_are_refused(ended, photon, tmp_path):
    run, clicks = ended.directory / "run", tmp_path / "clicks"
    shutil.copytree(ended.directory / "clicks", clicks)
    (clicks / "c.jsonl").write_bytes(b'{"click":"waits","query":"q","ts_us":2}\n')
    (inbox,) = (path / "inbox" for path in (run / ".photon").glob("*/dispatcher"))
    inbox.mkdir(exist_ok=True)
    shutil.copy(clicks / "c.jsonl", inbox / "replay-1.jsonl")
    arguments = ("verify", "--foreign", ended.directory / "clicks", "--foreign", clicks / "c.jsonl")
    status, said, _ = photon(*arguments, "--out", run, "--json")
    (inbox / "replay-1.jsonl").unlink()
    assert (status, json.loads(said)["pending"]) == (0, 1)
    (tmp_path / "other.toml").write_text('[foreign]\nid = "id"\n')
    status, _, errors = photon(*arguments, "--out", run, "--config", tmp_path / "other.toml")
    assert (status, "must be those of the run" in errors, errors.count("\n")) == (2, True, 1)


def test_with_complete_an_event_that_came_out_nowhere_is_lost(logs, photon):
    arguments = ("verify", "--foreign", logs.directory / "clicks", "--out", logs.out)
    assert photon(*arguments)[0] == 0
    status, said, _ = photon(*arguments, "--complete")
    assert (status, "such as 'c'" in said, "broken: lost pending" in said) == (1, True, True)


def test_a_directory_with_brackets_in_its_name_is_itself_and_no_pattern(logs, photon, tmp_path):
    (tmp_path / "logs[1]").mkdir()
    (tmp_path / "logs1").mkdir()
    shutil.copy(logs.directory / "clicks" / "clicks.jsonl", tmp_path / "logs[1]")
    (tmp_path / "logs1" / "clicks.jsonl").write_text(json.dumps(foreign("alien", "q")) + "\n")
    status, said, errors = photon("verify", "--foreign", tmp_path / "logs[1]", "--out", logs.out, "--json")
    assert (status, errors, json.loads(said)["foreign_events"]) == (0, "", 3)


@pytest.mark.spark
@pytest.mark.usefixtures("session")  # skips where Spark can't run
def test_a_broken_run_ends_with_1_and_a_table_that_names_the_event(logs, tmp_path):
    logs.joined("dc2", joined(foreign("a", "q"), primary("q")))
    arguments = ("--foreign", logs.directory / "clicks", "--out", logs.out, "--master", "local[2]")
    quick = ("--conf", "spark.sql.shuffle.partitions=2", "--driver-memory", "512m")
    done = system.photon("verify", *arguments, *quick, "--details", tmp_path / "details")
    assert (done.returncode, done.stderr) == (1, "")
    assert "such as 'a'" in done.stdout
    assert "broken: joined twice" in done.stdout
    assert (tmp_path / "details" / "verdict=joined_twice").is_dir()


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--out", "nowhere", "neither joined/ nor dead-letters/"),
        ("--foreign", "nothing-*.jsonl", "no file matches"),
        ("--config", "none.toml", "none.toml"),
        ("--driver-memory", "much", "512m"),
        ("--from", "yesterday", "give a time as"),
        ("--export", "none --work none", "not both"),
        ("--export", "none", "no whole export"),
        ("--scan-timeout", "0", "--scan-timeout"),
    ],
)
def test_bad_usage_ends_with_2_and_one_line(logs, monkeypatch, photon, option, value, message):
    monkeypatch.setattr("spark.verification.verify.verify", lambda *_: pytest.fail("too late"))
    options = {"--out": logs.out, "--foreign": logs.directory / "clicks", option: value}
    arguments = [part for name, given in options.items() for part in (name, *str(given).split(" "))]
    status, said, errors = photon("verify", *arguments)
    assert (status, said, errors.count("\n")) == (2, "", 1)
    assert message in errors


def test_a_log_that_goes_while_the_logs_are_listed_is_to_be_asked_for_again(logs, monkeypatch, photon):
    monkeypatch.setattr("spark.verification.verify.input_paths", lambda _: ["file:///clicks.log.1"])
    status, _, errors = photon("verify", "--foreign", logs.directory / "clicks", "--out", logs.out)
    told = "/clicks.log.1 cannot be read (No such file or directory); see to it and ask again"
    assert (status, errors.count("\n"), told in errors) == (1, 1, True)


def test_the_question_is_what_the_options_say(logs, monkeypatch, photon):
    asked = []

    def verify(_engine, question, _settings):
        asked.append(question)
        return make_report([], primaries_given=False)

    monkeypatch.setattr("spark.verification.verify.verify", verify)
    options = ["--registry", "a:1,b:2", "--settle", "5", "--scan-timeout", "90", "--to", "3"]
    config = logs.directory / "photon.toml"
    config.write_text('[replicas.r0]\ndatacenter = "east"\ngrpc = "c:1"\nraft = "c:2"\n')
    for given in (options, ["--config", str(config)], [*options, "--config", str(config)], []):
        done = photon("verify", "--foreign", logs.directory / "clicks", "--out", logs.out, *given)
        assert done[::2] == (0, "")
    question = asked[0]
    assert (question.settle_s, question.scan_timeout_s, question.span.end) == (5.0, 90.0, 3_000_000)
    named, of_settings = RegistryAt(("a:1", "b:2")), RegistryAt(("c:1",))
    assert [one.registry for one in asked] == [named, of_settings, named, None]
