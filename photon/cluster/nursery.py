"""A process that has imported everything and forks the processes of a system: they start in milliseconds.

Importing gRPC, NumPy and the rooms costs each process 0.3 s of CPU, which on a small machine is most of the
start of `photon join` and of every restart. The nursery has neither threads nor channels, so that it can be
forked from safely. Its children die with it, and it dies with the command that it serves.
"""

import contextlib
import ctypes
import errno
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, NoReturn

from photon.cluster.supervisor import FreshLauncher, Process, child_environment

START_S_MAX: Final = 30.0
SILENCE_S_MAX: Final = 1.0
"""So long is the word of a nursery that stands still waited for; of one that imports, START_S_MAX."""
_DEATH_S_MAX: Final = 5.0
_ONE_THREAD: Final = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Other threads do not live on in a fork, whatever the user wants of NumPy elsewhere."""
_TITLE_BYTES_MAX: Final = 1024
_REQUEST_BYTES_MAX: Final = 1 << 16


class NurseryChild:
    """A process that the nursery forked, as its supervisor sees it."""

    def __init__(self, nursery: "Nursery", pid: int) -> None:
        self.pid = pid
        self._nursery = nursery
        self._status: int | None = None
        self._gone_at: float | None = None
        # Signals go to this process and to none that got its number later.
        self._descriptor: int | None = None
        with contextlib.suppress(ProcessLookupError):  # it has ended already
            self._descriptor = os.pidfd_open(pid)

    def poll(self) -> int | None:
        """Of one that is gone though the nursery says nothing of it (it stands still): as if killed."""
        if self._status is None:
            self._nursery.await_news(0.0)
        if self._status is None and self.is_gone():
            now = time.monotonic()
            if self._gone_at is None:
                self._gone_at = now
            elif now - self._gone_at > self._nursery.patience_s():
                self.ended(-signal.SIGKILL)
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            if self._gone_at is None and self._descriptor is not None:
                self._nursery.await_news(left, self._descriptor)
            else:
                self._nursery.await_news(min(left, SILENCE_S_MAX))
        return status

    def ended(self, status: int) -> None:
        """The nursery's word, or what stands for it; the first one holds."""
        if self._status is None:
            self._status = status

    def is_gone(self, within_s: float = 0.0) -> bool:
        """Whether the process has ended (all of it: locks and ports are free)."""
        return self._descriptor is None or _readable([self._descriptor], within_s) != []

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int, /) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._descriptor, number)

    def __del__(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)


class Nursery:
    """The launcher. For one thread. It begins to import at once; `launch` waits for it."""

    _module = "photon.cluster.nursery"
    """Which is its program."""

    def __init__(self) -> None:
        self._running: dict[int, NurseryChild] = {}
        """By process id, those of whose end it has not told."""
        self._fallback = FreshLauncher()
        self._launched: NurseryChild | OSError | None = None
        self._useless = False
        self._begin()

    def launch(self, arguments: Sequence[str], log: Path) -> Process:
        """A fork of the nursery; a fresh interpreter where that can't be had. OSError if there is no room for
        a process, or the log can't be opened."""
        if self._useless:
            return self._fallback.launch(arguments, log)
        if self._process.poll() is not None:  # somebody has killed it
            self._lose()
            self._begin()
        launched = self._asked(arguments, log)
        if launched is None:
            self._useless = True
            self._lose()
            return self._fallback.launch(arguments, log)
        if isinstance(launched, OSError):
            raise launched
        return launched

    def await_news(self, timeout_s: float, child: int | None = None) -> None:
        """Take in all that the nursery says; wait up to so long for something, or for a child's own end."""
        descriptors = [self._socket.fileno()] if child is None else [self._socket.fileno(), child]
        while self._socket.fileno() in _readable(descriptors, timeout_s):
            timeout_s = 0.0
            try:
                said = self._socket.recv(_REQUEST_BYTES_MAX)
            except OSError:
                said = b""
            if not said:
                self._lose()
                return
            news = json.loads(said)
            if "launched" in news:
                pid = int(news["launched"])
                self._launched = self._running[pid] = NurseryChild(self, pid)
            elif "failed" in news:
                self._launched = OSError(news["failed"], os.strerror(news["failed"]))
            elif news["ended"] in self._running:
                self._running.pop(news["ended"]).ended(news["status"])

    def _asked(self, arguments: Sequence[str], log: Path) -> NurseryChild | OSError | None:
        """What came of the request; None of a nursery that does not answer."""
        with log.open("ab") as output:
            try:
                socket.send_fds(self._socket, [json.dumps(list(arguments)).encode()], [output.fileno()])
            except OSError:
                return None
        deadline = time.monotonic() + START_S_MAX
        while (left := deadline - time.monotonic()) > 0:
            self.await_news(left)
            if self._launched is not None:
                launched, self._launched = self._launched, None
                return launched
            if self._process.poll() is not None:
                break
        return None

    def patience_s(self) -> float:
        """How long its word on a child's end may take; the status that it tells decides over a restart."""
        with contextlib.suppress(OSError):
            state = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()[0]
            return SILENCE_S_MAX if state in ("T", "t") else START_S_MAX
        return SILENCE_S_MAX

    def close(self) -> None:
        """It ends, and what it forked with it."""
        self._lose()
        self._socket.close()

    def _begin(self) -> None:
        self._launched = None
        ahead = _AHEAD and self._module == Nursery._module
        self._socket, self._process = _AHEAD.pop() if ahead else _begun(self._module)

    def _lose(self) -> None:
        self._process.kill()
        self._process.wait()
        lost = list(self._running.values())
        self._running.clear()
        for child in lost:
            child.kill()  # as the kernel does; but one that was just forked may not have asked it to yet
        deadline = time.monotonic() + _DEATH_S_MAX
        for child in lost:
            child.is_gone(max(0.0, deadline - time.monotonic()))
            child.ended(-signal.SIGKILL)


_Begun = tuple[socket.socket, "subprocess.Popen[bytes]"]
_AHEAD: Final[list[_Begun]] = []


def begin_ahead() -> None:
    """For who is sure to make a `Nursery` soon: it imports meanwhile. Not where there is no room for it."""
    with contextlib.suppress(OSError):
        _AHEAD.append(_begun(Nursery._module))


def _begun(module: str) -> _Begun:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno()), " " * _TITLE_BYTES_MAX],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**child_environment(), **_ONE_THREAD},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return ours, process


def _readable(descriptors: Sequence[int], timeout_s: float) -> list[int]:
    """Those that have something to say, or to tell that they are gone, within the time (inf: for ever)."""
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLIN)
    return [found for found, _ in poller.poll(None if timeout_s == float("inf") else timeout_s * 1_000)]


def serve(channel: socket.socket) -> None:
    """Fork what is asked for and tell of each end, until the other side is gone."""
    from photon.cluster.roles import ROLES  # here alone: whoever begins it need not wait for these

    children: dict[int, int] = {}
    poller = select.poll()
    poller.register(channel, select.POLLIN)
    ahead = list(ROLES)
    while True:
        news = poller.poll(0 if ahead else None)
        if not news:
            _import_all(ROLES[ahead.pop(0)].imports)
        for descriptor, _ in news:
            if descriptor == channel.fileno():
                request, logs, _, _ = socket.recv_fds(channel, _REQUEST_BYTES_MAX, 1)
                if not request:
                    return
                arguments = json.loads(request)
                _import_all(ROLES[arguments[0]].imports if arguments[0] in ROLES else ())
                try:
                    pid, new = _forked(arguments, logs, channel, children)
                except OSError as error:  # too many processes or files, or no memory: those that run go on
                    _tell(channel, {"failed": error.errno or errno.EAGAIN})
                else:
                    children[new] = pid
                    poller.register(new, select.POLLIN)
                    _tell(channel, {"launched": pid})
                for log in logs:
                    os.close(log)
            else:
                pid = children.pop(descriptor)
                poller.unregister(descriptor)
                os.close(descriptor)
                _, status = os.waitpid(pid, 0)
                _tell(channel, {"ended": pid, "status": os.waitstatus_to_exitcode(status)})


def _forked(
    arguments: list[str], logs: Sequence[int], channel: socket.socket, children: Iterable[int]
) -> tuple[int, int]:
    """Process id and descriptor of the new one. OSError if there is no room for it: there is none then."""
    if not logs:  # the kernel drops what it has no number for
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    me = os.getpid()  # asked by the fork, it might be another one's child already
    pid = os.fork()
    if pid == 0:
        _become(arguments, logs[0], me, [channel.detach(), *children])
    try:
        return pid, os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def _import_all(modules: Iterable[str]) -> None:
    for module in modules:
        if module not in sys.modules:
            with contextlib.suppress(Exception):  # the process that needs it says what is wrong with it
                importlib.import_module(module)
    gc.freeze()  # what is here lives as long as the process: its pages stay shared


def _tell(channel: socket.socket, news: dict[str, int]) -> None:
    channel.send(json.dumps(news).encode())


def _become(arguments: list[str], log: int, parent: int, descriptors: Sequence[int]) -> NoReturn:
    """In the fork: be `photon <arguments>`. Of all descriptors that the nursery has it keeps the log."""
    status = 1
    try:
        os.dup2(log, 1)
        os.dup2(log, 2)
        for descriptor in (log, *descriptors):
            if descriptor > 2:  # else it was among the standard ones, closed at the start, and is replaced
                os.close(descriptor)
        sys.stderr = sys.stderr or os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        os.setsid()
        os.environ["PHOTON_PARENT"] = str(parent)
        sys.argv = ["photon", *arguments]
        show_title(sys.argv)
        importlib.import_module("photon.__main__").main()  # by name: the console is above this room
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)  # what has to be on disk is there; no interpreter to tear down


def show_title(words: Sequence[str]) -> None:
    """What `ps` shows of this process, written over the arguments that it was started with (Linux)."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        start, end = int(fields[45]), int(fields[46])
        title = b"\0".join(word.encode("utf-8", "surrogateescape") for word in words)[: end - start - 1]
        ctypes.memmove(start, title.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    from photon.cluster.supervisor import die_with_parent

    die_with_parent()
    with contextlib.suppress(OSError):
        serve(socket.socket(fileno=int(sys.argv[1])))
