"""A client process of etcd: `python -m benchmarks.etcd_client JSON`, then one load a line.

A transaction creates each of its keys that is absent, in one of two forms:
nested   per key a transaction of its own inside (absent: put, else get, to know a retry from a duplicate):
         each key has its outcome, as in the registry
flat     one condition for all (all absent: put all, else nothing): less, and a little cheaper
"""

import json
import os
import sys
import threading
import time
from typing import Any

import grpc

from benchmarks.etcd import stubs
from photon.app.supervisor import die_with_parent
from photon.core.tokens import Token

_TIMEOUT_S = 30.0


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
        self._lock = threading.Lock()
        self._made: list[Any] = []
        self._latencies_ms: list[float] = []
        self._failures: list[str] = []

    def prepare(self, form: str, ids: int, count: int) -> int:
        """Make requests before the time begins, so that as little as can be of this client is in it."""
        self._made = [transaction(form, ids, _token(n)) for n in range(count)]
        return count

    def run(self, form: str, ids: int, in_flight: int, begin: float, end: float) -> dict[str, Any]:
        threads = [
            threading.Thread(target=self._work, args=(form, ids, begin, end)) for _ in range(in_flight)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return {"latencies_ms": self._latencies_ms, "failures": self._failures}

    def _work(self, form: str, ids: int, begin: float, end: float) -> None:
        while (start := time.monotonic()) < end:
            with self._lock:
                request = self._made.pop() if self._made else transaction(form, ids, _token(0))
            try:
                answer = self._stub.Txn(request, timeout=_TIMEOUT_S)
            except grpc.RpcError as error:
                self._failures.append(f"{error.code()}: {error.details()}")
                return
            done = time.monotonic()
            assert answer.succeeded, "every key is new"
            if begin <= done < end:
                self._latencies_ms.append((done - start) * 1e3)


def _token(n: int) -> bytes:
    return Token("127.0.0.1:7000", 1, n).pack()


def main() -> None:
    die_with_parent()
    caller = Caller(json.loads(sys.argv[1])["address"])
    for line in sys.stdin:
        asked = json.loads(line)
        act = caller.prepare if "count" in asked else caller.run
        print(json.dumps(act(**asked)), flush=True)


if __name__ == "__main__":
    main()
