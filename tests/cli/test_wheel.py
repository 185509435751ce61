"""The wheel, built from the sources and installed where nothing of them is, joins the logs of the README."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.system import write_lines

ROOT = Path(__file__).parents[2]
VERSIONS = ("3.11", "3.12", "3.13")


def interpreter(version):
    """The path of one of this version, or None: on the PATH, or among those that pyenv has."""
    candidates = [sys.executable, shutil.which(f"python{version}")]
    candidates += sorted(map(str, (Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/python")))
    for path in filter(None, candidates):
        asked = [path, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])"]
        told = subprocess.run(asked, capture_output=True, text=True, check=False)
        if told.stdout.strip() == version:
            return path
    return None


def run(*words, cwd, **given):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        list(map(str, words)), cwd=cwd, env=environment, capture_output=True, text=True, check=False, **given
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built from the files that git knows, as from a release."""
    where = tmp_path_factory.mktemp("wheel")
    source = where / "source"
    files = run("git", "ls-files", "-co", "--exclude-standard", cwd=ROOT).splitlines()
    for name in files:
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, source / name)
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "-w", where, source, cwd=where)
    (found,) = where.glob("photon_joiner-*.whl")
    return found


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", VERSIONS)
def test_a_wheel_alone_joins(version, wheel, tmp_path):
    python = interpreter(version)
    if python is None:
        pytest.skip(f"no Python {version} here; install one (pyenv install {version})")
    run(python, "-m", "venv", "env", cwd=tmp_path)
    run(
        "env/bin/pip",
        "install",
        "--quiet",
        "--no-compile",
        "--disable-pip-version-check",
        wheel,
        cwd=tmp_path,
    )
    write_lines(tmp_path / "queries" / "q.jsonl", ({"query_id": f"q{n}"} for n in range(50)))
    clicks = (
        {"click_id": f"c{n}", "query_id": f"q{n}", "clicked_at": 1_763_622_600_000 + n} for n in range(50)
    )
    write_lines(tmp_path / "clicks" / "c.jsonl", clicks)
    logs = ("--primary", "queries/*.jsonl", "--foreign", "clicks/*.jsonl")
    photon = tmp_path / "env" / "bin" / "photon"
    run(photon, "init", *logs, cwd=tmp_path)
    run(photon, "join", "--check", *logs, "--config", "photon.toml", cwd=tmp_path)
    run(photon, "join", *logs, "--out", "out", "--config", "photon.toml", cwd=tmp_path, timeout=100)
    joined = [line for path in (tmp_path / "out" / "joined").rglob("*.jsonl") for line in path.open()]
    assert len(joined) == 50
    where = "import photon, millwheel; print(photon.__file__)"
    assert str(tmp_path) in run("env/bin/python", "-c", where, cwd=tmp_path)
