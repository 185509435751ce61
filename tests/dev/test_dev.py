"""`photon dev` as a user has it: a datacenter dies and comes back, and nothing is lost or doubled."""

import json
import os
import signal
from collections import Counter

import pytest
from click.testing import CliRunner

from photon.cli.dev import command, duration
from photon.cli.explain import command as explain
from photon.core.errors import PhotonError
from photon.dev.plan import logs_of
from tests.ports import free_ports
from tests.system import children_of, joined_pairs, photon, read_lines, start_photon, write_lines
from tests.waiting import wait_until

ROLES = ("registry", "eventstore", "joiner", "dispatcher")


@pytest.mark.parametrize(
    ("text", "seconds"), [("20s", 20.0), ("500ms", 0.5), ("1.5m", 90.0), ("1h", 3600.0), ("7", 7.0)]
)
def test_durations_are_read_in_all_units(text, seconds):
    assert duration(None, None, text) == seconds


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--for", "soon"], "no duration; write 20s"),
        (
            ["--for", "30s", "--kill-datacenter", "east", "--after", "20s", "--restore-after", "20s"],
            "give it more",
        ),
        (["--restore-after", "20s"], "needs --kill-datacenter"),
        (["--primary", "q"], "go together"),
        (["--config", "none.toml"], "cannot be read"),
    ],
)
def test_bad_usage_is_told_in_a_line(tmp_path, arguments, said):
    result = CliRunner().invoke(command, ["--out", str(tmp_path / "out"), *arguments])
    wrong = str(result.exception) if isinstance(result.exception, PhotonError) else result.output
    assert said in wrong
    assert getattr(result.exception, "exit_status", 2) == 2 and result.exit_code != 0


@pytest.mark.cluster
@pytest.mark.long
def test_an_outage_that_ends_when_the_run_does_neither_loses_nor_doubles_an_event(tmp_path):
    out = tmp_path / "out"
    rates = ("--queries-per-s", 300, "--clicks-per-s", 100)
    outage = ("--for", "4s", "--kill-datacenter", "east", "--after", "1s", "--restore-after", "3s")
    done = photon("dev", "--out", out, *rates, *outage, "--json")
    assert done.returncode == 0, done.stderr + done.stdout
    *looks, last = map(json.loads, done.stdout.splitlines())
    killed = [look for look in looks if look["killed"] == ["east"]]
    assert killed and {look["datacenters"]["east"]["state"] for look in killed} == {"killed"}
    assert "datacenter east is killed" in done.stderr and "datacenter east is restored" in done.stderr

    summary = last["summary"]
    assert [check["ok"] for check in summary["checks"]] == [True] * 3
    assert (summary["restarts"], summary["killed"], summary["pending"]) == (4, [], 0)
    # What was written, read by other means: every click with its query, once in both datacenters together.
    logs = out / ".photon"
    written = read_lines(logs_of(logs, "east") / "clicks")
    assert written == read_lines(logs_of(logs, "west") / "clicks")
    truth = {(click["primary_id"], click["id"]) for click in written}
    assert joined_pairs(out) == Counter(dict.fromkeys(truth, 1))
    assert summary["joined"] == len(truth) > 100


SETTINGS = """
[system]
out = "{home}/out"
work = "{home}/work"
[replicas.lone]
datacenter = "attic"
grpc = "127.0.0.1:{0}"
raft = "127.0.0.1:{1}"
[datacenters.attic]
eventstores = ["127.0.0.1:{2}"]
joiners = ["127.0.0.1:{3}"]
dispatchers = ["127.0.0.1:{4}"]
primary = ["{home}/q.jsonl"]
foreign = ["{home}/c.jsonl"]
"""


def explained(event_id, config):
    return CliRunner().invoke(explain, [event_id, "--config", str(config)], catch_exceptions=False).output


@pytest.mark.cluster
@pytest.mark.long
def test_a_system_of_settings_is_looked_at_by_its_settings_and_stops_when_told(tmp_path):
    config, out = tmp_path / "photon.toml", tmp_path / "out"
    config.write_text(SETTINGS.format(*free_ports(5), home=tmp_path))
    write_lines(tmp_path / "q.jsonl", [{"id": "q", "ts_us": 1}])
    click = {"id": "c", "primary_id": "q", "ts_us": 2}
    write_lines(tmp_path / "c.jsonl", [click, {**click, "id": "d", "primary_id": "later"}])
    process = start_photon("dev", "--config", config)
    try:
        wait_until(lambda: out.exists() and joined_pairs(out, growing=True) == {("q", "c"): 1}, 90)
        shown = json.loads(photon("status", "--config", config, "--json").stdout)
        assert shown.keys() == {f"{role}-attic" for role in ROLES[1:]} | {"registry-lone", "fates"}
        assert shown["fates"]["attic"]["fates"]["joined"] == 1
        found = photon("explain", "c", "--config", config).stdout
        assert (
            found.startswith("c: joined\n") and "registered in shard 0 by joiner-attic at 127.0.0.1" in found
        )
        assert "found in attic" in found and "waits to be tried" in explained("d", config)

        # As on a machine that does not have the output.
        elsewhere = tmp_path / "elsewhere.toml"
        elsewhere.write_text(config.read_text().replace(f"{tmp_path}/out", f"{tmp_path}/away"))
        found = explained("c", elsewhere)
        assert "it may stand in a file that cannot be read here" in found
        assert f"{tmp_path}/away/joined/attic: is not on this machine" in found

        process.send_signal(signal.SIGTERM)
        said, wrong = process.communicate(timeout=100)
        assert process.returncode == 0, wrong
        assert "attic      joined 1 of 2 events read, pending 1" in said and "WRONG" not in said
        assert "1 events are joined, each once" in said

        process = start_photon("dev", "--config", config)
        wait_until(lambda: len(children_of(process.pid)) == 4, 60)
        pids = children_of(process.pid).values()
        process.send_signal(signal.SIGINT)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=100)
        assert process.returncode == 130
        wait_until(lambda: not any(os.path.exists(f"/proc/{pid}") for pid in pids))
    finally:
        if process.poll() is None:
            process.kill()
            process.communicate()
