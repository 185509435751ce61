"""`photon dispatcher init`: whose logs begin where, and what it refuses. Which offsets: tests/dispatcher."""

import json
import random
from functools import partial

import pytest

from dispatcher.ledger import LedgerFile
from dispatcher.workers import worker_directories, worker_of
from photon.cluster.topology import write_topology
from photon.core.disk import DirectoryLock
from photon.core.settings import Settings
from photon.dev.plan import logs_of, plan_dev

SYSTEM = """
[system]
work = "WORK"
secret_file = "/not/here"
[replicas.a]
datacenter = "tokyo"
grpc = "127.0.0.1:7400"
raft = "127.0.0.1:7401"
[datacenters.quorum]
[datacenters.tokyo]
primary = ["ROOT/tokyo/queries"]
foreign = ["ROOT/tokyo/clicks"]
eventstores = ["127.0.0.1:7410"]
joiners = ["127.0.0.1:7420"]
dispatchers = ["127.0.0.1:7430"]
"""


@pytest.fixture
def init(command):
    return partial(command, "dispatcher", "init", "--from", "now")


def write_clicks(directory, count):
    directory.mkdir(parents=True)
    lines = [json.dumps({"id": f"c{n}", "primary_id": "q", "ts_us": n}) + "\n" for n in range(count)]
    (directory / "a.jsonl").write_text("".join(lines))
    return sum(map(len, lines))


def places(dispatcher):
    """Log -> where the dispatchers will read on."""
    found = {}
    for place in worker_directories(dispatcher).values():
        with LedgerFile(place, Settings().dispatcher.state_bytes_max).read() as rows:
            found |= {file.name: file.offset for file in rows.files()}
    return found


@pytest.fixture
def dev(tmp_path):
    """The work directory of a `photon dev`, whose datacenters have logs of their own."""
    work = tmp_path / "work"
    work.mkdir()
    topology = plan_dev(Settings(), work, tmp_path / "out", (), (), 2, random.Random(1))
    write_topology(topology, work / "topology.json")
    return work


def clicks_of(work, datacenter):
    return logs_of(work, datacenter) / "clicks"


def test_each_datacenter_begins_at_the_ends_of_its_own_logs(dev, init):
    sizes = {name: write_clicks(clicks_of(dev, name), count) for name, count in (("east", 3), ("west", 5))}
    status, told, _ = init("--work", dev)
    assert (status, told.count(": 1 files")) == (0, 2)
    for name, size in sizes.items():
        assert places(dev / name / "dispatcher") == {str(clicks_of(dev, name) / "a.jsonl"): size}


def test_one_datacenter_alone_is_set_if_one_is_named(dev, init):
    for name in ("east", "west"):
        write_clicks(clicks_of(dev, name), 3)
    assert init("--work", dev, "--datacenter", "west")[0] == 0
    assert places(dev / "west" / "dispatcher")
    assert not (dev / "east").exists()


def test_a_datacenter_without_a_file_that_matches_is_told_and_ends_in_status_2(dev, init):
    write_clicks(clicks_of(dev, "east"), 3)
    clicks_of(dev, "west").mkdir(parents=True)
    status, told, why = init("--work", dev)
    assert status == 2
    assert ": 0 files" in told
    assert "no place was set" in why and str(clicks_of(dev, "west")) in why and "logs-east" not in why
    assert places(dev / "east" / "dispatcher")


def test_nothing_is_set_where_the_logs_of_one_datacenter_are_not_here(dev, init):
    write_clicks(clicks_of(dev, "east"), 3)
    status, told, why = init("--work", dev)
    assert (status, told) == (2, "")
    assert str(clicks_of(dev, "west")) in why
    assert not (dev / "east").exists()


@pytest.fixture
def system(tmp_path):
    """The settings of a system whose roles are started alone."""
    config = tmp_path / "photon.toml"
    config.write_text(SYSTEM.replace("ROOT", str(tmp_path)).replace("WORK", str(tmp_path / "work")))
    return config


def test_settings_that_name_the_datacenters_are_enough(tmp_path, system, init):
    size = write_clicks(tmp_path / "tokyo" / "clicks", 4)
    assert init("--config", system, "--datacenter", "tokyo")[0] == 0
    log = tmp_path / "tokyo" / "clicks" / "a.jsonl"
    assert places(tmp_path / "work" / "tokyo" / "dispatcher") == {str(log): size}


def test_a_new_work_directory_takes_the_datacenters_of_the_settings(tmp_path, system, init):
    write_clicks(tmp_path / "logs", 4)
    new = ("--work", tmp_path / "new", "--foreign", tmp_path / "logs" / "*.jsonl")
    assert init(*new, "--config", system)[0] == 0
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["tokyo"]
    status, _, why = init(*new, "--datacenter", "tokyo")
    assert status == 2
    assert "no datacenter 'tokyo'; there are: east, " in why and "--config" in why


def test_what_does_not_name_the_datacenters_is_refused(tmp_path, system, init):
    bare = tmp_path / "bare.toml"
    bare.write_text(SYSTEM.partition("[datacenters.quorum]")[0])
    for arguments, said in (
        ((), "one of --work"),
        (("--config", system, "--work", tmp_path), "one of --work"),
        (("--config", system, "--datacenter", "osaka"), "no datacenter 'osaka' in the topology; there are: tokyo"),
        (("--config", bare), "[datacenters.NAME]"),
        (("--foreign", "*.jsonl"), "name it by --work"),
    ):  # fmt: skip
        status, _, why = init(*arguments)
        assert (status, said in why) == (2, True), why


def test_where_a_later_datacenter_is_in_use_what_is_set_already_is_said(init, dev):
    sizes = {name: write_clicks(clicks_of(dev, name), 3) for name in ("east", "west")}
    lock = DirectoryLock(dev / "west" / "dispatcher" / "worker-0")
    try:
        status, _, told = init("--work", dev)
    finally:
        lock.release()
    assert status != 0
    assert f"set already, and they stay so: {dev / 'east' / 'dispatcher'}; not {dev / 'west'}" in told
    assert places(dev / "east" / "dispatcher") == {str(clicks_of(dev, "east") / "a.jsonl"): sizes["east"]}
    lock = DirectoryLock(dev / "east" / "dispatcher" / "worker-0")
    try:
        assert "set already" not in init("--work", dev)[2]
    finally:
        lock.release()


def test_each_of_several_workers_begins_where_its_own_files_shall(tmp_path, system, init):
    config = tmp_path / "two.toml"
    config.write_text(
        system.read_text().replace('["127.0.0.1:7430"]', '["127.0.0.1:7430", "127.0.0.1:7431"]')
    )
    logs = tmp_path / "tokyo" / "clicks"
    sizes = {}
    for name in "abcdef":
        size = write_clicks(tmp_path / name, 4)
        logs.mkdir(parents=True, exist_ok=True)
        (tmp_path / name / "a.jsonl").rename(logs / f"{name}.jsonl")
        sizes[str(logs / f"{name}.jsonl")] = size
    status, told, _ = init("--config", config, "--datacenter", "tokyo")
    assert (status, ": 6 files" in told) == (0, True)
    dispatcher = tmp_path / "work" / "tokyo" / "dispatcher"
    assert places(dispatcher) == sizes
    for worker, place in worker_directories(dispatcher).items():
        with LedgerFile(place, 1 << 30).read() as rows:
            assert {worker_of(file.name, 2) for file in rows.files()} <= {worker}
    status, _, why = init("--config", system, "--datacenter", "tokyo")
    assert (status, "begun with 2 dispatcher workers, not 1" in why) == (2, True)
