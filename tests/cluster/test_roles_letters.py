"""Dead letters of a system that is served, each process alone by one photon.toml, while it runs."""

import json

import pytest

from tests.cluster.roles_kit import Roles
from tests.health import SERVING
from tests.system import joined_pairs, write_lines
from tests.waiting import wait_until

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(400)]


@pytest.fixture
def roles(tmp_path):
    made = Roles(tmp_path, ("east",), joiner={"unjoinable_tries_min": 1, "unjoinable_age_s": 0.0})
    made.start()
    yield made
    made.kill()


def write_clicks(logs, *clicks):
    lines = [{"id": name, "primary_id": query, "ts_us": 2} for name, query in clicks]
    write_lines(logs / "clicks" / f"{'-'.join(map('-'.join, clicks))}.jsonl", lines)


def joined_and_letters(command, roles, joined, letters):
    """Wait until these are all, by (datacenter, fate), as the command lists them."""

    def found():
        done = command("dead-letters", "list", "--config", roles.config, "--json")
        rows = json.loads(done.out) if done.status == 0 else []  # 2 before there is the first
        return joined_pairs(roles.out, growing=True), {
            (row["datacenter"], row["fate"]): row["count"] for row in rows
        }

    wait_until(lambda: found() == (joined, letters), 60, found)


def test_dead_letters_of_a_served_system_are_listed_replayed_and_joined(roles, command):
    logs = roles.root / "logs-east"
    roles.await_health(SERVING)
    write_lines(logs / "queries" / "a.jsonl", [{"id": "q1", "ts_us": 1}, {"id": "other", "ts_us": 1}])
    write_clicks(logs, ("c1", "q1"), ("c2", "q2"))
    joined_and_letters(command, roles, {("q1", "c1"): 1}, {("east", "unjoinable"): 1})
    write_clicks(logs, ("c1", "other"))
    both = {("east", "unjoinable"): 1, ("east", "duplicate"): 1}
    joined_and_letters(command, roles, {("q1", "c1"): 1}, both)
    write_lines(logs / "queries" / "b.jsonl", [{"id": "q2", "ts_us": 1}])
    done = command("dead-letters", "replay", "--config", roles.config, "--json")
    assert (done.status, json.loads(done.out)) == (0, {"east": 1})
    joined_and_letters(command, roles, {("q1", "c1"): 1, ("q2", "c2"): 1}, both)
    told = command("status", "--config", roles.config)
    assert "1 duplicates with another primary" in told.out, told.out
