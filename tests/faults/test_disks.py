"""Full disks, each store's in turn, and a datacenter that is gone with its disks."""

import os
import shutil
import subprocess
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from dispatcher.workers import read_totals
from photon.cluster.topology import Replica, write_topology
from photon.core.errors import DiskFullError
from tests.eventstore.kit import Parts, append, line
from tests.faults.kit.checkers import RULES, lost, packed_ids, read_joined
from tests.faults.kit.feeder import LONG, Feed, cut_short
from tests.faults.kit.system import FaultSystem, seed_for, under_faults
from tests.faults.scenarios import goes_on
from tests.ports import free_ports
from tests.system import photon

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

DISK = "24m"
STORES = {
    "registry-r0": "work/registry/r0",
    "joiner-east": "work/east/joiner",
    "dispatcher-east": "work/east/dispatcher",
}
"""Not the event store's map, which is written once in 262,144 events."""
OUTPUTS = {"joiner-east": "out/joined/east", "dispatcher-east": "out/dead-letters/east"}
"""Of the same processes."""
TOLD = b"no space left"


@contextmanager
def small_disk(directory):
    directory.mkdir(parents=True, exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK}", "tmpfs", directory])
    assert mounted.returncode == 0
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", directory], check=True)


@contextmanager
def full(disk):
    """Until it is left, not a page is free."""
    filler = disk / "filler"
    with filler.open("wb", buffering=0) as file:
        try:
            while file.write(b"\0" * 4096):
                pass
        except OSError:
            pass
    try:
        yield
    finally:
        filler.unlink()


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system can be mounted by root alone")
def test_a_full_disk_of_any_store_is_told_and_loses_nothing(tmp_path, nursery):
    with ExitStack() as mounts:
        disks = [
            (process, path, mounts.enter_context(small_disk(tmp_path / path)))
            for process, path in [*STORES.items(), *OUTPUTS.items()]
        ]
        system = mounts.enter_context(under_faults(tmp_path, "full disks", launcher=nursery))
        for process, path, disk in disks:
            log = system.work / "logs" / f"{process}.log"
            seen = log.stat().st_size
            with full(disk):
                system.until(
                    lambda log=log, seen=seen, process=process: _is_told(system, process, log, seen),
                    f"{process} to tell that the disk of {path} is full",
                )
                goes_on(system)
            system.until(lambda process=process: _is_well(system, process), f"{process} to be well again")
            goes_on(system)


def _is_told(system, process, log, seen):
    status = system.status(process)
    said = log.read_bytes()[seen:].lower()
    return TOLD in said or (status is not None and status.get("storage_error"))


def _is_well(system, process):
    status = system.status(process)
    return status is not None and not status.get("storage_error")


@pytest.mark.parametrize("backlog", ["ignored", "caught up with"])
def test_a_datacenter_that_is_gone_with_its_disks_starts_empty_while_the_other_goes_on(
    tmp_path, nursery, backlog
):
    """Its joined logs are gone: what they held, and what was registered and not written, is missing. The
    registry has it under the tokens of those that are gone, where the offline scan finds it."""
    seed = seed_for("lost datacenter")
    feed = Feed(seed, LONG, 200.0)
    with FaultSystem(tmp_path, seed, feed, launcher=nursery) as system:
        system.until_joined(200)
        lives = {life.incarnation for life in system.lives("east")}
        system.dev.kill_datacenter("east")
        for gone in (
            system.work / "east",
            system.work / "registry" / "r0",
            system.out / "joined" / "east",
            system.out / "dead-letters" / "east",
        ):
            shutil.rmtree(gone, ignore_errors=True)
        goes_on(system, 100)  # by the other
        if backlog == "ignored":  # paper, 3.2.2
            passed = system.feeder.written["east"]
            where = ["--work", system.work, "--datacenter", "east"]
            done = photon("dispatcher", "init", "--from", "now", *where)
            assert done.returncode == 0, done.stderr
        _replace_replica(system, "r0", "r3")
        system.dev.restore_datacenter("east")
        system.until(lambda: system.watch.by_datacenter().get("east", 0) > 50, "east to join again")
        cut_short(system.feeder)
        rules = [rule for rule in RULES if rule is not lost]
        ledgers = ["west"] if backlog == "ignored" else ["west", "east"]
        system.finish(ledgers=ledgers, replicas=["r1", "r2", "r3"], rules=rules)
        if backlog == "ignored":
            _check_what_was_passed_over(system, "east", passed)
        _check_what_is_missing(system, lives)


def _replace_replica(system, old, new):
    """As an operator does whose disk is gone: an empty one, under a new name, takes its place."""
    row = system.topology.replica(old)
    grpc, raft = free_ports(2)
    fresh = Replica(
        name=new,
        datacenter=row.datacenter,
        grpc=f"127.0.0.1:{grpc}",
        raft=f"127.0.0.1:{raft}",
        directory=str(system.work.absolute() / "registry" / new),
        joining=True,
    )
    topology = replace(system.topology, replicas=[*system.topology.replicas, fresh])
    path = system.work / f"topology-{new}.json"
    write_topology(topology, path)
    serve = ["registry", "serve", "--name", new, "--topology", str(path)]
    system.dev.supervisor.start(f"registry-{new}", serve)
    system.registry().replace(old, new, fresh.raft, fresh.grpc)
    system.until(
        lambda: old not in {r.name for r in system.registry().directory().replicas},
        f"{new} to take its place",
    )
    system.use(topology)


def _check_what_was_passed_over(system, datacenter, lines):
    """All that it has read was written after these."""
    place = Path(system.topology.pipeline(datacenter).directory) / "dispatcher"
    letters = system.topology.dead_letters_directory(datacenter)
    limit = system.topology.settings.dispatcher.state_bytes_max
    read = read_totals(place, letters, limit)["foreign_events"]
    assert 0 < read <= system.feeder.written[datacenter] - lines


def _check_what_is_missing(system, lives):
    there = {line.id for line in read_joined(system.out)}
    missing = system.feeder.truth.pairs.keys() - there
    assert missing, "the lost disk held nothing: the test shows nothing"
    holders = {key: life for scan in system.last_scans for key, life in scan.holders.items()}
    for text, key in packed_ids(missing):
        assert holders[key] in lives, f"{text} is missing and not of a joiner that is gone"


@pytest.mark.skipif(os.geteuid() != 0, reason="a small file system can be mounted by root alone")
def test_a_full_disk_under_the_map_of_the_logs_is_told_and_their_events_are_found_all_the_while(tmp_path):
    idents = [f"opaque-{n}" for n in range(20_000)]
    (tmp_path / "logs").mkdir()
    append(tmp_path / "logs" / "a.jsonl", *map(line, idents))
    with small_disk(tmp_path / "map") as disk:
        parts = Parts(tmp_path).read_all()
        with full(disk):
            for _ in range(3):
                with pytest.raises(DiskFullError, match="no space left"):
                    parts.map.flush()
            assert parts.in_logs(*idents) == list(map(line, idents))
        parts.map.flush()
        parts.close()
        parts = Parts(tmp_path)
        assert parts.in_logs(*idents) == list(map(line, idents))
        parts.close()
