"""What a person reads at the end of `photon dev`."""

import pytest

from photon.cluster.topology import Topology
from photon.core.settings import Settings
from photon.dev import checks as dev_checks
from photon.dev.checks import Check, Course, print_dev_summary, summary_of


@pytest.mark.parametrize(("seconds", "shown"), [(0.0, "in 0.0 s (-)"), (2.0, "in 2.0 s (500/s)")])
def test_a_run_of_no_time_has_no_rate(seconds, shown, capsys):
    print_dev_summary(
        {
            "datacenters": {},
            "joined": 1000,
            "seconds": seconds,
            "joined_per_s": 12_577_825.0 if not seconds else 500.0,
            "restarts": 0,
            "killed": [],
            "checks": [],
        }
    )
    assert f"joined 1,000 {shown}" in capsys.readouterr().out


def test_a_feeder_that_failed_is_a_check_that_is_not_ok_beside_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(dev_checks, "checks_of", lambda *_: [Check(True, "every event is read")])
    (tmp_path / "joined").mkdir()
    topology = Topology(Settings(), [], [], str(tmp_path), "", True, [], [])
    assert summary_of(topology, tmp_path, 0, Course(6.0))["ok"]
    failed = summary_of(topology, tmp_path, 0, Course(6.0, feeder_failed="the feeder was killed by signal 9"))
    assert not failed["ok"]
    assert [(one["ok"], one["text"]) for one in failed["checks"]] == [
        (True, "every event is read"),
        (False, "the feeder was killed by signal 9"),
    ]
