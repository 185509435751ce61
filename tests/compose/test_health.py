"""`photon health`, which the image's health check calls."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from photon.cli.main import main
from photon.rpc.servers import Server


@pytest.fixture
def server() -> Iterator[Server]:
    """One without any service of ours."""
    one = Server("127.0.0.1:0", workers=2)
    one.start()
    yield one
    one.stop(0.1)


def health(capfd: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """Exit status and all words."""
    with pytest.raises(SystemExit) as ended:
        main(["health", *arguments])
    told = capfd.readouterr()
    return int(str(ended.value.code)), told.out + told.err


def test_a_server_that_serves_is_healthy(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    assert health(capfd, server.listen) == (0, f"{server.listen}: serving\n")


def test_the_address_may_come_from_the_environment(
    server: Server, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a container."""
    settings = tmp_path / "photon.toml"
    settings.write_text("")
    monkeypatch.setenv("PHOTON_ADDRESS", server.listen)
    monkeypatch.setenv("PHOTON_CONFIG", str(settings))
    assert health(capfd)[0] == 0


def test_no_answer_is_status_1_and_one_line(server: Server, capfd: pytest.CaptureFixture[str]) -> None:
    server.stop(0.1)
    status, words = health(capfd, server.listen, "--timeout", "5")
    assert status == 1
    assert words.startswith(f"photon: {server.listen}: unavailable")
    assert words.count("\n") == 1


def test_certificates_that_are_not_there_are_bad_settings(
    server: Server, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    settings = tmp_path / "photon.toml"
    settings.write_text('[tls]\ncert = "missing.pem"\nkey = "missing.key"\nca = "ca.pem"\n')
    status, words = health(capfd, server.listen, "--config", str(settings))
    assert status == 2
    assert "missing.pem" in words
