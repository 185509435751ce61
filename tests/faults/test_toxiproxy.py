"""Where there is no toxiproxy server: tests are skipped, in CI they fail, and what is no test says so."""

import pytest
from click.testing import CliRunner

from tests.faults import soak
from tests.faults.kit import toxiproxy


@pytest.fixture(autouse=True)
def nowhere(monkeypatch, tmp_path):
    for name in ("PHOTON_TOXIPROXY", "CI"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(toxiproxy, "_PLACE", tmp_path / ".toxiproxy" / "bin" / "server")


def test_without_a_server_a_test_is_skipped_and_fails_in_ci(monkeypatch):
    with pytest.raises(pytest.skip.Exception, match="make toxiproxy"):
        toxiproxy.need_toxiproxy()
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="make toxiproxy"):
        toxiproxy.need_toxiproxy()


def test_outside_of_tests_a_missing_server_is_an_error_in_a_line(monkeypatch):
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    try:
        done = CliRunner().invoke(soak.main, ["--minutes", "0"])
    except pytest.skip.Exception as error:  # which would skip this test, too
        pytest.fail(f"skipped: {error}")
    assert done.exit_code == 1
    assert done.output.startswith("Error: no toxiproxy server: `make toxiproxy`")


def test_it_is_found_where_it_is_built_on_the_path_and_where_it_is_named(monkeypatch, tmp_path):
    built = tmp_path / ".toxiproxy" / "bin" / "server"
    built.parent.mkdir(parents=True)
    built.touch()
    assert toxiproxy.need_toxiproxy() == built
    installed = tmp_path / "toxiproxy-server"
    installed.touch(mode=0o755)
    assert toxiproxy.need_toxiproxy() == installed
    elsewhere = tmp_path / "elsewhere"
    elsewhere.touch()
    monkeypatch.setenv("PHOTON_TOXIPROXY", str(elsewhere))
    assert toxiproxy.need_toxiproxy() == elsewhere
    elsewhere.unlink()
    with pytest.raises(toxiproxy.ToxiproxyError, match=r"PHOTON_TOXIPROXY names .*/elsewhere"):
        toxiproxy.need_toxiproxy()
