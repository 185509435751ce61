"""A process that has imported everything and forks the processes of a system: they start in milliseconds.

Importing gRPC, NumPy and the rooms costs each process 0.3 s of CPU, which on a small machine is most of the
start of `photon join`, of a run of MillWheel, and of every restart. The nursery has neither threads nor
channels, so that it can be forked from safely. What it forks is the child of the command that asked for it,
and dies with that.
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
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NoReturn

from photon.cluster.supervisor import FreshLauncher, Process, child_environment

START_S_MAX: Final = 30.0
_LOOK_S: Final = 0.01
_ONE_THREAD: Final = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
"""Other threads do not live on in a fork, whatever the user wants of NumPy elsewhere."""
_TITLE_BYTES_MAX: Final = 1024
_REQUEST_BYTES_MAX: Final = 1 << 16
WHEEL: Final = "millwheel"
"""First word of the processes of a run of MillWheel; other nurseries are for roles."""
_OF_WHEEL: Final = {
    WHEEL: ("photon.cli.main", "photon.cli.millwheel", "millwheel.worker", "millwheel.postgresql")
}


class NurseryChild:
    """A process that the nursery forked, a child of this one, as its supervisor sees it."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._status: int | None = None

    def poll(self) -> int | None:
        if self._status is None:
            ended, status = os.waitpid(self.pid, os.WNOHANG)
            self._status = os.waitstatus_to_exitcode(status) if ended else None
        return self._status

    def wait(self, timeout: float | None = None) -> int:
        deadline = float("inf") if timeout is None else time.monotonic() + timeout
        while (status := self.poll()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            time.sleep(min(left, _LOOK_S))
        return status

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, number: int, /) -> None:
        if self._status is None:  # until then nobody else has its number
            os.kill(self.pid, number)


class Nursery:
    """The launcher. For one thread. It begins to import at once; `launch` waits for it."""

    _module = "photon.cluster.nursery"
    """Which is its program."""

    def __init__(self, kind: str = "") -> None:
        """`kind`: of processes, WHEEL or none."""
        self._kind = kind
        self._fallback = FreshLauncher()
        self._useless = False
        self._begin()

    def launch(self, arguments: Sequence[str], log: Path) -> Process:
        """A fork of the nursery; a fresh interpreter where that can't be had. OSError if there is no room for
        a process, or the log can't be opened."""
        if not self._useless and self._process.poll() is not None:  # somebody has killed it
            self.close()
            self._begin()
        answer = 0 if self._useless else self._asked(arguments, log)
        if answer < 0:
            raise OSError(-answer, os.strerror(-answer))
        if answer:
            return NurseryChild(answer)
        self._useless = True
        self.close()
        return self._fallback.launch(arguments, log)

    def _asked(self, arguments: Sequence[str], log: Path) -> int:
        """Process id of the new one, or the error that kept it from it, below 0; 0 of a nursery that does not
        answer."""
        with log.open("ab") as output, _adopting():
            try:
                socket.send_fds(self._socket, [json.dumps(list(arguments)).encode()], [output.fileno()])
                return int(self._socket.recv(_REQUEST_BYTES_MAX) or 0)
            except OSError:
                return 0

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        with _adopting(), contextlib.suppress(OSError):  # those that nobody has heard of yet
            while said := self._socket.recv(_REQUEST_BYTES_MAX):
                if (pid := int(said)) > 0:
                    NurseryChild(pid).kill()
                    os.waitpid(pid, 0)
        self._socket.close()

    def _begin(self) -> None:
        ahead = _AHEAD and self._module == Nursery._module
        self._socket, self._process = _AHEAD.pop() if ahead else _begun(self._module, self._kind)
        self._socket.settimeout(START_S_MAX)


@contextlib.contextmanager
def _adopting() -> Iterator[None]:
    """Within the block those whose parent ends, and is below this process, become children of this one."""
    set_child_subreaper = 36
    ctypes.CDLL(None).prctl(set_child_subreaper, 1)
    try:
        yield
    finally:
        ctypes.CDLL(None).prctl(set_child_subreaper, 0)


_Begun = tuple[socket.socket, "subprocess.Popen[bytes]"]
_AHEAD: Final[list[_Begun]] = []


def begin_ahead(kind: str = "") -> None:
    """For who is sure to make such a `Nursery` soon, before any other: it imports meanwhile. Not where there
    is no room for it."""
    with contextlib.suppress(OSError):
        _AHEAD.append(_begun(Nursery._module, kind))


def _begun(module: str, kind: str) -> _Begun:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        process = subprocess.Popen(
            [sys.executable, "-m", module, str(theirs.fileno()), kind, " " * _TITLE_BYTES_MAX],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            env={**child_environment(), **_ONE_THREAD},
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    return ours, process


def serve(channel: socket.socket, kind: str = "") -> None:
    """Fork what is asked for, until the other side is gone. Who is forked says so with its number."""
    imports = _OF_WHEEL if kind == WHEEL else _of_roles()
    ahead = list(imports)
    while True:
        if ahead and not select.select([channel], [], [], 0)[0]:
            _import_all(imports[ahead.pop(0)])
            continue
        request, logs, _, _ = socket.recv_fds(channel, _REQUEST_BYTES_MAX, 1)
        if not request:
            return
        arguments = json.loads(request)
        _import_all(imports.get(arguments[0], ()))
        # The kernel drops a log that it has no number for.
        failed = _forked(arguments, logs[0], channel) if logs else errno.EMFILE
        if failed:
            channel.send(b"%d" % -failed)
        for log in logs:
            os.close(log)


def _of_roles() -> Mapping[str, tuple[str, ...]]:
    from photon.cluster.roles import ROLES  # here alone: whoever begins it need not wait for these

    return {name: role.imports for name, role in ROLES.items()}


def _forked(arguments: list[str], log: int, channel: socket.socket) -> int:
    """0, or why there is no room (errno). The process between ends at once, and leaves ours to our parent."""
    asker = os.getppid()
    try:
        between = os.fork()
    except OSError as error:  # too many processes, or no memory: those that run go on
        return error.errno or errno.EAGAIN
    if between == 0:
        between = os.getpid()
        try:
            pid = os.fork()
        except OSError as error:
            os._exit(error.errno or errno.EAGAIN)
        if pid == 0:
            _become(arguments, log, channel, asker, between)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(between, 0)[1])
    return status if status >= 0 else errno.EAGAIN


def _import_all(modules: Iterable[str]) -> None:
    for module in modules:
        if module not in sys.modules:
            with contextlib.suppress(Exception):  # the process that needs it says what is wrong with it
                importlib.import_module(module)
    gc.freeze()  # what is here lives as long as the process: its pages stay shared


def _become(arguments: list[str], log: int, channel: socket.socket, asker: int, between: int) -> NoReturn:
    """In the fork: be `photon <arguments>`. Of all descriptors that the nursery has it keeps the log."""
    status = 1
    try:
        while os.getppid() == between:
            time.sleep(0.001)
        if os.getppid() != asker:  # it is gone
            os._exit(1)
        channel.send(b"%d" % os.getpid())
        descriptor = channel.detach()
        os.dup2(log, 1)
        os.dup2(log, 2)
        for each in (log, descriptor):
            if each > 2:  # else it was among the standard ones, closed at the start, and is replaced
                os.close(each)
        sys.stderr = sys.stderr or os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
        os.setsid()
        os.environ["PHOTON_PARENT"] = str(asker)
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
        serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2])
