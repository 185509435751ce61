"""The profile `millwheel` of docker-compose.yml: clicks are counted while machine and database are killed.

The database's image is made here of this machine's PostgreSQL, as no registry of images is asked.
"""

import json
import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.compose.deployed import Deployed
from tests.compose.engine import Engine
from tests.compose.images import BASE
from tests.connect.postgresql import need_server

pytestmark = [pytest.mark.compose, pytest.mark.timeout(1200)]

IMAGE = "photon-compose-test-postgresql"
SERVICES = ("wheel-feed", "wheel-db1", "wheel-db2", "wheel-a", "wheel-b")
DATA = "/var/lib/postgresql/data/millwheel"
DOCKERFILE = """ARG BASE
FROM ${BASE}
RUN useradd --system --uid 999 postgres && install -d -o postgres -m 700 /var/lib/postgresql/data
COPY root /
ENV PATH=%s:$PATH LD_LIBRARY_PATH=/pglibs
USER postgres
"""
WINDOW_US = 10_000_000
Counts = Counter[tuple[str, int]]


def copied(programs: Path, root: Path) -> None:
    """Programs, what they load and what they read, by the same paths."""
    version = programs.parent.name
    for directory in (programs.parent, Path("/usr/share/postgresql") / version):
        shutil.copytree(directory, root / directory.relative_to("/"), symlinks=True)
    (root / "pglibs").mkdir()
    loading = [programs / name for name in ("postgres", "initdb", "pg_basebackup", "pg_ctl")]
    loading += programs.parent.glob("lib/libpqwalreceiver.so")
    for program in loading:
        told = subprocess.run(["ldd", program], check=True, capture_output=True, text=True).stdout
        for library in re.findall(r"=> (/\S+)", told):
            if not re.match(r"(ld-linux|lib(c|m|dl|rt|pthread)\.so)", Path(library).name):
                shutil.copy2(library, root / "pglibs")


@pytest.fixture(scope="module")
def with_database(
    engine: Engine, staged: Path, deployed: Deployed, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Deployed]:
    """A project of its own, of the images that `deployed` has built."""
    programs = need_server()
    context = tmp_path_factory.mktemp("postgresql") / "context"
    copied(programs, context / "root")
    (context / "Dockerfile").write_text(DOCKERFILE % programs)
    engine.docker("build", "--quiet", f"--build-arg=BASE={BASE}", f"--tag={IMAGE}", context)
    system = Deployed(engine, staged, f"photonwheel{os.getpid()}", {})
    system.environment |= {"POSTGRES_IMAGE": IMAGE, "WHEEL_DURATION": "600"}
    try:
        system.compose("--profile", "millwheel", "up", "--detach", "--no-build", *SERVICES)
        yield system
    finally:
        system.compose("--profile", "millwheel", "down", "--volumes", "--timeout", "5")
        if not engine.own:
            engine.docker("rmi", "--force", IMAGE)


def counted(system: Deployed) -> int:
    """Lines in the sink."""
    counting = "cat /logs/counts/*.jsonl 2>/dev/null | wc -l"
    up = next(name for name in ("wheel-a", "wheel-b") if system.container(name)["State"]["Running"])
    return int(system.execute(up, "sh", "-c", counting))


def machines(system: Deployed, asked: str) -> int:
    """How many compute, as this one tells it."""
    told = system.execute(asked, "sh", "-c", "photon millwheel status --work /data --json || true")
    status = json.loads(told) if told.startswith("{") else {"machines": [], "processes": {}}
    there = len(status["machines"])
    return there if len(status["processes"]) == 2 * there else 0


def counts_of(files: dict[str, bytes]) -> tuple[Counts, Counts]:
    """Clicks by ad and window: as they were written, and as they were counted."""
    written, told = Counts(), Counts()
    for name, content in files.items():
        lines = [json.loads(line) for line in content[: content.rfind(b"\n") + 1].splitlines()]
        if name.startswith("clicks/"):
            written.update((one["payload"]["ad"], one["ts_us"] // WINDOW_US * WINDOW_US) for one in lines)
        elif name.startswith("counts/") and name.endswith(".jsonl"):
            for one in lines:
                told[one["key"], one["start_us"]] += one["count"]
    return written, told


def test_clicks_are_counted_once_whichever_machine_and_database_is_killed(with_database: Deployed) -> None:
    system = with_database

    def goes_on(after: str) -> None:
        wanted = counted(system) + 300
        system.wait(f"counting goes on after {after}", lambda: counted(system) > wanted)

    system.wait("the first are counted", lambda: counted(system) > 100)
    system.wait("both compute", lambda: machines(system, "wheel-b") == 2)
    system.compose("--profile", "millwheel", "kill", "wheel-a")
    system.wait("the other one does all of it", lambda: machines(system, "wheel-b") == 1)
    goes_on("a kill of a machine")
    system.compose("--profile", "millwheel", "start", "wheel-a")
    system.wait("both compute again", lambda: machines(system, "wheel-a") == 2)
    system.compose("--profile", "millwheel", "kill", "wheel-db1")
    system.execute("wheel-db2", "pg_ctl", "promote", "-D", DATA)
    goes_on("a kill of the database")
    assert machines(system, "wheel-a") == 2
    system.compose("--profile", "millwheel", "kill", "wheel-feed")

    def is_counted() -> bool:
        written, told = counts_of(system.volume("wheel-logs"))
        return len(written) > 1000 and told == written

    system.wait("each click is counted once", is_counted, 120)
