"""The nursery: processes that are forked rather than started, as their supervisor sees them."""

import os
import signal
import subprocess
import sys
import time
from random import Random

import psutil
import pytest

from photon.app.nursery import Nursery
from photon.app.ports import free_ports
from photon.app.supervisor import Supervisor, last_message
from photon.app.topology import Replica, Topology, write_topology
from tests.app.test_supervisor import eventually


@pytest.fixture(scope="module")
def nursery():
    made = Nursery()
    yield made
    made.close()


BAD = ["registry", "serve", "--topology", "nowhere.json", "--name", "r0"]


def test_a_fork_ends_with_its_own_status_and_words(nursery, tmp_path):
    child = nursery.launch(BAD, tmp_path / "log")
    assert child.wait(20.0) == 2
    assert "nowhere.json: cannot be read" in last_message(tmp_path / "log")
    assert child.poll() == 2


def test_the_nursery_has_one_thread_so_that_it_can_be_forked_from(nursery, tmp_path):
    nursery.launch(["--version"], tmp_path / "log").wait(20.0)  # everything is imported by then
    assert len(os.listdir(f"/proc/{nursery._process.pid}/task")) == 1


def test_a_log_is_appended_to(nursery, tmp_path):
    (tmp_path / "log").write_text("before\n")
    nursery.launch(["--version"], tmp_path / "log").wait(20.0)
    assert (tmp_path / "log").read_text().startswith("before\nphoton")


@pytest.fixture
def serving(nursery, tmp_path):
    """Starts registry replicas that wait for two others for ever."""
    ports = iter(free_ports(6, Random()))
    replicas = [
        Replica(f"r{n}", f"127.0.0.1:{next(ports)}", "127.0.0.1", next(ports), str(tmp_path / f"r{n}"))
        for n in range(3)
    ]
    write_topology(Topology({}, [], [], str(tmp_path), "00" * 32, True, replicas, []), tmp_path / "t.json")
    started = []

    def start(launcher=nursery, name="r0"):
        arguments = ["registry", "serve", "--name", name, "--topology", str(tmp_path / "t.json")]
        child = launcher.launch(arguments, tmp_path / f"{name}.log")
        started.append(child)
        eventually(lambda: "serve" in psutil.Process(child.pid).cmdline())
        return child

    yield start
    for child in started:
        child.kill()


def test_a_fork_shows_its_own_command_line_and_can_be_told_to_end(serving):
    child = serving()
    words = [word for word in psutil.Process(child.pid).cmdline() if word]
    assert words[:5] == ["photon", "registry", "serve", "--name", "r0"]
    time.sleep(0.3)  # until it has set its own answer to the signal; one without ends by it as well
    child.terminate()
    assert child.wait(20.0) in (0, -signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        serving(name="r1").wait(0.05)


def test_killed_is_told_as_such(serving):
    child = serving()
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait(20.0) == -signal.SIGKILL


def test_children_of_a_nursery_that_is_killed_are_gone_and_known_to_be_and_the_next_one_starts(
    serving, tmp_path
):
    own = Nursery()
    try:
        children = [serving(own, name) for name in ("r0", "r1")]
        os.kill(own._process.pid, signal.SIGKILL)
        assert [child.wait(20.0) for child in children] == [-signal.SIGKILL] * 2
        eventually(lambda: not any(psutil.pid_exists(c.pid) and running(c.pid) for c in children))
        assert own.launch(BAD, tmp_path / "log").wait(20.0) == 2
    finally:
        own.close()


def running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def test_a_supervisor_restarts_what_the_nursery_forked(nursery, serving, tmp_path):
    serving()  # writes the topology's first word
    made = Supervisor(tmp_path / "logs", nursery)
    arguments = ["registry", "serve", "--name", "r2", "--topology", str(tmp_path / "t.json")]
    made.start("registry-r2", arguments)
    try:
        first = made.children["registry-r2"].process.pid
        os.kill(first, signal.SIGKILL)

        def again():
            made.poll()
            process = made.children["registry-r2"].process
            return process is not None and process.pid != first

        eventually(again)
    finally:
        made.kill()


def test_a_nursery_does_not_outlive_its_command():
    program = "from photon.app.nursery import Nursery; import time; n = Nursery(); print(n._process.pid, flush=True); time.sleep(100)"
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    nursery = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    eventually(lambda: not running(nursery))
