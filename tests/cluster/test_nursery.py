"""The nursery: processes that are forked rather than started, as their supervisor sees them."""

import contextlib
import errno
import json
import os
import resource
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from photon.cluster.nursery import WHEEL, Nursery, _adopting
from photon.cluster.supervisor import Supervisor, last_message
from photon.cluster.topology import Replica, Topology, write_topology
from photon.core.settings import Settings
from tests.cluster.test_supervisor import await_restart
from tests.ports import free_ports
from tests.system import state_of
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def nursery():
    made = Nursery()
    yield made
    made.close()


@pytest.fixture
def own():
    """One for the test to ill-treat."""
    made = Nursery()
    yield made
    made.close()


BAD = ["registry", "serve", "--topology", "nowhere.json", "--name", "r0"]


def test_a_fork_ends_with_its_own_status_and_words_appended_to_its_log(nursery, tmp_path):
    (tmp_path / "log").write_text("before\n")
    child = nursery.launch(BAD, tmp_path / "log")
    assert child.wait(60.0) == child.poll() == 2
    assert "nowhere.json: cannot be read" in last_message(tmp_path / "log")
    assert (tmp_path / "log").read_text().startswith("before\nphoton: ")


def test_that_of_millwheel_forks_what_has_imported_a_worker_and_none_of_the_users_modules(
    tmp_path, monkeypatch
):
    source = "import sys\nraise RuntimeError('millwheel.worker' in sys.modules)\n"
    (tmp_path / "visits.py").write_text(source)
    monkeypatch.chdir(tmp_path)
    with contextlib.closing(Nursery(WHEEL)) as wheel:
        for loaded in (True, "other"):
            child = wheel.launch(["millwheel", "check", "visits:TOPOLOGY"], tmp_path / "log")
            assert child.wait(60.0) == 2
            assert last_message(tmp_path / "log").endswith(f"RuntimeError: {loaded}")
            (tmp_path / "visits.py").write_text("raise RuntimeError('other')\n")


@pytest.fixture
def serving(nursery, tmp_path):
    """Starts registry replicas that wait for two others for ever."""
    addresses = (f"127.0.0.1:{port}" for port in free_ports(6))
    replicas = [
        Replica("", next(addresses), next(addresses), name=f"r{n}", directory=str(tmp_path / f"r{n}"))
        for n in range(3)
    ]
    write_topology(
        Topology(Settings(), [], [], str(tmp_path), "00" * 32, True, replicas, []), tmp_path / "t.json"
    )
    started = []

    def start(launcher=nursery, name="r0"):
        arguments = ["registry", "serve", "--name", name, "--topology", str(tmp_path / "t.json")]
        child = launcher.launch(arguments, tmp_path / f"{name}.log")
        started.append(child)
        wait_until(lambda: "serve" in psutil.Process(child.pid).cmdline())
        return child

    yield start
    for child in started:
        child.kill()
        child.wait(60.0)


def test_a_fork_shows_its_own_command_line_and_can_be_told_to_end(serving):
    child = serving()
    words = [word for word in psutil.Process(child.pid).cmdline() if word]
    assert words[:5] == ["photon", "registry", "serve", "--name", "r0"]
    wait_until(lambda: answers(child.pid, signal.SIGTERM))
    child.terminate()
    assert child.wait(60.0) == 0
    with pytest.raises(subprocess.TimeoutExpired):
        serving(name="r1").wait(0.05)


def answers(pid, number):
    """Whether it has set its own answer to the signal."""
    fields = dict(line.split(":\t") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["SigCgt"], 16) >> (number - 1) & 1


def test_children_of_a_nursery_that_is_killed_go_on_and_the_next_one_starts(serving, tmp_path, own):
    children = [serving(own, name) for name in ("r0", "r1")]
    os.kill(own._process.pid, signal.SIGKILL)
    assert own.launch(BAD, tmp_path / "log").wait(60.0) == 2
    assert [child.poll() for child in children] == [None, None]
    for child in children:
        child.kill()
    assert [child.wait(60.0) for child in children] == [-signal.SIGKILL] * 2


def test_a_fork_that_nobody_has_heard_of_is_gone_when_the_nursery_is_closed(serving, tmp_path, own):
    """As after a Ctrl-C while it was asked for."""
    serving()  # writes the topology
    arguments = ["registry", "serve", "--name", "r1", "--topology", str(tmp_path / "t.json")]

    def unheard():
        return [child for child in psutil.Process().children() if "r1" in child.cmdline()]

    with (tmp_path / "log").open("ab") as log, _adopting():
        socket.send_fds(own._socket, [json.dumps(arguments).encode()], [log.fileno()])
        wait_until(unheard)
    own.close()
    assert not unheard()


def test_a_nursery_that_stands_still_holds_up_no_command_that_kills_or_stops(serving, tmp_path, own):
    killed, ended, asked = (serving(own, name) for name in ("r0", "r1", "r2"))
    os.kill(own._process.pid, signal.SIGSTOP)
    killed.kill()
    ended.kill()
    waited = threading.Thread(target=killed.wait, daemon=True)
    waited.start()
    waited.join(10.0)
    assert not waited.is_alive()
    assert killed.poll() == -signal.SIGKILL
    wait_until(lambda: ended.poll() == -signal.SIGKILL)
    with pytest.raises(subprocess.TimeoutExpired):
        asked.wait(0.05)
    os.kill(own._process.pid, signal.SIGCONT)
    assert own.launch(BAD, tmp_path / "log").wait(60.0) == 2


def test_a_fork_whose_command_dies_before_it_can_ask_to_die_with_it_ends(tmp_path):
    program = """
import os, socket, sys, time
from photon.cluster import nursery
first, fork = os.getpid(), os.fork
def fork_and_die():
    if fork():
        os._exit(0)
    while os.getppid() == first:
        time.sleep(0.01)
    return 0
os.fork = fork_and_die
nursery.serve(socket.socket(fileno=int(sys.argv[1])))
"""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    until_the_end, held = os.pipe()
    with (tmp_path / "log").open("ab") as log:
        socket.send_fds(ours, [json.dumps(BAD).encode()], [log.fileno()])
    descriptors = [theirs.fileno(), held]
    with ours, theirs, open(until_the_end, "rb") as pipe:
        command = [sys.executable, "-c", program, str(theirs.fileno())]
        subprocess.run(command, pass_fds=descriptors, check=True, timeout=30)
        os.close(held)
        assert pipe.read() == b""
    assert (tmp_path / "log").read_text() == ""


NO_SECOND_FORK = """
import os, socket, sys
from photon.cluster import nursery
fork, asked, first = os.fork, [], os.getpid()
def fork_but_once():
    asked.append(os.getpid() == first)
    if sum(asked) == 2 and asked[-1] == IN_FIRST:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    return fork()
os.fork = fork_but_once
nursery.serve(socket.socket(fileno=int(sys.argv[1])))
"""


@pytest.mark.parametrize("in_first", [True, False])
def test_a_fork_that_fails_is_told_and_ends_no_other(serving, tmp_path, monkeypatch, in_first):
    """That of the nursery, or that of the process between it and the new one."""
    real, program = subprocess.Popen, NO_SECOND_FORK.replace("IN_FIRST", str(in_first))
    monkeypatch.setattr(
        "photon.cluster.nursery.subprocess.Popen",
        lambda command, **how: real([command[0], "-c", program, command[3]], **how),
    )
    own = Nursery()
    monkeypatch.undo()
    try:
        first = serving(own)
        with pytest.raises(BlockingIOError):
            own.launch(BAD, tmp_path / "log")
        assert first.poll() is None
        assert own.launch(BAD, tmp_path / "log").wait(60.0) == 2
        assert first.poll() is None
    finally:
        own.close()


def test_a_log_that_cannot_be_opened_is_told_and_ends_no_other(nursery, serving, tmp_path):
    first = serving()
    with pytest.raises(IsADirectoryError):
        nursery.launch(BAD, tmp_path)
    assert first.poll() is None
    assert nursery.launch(BAD, tmp_path / "log").wait(60.0) == 2


def test_no_descriptor_for_another_process_is_told_and_ends_no_other(serving, tmp_path, own):
    first = serving(own)
    for role in ("registry", "eventstore", "joiner", "dispatcher"):  # no import opens files after that
        own.launch([role, "--help"], tmp_path / "log").wait(60.0)
    nursery = own._process.pid
    before = resource.prlimit(nursery, resource.RLIMIT_NOFILE)
    used = set(map(int, os.listdir(f"/proc/{nursery}/fd")))
    free = min(set(range(len(used) + 1)) - used)
    resource.prlimit(nursery, resource.RLIMIT_NOFILE, (free, before[1]))
    with pytest.raises(OSError) as refused:
        own.launch(BAD, tmp_path / "log")
    assert refused.value.errno == errno.EMFILE
    resource.prlimit(nursery, resource.RLIMIT_NOFILE, before)
    assert own.launch(BAD, tmp_path / "log").wait(60.0) == 2
    assert first.poll() is None


def test_the_log_has_the_words_of_a_process_whose_command_was_started_with_stderr_closed(tmp_path):
    program = (
        "import sys; from pathlib import Path; from photon.cluster.nursery import Nursery; n = Nursery(); "
        f"print([n.launch({BAD!r}, Path(sys.argv[1])).wait(60.0) for _ in range(2)], n._useless); n.close()"
    )
    command = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-c", program, str(tmp_path / "log")]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=100, check=True)
    assert done.stdout == "[2, 2] False\n"
    assert (tmp_path / "log").read_text().count("nowhere.json: cannot be read") == 2


def test_the_nursery_has_one_thread_so_that_it_can_be_forked_from_whatever_the_user_sets(
    tmp_path, monkeypatch
):
    for name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "2")
    own = Nursery()
    try:
        process = Path(f"/proc/{own._process.pid}")
        own.launch(["--version"], tmp_path / "log").wait(60.0)  # all is imported by then
        wait_until(lambda: "_umath_linalg" in (process / "maps").read_text())  # NumPy's threads run by then
        assert len(os.listdir(process / "task")) == 1
    finally:
        own.close()


def running(pid):
    return state_of(pid) != psutil.STATUS_ZOMBIE


def test_a_supervisor_restarts_what_the_nursery_forked(nursery, serving, tmp_path):
    serving()  # writes the topology
    made = Supervisor(tmp_path / "logs", nursery)
    arguments = ["registry", "serve", "--name", "r2", "--topology", str(tmp_path / "t.json")]
    made.start("registry-r2", arguments)
    try:
        os.kill(made.children["registry-r2"].process.pid, signal.SIGKILL)
        await_restart(made, "registry-r2")
        assert made.notices == ["registry-r2 ended (killed by signal 9); started again"]
    finally:
        made.kill()


def test_a_nursery_does_not_outlive_its_command():
    program = (
        "from photon.cluster.nursery import Nursery; import time; "
        "n = Nursery(); print(n._process.pid, flush=True); time.sleep(100)"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    nursery = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    wait_until(lambda: not running(nursery))
