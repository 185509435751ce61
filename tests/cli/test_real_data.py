"""Real data with known truth. The data sets are not part of the project: absent, the tests skip."""

import json

import pytest

from photon.dev.pairs import check_pairs
from tests.system import fates_add_up, photon, shared_data

pytestmark = [
    pytest.mark.cluster,
    pytest.mark.long,
    pytest.mark.skipif(shared_data() is None, reason="no real data: set PHOTON_SHARED_DATA to its directory"),
]


@pytest.mark.parametrize(
    ("name", "datacenters"),
    [pytest.param("spans-logs", 1, marks=pytest.mark.soak), ("spans-logs", 2), ("weather-flights", 2)],
)
def test_exactly_the_known_pairs_are_joined(tmp_path, name, datacenters):
    data = shared_data() / name
    truth = json.loads((data / "stats.json").read_bytes())
    done = photon(
        "join", "--primary", data / "primary.jsonl.gz", "--foreign", data / "foreign.jsonl.gz", "--out", tmp_path,
        "--datacenters", datacenters, "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    summary = json.loads(done.stdout)
    report = check_pairs(tmp_path / "joined")
    assert report.repeated == 0
    assert report.lines == summary["joined"] == truth["distinct_joined_pairs"]
    assert report.sha256 == truth["joined_pairs_sha256"]
    assert summary["foreign_events"] == truth["foreign_rows"]
    assert summary["unjoinable"] == truth["foreign_rows_orphan"]
    assert fates_add_up(summary)
