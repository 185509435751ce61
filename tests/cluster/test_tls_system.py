"""Whole systems with [tls]: what works, and what does not start."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from photon.rpc.network import Tls
from tests.certificates import Authority
from tests.fuzz.site import ROLES, Site
from tests.system import environment, fates_add_up, join, joined_pairs, photon, write_logs

EVENTS = 200


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls") / "ca")


def configure(path: Path, tls: Tls) -> Path:
    path.write_text(
        f'[tls]\ncert = "{tls.cert}"\nkey = "{tls.key}"\nca = "{tls.ca}"\n[metrics]\nserve = true\n', "utf-8"
    )
    return path


@pytest.mark.cluster
def test_a_run_inside_tls_joins_each_event_once_with_what_photon_certs_has_made(
    tmp_path: Path, command: Any
) -> None:
    made = command("certs", "--out", tmp_path / "certs", "--name", "here")
    assert made.status == 0, made.err
    config = tmp_path / "photon.toml"
    config.write_text(made.out + "[metrics]\nserve = true\n", "utf-8")
    out = tmp_path / "out"
    summary = join(write_logs(tmp_path / "logs", EVENTS), out, "--config", config, "--datacenters", 2)
    assert summary["joined"] == EVENTS and fates_add_up(summary)
    assert set(joined_pairs(out).values()) == {1}
    logs = b"".join(path.read_bytes() for path in (out / ".photon" / "logs").iterdir())
    assert b"Traceback" not in logs and b"Handshake failed" not in logs


# -- what does not start, and says why in one line -------------------------------------------------------


Refusal = Callable[..., str]


@pytest.fixture
def refusal(tmp_path: Path) -> Iterator[Refusal]:
    """What a role says that must not start: one line, exit status 2."""

    def of(role: str, more: str = "", tls: Tls | None = None) -> str:
        site = Site(tmp_path / role, tls, more)
        site.prepare()
        done = subprocess.run(
            site.command(role),
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            cwd=site.directory,
            env=environment(),
        )
        assert done.returncode == 2, done.stderr
        assert done.stdout == "" and done.stderr.count("\n") == 1, done.stderr
        return done.stderr

    yield of


@pytest.mark.parametrize("role", ROLES)
def test_no_role_listens_beyond_loopback_without_tls_unless_it_is_told_to(
    role: str, refusal: Refusal
) -> None:
    told = refusal(role, '[network]\nbind = "0.0.0.0"\n')
    assert "refusing to listen on 0.0.0.0:" in told
    assert "set [tls] (`photon certs` makes a test CA)" in told
    assert "network.insecure_beyond_loopback = true" in told


def test_a_certificate_that_no_other_would_take_stops_the_start(
    authority: Authority, tmp_path: Path, refusal: Refusal
) -> None:
    nameless = authority.issue("nameless", carries="DNS:other", tls_name="photon")
    assert "does not carry the name 'photon'" in refusal("joiner", tls=nameless)
    late = authority.issue("late", days=-1, tls_name="photon")
    assert "certificate has expired" in refusal("registry", tls=late)
    other = Authority(tmp_path / "theirs").issue("node", tls_name="photon")
    assert "no node would accept it" in refusal(
        "eventstore", tls=Tls(other.cert, other.key, authority.ca, "photon")
    )


@pytest.mark.cluster
@pytest.mark.long
def test_a_certificate_that_ends_soon_is_told_of_in_the_log(authority: Authority, tmp_path: Path) -> None:
    site = Site(tmp_path / "site", authority.issue("soon", days=3, tls_name="photon"))
    try:
        site.start()
        assert "expires in 3.0 days: sign a new one" in site.said("dispatcher")
    finally:
        site.kill()


def test_no_run_starts_with_files_that_can_not_be_used(tmp_path: Path, authority: Authority) -> None:
    late = authority.issue("late2", days=-1)
    logs = write_logs(tmp_path / "logs", EVENTS)
    arguments = ["--primary", logs / "queries", "--foreign", logs / "clicks", "--out", tmp_path / "out"]
    done = photon("join", *arguments, "--config", configure(tmp_path / "photon.toml", late))
    assert done.returncode == 2
    assert "certificate has expired" in done.stderr
