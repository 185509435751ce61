"""A datacenter of three machines: any may be lost, with the disks of its event store and dispatcher."""

import json
import shutil
import signal
import threading
from collections import Counter

import pytest

from tests.cluster.roles_kit import Roles, Truth
from tests.health import SERVING
from tests.system import photon
from tests.waiting import wait_until

ROLES = ("eventstore", "joiner", "dispatcher")
NAMES = ("east", "east-1", "east-2")
FILES = 12


class Machines(Roles):
    def __init__(self, root):
        super().__init__(root, datacenters=("east",), machines=3)

    @staticmethod
    def of(machine):
        return [(role, f"east/{machine}" if machine else "east") for role in ROLES]

    def lose(self, machine):
        """SIGKILL for all, and the disks are gone but for the joiner's, whose lines others can't write; the
        dead letters of the dispatcher with them."""
        self.signal(signal.SIGKILL, *self.of(machine))
        self.kill(*self.of(machine))
        for role in ("eventstore", "dispatcher"):
            shutil.rmtree(self.root / "work" / "east" / (f"{role}-{machine}" if machine else role))
        for letters in self.letters_directory.glob(f"foreign{f'-p{machine}' if machine else '-[w0]'}*"):
            letters.unlink()

    @property
    def letters_directory(self):
        return self.out / "dead-letters" / "east"

    def letters(self):
        """Of what is no event: how often each line was told."""
        lines = [line for path in self.letters_directory.iterdir() for line in path.read_bytes().splitlines()]
        return Counter(json.loads(line)["event"] for line in lines)

    def status(self):
        return json.loads(photon("status", "--json", "--config", self.config).stdout)

    def dispatchers(self):
        told = self.status()
        return [told[f"dispatcher-{name}"] for name in NAMES if told.get(f"dispatcher-{name}")]

    def shares(self):
        """How many each dispatcher that answers runs."""
        return [sum(one["runs"] for one in told["shares"].values()) for told in self.dispatchers()]

    def counted(self):
        found = self.dispatchers()
        return sum(one["foreign_events"] for one in found), sum(one["pending"] for one in found)


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.timeout(300)
def test_any_machine_may_be_lost_while_events_come(tmp_path):
    machines = Machines(tmp_path)
    machines.start()
    truth, stop, bad = Truth(machines, files=FILES), threading.Event(), []

    def write():
        while not stop.wait(0.1):
            truth.write(20)
            bad.append(f"no event, {len(bad)}")
            with (tmp_path / "logs-east" / "clicks" / f"log{len(bad) % FILES or ''}.jsonl").open("a") as file:
                file.write(bad[-1] + "\n")

    writer = threading.Thread(target=write)
    try:
        machines.await_health(SERVING)
        wait_until(lambda: machines.shares() == [1, 1, 1])
        writer.start()
        for machine in (1, 0):
            before = len(truth.joined())
            wait_until(lambda before=before: len(truth.joined()) > before + 100)
            machines.lose(machine)
            wait_until(lambda: sorted(machines.shares()) == [1, 2])
            before = len(truth.pairs)
            wait_until(lambda before=before: len(truth.joined()) > before, what=machines.told)
            machines.start(*machines.of(machine))
            machines.await_health(SERVING, *machines.of(machine))
            wait_until(lambda: machines.shares() == [1, 1, 1])
        for name in ("dispatcher-east", "dispatcher-east-2"):
            drained = photon("drain", name, "--config", machines.config)
            assert (drained.returncode, drained.stderr) == (0, "")
            assert f"{name} has no shares any more" in drained.stdout
        told = photon("status", "--config", machines.config).stdout
        assert (
            "dispatcher-east, which leaves: none; dispatcher-east-1: 0 1 2; dispatcher-east-2, which" in told
        )
        alone = photon("drain", "dispatcher-east-1", "--config", machines.config)
        assert (alone.returncode, "no other member" in alone.stderr) == (2, True)
        nobody = photon("drain", "dispatcher-west", "--config", machines.config)
        assert (nobody.returncode, "there are: dispatcher-east," in nobody.stderr) == (2, True)
        stop.set()
        writer.join()
        truth.await_all()
        read = truth.clicks + len(bad)
        wait_until(lambda: machines.counted() == (read, 0), what=lambda: str(machines.counted()))
        assert machines.letters() == Counter(bad)
        for told in machines.dispatchers():
            assert told["foreign_events"] == sum(told["fates"].values())
        stores = [machines.status()[f"eventstore-{name}"] for name in NAMES]
        assert len({one["primary_events"] for one in stores}) == 1
        assert all(one["serves"] for one in stores)
    finally:
        stop.set()
        if writer.ident is not None:
            writer.join()
        machines.kill()
