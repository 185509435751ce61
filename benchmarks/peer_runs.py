"""What users would take instead, measured: each peer is a process of its own, by an interpreter that has it.

Whether what it wrote is true, benchmarks.join_peers and benchmarks.millwheel say.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from benchmarks.measuring import ROOT, ProcessTree, Usage, fresh
from photon.core.errors import UsageError

PEER_S_MAX: Final = 900.0


@dataclass(frozen=True, slots=True)
class Peer:
    """`needs`: what its interpreter must be able to import."""

    needs: str
    what: str
    java: bool = False


@dataclass(frozen=True, slots=True)
class PeerRun:
    """`status`: 0 where it has done all. `usage`: of its last process, where it was killed."""

    status: int
    seconds: float
    usage: Usage


def chosen(names: str, peers: Mapping[str, Peer]) -> dict[str, Peer]:
    """`all`, or some of them with commas between. UsageError."""
    wanted = tuple(peers) if names == "all" else names.split(",")
    if unknown := set(wanted) - set(peers):
        raise UsageError(f"--peers {names}: there is no {', '.join(sorted(unknown))}, but {', '.join(peers)}")
    return {name: peers[name] for name in wanted}


def interpreters(pythons: Sequence[str], peers: Collection[str]) -> Mapping[str, str]:
    """`pythons`: NAME=PATH, the interpreter of a peer; this one for the others. UsageError."""
    found = dict.fromkeys(peers, sys.executable)
    for text in pythons:
        name, equals, path = text.partition("=")
        if not equals or name not in peers or not shutil.which(path):
            raise UsageError(
                f"--peer-python {text}: give NAME=PATH, a name of {', '.join(peers)} and a Python's path"
            )
        found[name] = path
    return found


def missing(peer: Peer, python: str) -> str:
    """Why this peer can't run; empty if it can."""
    if peer.java and not shutil.which("java"):
        return "no Java on PATH"
    found = subprocess.run([python, "-c", f"import {peer.needs}"], check=False, capture_output=True)
    return f"{python} has no {peer.needs}" if found.returncode else ""


def run_peer(
    module: str,
    name: str,
    python: str,
    logs: Path,
    out: Path,
    kill_after_s: float | None = None,
    root: Path = ROOT,
) -> PeerRun:
    """Files to files, start included; what it says is in OUT/log. `kill_after_s`: it and all that it started
    are killed once, that long after its start, and it is started again with the same OUT."""
    fresh(out)
    deadline = time.monotonic() + PEER_S_MAX
    began = time.monotonic()
    arguments = [python, "-m", module, name, str(logs.absolute()), str(out.absolute())]
    waits = [PEER_S_MAX] if kill_after_s is None else [kill_after_s, PEER_S_MAX]
    with (out / "log").open("ab") as log:
        for wait_s in waits:
            process = subprocess.Popen(arguments, cwd=root, stdout=log, stderr=log, start_new_session=True)
            tree = ProcessTree(process.pid)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(min(wait_s, deadline - time.monotonic()))
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            status, usage = process.wait(), tree.stop(ended=True)
            if status >= 0:
                break
    return PeerRun(status, time.monotonic() - began, usage)
