"""A role that can't be started says in one line why, and ends with a status that tells whose fault it is."""

import pytest

from photon.cluster.supervisor import ADDRESS_STATUS
from tests.cluster.roles_kit import METRICS_OFFSET, Roles
from tests.system import photon

pytestmark = pytest.mark.timeout(300)

USAGE = 2


@pytest.fixture
def roles(tmp_path):
    return Roles(tmp_path)


def change(roles, old, new):
    text = roles.config.read_text()
    assert old in text
    roles.config.write_text(text.replace(old, new))


def test_names_and_addresses_that_are_none_are_told_with_those_that_are(roles, refused):
    for role, name, there_are in (
        ("registry", "r9", "r0, r1, r2"),
        ("joiner", "north", "east, east/1, west"),
        ("joiner", "east/2", "east, east/1, west"),
        ("dispatcher", "central", "east, west"),
    ):
        line = refused(role, "serve", "--config", roles.config, "--name", name)
        assert f"'{name}'" in line and there_are in line
    change(roles, roles.all["joiner", "west"], "127.0.0.1")
    line = refused("joiner", "serve", "--config", roles.config, "--name", "east")
    assert "datacenters.west.joiners" in line and "is no address: give HOST:PORT" in line


@pytest.mark.parametrize(
    ("role", "told", "status"),
    [
        ("eventstore", "insecure_beyond_loopback", USAGE),
        ("eventstore", "not of this machine", ADDRESS_STATUS),
        ("joiner", "not of this machine", ADDRESS_STATUS),
        ("registry", "not of this machine", ADDRESS_STATUS),
        ("registry", f"cannot serve metrics on 192.0.2.1:{7410 + METRICS_OFFSET}", ADDRESS_STATUS),
    ],
)
def test_where_a_role_may_not_or_can_not_listen_is_told(roles, role, told, status):
    name = "r0" if role == "registry" else "west"
    change(roles, roles.all[role, name], "192.0.2.1:7410")
    if status == ADDRESS_STATUS:
        change(roles, "insecure_beyond_loopback = false", "insecure_beyond_loopback = true")
    if "metrics" not in told:
        change(roles, "serve = true", "serve = false")
    done = photon(role, "serve", "--config", roles.config, "--name", name)
    line = done.stderr.splitlines()[-1]
    assert (done.returncode, done.stdout) == (status, "")
    assert line.startswith("photon: ") and told in line
    assert "192.0.2.1:741" in line and (status == USAGE or "not of this machine" in line)
    assert status != USAGE or done.stderr.count("\n") == 1
