"""Where there is no toxiproxy server: tests are skipped, in CI they fail, and what is no test says so."""

import shutil
import subprocess
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.faults import soak
from tests.faults.kit import toxiproxy

ROOT = Path(__file__).parents[2]
PLACE = toxiproxy._PLACE
MAKE = shutil.which("make")


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


def test_outside_of_tests_a_missing_server_is_an_error_in_a_line(monkeypatch):
    monkeypatch.delenv("PYTEST_CURRENT_TEST")
    try:
        done = CliRunner().invoke(soak.main, ["--minutes", "0"])
    except pytest.skip.Exception as error:  # which would skip this test, too
        pytest.fail(f"skipped: {error}")
    assert done.exit_code == 1
    assert done.output.startswith("Error: no toxiproxy server: `make toxiproxy`")


@pytest.mark.skipif(MAKE is None, reason="there is no make")
def test_make_knows_the_target_that_is_named():
    told = subprocess.run([MAKE, "-n", "toxiproxy"], cwd=ROOT, capture_output=True)
    assert told.returncode == 0, told.stderr
    assert str(PLACE.relative_to(ROOT)).encode() in told.stdout


def test_a_server_that_is_not_where_it_is_named_is_an_error(monkeypatch, tmp_path):
    monkeypatch.setenv("PHOTON_TOXIPROXY", str(tmp_path / "server"))
    with pytest.raises(toxiproxy.ToxiproxyError, match=r"PHOTON_TOXIPROXY names .*/server"):
        toxiproxy.need_toxiproxy()


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
