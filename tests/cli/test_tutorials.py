"""The tutorials are run, each command in turn, and print what their pages show."""

import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

TUTORIALS = Path(__file__).parents[2] / "docs" / "tutorials"
BLOCK_S_MAX = 180


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.parametrize("page", sorted(TUTORIALS.glob("*.md")), ids=lambda page: page.stem)
def test_a_tutorial_does_what_its_page_shows(page, tmp_path):
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text("utf-8"), re.M | re.S)
    assert blocks[0][0] == "sh"
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for (kind, text), (follows, expected) in pairwise([*blocks, ("sh", "")]):
        if kind != "sh":
            continue
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", text],
            cwd=tmp_path,
            env={**os.environ, "PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=BLOCK_S_MAX,
        )
        assert done.returncode == 0, f"{text}\n{done.stdout}"
        if follows == "":
            printed = {line.rstrip() for line in done.stdout.splitlines()}
            missing = [line for line in expected.splitlines() if line and line.rstrip() not in printed]
            assert not missing, f"{text}\nprinted:\n{done.stdout}\nand not: {missing}"
