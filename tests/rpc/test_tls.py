"""TLS files: what would fail at the first connection is found when the settings are read."""

from pathlib import Path

import pytest

from photon.core.errors import SettingsError
from photon.rpc.network import Tls, load_tls
from tests.certificates import Authority


@pytest.fixture(scope="module")
def files(authority: Authority) -> Tls:
    return authority.issue("a")


def refused(cert: Path, key: Path, ca: Path) -> str:
    with pytest.raises(SettingsError) as caught:
        load_tls(cert, key, ca)
    return str(caught.value)


def test_good_files_are_taken(files: Tls) -> None:
    assert load_tls(files.cert, files.key, files.ca) == files


@pytest.mark.parametrize("setting", ["cert", "key", "ca"])
def test_a_file_that_cannot_be_read_is_named(files: Tls, tmp_path: Path, setting: str) -> None:
    for path, why in ((tmp_path / "missing", "No such file"), (tmp_path, "Is a directory")):
        paths = {"cert": files.cert, "key": files.key, "ca": files.ca, setting: path}
        assert f"tls.{setting}: {path}: cannot be read ({why}" in refused(**paths)


@pytest.mark.parametrize("text", [b"", b"no PEM", bytes(100), b"-----BEGIN CERTIFICATE-----\nAAAA\n"])
def test_a_file_that_is_no_pem_is_named(text: bytes, files: Tls, tmp_path: Path) -> None:
    bad = tmp_path / "bad.pem"
    bad.write_bytes(text)
    assert f"{bad}" in refused(bad, files.key, files.ca)
    assert f"{bad}" in refused(files.cert, bad, files.ca)
    assert f"tls.ca: {bad}" in refused(files.cert, files.key, bad)


def test_the_key_of_another_certificate_is_named(files: Tls, authority: Authority) -> None:
    other = authority.issue("b")
    assert "are no certificate and its key (key values mismatch)" in refused(files.cert, other.key, files.ca)


def test_a_key_with_a_passphrase_is_refused_and_nobody_is_asked_for_it(
    files: Tls, authority: Authority, tmp_path: Path
) -> None:
    locked = tmp_path / "locked.key"
    authority.run("ec", "-in", files.key, "-out", locked, "-aes256", "-passout", "pass:word")
    assert "the key is encrypted" in refused(files.cert, locked, files.ca)


def test_a_certificate_that_no_peer_would_accept_is_refused(
    files: Tls, authority: Authority, tmp_path: Path
) -> None:
    other = Authority(tmp_path / "theirs")
    assert "no node would accept it" in refused(files.cert, files.key, other.ca)
    late = authority.issue("late", days=-1)
    assert "certificate has expired" in refused(late.cert, late.key, late.ca)
    for_servers = authority.issue("web", usage="serverAuth")
    assert "no node would accept it" in refused(for_servers.cert, for_servers.key, for_servers.ca)
