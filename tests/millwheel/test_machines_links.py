"""Two machines of a run all of whose links, to each other and to the database, pass toxiproxy."""

import contextlib
import signal
import time
import uuid

import pytest

from millwheel.machines import LEASE_S
from tests.faults.kit.toxiproxy import ToxiproxyServer, need_toxiproxy
from tests.millwheel.running import LOSES, Proxied, System

pytest.importorskip("millwheel.postgresql", reason="the postgresql extra is not installed")
pytestmark = [pytest.mark.links, pytest.mark.timeout(300)]
NAMES = ("one", "two")


@pytest.fixture
def several(server, tmp_path):
    system = System(tmp_path)
    with contextlib.closing(ToxiproxyServer(need_toxiproxy())) as proxies:
        address = server.uri.partition("@")[2].partition("/")[0]
        (proxied,) = proxies.create({"database": address}).values()
        uri = f"{server.uri.replace(address, proxied)}?schema=s{uuid.uuid4().hex}&{LOSES}"
        yield Proxied(system, uri, tmp_path, 8, proxies, NAMES)
        for name in NAMES:
            system.signal(name, signal.SIGKILL)


def test_links_that_are_cut_lose_bytes_or_are_slow_lose_and_double_nothing(several):
    proxies = several.proxies
    for name in NAMES:
        several.start(name, "--follow")
    several.computes(*NAMES)
    several.feed(0, 6)
    several.each(proxies.enable, False)
    several.write(6, 9)
    time.sleep(3)
    several.each(proxies.enable, True)
    several.feed(9, 12)
    # Nothing passes, though connections stay; what was lost in them is missed when they go on.
    several.each(proxies.add, "timeout", "upstream", {"timeout": 0}, 1.0)
    several.write(12, 15)
    time.sleep(3)
    several.each(proxies.clear)
    several.feed(15, 18)
    several.each(proxies.add, "latency", "downstream", {"latency": 100, "jitter": 50}, 1.0)
    slices = {"average_size": 1_000, "size_variation": 500, "delay": 10}
    several.each(proxies.add, "slicer", "upstream", slices, 1.0)
    several.feed(18, 24)
    several.each(proxies.clear)
    for part in range(24, 27):
        several.write(part, part + 1)
        several.each(proxies.enable, False)
        several.each(proxies.enable, True)
    several.feed(27, 27)
    proxies.enable("database", False)
    several.write(27, 28)
    time.sleep(2)  # less than a machine may go on without it, and then longer
    proxies.enable("database", True)
    several.feed(28, 29)
    proxies.add("database", "latency", "downstream", {"latency": 30, "jitter": 20}, 1.0)
    proxies.add("database", "timeout", "upstream", {"timeout": 0}, 1.0)
    several.write(29, 30)
    time.sleep(LEASE_S + 2)
    proxies.clear("database", ("timeout",))
    several.feed(30, 30)
    proxies.clear("database")
    several.computes(*NAMES)
    for name in NAMES:
        several.system.signal(name, signal.SIGTERM)
    several.finish(*NAMES)
