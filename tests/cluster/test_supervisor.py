import errno
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from photon.cluster import supervisor as supervisor_module
from photon.cluster.local_cluster import free_ports
from photon.cluster.supervisor import PortTakenError, ProcessFailedError, Supervisor
from photon.core.errors import StorageError
from tests.system import state_of
from tests.waiting import wait_until

SLEEP = "import time; time.sleep(100)"


class Programs:
    """Launches a little Python program, the first argument, instead of photon."""

    def launch(self, arguments, log):
        with log.open("ab") as output:
            return subprocess.Popen([sys.executable, "-c", *arguments], stdout=output, stderr=output)

    def close(self):
        pass


@pytest.fixture
def sleepers(tmp_path):
    made = Supervisor(tmp_path, Programs())
    yield made
    made.kill()


def await_end(supervisor, name="a"):
    wait_until(lambda: supervisor.children[name].process.poll() is not None)


def await_restart(supervisor, name):
    """Of a process that somebody has killed."""
    first = supervisor.children[name].process

    def again():
        supervisor.poll()
        return supervisor.children[name].process not in (None, first)

    wait_until(again)


def test_a_killed_process_is_started_again(sleepers):
    sleepers.start("a", [SLEEP])
    os.kill(sleepers.children["a"].process.pid, signal.SIGKILL)
    await_restart(sleepers, "a")
    assert sleepers.restarts() == 1


def test_a_process_that_keeps_dying_is_started_again_ever_more_slowly_for_days(sleepers):
    sleepers.start("a", ["raise SystemExit(1)"])
    delays = []
    for failures in (0, 1, 2, 3, 100_000):
        sleepers.children["a"].failures = failures
        await_end(sleepers)
        sleepers.poll()
        delays.append(sleepers.children["a"].restart_at - time.monotonic())
        if failures < 3:
            wait_until(lambda: sleepers.poll() or sleepers.children["a"].process is not None)
        elif failures == 3:
            sleepers.children["a"].restart_at = 0.0
            sleepers.poll()
    assert delays[3] > delays[2] > delays[1]
    assert 0.0 < delays[4] <= supervisor_module.RESTARTS.delay_s_max


def test_a_process_for_which_there_is_no_room_is_tried_again_ever_more_slowly(tmp_path):
    class Full(Programs):
        refused = 0

        def launch(self, arguments, log):
            if self.refused < 3:
                self.refused += 1
                raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
            return super().launch(arguments, log)

    full = Full()
    made = Supervisor(tmp_path, full)
    try:
        made.start("a", ["import sys; print('photon: the port is taken', file=sys.stderr); sys.exit(4)"])
        delays = []
        while made.children["a"].process is None:
            delays.append(made.children["a"].restart_at - time.monotonic())
            wait_until(
                lambda refused=full.refused: made.poll() or full.refused > refused or started(made, "a")
            )
        assert len(delays) == 3 and delays[2] > delays[1] > delays[0]
        assert made.notices[0] == (
            "a could not be started ([Errno 11] Resource temporarily unavailable); it is tried again"
        )
        assert made.restarts() == 0  # and what it says at its first start is heard as such
        with pytest.raises(PortTakenError):
            wait_until(made.poll)
    finally:
        made.kill()


def test_a_log_that_cannot_be_written_ends_the_run_at_its_start(sleepers, tmp_path):
    (tmp_path / "a.log").mkdir()
    with pytest.raises(StorageError, match=r"a\.log: Is a directory"):
        sleepers.start("a", ["raise SystemExit(1)"])


def started(supervisor, name):
    return supervisor.children[name].process is not None


@pytest.mark.parametrize(("status", "error"), [(2, ProcessFailedError), (4, PortTakenError)])
def test_what_no_restart_mends_ends_the_run_with_the_words_of_the_process(sleepers, status, error):
    """Bad settings; and a port that is taken at the first start, which is told apart."""
    sleepers.start("a", [f"import sys; print('photon: it is taken', file=sys.stderr); sys.exit({status})"])
    with pytest.raises(error, match=r"^a: it is taken$") as told:
        wait_until(sleepers.poll)
    assert type(told.value) is error


@pytest.mark.parametrize("status", [2, 4])
def test_a_port_that_is_taken_while_a_process_restarts_is_waited_for(sleepers, tmp_path, status):
    """These end a run only at the first start: after that the settings are known to be good."""
    flag = tmp_path / "started"
    program = f"import sys, pathlib, time; f = pathlib.Path({str(flag)!r})\n"
    program += "n = len(f.read_text()) if f.exists() else 0; f.write_text('x' * (n + 1))\n"
    program += f"sys.exit({status}) if n == 1 else time.sleep(100)"
    sleepers.start("a", [program])
    wait_until(lambda: flag.exists() and flag.read_text() == "x")
    sleepers.children["a"].process.kill()

    def third_start():
        sleepers.poll()
        return flag.read_text() == "xxx"

    wait_until(third_start)


def test_a_log_that_grows_without_end_is_cut(sleepers, monkeypatch):
    monkeypatch.setattr(supervisor_module, "LOG_BYTES_MAX", 1_000)
    monkeypatch.setattr(supervisor_module, "LOG_LOOK_S", 0.0)
    sleepers.start(
        "a", ["import time\nfor n in range(10**9): print('line', n, flush=True); time.sleep(0.001)"]
    )
    log = sleepers.children["a"].log

    def cut():
        sleepers.poll()
        return log.with_suffix(".log.1").exists()

    wait_until(cut)
    wait_until(lambda: log.read_text())  # it goes on in the emptied file
    assert log.read_text().startswith("line")


def test_a_log_that_can_be_copied_nowhere_is_cut_all_the_same_and_the_run_goes_on(
    sleepers, tmp_path, monkeypatch
):
    def copy_half(source, target):
        target.write_bytes(b"half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(target))

    monkeypatch.setattr(supervisor_module.shutil, "copyfile", copy_half)
    monkeypatch.setattr(supervisor_module, "LOG_BYTES_MAX", 1_000)
    (tmp_path / "a.log").write_bytes(b"x" * 1_001)
    sleepers.start("a", [SLEEP])
    sleepers.poll()
    assert (tmp_path / "a.log").stat().st_size == 0
    assert not (tmp_path / "a.log.1").exists()


def test_a_file_where_the_user_stands_is_no_module_of_the_processes(tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("raise SystemExit('the wrong module')")
    monkeypatch.chdir(tmp_path)
    made = Supervisor(tmp_path / "logs")
    made.start("a", ["registry", "serve", "--topology", "nowhere.json", "--name", "r0"])
    try:
        with pytest.raises(ProcessFailedError, match=r"nowhere\.json: cannot be read"):
            wait_until(made.poll)
    finally:
        made.kill()


STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(100)"


def test_stop_ends_all_and_kills_what_does_not_end(sleepers):
    sleepers.start("a", [SLEEP])
    sleepers.start("b", [STUBBORN])
    wait_until(lambda: "up" in sleepers.children["b"].log.read_text())
    processes = [child.process for child in sleepers.children.values()]
    sleepers.stop(["a", "b"], grace_s=0.5)
    assert [p.poll() for p in processes] == [-signal.SIGTERM, -signal.SIGKILL]
    assert sleepers.children == {}


def test_kill_finds_those_whose_end_an_interrupted_stop_was_waiting_for(sleepers, monkeypatch):
    for name in ("a", "b"):
        sleepers.start(name, [STUBBORN])
    wait_until(lambda: all("up" in child.log.read_text() for child in sleepers.children.values()))
    processes = [child.process for child in sleepers.children.values()]

    def interrupted(timeout=None):
        raise KeyboardInterrupt

    monkeypatch.setattr(processes[0], "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sleepers.stop(["a", "b"])
    monkeypatch.undo()
    sleepers.kill()
    assert [p.poll() for p in processes] == [-signal.SIGKILL] * 2


def test_kill_waits_for_nobody_before_all_are_killed(sleepers, monkeypatch):
    for name in ("a", "b"):
        sleepers.start(name, [SLEEP])
    first, second = (child.process for child in sleepers.children.values())
    monkeypatch.setattr(first, "wait", lambda: wait_until(lambda: second.poll() is not None))
    sleepers.kill()
    monkeypatch.undo()
    assert [first.wait(), second.poll()] == [-signal.SIGKILL] * 2


def test_children_die_with_their_parent():
    program = """
import subprocess, sys, os, time
child = "from photon.cluster.supervisor import die_with_parent; die_with_parent(); import time; print('up', flush=True); time.sleep(100)"
p = subprocess.Popen([sys.executable, '-c', child], env={**os.environ, 'PHOTON_PARENT': str(os.getpid())}, stdout=subprocess.PIPE)
p.stdout.readline()
print(p.pid, flush=True)
time.sleep(100)
"""
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()

    wait_until(lambda: state_of(child) == psutil.STATUS_ZOMBIE)


def test_free_ports_are_distinct_and_not_listened_on():
    rng = random.Random(5)
    with socket.socket() as taken:
        port = free_ports(1, random.Random(5))[0]
        taken.bind(("127.0.0.1", port))
        taken.listen()
        ports = free_ports(20, rng)
    assert port not in ports
    assert len(set(ports)) == 20


def test_the_words_of_an_earlier_process_are_not_taken_for_those_of_a_later_one(tmp_path):
    log = tmp_path / "a.log"
    log.write_text("photon: the disk is full\n")
    start = log.stat().st_size
    assert supervisor_module.last_message(log, start) == f"ended without a word (see {log})"
    with log.open("a") as file:
        file.write("photon: the port is taken\n")
    assert supervisor_module.last_message(log, start) == "the port is taken"


def test_who_could_not_say_why_for_want_of_room_is_told_so(tmp_path, monkeypatch):
    full = shutil.disk_usage(tmp_path)._replace(free=0)
    monkeypatch.setattr(supervisor_module.shutil, "disk_usage", lambda _: full)
    assert "is full: make room" in supervisor_module.last_message(tmp_path / "a.log")


def test_processes_that_are_held_down_stay_down_until_they_are_let_up(sleepers):
    for name in ("a", "b"):
        sleepers.start(name, [SLEEP])
    first = {name: sleepers.children[name].process for name in ("a", "b")}
    sleepers.hold_down(["a"])
    assert first["a"].poll() == -signal.SIGKILL
    for _ in range(20):
        sleepers.poll()
    assert sleepers.children["a"].process is None and sleepers.notices == []
    assert sleepers.children["b"].process is first["b"]
    sleepers.let_up(["a"])
    sleepers.poll()
    assert sleepers.children["a"].process.poll() is None
    assert sleepers.restarts() == 1


def test_one_that_died_and_waits_for_its_restart_can_be_held_down_too(sleepers):
    sleepers.start("a", ["raise SystemExit(1)"])
    await_end(sleepers)
    sleepers.poll()
    sleepers.hold_down(["a"])
    time.sleep(2 * supervisor_module.RESTARTS.delay_s_min)  # its restart was due by now
    sleepers.poll()
    assert sleepers.children["a"].process is None
    sleepers.stop(["a"])
    assert sleepers.children == {}
