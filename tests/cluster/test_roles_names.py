"""Processes that are started before the names of the others can be resolved, as containers are in any order.

Each has a mount namespace with an /etc/hosts of the test's own, which takes root.
"""

import shlex
import subprocess
import time

import pytest

from tests.cluster.roles_kit import Roles, Truth
from tests.health import NOT_SERVING, SERVING, status_of
from tests.waiting import wait_until

UNKNOWN_S = 4.0


@pytest.fixture
def hosts(tmp_path):
    path = tmp_path / "hosts"
    path.write_text("127.0.0.1 localhost\n")
    (tmp_path / "resolv.conf").write_text("nameserver 127.0.0.1\n")
    return path


@pytest.fixture
def in_own_names(hosts):
    """What to put before a command."""
    mounts = "mount --bind {} /etc/hosts && mount --bind {} /etc/resolv.conf".format(
        *(shlex.quote(str(path)) for path in (hosts, hosts.with_name("resolv.conf")))
    )
    wrap = ["unshare", "--mount", "--propagation", "private", "sh", "-c", f'{mounts} && exec "$@"', "sh"]
    if subprocess.run([*wrap, "true"], capture_output=True, check=False).returncode:
        pytest.skip("mount namespaces can't be made here (root only)")
    return wrap


@pytest.fixture
def roles(tmp_path):
    made = Roles(tmp_path, datacenters=("east",), names=True)
    yield made
    made.kill()


@pytest.mark.timeout(400)
@pytest.mark.long
@pytest.mark.soak
def test_processes_wait_until_the_names_of_the_others_are_known_and_say_what_they_wait_for(
    roles, hosts, in_own_names
):
    roles.start(wrapped=in_own_names)
    truth = Truth(roles)
    truth.write(100)
    roles.await_health(NOT_SERVING, ("registry", "r0"), ("joiner", "east"))
    time.sleep(UNKNOWN_S)  # so long at least
    assert sorted(roles.running) == sorted(roles.all)
    assert "no connection to r1" in roles.said(("registry", "r0"))
    names = {address.partition(":")[0] for address in roles.advertised()}
    with hosts.open("a") as file:
        file.write("".join(f"127.0.0.1 {name}\n" for name in sorted(names)))
    known = time.monotonic()
    roles.await_health(SERVING)
    truth.await_all()
    stores = [address for (role, _), address in roles.all.items() if role == "eventstore"]
    for address in stores:
        wait_until(lambda at=address: len(status_of("eventstore", at)["members"]) == len(stores) == 2)
    print(f"all joined {time.monotonic() - known:.1f} s after the names were known")
