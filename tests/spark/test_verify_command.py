"""`photon verify` as a person calls it."""

import json
from contextlib import nullcontext

import pytest

from idregistry.client import RegistryAt
from spark.verification.rules import make_report
from tests import system
from tests.spark.written_logs import WrittenLogs, foreign, joined, letter, primary

pytestmark = pytest.mark.spark


@pytest.fixture
def logs(tmp_path):
    logs = WrittenLogs(tmp_path)
    logs.primary(primary("q"))
    logs.foreign(foreign("a", "q"), foreign("b", "gone"), foreign("c", "q"))
    logs.joined("dc1", joined(foreign("a", "q"), primary("q")))
    logs.letters("dc1", letter("unjoinable", foreign("b", "gone")))
    return logs


@pytest.mark.usefixtures("on_session")
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
        "lost_pending": 1,
        "ok": True,
        "registry": "not asked",
    }


@pytest.mark.usefixtures("on_session")
def test_the_registry_of_a_run_that_ended_tells_what_was_lost_from_its_output(
    logs, session, photon, tmp_path
):
    out = tmp_path / "real"
    clicks = [foreign(f"c{n}", "q") for n in range(40)]
    logs.foreign(*clicks)
    system.join(logs.directory, out)
    (path,) = (out / "joined").glob("*/*.jsonl")
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[3:]) + lines[-1])
    gone = {json.loads(line)["id"] for line in lines[:3]}
    arguments = ["--foreign", logs.directory / "clicks", "--out", out, "--work", out / ".photon"]
    details = tmp_path / "lost"
    status, said, errors = photon("verify", *arguments, "--settle", 0, "--json", "--details", details)
    assert (status, errors) == (1, "")
    report = json.loads(said)
    assert report["registry"] == "asked"
    assert report["broken"][-1] == "joined_twice"
    assert report["lost"] == 3
    assert (report["joined"], report["joined_twice"], report["unregistered"]) == (36, 1, 0)
    verdicts = session.read.parquet(str(details)).where("verdict LIKE 'lost%'").collect()
    assert {row.id for row in verdicts} == gone
    # A lease outlives its joiner: how long ago the run ended is this machine's matter.
    assert report["lost_by"][0]["lease"] in ("runs", "over")


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


@pytest.mark.usefixtures("requirements")
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
    monkeypatch.setattr("spark.session.open_session", lambda *_: pytest.fail("too late"))
    options = {"--out": logs.out, "--foreign": logs.directory / "clicks", option: value}
    arguments = [part for name, given in options.items() for part in (name, *str(given).split(" "))]
    status, said, errors = photon("verify", *arguments)
    assert (status, said, errors.count("\n")) == (2, "", 1)
    assert message in errors


@pytest.mark.usefixtures("requirements")
def test_the_question_is_what_the_options_say(logs, monkeypatch, photon):
    asked = []

    def verify(_session, question, _settings):
        asked.append(question)
        return make_report([], primaries_given=False)

    monkeypatch.setattr("spark.session.open_session", lambda *_: nullcontext())
    monkeypatch.setattr("spark.verification.verify.verify", verify)
    options = ["--registry", "a:1,b:2", "--settle", "5", "--scan-timeout", "90", "--to", "3"]
    config = logs.directory / "photon.toml"
    config.write_text('[replicas.r0]\ndatacenter = "east"\ngrpc = "c:1"\nraft = "c:2"\n')
    for given in (options, ["--config", str(config)], [*options, "--config", str(config)], []):
        done = photon("verify", "--foreign", logs.directory / "clicks", "--out", logs.out, *given)
        assert done[::2] == (0, "")
    question = asked[0]
    assert (question.settle_s, question.scan_timeout_s, question.span.end_us) == (5.0, 90.0, 3_000_000)
    named, of_settings = RegistryAt(("a:1", "b:2")), RegistryAt(("c:1",))
    assert [one.registry for one in asked] == [named, of_settings, named, None]
