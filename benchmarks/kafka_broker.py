"""A Kafka broker on loopback, from Maven Central's jars alone: KRaft, one node that is all roles."""

import contextlib
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, Final

VERSION: Final = "4.4.0"
START_S: Final = 60
JAVA: Final = ("java", "-Xms64m", "-Xmx384m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1", "-cp")
BROKER: Final = (f"org.apache.kafka:kafka_2.13:{VERSION}", "org.slf4j:slf4j-simple:1.7.36")
_FETCH_S: Final = 600
_CACHE: Final = Path.home() / ".cache/photon-jars"
_POM: Final = """<project xmlns="http://maven.apache.org/POM/4.0.0"><modelVersion>4.0.0</modelVersion>
<groupId>x</groupId><artifactId>jars</artifactId><version>1</version><packaging>pom</packaging>
<dependencies>{}</dependencies></project>
"""
_DEPENDENCY: Final = (
    "<dependency><groupId>{}</groupId><artifactId>{}</artifactId><version>{}</version></dependency>"
)


def lacking(*programs: str) -> str:
    """Which of them are not on PATH; empty if all are."""
    return " and ".join(f"no {name}" for name in programs if shutil.which(name) is None)


def jars(*coordinates: str) -> Path:
    """The directory that has these (`group:artifact:version`) and all that they need; fetched once, by Maven.

    subprocess.CalledProcessError if they can't be had.
    """
    _, artifact, version = coordinates[0].split(":")
    known = Path(os.environ.get("PHOTON_JARS", _CACHE)) / f"{artifact}-{version}"
    if known.is_dir():
        return known
    made = known.with_name(f"{known.name}.{os.getpid()}")
    made.mkdir(parents=True)
    pom = made / "pom.xml"
    pom.write_text(_POM.format("".join(_DEPENDENCY.format(*one.split(":")) for one in coordinates)), "utf-8")
    goal = ("dependency:copy-dependencies", "-DincludeScope=runtime", f"-DoutputDirectory={made}")
    try:
        subprocess.run(
            ["mvn", "-q", "-B", "-f", pom, *goal], check=True, capture_output=True, timeout=_FETCH_S
        )
        with contextlib.suppress(OSError):  # another process was quicker
            made.rename(known)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return known


class Broker:
    """Started at once; `kill` and `start` again, `close`."""

    def __init__(
        self,
        directory: Path,
        ports: tuple[int, int],
        behind: Callable[[str], str] = lambda address: address,
    ) -> None:
        """`behind`: the address it listens on -> the one that clients are to use."""
        self._jars, self._directory = jars(*BROKER), directory
        here = f"127.0.0.1:{ports[0]}"
        self.address = behind(here)
        self._process: subprocess.Popen[bytes] | None = None
        directory.mkdir(parents=True)
        self._settings = directory / "server.properties"
        listeners = f"PLAINTEXT://{here},CONTROLLER://127.0.0.1:{ports[1]}"
        self._settings.write_text(
            f"""process.roles=broker,controller
node.id=1
controller.quorum.bootstrap.servers=127.0.0.1:{ports[1]}
listeners={listeners}
advertised.listeners=PLAINTEXT://{self.address}
controller.listener.names=CONTROLLER
inter.broker.listener.name=PLAINTEXT
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs={directory / "data"}
offsets.topic.replication.factor=1
offsets.topic.num.partitions=1
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
transaction.state.log.num.partitions=1
share.coordinator.state.topic.replication.factor=1
share.coordinator.state.topic.min.isr=1
group.initial.rebalance.delay.ms=0
""",
            "utf-8",
        )
        cluster = ("-t", "cGhvdG9uLXRlc3RzLTEyMw", "-c", str(self._settings))
        self._java("kafka.tools.StorageTool", "format", "--standalone", *cluster).wait(START_S)
        self.start()

    def _java(self, *arguments: str, out: int | IO[Any] = subprocess.DEVNULL) -> "subprocess.Popen[bytes]":
        return subprocess.Popen([*JAVA, f"{self._jars}/*", *arguments], stdout=out, stderr=out)

    def start(self) -> None:
        """RuntimeError if it does not serve within START_S."""
        log = self._directory / "broker.log"
        with log.open("w") as out:
            self._process = self._java("kafka.Kafka", str(self._settings), out=out)
        until = time.monotonic() + START_S
        while "Kafka Server started" not in (told := log.read_text("utf-8", "replace")):
            if self._process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"the broker did not start: {told[-2000:]}")
            time.sleep(0.1)

    def kill(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._directory, ignore_errors=True)
