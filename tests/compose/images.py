"""The images, made without a registry: a base of Debian's packages, fetched wheels, toxiproxy's binary."""

import hashlib
import os
import shutil
import subprocess
from pathlib import Path

from tests.compose.engine import Engine, NoEngineError, run
from tests.faults.kit.toxiproxy import toxiproxy_binary

ROOT = Path(__file__).parents[2]
BASE = "photon-compose-test-base"
PHOTON = "photon-compose-test"
TOXIPROXY = "photon-compose-test-toxiproxy"

_PACKAGES = "python3,python3-venv,python3-pip,ca-certificates,iproute2"
_SUITE = "bookworm"
_MADE_OF = ("Dockerfile", ".dockerignore", "docker-compose.yml", "requirements", "deploy")
"""Beside what `.dockerignore` lets through."""
_TOXIPROXY_MODULE = "github.com/Shopify/toxiproxy/v2/cmd/server@v2.12.0"
_CA_BUNDLES = ("/etc/ssl/certs/ca-certificates.crt", "/etc/ssl/cert.pem", "/etc/pki/tls/certs/ca-bundle.crt")
_FETCH_S = 900.0


def make_base(engine: Engine, cache: Path) -> None:
    """Debian with Python: 45 s the first time."""
    archive = cache / f"{_SUITE}.tar"
    if not archive.exists():
        if shutil.which("mmdebstrap") is None:
            raise NoEngineError("there is no mmdebstrap to make the base image with")
        partial = archive.with_suffix(".partial.tar")
        include = f"--include={_PACKAGES}"
        run(
            ["mmdebstrap", "--quiet", "--variant=minbase", include, _SUITE, str(partial)],
            os.environ,
            _FETCH_S,
        )
        partial.replace(archive)
    engine.docker("import", archive, BASE)


def fetch_wheels(engine: Engine, cache: Path) -> Path:
    """For the base's Python; by pip in the base itself, on the machine's own network and with its CAs."""
    wanted = b"".join((ROOT / f"requirements/{name}.txt").read_bytes() for name in ("run", "image"))
    wheels = cache / f"wheels-{hashlib.sha256(wanted).hexdigest()[:16]}"
    if not wheels.exists():
        partial = wheels.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir()
        arguments = ["run", "--rm", "--network=host", "--env=PIP_DEFAULT_TIMEOUT=180"]
        arguments += [f"--volume={partial}:/wheels", f"--volume={ROOT / 'requirements'}:/requirements:ro"]
        given = [os.environ.get("PIP_CERT", ""), os.environ.get("SSL_CERT_FILE", ""), *_CA_BUNDLES]
        bundle = next((path for path in given if path and Path(path).is_file()), None)
        if bundle is not None:
            arguments += [f"--volume={bundle}:/ca.crt:ro", "--env=PIP_CERT=/ca.crt"]
        for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY", "PIP_INDEX_URL"):
            for spelled in (name, name.lower()):
                if spelled in os.environ:
                    arguments.append(f"--env={spelled}")
        pip = [
            "python3",
            "-m",
            "pip",
            "wheel",
            "--quiet",
            "--disable-pip-version-check",
            "--wheel-dir=/wheels",
        ]
        engine.docker(
            *arguments, BASE, *pip, "-r", "/requirements/image.txt", "setuptools>=77", timeout_s=_FETCH_S
        )
        partial.replace(wheels)
    return wheels


def stage(directory: Path, wheels: Path) -> None:
    """What a clean checkout has, with the wheels laid where the Dockerfile looks for them."""
    ignored = shutil.ignore_patterns("__pycache__", "*.pyc", "*.whl")
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    named = [line[1:] for line in lines if line.startswith("!")]
    for name in dict.fromkeys((*_MADE_OF, *(name for name in named if "/" not in name))):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, directory / name, ignore=ignored)
        else:
            shutil.copy2(source, directory / name)
    for wheel in wheels.glob("*.whl"):
        shutil.copy2(wheel, directory / "deploy/wheels")


def make_toxiproxy(engine: Engine, cache: Path, directory: Path) -> None:
    """From the binary that is here, by PHOTON_TOXIPROXY or `make toxiproxy`; else it is built by Go.

    NoEngineError without Go; ToxiproxyError if PHOTON_TOXIPROXY names no file.
    """
    directory.mkdir()
    shutil.copy2(_toxiproxy_binary(cache), directory / "toxiproxy")
    (directory / "Dockerfile").write_text(
        'ARG BASE\nFROM ${BASE}\nCOPY toxiproxy /toxiproxy\nUSER nobody\nENTRYPOINT ["/toxiproxy"]\n'
    )
    engine.docker("build", "--quiet", f"--build-arg=BASE={BASE}", f"--tag={TOXIPROXY}", directory)


def _toxiproxy_binary(cache: Path) -> Path:
    found = toxiproxy_binary()
    if found is not None:
        return found
    built = cache / "server"
    if not built.exists():
        if shutil.which("go") is None:
            raise NoEngineError("there is no toxiproxy: name its server by PHOTON_TOXIPROXY, or install Go")
        environment = {**os.environ, "GOBIN": str(cache), "CGO_ENABLED": "0"}
        subprocess.run(["go", "install", _TOXIPROXY_MODULE], env=environment, check=True, timeout=_FETCH_S)
    return built
