"""Where there is no toxiproxy server: tests are skipped, and in CI they fail."""

import pytest

from tests.faults.kit import toxiproxy


@pytest.fixture(autouse=True)
def nowhere(monkeypatch, tmp_path):
    for name in ("PHOTON_TOXIPROXY", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(toxiproxy, "_PLACE", tmp_path / ".toxiproxy" / "bin" / "server")


def test_without_a_server_a_test_is_skipped_and_says_why():
    with pytest.raises(pytest.skip.Exception, match="make toxiproxy"):
        toxiproxy.need_toxiproxy()


def test_in_ci_a_missing_server_is_a_failure(monkeypatch):
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="make toxiproxy"):
        toxiproxy.need_toxiproxy()


def test_it_is_found_where_it_is_built_on_the_path_and_where_it_is_named(monkeypatch, tmp_path):
    built = tmp_path / ".toxiproxy" / "bin" / "server"
    built.parent.mkdir(parents=True)
    built.touch()
    assert toxiproxy.need_toxiproxy() == built
    installed = tmp_path / "toxiproxy-server"
    installed.touch(mode=0o755)
    assert toxiproxy.need_toxiproxy() == installed
    monkeypatch.setenv("PHOTON_TOXIPROXY", "/elsewhere/server")
    assert str(toxiproxy.need_toxiproxy()) == "/elsewhere/server"
