"""A real PostgreSQL server on loopback, of Debian's package: started, killed and started again."""

import contextlib
import os
import pwd
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from tests.ports import paired_ports

START_S = 60


def need_server():
    """The directory of its programs; without them the test is skipped, in CI it fails."""
    known = shutil.which("initdb")
    if known is not None:
        return Path(known).resolve().parent
    for path in sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), reverse=True):
        return path.parent
    why = "no PostgreSQL server (initdb): install Debian's postgresql"
    pytest.fail(why) if os.environ.get("CI") else pytest.skip(why)


class Postgresql:
    """Started at once; `kill` and `start` again, `close`. `standby_of`: a copy of that one, which follows it
    until `promote`; `settings`: of the server."""

    def __init__(self, programs, settings=(), standby_of=None):
        self._programs, self._settings = programs, settings
        # It refuses to run as root, and that user must reach its files.
        user = "postgres" if os.geteuid() == 0 else None
        self._as = {} if user is None else {"user": user, "group": user, "extra_groups": []}
        self._directory = Path(tempfile.mkdtemp(prefix="photon-postgresql-"))
        if user is not None:
            owner = pwd.getpwnam(user)
            os.chown(self._directory, owner.pw_uid, owner.pw_gid)
        (self._port,) = paired_ports(1)
        self._process = None
        made = ["initdb", "-U", "photon", "-A", "trust", "-E", "UTF8"]
        if standby_of is not None:
            made = ["pg_basebackup", "-d", standby_of.uri, "-R", "-c", "fast"]
        self._run(*made, "--no-sync", "-D", self._directory / "data")
        self.uri = f"postgresql://photon@127.0.0.1:{self._port}/postgres"
        self.start()

    def start(self):
        where = ("-D", self._directory / "data", "-p", str(self._port), "-k", self._directory)
        on = ["-c", "listen_addresses=127.0.0.1", "-c", "fsync=off"]
        on += [word for setting in self._settings for word in ("-c", setting)]
        with open(self._directory.with_suffix(".log"), "ab") as log:
            self._process = subprocess.Popen(
                [self._programs / "postgres", *where, *on], stdout=log, stderr=log, **self._as
            )
        import psycopg

        until = time.monotonic() + START_S
        while True:
            try:
                psycopg.connect(self.uri).close()
                return
            except psycopg.OperationalError:
                assert self._process.poll() is None and time.monotonic() < until
                time.sleep(0.05)

    def kill(self):
        """SIGKILL to all of it."""
        import psutil

        if self._process.poll() is not None:
            return
        of_it = psutil.Process(self._process.pid)
        gone = [*of_it.children(), of_it]
        for one in gone:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.kill()
        psutil.wait_procs(gone)  # else the next start finds their memory
        self._process.wait()

    def promote(self):
        self._run("pg_ctl", "promote", "-D", self._directory / "data")

    def signal(self, number):
        """To all of its processes."""
        import psutil

        server = psutil.Process(self._process.pid)
        for one in [server, *server.children()]:
            with contextlib.suppress(psutil.NoSuchProcess):
                one.send_signal(number)

    def _run(self, program, *words):
        command = [self._programs / program, *words]
        subprocess.run(command, check=True, capture_output=True, timeout=START_S, **self._as)

    def rows(self, table="joined"):
        import psycopg

        with psycopg.connect(self.uri) as connection:
            return connection.execute(f"SELECT id, event::text FROM {table} ORDER BY id").fetchall()

    def close(self):
        self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)
        self._directory.with_suffix(".log").unlink(missing_ok=True)
