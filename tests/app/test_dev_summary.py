"""What a person reads at the end of `photon dev`."""

import pytest

from photon.app.dev_summary import print_dev_summary


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
