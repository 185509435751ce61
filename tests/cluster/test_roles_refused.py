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


def serve(roles, role, name):
    done = photon(role, "serve", "--config", roles.config, "--name", name)
    assert done.stdout == ""
    lines = done.stderr.splitlines()
    assert lines[-1].startswith("photon: ")
    assert len(lines) == 1 or done.returncode != USAGE, lines
    return done.returncode, lines[-1]


def change(roles, old, new):
    text = roles.config.read_text()
    assert old in text
    roles.config.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("role", "name", "there_are"),
    [
        ("registry", "r9", "r0, r1, r2"),
        ("joiner", "north", "east, east/1, west"),
        ("joiner", "east/2", "east, east/1, west"),
        ("dispatcher", "central", "east, west"),
    ],
)
def test_a_name_that_is_not_in_the_settings_is_answered_with_those_that_are(roles, role, name, there_are):
    status, line = serve(roles, role, name)
    assert status == USAGE
    assert f"'{name}'" in line and there_are in line


def test_an_address_that_is_none_is_named_with_its_place(roles):
    address = roles.all["joiner", "west"]
    change(roles, address, "127.0.0.1")
    status, line = serve(roles, "joiner", "east")
    assert status == USAGE
    assert "datacenters.west.joiners" in line and "is no address: give HOST:PORT" in line


def test_nothing_listens_beyond_loopback_without_tls(roles):
    address = roles.all["eventstore", "west"]
    change(roles, address, "192.0.2.1:7410")
    status, line = serve(roles, "eventstore", "west")
    assert status == USAGE
    assert "192.0.2.1:7410" in line and "insecure_beyond_loopback" in line


@pytest.mark.parametrize(
    ("role", "metrics", "told"),
    [
        ("eventstore", False, "192.0.2.1:7410"),
        ("joiner", False, "192.0.2.1:7410"),
        ("registry", False, "192.0.2.1:7410"),
        ("registry", True, f"cannot serve metrics on 192.0.2.1:{7410 + METRICS_OFFSET}"),
    ],
)
def test_an_address_that_is_not_of_this_machine_is_told(roles, role, metrics, told):
    name = "r0" if role == "registry" else "west"
    address = roles.all[role, name]
    change(roles, address, "192.0.2.1:7410")
    change(roles, "insecure_beyond_loopback = false", "insecure_beyond_loopback = true")
    if not metrics:
        change(roles, "serve = true", "serve = false")
    status, line = serve(roles, role, name)
    assert status == ADDRESS_STATUS
    assert told in line and "not of this machine" in line


def test_settings_that_name_no_system_are_refused(tmp_path):
    config = tmp_path / "photon.toml"
    config.write_text("[system]\n")
    done = photon("joiner", "serve", "--config", config, "--name", "east")
    assert done.returncode == USAGE and len(done.stderr.splitlines()) == 1
    assert "replicas" in done.stderr
    neither = photon("joiner", "serve", "--name", "east")
    assert neither.returncode == USAGE and "--config" in neither.stderr
