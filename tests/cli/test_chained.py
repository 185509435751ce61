"""Chained joins: click -> query -> user. The second join's foreign log is the first one's joined log."""

import json
import random
import re
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from tests.system import children_of, fates_add_up, read_lines, start_photon
from tests.waiting import wait_until

pytestmark = pytest.mark.cluster

PAGE = Path(__file__).parents[2] / "docs" / "chained-joins.md"
T0 = 1_700_000_000_000_000


@pytest.mark.long
def test_the_documents_commands_do_what_it_says(tmp_path):
    """Every command of the example, as a reader would type it."""
    example = PAGE.read_text("utf-8").split("## As streams")[0]
    script = "set -e\n" + "\n".join(re.findall(r"^```sh\n(.*?)^```", example, re.M | re.S))
    command = tmp_path / "bin" / "photon"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m photon.cli.main "$@"\n')
    command.chmod(0o755)
    environment = {
        "PATH": f"{command.parent}:{Path(sys.executable).parent}:/usr/bin:/bin",
        "PYTHONPATH": str(PAGE.parents[1]),
        "LANG": "C.UTF-8",
    }
    done = subprocess.run(
        ["bash", "-c", script],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    truth = json.loads((tmp_path / "logs" / "truth.json").read_bytes())
    lines = read_lines(tmp_path / "known" / "joined")
    assert len({line["id"] for line in lines}) == len(lines) == truth["distinct_joined_pairs"]
    for line in lines:
        assert line["primary"]["id"] == line["primary_id"]
        assert line["user"]["id"] == line["primary"]["payload"]["user"]
        assert line["user"]["country"]
    shown = json.loads(done.stdout.splitlines()[-1])
    assert shown in lines


class Log:
    """A log that rotates, of events that are remembered by id."""

    def __init__(self, directory):
        directory.mkdir(parents=True)
        self._directory = directory
        self.events = {}
        self._lines = 0

    def write(self, event):
        self.events[event["id"]] = event
        path = self._directory / f"log-{self._lines // 200:04}.jsonl"
        self._lines += 1
        with path.open("ab") as file:
            file.write(json.dumps(event).encode() + b"\n")


def follow(logs, primary, foreign, out, config):
    return start_photon(
        "join", "--primary", logs / primary, "--foreign", foreign, "--out", out, "--config", config, "--json",
        "--follow", stderr=subprocess.DEVNULL,
    )  # fmt: skip


@pytest.mark.long
def test_three_streams_are_joined_once_each_though_processes_of_both_joins_are_killed(tmp_path):
    """Users and queries that come late, joined logs that rotate while they are read, kills on both sides."""
    rng = random.Random(17)
    logs, clicked, known = tmp_path / "logs", tmp_path / "clicked", tmp_path / "known"
    queries, clicks, users = (Log(logs / name) for name in ("queries", "clicks", "users"))
    (clicked / "joined").mkdir(parents=True)
    small = "[joiner]\noutput_file_bytes_max = 20000\n"
    (tmp_path / "clicks.toml").write_text(small)
    (tmp_path / "users.toml").write_text(
        '[foreign]\nprimary_id = "primary.user_id"\n[adapter]\nfield = "user"\n' + small
    )
    runs = [
        follow(logs, "queries", logs / "clicks", clicked, tmp_path / "clicks.toml"),
        follow(logs, "users", clicked / "joined" / "*" / "*.jsonl", known, tmp_path / "users.toml"),
    ]
    kills = iter(
        [(0, "joiner"), (1, "dispatcher"), (1, "joiner"), (0, "registry"), (0, "joiner"), (1, "eventstore")]
    )
    late = []
    try:
        for number in range(1_200):
            user = {"id": f"u{number % 90}", "ts_us": T0, "name": f"user {number % 90}"}
            query = {"id": f"q{number}", "ts_us": T0 + number, "user_id": user["id"]}
            if number < 90:
                late.append((users, user)) if rng.random() < 0.3 else users.write(user)
            late.append((queries, query)) if rng.random() < 0.1 else queries.write(query)
            clicks.write({"id": f"c{number}", "primary_id": query["id"], "ts_us": T0 + number})
            if number % 200 == 199:
                wait_until(
                    lambda enough=0.6 * number: len(read_lines(clicked / "joined", growing=True)) > enough
                )
                which, role = next(kills)
                victims = [pid for name, pid in children_of(runs[which].pid).items() if name.startswith(role)]
                if victims:
                    subprocess.run(["kill", "-9", str(rng.choice(victims))], check=False)
                while late and rng.random() < 0.9:
                    log, event = late.pop(0)
                    log.write(event)
        for log, event in late:
            log.write(event)
        wait_until(lambda: len(read_lines(known / "joined", growing=True)) >= 1_200, 60)
        summaries = []
        for run in runs:
            run.send_signal(signal.SIGINT)
            summaries.append(json.loads(run.communicate(timeout=100)[0]))
    finally:
        for run in runs:
            run.kill()
            run.communicate()
    assert_each_once(read_lines(known / "joined"), clicks, queries, users)
    assert [summary["joined"] for summary in summaries] == [1_200, 1_200]
    assert all(map(fates_add_up, summaries))
    assert sum(summary["restarts"] for summary in summaries) >= 4
    assert len(list((clicked / "joined").rglob("*.jsonl"))) > 3


def assert_each_once(lines, clicks, queries, users):
    assert Counter(line["id"] for line in lines) == Counter(clicks.events.keys())
    for line in lines:
        query = queries.events[line["primary_id"]]
        assert line == {**clicks.events[line["id"]], "primary": query, "user": users.events[query["user_id"]]}
