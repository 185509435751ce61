"""The system of docker-compose.yml, run for real by docker-compose."""

import io
import json
import shutil
import tarfile
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.compose.engine import Engine, run
from tests.compose.images import BASE, PHOTON, TOXIPROXY
from tests.ports import free_ports

_WAIT_S = 600.0
_POLL_S = 1.0
_COMMAND_S = 900.0


def pipeline(replica: str, datacenter: str) -> dict[str, str]:
    """The services of a datacenter that has a pipeline -> their gRPC addresses."""
    ports = {f"eventstore-{datacenter}": 7410, f"joiner-{datacenter}": 7420, f"joiner-{datacenter}-1": 7420}
    ports = {replica: 7400, **ports, f"dispatcher-{datacenter}": 7430}
    return {service: f"{service}:{port}" for service, port in ports.items()}


_REPLICAS = {name: f"{name}:7400" for name in ("r1", "r3", "r4")}
ADDRESSES = {**_REPLICAS, **pipeline("r0", "east"), **pipeline("r2", "west")}
"""All that serve gRPC."""


class Deployed:
    """One project: its containers are `<project>_<service>_1` or `<project>-<service>-1`."""

    def __init__(
        self, engine: Engine, directory: Path, project: str, generator: Mapping[str, object]
    ) -> None:
        self.engine = engine
        self.directory = directory
        self.project = project
        self._is_down = False
        self._compose = ["docker-compose"] if shutil.which("docker-compose") else ["docker", "compose"]
        (self._toxiproxy_port,) = free_ports(1)
        self.environment = {
            **engine.environment,
            "COMPOSE_HTTP_TIMEOUT": "600",
            "COMPOSE_PROJECT_NAME": project,
            "PHOTON_BASE": BASE,
            "PHOTON_IMAGE": PHOTON,
            "PIP_OPTIONS": "--no-index",
            "TOXIPROXY_IMAGE": TOXIPROXY,
            "TOXIPROXY_PORT": str(self._toxiproxy_port),
            **{f"GENERATOR_{name.upper()}": str(value) for name, value in generator.items()},
        }

    def compose(self, *arguments: object) -> str:
        command = [*self._compose, "-f", str(self.directory / "docker-compose.yml"), *map(str, arguments)]
        return run(command, self.environment, _COMMAND_S)

    def container(self, service: str) -> dict[str, Any]:
        """What the engine knows of a service's container."""
        label = f"label=com.docker.compose.project={self.project}"
        of_service = f"label=com.docker.compose.service={service}"
        ids = self.engine.docker("ps", "--all", "--quiet", "--filter", label, "--filter", of_service).split()
        assert len(ids) == 1, f"{service} has {len(ids)} containers"
        (found,) = json.loads(self.engine.docker("inspect", ids[0]))
        return dict(found)

    def execute(self, service: str, *command: object) -> str:
        return self.engine.docker("exec", self.container(service)["Id"], *command)

    def serves(self, service: str) -> bool:
        """By `photon health`, as the image's health check asks it."""
        try:
            return "serving" in self.execute(service, "photon", "health", "--timeout=20")
        except AssertionError:
            return False

    def joined_lines(self, service: str, datacenter: str) -> int:
        """How many a datacenter has, seen from one of its containers."""
        counting = f"cat /data/out/joined/{datacenter}/*.jsonl 2>/dev/null | wc -l"
        return int(self.execute(service, "sh", "-c", counting))

    def volume(self, name: str) -> dict[str, bytes]:
        """All files in a volume, by their path in it; read by a container, for it may lie anywhere."""
        packed = self.directory / "volume.tar"
        self.engine.docker(
            "run",
            "--rm",
            "--network=none",
            "--user=0:0",
            f"--volume={self.project}_{name}:/volume:ro",
            f"--volume={self.directory}:/packed",
            "--entrypoint=tar",
            PHOTON,
            *("--directory=/volume", "--create", "--file=/packed/volume.tar", "."),
        )
        with tarfile.open(fileobj=io.BytesIO(packed.read_bytes())) as archive:
            members = [member for member in archive.getmembers() if member.isfile()]
            return {m.name.removeprefix("./"): archive.extractfile(m).read() for m in members}

    def toxiproxy(self, path: str) -> Any:
        """An answer of its API, through the port that is mapped to this machine."""
        directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        with directly.open(f"http://127.0.0.1:{self._toxiproxy_port}{path}", timeout=10) as answer:
            return json.load(answer)

    def wait(self, what: str, holds: Callable[[], bool], timeout_s: float = _WAIT_S) -> None:
        """AssertionError, with what the containers say, if it does not come to hold in time.

        A container that can't be asked, since it starts anew, say, is asked again.
        """
        deadline = time.monotonic() + timeout_s
        while True:
            failed = ""
            try:
                if holds():
                    return
            except AssertionError as error:
                failed = str(error)
            if time.monotonic() > deadline:
                raise AssertionError(f"not in {timeout_s:.0f} s: {what}\n{failed}\n{self.words()}")
            time.sleep(_POLL_S)

    def words(self) -> str:
        return self.compose("ps") + self.compose("logs", "--no-color", "--tail=12")

    def down(self) -> None:
        """Containers, networks and volumes."""
        if self._is_down:
            return
        self._is_down = True
        self.compose("down", "--volumes", "--timeout", "5")
