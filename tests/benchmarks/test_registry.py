"""The registry's benchmark: its parts do what their figures rest on. The figures themselves are no test."""

import subprocess
import sys

import pytest

from benchmarks import registry
from benchmarks.measuring import BenchError
from benchmarks.registry import HOW_TO_GET, PARTS, Plan, beside_etcd, silence_s, won_once
from benchmarks.registry_load import measure, running
from photon.cli import bench
from photon.core.errors import UsageError


def test_a_silence_ends_with_the_first_success_after_the_longest_gap():
    # killed at 10; an answer that was on its way; 0.6 s of nothing; then all is well
    assert silence_s([9.9, 10.01, 10.61, 10.62, 10.7], 10.0, 10.8) == pytest.approx(0.61)


def test_a_pause_long_after_the_kill_is_not_of_it():
    assert silence_s([10.01, 10.05, 10.3, 10.5, 14.0], 10.0, 14.1) == pytest.approx(0.3)


def test_a_silence_without_end_lasts_as_long_as_was_watched():
    assert silence_s([9.9, 10.01], 10.0, 15.0) == pytest.approx(5.0)


def test_a_race_is_won_once_by_one_or_the_other():
    assert won_once([{1: b"\0\1", 2: b"\0"}, {1: b"\1\0"}]) == 3
    for told in ([{1: b"\0\1"}, {1: b"\0\0"}], [{1: b"\1"}, {1: b"\1"}], [{1: b"\0"}, {1: b"\2"}]):
        with pytest.raises(BenchError, match="batch 1"):
            won_once(told)


def test_etcd_that_is_not_here_is_skipped_with_the_way_to_get_it(tmp_path):
    assert beside_etcd(Plan(tmp_path, etcd="no-such-program")) == {"skipped": HOW_TO_GET}
    assert "apt-get install etcd-server" in HOW_TO_GET and "\n" not in HOW_TO_GET


def test_long_links_without_toxiproxy_are_skipped_with_the_way_to_get_it(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "has_toxiproxy", lambda: False)
    assert "make toxiproxy" in registry.wan(Plan(tmp_path))["skipped"]


def test_a_checkout_is_asked_for_where_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr(bench.photon, "__file__", str(tmp_path / "photon" / "__init__.py"))
    with pytest.raises(UsageError, match="git clone"):
        bench.load_benchmarks("registry")


def test_the_command_knows_the_parts_that_there_are():
    assert tuple(PARTS) == bench.REGISTRY_PARTS


def test_bench_lists_registry_and_keeps_its_own_options():
    command = [sys.executable, "-m", "photon.cli.main", "bench", "--help"]
    told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "registry" in told and "--live-seconds" in told and "--json" in told


@pytest.mark.cluster
@pytest.mark.long
def test_a_load_is_counted_at_the_clients_and_in_the_log(tmp_path):
    with running(tmp_path) as (cluster, clients):
        measured = measure(cluster.meter(), clients, 0.5, ids=(10, 10), in_flight=4)
        looked_up = measure(cluster.meter(), clients, 0.3, call="lookup", ids=(10, 10), in_flight=2)
    assert measured.seen.ids == 10 * len(measured.seen.ends) > 0
    assert measured.commits > 0 and not measured.seen.failures
    assert set(measured.cores) == {"leader", "followers", "clients"}
    assert looked_up.seen.ids > 0
