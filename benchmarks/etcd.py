"""Three etcd nodes on this machine, beside which the registry is measured. Needs etcd and grpcio-tools."""

import importlib
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import Any, Final, Self

import grpc

from benchmarks.measuring import BenchError, cpu_seconds
from benchmarks.registry_load import WARM_S, Load
from photon.cluster.ports import free_ports
from photon.core.ids import Token

NODES: Final = ("etcd0", "etcd1", "etcd2")
HOW_TO_GET: Final = "no etcd here, that part is skipped; to have it: apt-get install etcd-server"
_READY_S: Final = 30.0
_REQUEST_BYTES: Final = 8_000_000
_TIMEOUT_S: Final = 30.0
_PREPARED_PER_S: Final = 150
"""More transactions than etcd takes on this kind of machine; what is left over is thrown away."""


def version(program: str) -> str | None:
    """As it says itself: `etcd Version: 3.4.23`; None where it is not installed."""
    if shutil.which(program) is None:
        return None
    told = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout
    return told.split("\n", 1)[0]


@cache
def stubs() -> tuple[Any, Any]:
    """(messages, stubs), generated from etcd.proto into a directory of this process."""
    try:
        from grpc_tools import protoc  # type: ignore[import-untyped]
    except ImportError as error:
        raise BenchError("etcd's stubs are made by grpcio-tools: pip install grpcio-tools") from error
    here = Path(__file__).parent
    with tempfile.TemporaryDirectory(prefix="etcd-stubs-") as directory:
        made = [f"--python_out={directory}", f"--grpc_python_out={directory}"]
        if protoc.main(["protoc", f"-I{here}", *made, "etcd.proto"]):
            raise BenchError(f"protoc could not compile {here / 'etcd.proto'}")
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
        self._pids: list[int] = []
        self._leader = ""

    def __enter__(self) -> Self:
        self._parent.mkdir(parents=True, exist_ok=True)
        ports = free_ports(2 * len(NODES), random.Random())
        serve = {node: f"127.0.0.1:{ports.pop()}" for node in NODES}
        peer = {node: f"http://127.0.0.1:{ports.pop()}" for node in NODES}
        with ExitStack() as stack:
            scratch = tempfile.TemporaryDirectory(
                prefix="etcd-", dir=self._parent, ignore_cleanup_errors=True
            )
            directory = Path(stack.enter_context(scratch))
            for node in NODES:
                self._start(stack, node, f"http://{serve[node]}", peer, directory / node)
            self._leader = _wait_for_leader(list(serve.values()))
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def leader(self) -> str:
        """Its gRPC address."""
        return self._leader

    def cpu(self, leader: str) -> dict[str, float]:
        """Seconds used so far, of all nodes."""
        return {"nodes": cpu_seconds(self._pids)}

    def commit_index(self, node: str) -> int:
        """Not asked for."""
        return 0

    def _start(self, stack: ExitStack, node: str, serve: str, peer: dict[str, str], directory: Path) -> None:
        options = {
            "name": node,
            "data-dir": directory,
            "listen-client-urls": serve,
            "advertise-client-urls": serve,
            "listen-peer-urls": peer[node],
            "initial-advertise-peer-urls": peer[node],
            "initial-cluster": ",".join(f"{name}={url}" for name, url in peer.items()),
            "initial-cluster-state": "new",
            "max-txn-ops": self._ops_max,
            "max-request-bytes": _REQUEST_BYTES,
            "quota-backend-bytes": 8 << 30,
            "logger": "zap",
            "log-level": "error",
        }
        command = [self._program, *(f"--{name}={value}" for name, value in options.items())]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        stack.callback(process.wait)
        stack.callback(process.kill)
        self._pids.append(process.pid)


def _wait_for_leader(addresses: list[str]) -> str:
    messages, services = stubs()
    deadline = time.monotonic() + _READY_S
    while time.monotonic() < deadline:
        for address in addresses:
            with grpc.insecure_channel(address) as channel, suppress(grpc.RpcError):
                status = services.MaintenanceStub(channel).Status(messages.StatusRequest(), timeout=1)
                if status.leader and status.leader == status.header.member_id:
                    return address
        time.sleep(0.1)
    raise BenchError(f"etcd has no leader within {_READY_S:g} s")


def transaction(ids: int, token: bytes) -> Any:
    """A TxnRequest that creates each of `ids` fresh keys that is absent, and gets each that is there, to know
    a retry from a duplicate: a transaction inside per key, so that each has its outcome, as in the registry.
    """
    messages, _ = stubs()
    compare, result = messages.Compare.CREATE, messages.Compare.EQUAL
    data = os.urandom(16 * ids)
    each = []
    for at in range(0, len(data), 16):
        key = data[at : at + 16]
        absent = messages.Compare(result=result, target=compare, key=key, create_revision=0)
        put = messages.RequestOp(request_put=messages.PutRequest(key=key, value=token))
        get = messages.RequestOp(request_range=messages.RangeRequest(key=key))
        inside = messages.TxnRequest(compare=[absent], success=[put], failure=[get])
        each.append(messages.RequestOp(request_txn=inside))
    return messages.TxnRequest(success=each)


class EtcdCaller:
    """Made with requests enough for `seconds`, so that as little as can be of this client is measured."""

    def __init__(self, address: str, ids: int, seconds: float) -> None:
        _, services = stubs()
        self._stub = services.KVStub(grpc.insecure_channel(address))
        count = round((seconds + WARM_S) * _PREPARED_PER_S)
        self._made = [transaction(ids, Token("127.0.0.1:7000", 1, n).pack()) for n in range(count)]

    def call(self, load: Load) -> int:
        ids = load.ids_min
        try:
            request = self._made.pop()
        except IndexError:
            request = transaction(ids, Token("127.0.0.1:7000", 1, 0).pack())
        try:
            answer = self._stub.Txn(request, timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            raise BenchError(f"{error.code()}: {error.details()}") from error
        assert answer.succeeded, "every key is new"
        return ids
