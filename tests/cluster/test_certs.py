"""`photon certs`: what it makes is what [tls] takes."""

import datetime
import ipaddress
import re
import stat
import subprocess
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography import x509

from photon.cli.certs import Authority, check_name
from photon.cluster.roles import watch_expiry
from photon.core.errors import SettingsError, UsageError
from photon.core.settings import parse_settings
from photon.rpc.network import EXPIRES_SOON_S, Tls, expiry_complaint, load_tls
from tests.system import photon

NOW = datetime.datetime.now(datetime.UTC)
DAY_S = 86_400


def issue(directory: Path, name: str = "node", tls_name: str = "photon", days: float = 30) -> Tls:
    Authority(directory, NOW).issue(name, tls_name, days)
    return Tls(directory / f"{name}.pem", directory / f"{name}.key", directory / "ca.pem", tls_name)


def certs(*arguments: object) -> subprocess.CompletedProcess[str]:
    return photon("certs", *arguments)


def test_what_it_prints_is_the_section_that_settings_take(tmp_path: Path) -> None:
    made = certs("--out", tmp_path / "certs", "--name", "east", "--name", "10.1.2.3", "--days", 7)
    assert made.returncode == 0, made.stderr
    for name, text in zip(("east", "10.1.2.3"), made.stdout.split("\n\n")[1:], strict=True):
        section = parse_settings(tomllib.loads(text)).tls
        tls = load_tls(Path(section.cert), Path(section.key), Path(section.ca), section.name)
        assert tls.cert.stem == name
        assert abs(tls.expires_s - time.time() - 7 * DAY_S) < 60
        load_tls(tls.cert, tls.key, tls.ca, name)
        load_tls(tls.cert, tls.key, tls.ca, "localhost")
        load_tls(tls.cert, tls.key, tls.ca, "127.0.0.1")


def test_a_ca_that_is_there_signs_and_stays_and_keys_are_for_the_owner_alone(tmp_path: Path) -> None:
    first = issue(tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in ("ca.pem", "ca.key", "node.pem", "node.key")}
    second = issue(tmp_path, "another")
    assert {name: (tmp_path / name).read_bytes() for name in before} == before
    assert load_tls(first.cert, first.key, second.ca, "photon")
    assert {stat.S_IMODE(key.stat().st_mode) for key in tmp_path.glob("*.key")} == {0o600}
    assert not list(tmp_path.glob("*.tmp"))


def test_a_certificate_is_renewed_for_the_key_that_is_there(tmp_path: Path) -> None:
    old = issue(tmp_path, days=-0.001)
    with pytest.raises(SettingsError, match="has expired"):
        load_tls(old.cert, old.key, old.ca)
    key = old.key.read_bytes()
    new = issue(tmp_path)
    assert new.key.read_bytes() == key
    assert load_tls(new.cert, new.key, new.ca, "photon")


def test_a_certificate_that_ends_with_its_ca_is_not_said_to_be_good_for_longer(tmp_path: Path) -> None:
    Authority(tmp_path, NOW - datetime.timedelta(days=3600))
    said = certs("--out", tmp_path, "--days", 365).stdout
    assert re.search(r"^# node, good for (49|50) days, as long as its CA$", said, re.MULTILINE), said


@pytest.mark.parametrize("missing", ["ca.pem", "ca.key"])
def test_half_a_ca_is_told_and_nothing_replaced(tmp_path: Path, missing: str) -> None:
    issue(tmp_path)
    (tmp_path / missing).unlink()
    done = certs("--out", tmp_path)
    assert done.returncode == 2
    assert missing in done.stderr and done.stderr.count("\n") == 1
    assert not (tmp_path / missing).exists()


def test_the_key_of_another_ca_is_told(tmp_path: Path) -> None:
    issue(tmp_path / "a")
    issue(tmp_path / "b")
    (tmp_path / "a" / "ca.key").write_bytes((tmp_path / "b" / "ca.key").read_bytes())
    with pytest.raises(UsageError, match="is not of the key in"):
        issue(tmp_path / "a")


def test_an_expired_ca_signs_nothing(tmp_path: Path) -> None:
    issue(tmp_path)
    later = NOW + datetime.timedelta(days=3651)
    with pytest.raises(UsageError, match="the CA has expired"):
        Authority(tmp_path, later)


@pytest.mark.parametrize("name", ["", "ca", "../up", "a/b", "-x", "a b", "a\n"])
def test_a_name_that_can_be_no_file_is_refused(name: str) -> None:
    with pytest.raises(UsageError, match="is no name for a node"):
        check_name(name)


# -- what a node says of its own -------------------------------------------------------------------------


def test_an_address_of_either_kind_is_a_name(tmp_path: Path) -> None:
    authority = Authority(tmp_path, NOW)
    for name in ("::1", "fd00::2", "10.1.2.3"):
        check_name(name)
        authority.issue(name, "photon", 1)
        cert = x509.load_pem_x509_certificate((tmp_path / f"{name}.pem").read_bytes())
        names = cert.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        assert ipaddress.ip_address(name) in names.get_values_for_type(x509.IPAddress)


def test_a_certificate_without_the_name_is_refused_when_it_is_loaded(tmp_path: Path) -> None:
    tls = issue(tmp_path, tls_name="elsewhere")
    with pytest.raises(
        SettingsError, match=r"does not carry the name 'photon'.*sign one that does"
    ) as caught:
        load_tls(tls.cert, tls.key, tls.ca, "photon")
    assert "\n" not in str(caught.value)
    assert load_tls(tls.cert, tls.key, tls.ca, "")


def test_a_name_that_is_none_is_refused(tmp_path: Path) -> None:
    tls = issue(tmp_path)
    with pytest.raises(SettingsError, match=r"tls\.name"):
        load_tls(tls.cert, tls.key, tls.ca, ".")


def test_the_certificate_that_was_loaded_is_watched_though_a_newer_one_lies_there(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = issue(tmp_path, days=3)
    loaded = load_tls(old.cert, old.key, old.ca, "photon")
    issue(tmp_path, days=300)
    watch_expiry(loaded)
    deadline = time.monotonic() + 60
    while "expires in 3.0 days" not in caplog.text and time.monotonic() < deadline:
        time.sleep(0.01)
    assert "expires in 3.0 days" in caplog.text


def test_only_a_certificate_that_ends_soon_is_complained_of(tmp_path: Path) -> None:
    tls = issue(tmp_path)
    assert expiry_complaint(replace(tls, expires_s=EXPIRES_SOON_S + 1), 0) is None
    assert "expires in 3.0 days" in str(expiry_complaint(replace(tls, expires_s=3 * DAY_S), 0))
    assert "has expired" in str(expiry_complaint(replace(tls, expires_s=5), 6))
