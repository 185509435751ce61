"""Every process is replaced by a newer build's, one by one, while events come: none is lost, doubled or refused."""

import random
import re
import shutil
import threading
from pathlib import Path

import pytest

from idregistry.client import RegistryClient
from photon.cluster.supervisor import CORRUPT_STATUS
from photon.core.clock import SystemClock
from photon.core.protocol import NEWEST
from tests.cluster.roles_kit import Roles, Truth
from tests.health import SERVING, status_of
from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
ROOMS = ("photon", "idregistry", "eventstore", "dispatcher", "joiner", "millwheel")


def newer_build(directory):
    """The same, but that it knows one more protocol version."""
    for room in ROOMS:
        shutil.copytree(ROOT / room, directory / room, ignore=shutil.ignore_patterns("__pycache__"))
    path = directory / "photon" / "core" / "protocol.py"
    text, found = re.subn(r"(?m)^NEWEST: Final = \d+$", f"NEWEST: Final = {NEWEST + 1}", path.read_text())
    assert found == 1
    path.write_text(text)
    return directory


@pytest.fixture
def roles(tmp_path):
    made = Roles(tmp_path)
    yield made
    made.kill()


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.timeout(400)
def test_a_newer_build_replaces_each_process_under_load_and_then_raises_the_protocol(roles, tmp_path):
    newer = newer_build(tmp_path / "newer")
    wrapped = ("env", f"PYTHONPATH={newer}")
    addresses = [grpc for grpc, _ in roles.replicas.values()]
    client = RegistryClient(addresses, 10.0, SystemClock(), random.Random(1))

    def in_force():
        return [status_of("registry", address)["protocol"] for address in addresses]

    roles.start()
    roles.await_health(SERVING)
    truth, stop = Truth(roles), threading.Event()

    def write():
        while not stop.wait(0.02):
            truth.write(5)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for who in roles.all:  # replicas first
            if who == ("registry", "r2"):
                assert in_force() == [NEWEST] * 3  # one replica knows no more
            assert roles.terminate(who) == [0], roles.told()
            roles.start(who, wrapped=wrapped)
            roles.await_health(SERVING, who)
        wait_until(lambda: in_force() == [NEWEST + 1] * 3)
        for who in [("registry", "r0"), ("joiner", "west")]:  # an older one comes too late
            assert roles.terminate(who) == [0]
            roles.start(who)
            assert roles.ended(who) == CORRUPT_STATUS
            assert f"of protocol version {NEWEST + 1}, and this build reads" in roles.said(who)
            roles.start(who, wrapped=wrapped)
        roles.await_health(SERVING)
    finally:
        stop.set()
        writer.join()
        client.close()
    truth.await_all()
