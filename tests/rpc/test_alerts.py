"""The rules of alerts: when each fires, by Prometheus's own tool, and what a person is told to do."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RULES, TESTS = ((ROOT / "deploy" / name).read_text() for name in ("alerts.yml", "alerts.test.yml"))
ALERTS = re.findall(r"- alert: (\w+)", RULES)


@pytest.mark.skipif(shutil.which("promtool") is None, reason="no promtool on PATH: apt install prometheus")
def test_each_alert_fires_when_it_should_and_not_before():
    command = ["promtool", "test", "rules", "alerts.test.yml"]
    done = subprocess.run(command, cwd=ROOT / "deploy", capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("alert", ALERTS)
def test_each_alert_is_tested_both_ways_and_has_an_entry_in_the_runbook(alert):
    asked = re.findall(rf"eval_time: \w+,? *\n? *alertname: {alert}\b(.*(?:\n +exp_alerts)?)", TESTS)
    assert {"exp_alerts" in each for each in asked} == {True, False}
    assert f"runbook: docs/runbook.md#{alert.lower()}\n" in RULES
    assert f"\n## {alert}\n" in (ROOT / "docs" / "runbook.md").read_text()
