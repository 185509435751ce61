"""A command asks the registry of a run, whether that is on or over."""

import random

import pytest

from idregistry.client import RegistryClient
from photon.app.borrowed_registry import registry_addresses
from photon.core.clock import SystemClock
from photon.core.errors import LockedError, UsageError
from tests.app.kit import join, join_arguments, photon, write_lines

pytestmark = pytest.mark.cluster

CLICKS = 200


@pytest.fixture(scope="module")
def out(tmp_path_factory):
    """The output of a run that is over: 200 clicks joined."""
    logs = tmp_path_factory.mktemp("run")
    write_lines(logs / "queries" / "a.jsonl", ({"id": f"q{n}"} for n in range(CLICKS)))
    clicks = ({"id": f"c{n}", "primary_id": f"q{n}", "ts_us": 1_000_000 + n} for n in range(CLICKS))
    write_lines(logs / "clicks" / "a.jsonl", clicks)
    assert join(logs, logs / "out")["joined"] == CLICKS
    return logs / "out"


def registered(addresses):
    client = RegistryClient(addresses, 10.0, SystemClock(), random.Random(1))
    try:
        shards = len(client.directory().leaders)
        return sum(len(part.ids) // 16 for shard in range(shards) for part in client.scan(shard))
    finally:
        client.close()


def test_the_registry_of_a_run_that_is_over_is_started_for_the_time_being(out):
    work = out / ".photon"
    for _ in range(2):  # again, on other ports
        with registry_addresses(work, None) as addresses:
            assert registered(addresses) == CLICKS
            refused = photon(*join_arguments(out.parent, out))
            assert refused.returncode == 1
            assert "another photon runs on" in refused.stderr
            with pytest.raises(LockedError, match="another command"), registry_addresses(work, None):
                pass
    assert not (work / "topology-registry.json").exists()
    logs = out.parent
    assert join(logs, out)["joined"] == CLICKS  # and a run goes on with it afterwards


def test_while_a_run_is_on_its_own_registry_is_named(out):
    from photon.app.topology import read_topology
    from photon.core.disk import DirectoryLock

    work = out / ".photon"
    with DirectoryLock(work), registry_addresses(work, None) as addresses:
        assert addresses == [replica.grpc for replica in read_topology(work / "topology.json").replicas]


@pytest.mark.parametrize(("work", "given"), [(False, None), (True, "127.0.0.1:1"), (False, ",")])
def test_a_registry_must_be_named_and_only_one(out, work, given):
    with pytest.raises(UsageError), registry_addresses(out / ".photon" if work else None, given):
        pass


def test_a_directory_without_a_run_is_refused(tmp_path):
    with pytest.raises(UsageError, match="topology"), registry_addresses(tmp_path, None):
        pass
    assert not list(tmp_path.iterdir())
