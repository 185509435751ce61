"""Three etcd nodes on this machine, beside which the registry is measured. Needs etcd and grpcio-tools.

    python -m benchmarks.etcd '{"address": ..}'     a client process: takes one load a line

A transaction creates each of its keys that is absent, in one of two forms:
nested   per key a transaction of its own inside (absent: put, else get, to know a retry from a duplicate):
         each key has its outcome, as in the registry
flat     one condition for all (absent: put all, else nothing): less, and a little cheaper
"""

import importlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any, Final, Self

import grpc

from benchmarks.processes import BenchError, Child, cpu_seconds, end
from benchmarks.registry_load import WARM_S, Seen, keep_calling
from photon.cluster.placing import free_ports
from photon.cluster.supervisor import die_with_parent
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

    def __exit__(self, *error: object) -> None:
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

    def measure(self, form: str, ids: int, in_flight: int, seconds: float) -> tuple[Seen, float]:
        """What a client saw of transactions of fresh keys, and how many cores all nodes kept busy."""
        with Child("benchmarks.etcd", {"address": self.leader}) as client:
            count = round((seconds + WARM_S) * _PREPARED_PER_S)
            client.ask({"form": form, "ids": ids, "count": count})
            begin = time.monotonic() + WARM_S
            client.tell({"threads": in_flight, "begin": begin, "end": begin + seconds})
            time.sleep(max(0.0, begin - time.monotonic()))
            cpu_s = cpu_seconds(self.pids)
            time.sleep(max(0.0, begin + seconds - time.monotonic()))
            cpu_s = cpu_seconds(self.pids) - cpu_s
            seen = Seen(**client.hear())
        if seen.failures:
            raise BenchError(f"etcd refused a transaction: {next(iter(seen.failures))}")
        return seen, cpu_s / seconds

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
        raise BenchError(f"etcd has no leader within {_READY_S:g} s")


def transaction(form: str, ids: int, token: bytes) -> Any:
    """A TxnRequest of `ids` fresh keys."""
    messages, _ = stubs()
    compare, result = messages.Compare.CREATE, messages.Compare.EQUAL
    data = os.urandom(16 * ids)
    keys = [data[at : at + 16] for at in range(0, len(data), 16)]
    absent = [messages.Compare(result=result, target=compare, key=key, create_revision=0) for key in keys]
    puts = [messages.RequestOp(request_put=messages.PutRequest(key=key, value=token)) for key in keys]
    if form == "flat":
        return messages.TxnRequest(compare=absent, success=puts)
    gets = [messages.RequestOp(request_range=messages.RangeRequest(key=key)) for key in keys]
    each = [
        messages.RequestOp(request_txn=messages.TxnRequest(compare=[one], success=[put], failure=[get]))
        for one, put, get in zip(absent, puts, gets, strict=True)
    ]
    return messages.TxnRequest(success=each)


class Caller:
    def __init__(self, address: str) -> None:
        _, services = stubs()
        self._stub = services.KVStub(grpc.insecure_channel(address))
        self._form, self._ids = "", 0
        self._made: list[Any] = []

    def prepare(self, form: str, ids: int, count: int) -> int:
        """Make requests before the time begins, so that as little as can be of this client is in it."""
        self._form, self._ids = form, ids
        self._made = [transaction(form, ids, Token("127.0.0.1:7000", 1, n).pack()) for n in range(count)]
        return count

    def run(self, threads: int, begin: float, end: float) -> dict[str, Any]:
        return asdict(keep_calling(threads, begin, end, None, self._call))

    def _call(self) -> int:
        try:
            request = self._made.pop()
        except IndexError:
            request = transaction(self._form, self._ids, Token("127.0.0.1:7000", 1, 0).pack())
        try:
            answer = self._stub.Txn(request, timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            raise BenchError(f"{error.code()}: {error.details()}") from error
        assert answer.succeeded, "every key is new"
        return self._ids


def main() -> None:
    die_with_parent()
    caller = Caller(json.loads(sys.argv[1])["address"])
    for line in sys.stdin:
        asked = json.loads(line)
        act = caller.prepare if "count" in asked else caller.run
        print(json.dumps(act(**asked)), flush=True)


if __name__ == "__main__":
    main()
