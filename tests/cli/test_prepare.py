"""deploy/prepare.sh, which may be killed anywhere: the next run makes good what is not done."""

import subprocess
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "deploy" / "prepare.sh"

PHOTON = """#!/bin/sh
for name; do :; done
for file in ca.pem "$name.key" "$name.pem"; do echo made >"$file"; done
"""
CHOWN = """#!/bin/sh
case "$*" in *certs*) [ -e {0}/killed ] || {{ touch {0}/killed; kill -9 $PPID; exit 1; }};; esac
echo "$@" >>{0}/chowned
"""


def test_certificates_whose_owner_was_not_set_before_it_was_killed_are_given_to_him(tmp_path):
    for directory in ("ca", "certs/east", "logs/east", "bin"):
        (tmp_path / directory).mkdir(parents=True)
    for name, text in (("photon", PHOTON), ("chown", CHOWN.format(tmp_path))):
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    text = SCRIPT.read_text()
    for directory in ("ca", "certs/", "logs/"):
        text = text.replace(f" /{directory}", f" {tmp_path}/{directory}").replace(
            f'"/{directory}', f'"{tmp_path}/{directory}'
        )
    path = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin"}

    def run():
        return subprocess.run(
            ["sh", "-c", text, "prepare", "east"], env=path, capture_output=True, timeout=60
        )

    assert run().returncode == -9 and (tmp_path / "killed").exists()
    done = run()
    assert done.returncode == 0, done.stderr
    assert f"-R photon {tmp_path}/certs/east" in (tmp_path / "chowned").read_text()
    assert (tmp_path / "certs" / "east" / "node.pem").read_text() == "made\n"
    again = run()
    assert again.returncode == 0 and b"made" not in again.stdout
