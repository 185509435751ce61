"""One node in a process of its own. Arguments: name, directory, then name=port of every node.

Reads `KEY TOKEN` lines; answers `KEY TOKEN won|lost|again LEADER` (again: refused or unknown). `?` answers
the state.
"""

import random
import sys
import threading
from collections import deque
from pathlib import Path

from photon.raft.addresses import Endpoint
from photon.raft.host import RaftHost
from photon.raft.port import Applied, Outcome, RaftLimits, Refused, ReplicatedLog
from tests.raft.kit import Register, command

waiting: deque[tuple[str, str]] = deque()
speaking = threading.Lock()


def say(*words: object) -> None:
    with speaking:
        print(*words, flush=True)


def propose_waiting(log: ReplicatedLog) -> None:
    while waiting:
        key, token = waiting.popleft()

        def done(outcome: Outcome, key: str = key, token: str = token) -> None:
            if isinstance(outcome, Applied):
                say(key, token, "won" if outcome.result else "lost", "-")
            else:
                say(key, token, "again", (outcome.leader if isinstance(outcome, Refused) else None) or "-")

        log.propose(command(key.encode(), int(token)), done)


def main() -> None:
    name, directory, *pairs = sys.argv[1:]
    addresses = {node: ("127.0.0.1", int(port)) for node, port in (pair.split("=") for pair in pairs)}
    founders = list(addresses)
    machine = Register()
    host = RaftHost(
        Endpoint(name, addresses.pop(name), b"secret"),
        addresses,
        Path(directory),
        rng=random.Random(),
        on_fatal=lambda error: say("fatal", error, "-", "-"),
        limits=RaftLimits(compact_entries=300, tail_entries=20, segment_bytes=10_000),
    )
    log = host.add_group(0, machine, propose_waiting, founders)
    host.start()
    for line in sys.stdin:
        if line.startswith("?"):
            say("?", machine.count, machine.digest.hex(), log.leader or "-")
        else:
            key, token = line.split()
            waiting.append((key, token))
            host.wake()
    host.stop()


main()
