"""Three etcd nodes on this machine, beside which the registry is measured. Needs etcd and grpcio-tools."""

import importlib
import random
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from benchmarks.registry_processes import BenchmarkError, end
from photon.app.ports import free_ports

NODES = ("etcd0", "etcd1", "etcd2")
HOW_TO_GET = "no etcd here, that part is skipped; to have it: apt-get install etcd-server"
_READY_S = 30.0
_REQUEST_BYTES = 8_000_000


def find_etcd(program: str) -> str | None:
    """Its path, where it is installed."""
    return shutil.which(program)


def version(program: str) -> str:
    """As it says itself: `etcd Version: 3.4.23`."""
    return subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.split(
        "\n", 1
    )[0]


@cache
def stubs() -> tuple[Any, Any]:
    """(messages, stubs), generated from etcd.proto into a directory of this process."""
    try:
        from grpc_tools import protoc  # type: ignore[import-untyped]
    except ImportError as error:
        raise BenchmarkError("etcd's stubs are made by grpcio-tools: pip install grpcio-tools") from error
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory(prefix="etcd-stubs-") as directory:
        made = [f"--python_out={directory}", f"--grpc_python_out={directory}"]
        if protoc.main(["protoc", f"-I{here}", *made, "etcd.proto"]):
            raise BenchmarkError(f"protoc could not compile {here / 'etcd.proto'}")
        sys.path.insert(0, directory)
        try:
            return importlib.import_module("etcd_pb2"), importlib.import_module("etcd_pb2_grpc")
        finally:
            sys.path.remove(directory)


class EtcdCluster:
    """Starts when entered, its files deleted when left. fsync is on: etcd's default."""

    def __init__(self, program: str, directory: Path, ops_max: int) -> None:
        """`ops_max`: operations a transaction may have (etcd's own default is 128)."""
        self._program = program
        self._parent = directory
        self._ops_max = ops_max
        self._stack = ExitStack()
        self.pids: list[int] = []
        self.leader = ""
        """Its gRPC address."""

    def __enter__(self) -> Self:
        self._parent.mkdir(parents=True, exist_ok=True)
        directory = self._stack.enter_context(
            tempfile.TemporaryDirectory(prefix="etcd-", dir=self._parent, ignore_cleanup_errors=True)
        )
        ports = free_ports(2 * len(NODES), random.Random())
        serve = dict(zip(NODES, ports, strict=False))
        peer = dict(zip(NODES, ports[len(NODES) :], strict=True))
        try:
            for node in NODES:
                self._start(node, serve, peer, Path(directory))
            self.leader = self._wait_for_leader([f"127.0.0.1:{port}" for port in serve.values()])
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: TracebackType | None) -> None:
        self._stack.close()

    def _start(self, node: str, serve: dict[str, int], peer: dict[str, int], directory: Path) -> None:
        options = {
            "name": node,
            "data-dir": str(directory / node),
            "listen-client-urls": f"http://127.0.0.1:{serve[node]}",
            "advertise-client-urls": f"http://127.0.0.1:{serve[node]}",
            "listen-peer-urls": f"http://127.0.0.1:{peer[node]}",
            "initial-advertise-peer-urls": f"http://127.0.0.1:{peer[node]}",
            "initial-cluster": ",".join(f"{name}=http://127.0.0.1:{port}" for name, port in peer.items()),
            "initial-cluster-state": "new",
            "max-txn-ops": str(self._ops_max),
            "max-request-bytes": str(_REQUEST_BYTES),
            "quota-backend-bytes": str(8 << 30),
            "logger": "zap",
            "log-level": "error",
        }
        command = [self._program, *(f"--{name}={value}" for name, value in options.items())]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        self._stack.callback(end, process)
        self.pids.append(process.pid)

    def _wait_for_leader(self, addresses: list[str]) -> str:
        messages, services = stubs()
        deadline = time.monotonic() + _READY_S
        while time.monotonic() < deadline:
            for address in addresses:
                with grpc.insecure_channel(address) as channel:
                    try:
                        status = services.MaintenanceStub(channel).Status(messages.StatusRequest(), timeout=1)
                    except grpc.RpcError:
                        continue
                    if status.leader and status.leader == status.header.member_id:
                        return address
            time.sleep(0.1)
        raise BenchmarkError(f"etcd has no leader within {_READY_S:g} s")
