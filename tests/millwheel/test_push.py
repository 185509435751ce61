"""What is pushed is durable before it is acknowledged, and is read once, whoever is killed meanwhile."""

import contextlib
import io
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import Future

import pytest

from millwheel import push
from millwheel.push import BATCH_BYTES_MAX, GapError, PushedLogs, Pusher, PushServer
from photon.core.clock import ManualClock, SystemClock
from photon.core.errors import OverloadedError, UnavailableError, UsageError
from photon.rpc.network import Network
from tests.certificates import Authority
from tests.millwheel.topologies import clicks
from tests.ports import free_ports
from tests.waiting import wait_until

PUSHED = "tests.millwheel.topologies:PUSHED"


class Served:
    """A receiver in this process."""

    def __init__(self, directory, network=None, address=""):
        self.directory = directory
        self.address = address or f"127.0.0.1:{free_ports(1)[0]}"
        self.network = network or Network()
        self.server = PushServer(PushedLogs(directory, SystemClock()), self.address, self.network)
        self._thread = threading.Thread(target=self.server.run)
        self._thread.start()

    def stop(self):
        self.server.stop()
        self._thread.join(20)
        assert not self._thread.is_alive()

    def pusher(self, producer="p", timeout_s=20.0):
        return Pusher(self.address, producer, self.network, timeout_s)

    def lines(self):
        return b"".join(path.read_bytes() for path in sorted(self.directory.glob("pushed-0-*.jsonl")))


@pytest.fixture
def served(tmp_path):
    running = Served(tmp_path)
    yield running
    running.stop()


def take(logs, *batches):
    """The numbers that producers were told, or what went wrong."""
    made = [push._Batch(*batch, Future()) for batch in batches]
    logs.take(made)
    return [batch.done.exception() or batch.done.result().number for batch in made]


def test_a_batch_that_comes_again_is_acknowledged_and_not_taken_again(tmp_path):
    logs = PushedLogs(tmp_path, ManualClock())
    assert take(logs, ("a", 0, 7, b"1\n"), ("a", 0, 7, b"1\n"), ("b", 0, 1, b"2\n")) == [7, 7, 1]
    logs.close()
    logs = PushedLogs(tmp_path, ManualClock())
    assert take(logs, ("a", 0, 7, b"1\n"), ("a", 7, 9, b"3\n"), ("a", 0, 0, b"")) == [9, 9, 9]
    logs.close()
    assert (tmp_path / "pushed-0-000000.jsonl").read_bytes() == b"1\n2\n3\n"


def test_a_start_that_was_killed_before_there_was_anything_is_gone_on_with(tmp_path, monkeypatch):
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        real = push.SinkFiles
        patched.setattr(push, "SinkFiles", lambda *arguments: (real(*arguments).close(), die()))
        PushedLogs(tmp_path, ManualClock())
    logs = PushedLogs(tmp_path, ManualClock())
    assert take(logs, ("a", 0, 1, b"1\n")) == [1]
    logs.close()


def die():
    raise KeyboardInterrupt


def test_a_gap_is_refused(tmp_path):
    logs = PushedLogs(tmp_path, ManualClock())
    (gap,) = take(logs, ("a", 5, 6, b"2\n"))
    assert isinstance(gap, GapError)
    _, overlap = take(logs, ("a", 0, 5, b"1\n"), ("a", 3, 8, b"2\n"))
    assert isinstance(overlap, GapError)
    logs.close()
    assert (tmp_path / "pushed-0-000000.jsonl").read_bytes() == b"1\n"


def test_a_producer_makes_room_when_it_was_silent_for_a_week(tmp_path, monkeypatch):
    monkeypatch.setattr(push, "PRODUCERS_MAX", 2)
    clock = ManualClock()
    logs = PushedLogs(tmp_path, clock)
    assert take(logs, ("a", 0, 1, b"1\n"), ("b", 0, 1, b"1\n")) == [1, 1]
    assert isinstance(take(logs, ("c", 0, 1, b"1\n"))[0], OverloadedError)
    clock.advance(push.FORGET_S + 1)
    assert take(logs, ("b", 1, 2, b"2\n"), ("c", 0, 1, b"3\n"), ("a", 1, 2, b"4\n"))[:2] == [2, 1]
    logs.close()
    assert (tmp_path / "pushed-0-000000.jsonl").read_bytes() == b"1\n1\n2\n3\n"


def test_many_producers_at_a_time_each_in_its_order(served):
    def one(name):
        with served.pusher(name) as pusher:
            for n in range(50):
                pusher.push(b'"%s %d"\n' % (name.encode(), n))

    threads = [threading.Thread(target=one, args=(f"p{n}",)) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    lines = [json.loads(line).split() for line in served.lines().splitlines()]
    for name in (f"p{n}" for n in range(8)):
        assert [int(number) for producer, number in lines if producer == name] == list(range(50))
    assert len(lines) == 400


@pytest.mark.parametrize(
    ("lines", "message"),
    [(b"1", "newline"), (b"1\n" * (BATCH_BYTES_MAX // 2) + b"1\n", "at most 4 MiB"), (b"", "newline")],
)
def test_a_batch_that_is_none_is_refused_and_the_next_one_is_taken(served, lines, message):
    with served.pusher() as pusher:
        with pytest.raises(UsageError, match=message):
            pusher.push(lines)
        pusher.push(b"1\n")
    assert served.lines() == b"1\n"


def test_nobody_there_is_told_in_time():
    with pytest.raises(UnavailableError):
        Pusher(f"127.0.0.1:{free_ports(1)[0]}", "p", timeout_s=0.3)


def test_who_waits_for_a_receiver_says_so_once_and_goes_on_waiting(tmp_path, monkeypatch):
    monkeypatch.setattr(push, "_SILENT_S", 0.0)
    address = f"127.0.0.1:{free_ports(1)[0]}"
    served, told = [], []

    def come(line):
        told.append(line)
        served.append(Served(tmp_path, address=address))

    with Pusher(address, "p", notice=come) as pusher:
        pusher.push(b"1\n")
    served[0].stop()
    assert told == [f"waits for {address}, up to 60 s: is its run up?"]
    assert served[0].lines() == b"1\n"


def test_a_stopped_receiver_answers_who_waits(tmp_path):
    served = Served(tmp_path)
    pusher = served.pusher(timeout_s=1.0)
    pusher.push(b"1\n")
    served.stop()
    with pytest.raises(UnavailableError), pusher:
        pusher.push(b"2\n")
    assert served.lines() == b"1\n"


def test_pushing_with_tls_and_not_without(tmp_path):
    authority = Authority(tmp_path / "ca")
    served = Served(tmp_path / "pushed", Network(authority.issue("node", tls_name="photon")))
    with served.pusher() as pusher:
        pusher.push(b"1\n")
    with pytest.raises(UnavailableError):
        Pusher(served.address, "q", timeout_s=1.0)
    served.stop()
    assert served.lines() == b"1\n"


@pytest.mark.long
def test_kills_of_receivers_and_of_workers_while_lines_are_pushed_change_nothing(system):
    dice = random.Random(4)
    now = time.time_ns() // 1_000
    lines = [line | {"ts": line["ts"] + now} for line in clicks(dice, 20_000, users=100, seconds=60)]
    system.start("--follow", "--workers", "2", name=PUSHED)

    done = []

    def one(producer):
        with Pusher(system.listen, producer) as pusher:
            mine = lines[int(producer) :: 2]
            for start in range(0, len(mine), 50):
                pusher.push(b"".join(json.dumps(line).encode() + b"\n" for line in mine[start : start + 50]))
                done.append(start)
                time.sleep(0.005)

    threads = [threading.Thread(target=one, args=(name,)) for name in "01"]
    for thread in threads:
        thread.start()
    kills = 0
    while any(thread.is_alive() for thread in threads):
        before = len(done)
        wait_until(lambda: len(done) >= before + 40 or not any(map(threading.Thread.is_alive, threads)))
        for kind in dice.choice([[b"receiver"], [b"receiver", b"worker"], [b"worker"]]):
            for pid in system.workers(kind)[:1]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    kills += kind == b"receiver"
    assert kills >= 3
    assert len(done) == 400
    wait_until(lambda: system.status()["counts"]["clicks"]["records"] >= 1)
    system.stop()
    system.run("--workers", "2", name=PUSHED)
    system.check(lines)
    assert system.dead_letters() == 0


@pytest.mark.long
def test_a_file_is_pushed_and_what_it_grew_by_and_the_disk_does_not_fill(system):
    now = time.time_ns() // 1_000
    system.environment["PUSHED_FILE_BYTES"] = "600000"
    pad = "x" * 2_000
    lines = [{"user": f"u{n % 7}", "ts": now + n, "what": "click", "pad": pad} for n in range(400)]
    system.write("a.jsonl", lines[:390])
    system.start("--follow", name=PUSHED)
    wait_until(lambda: system.workers(b"receiver"))
    assert "bytes" in system.push(system.listen, "logs/a.jsonl")
    assert system.push(system.listen, "logs/a.jsonl") == "pushed 0 bytes\n"
    system.write("a.jsonl", lines[390:], "a")
    system.push(system.listen, "logs/a.jsonl")
    pushed = system.directory / "work/received/clicks"
    wait_until(lambda: [path.name for path in pushed.glob("*.jsonl")] == ["pushed-0-000001.jsonl"])
    system.stop()
    system.run(name=PUSHED)
    system.check(lines)


def test_another_file_of_the_same_producer_is_refused(served, command, tmp_path):
    """Shorter, of other lines, of lines as long, or with the same last line."""
    files = {"a": b"1\n" * 10, "b": b"2\n", "c": b"22222\n" * 10, "d": b"2\n" * 20, "e": b"2\n" + b"1\n" * 9}
    for name, lines in files.items():
        (tmp_path / name).write_bytes(lines)
    words = ["millwheel", "push", served.address, "--producer", "p"]
    assert command(*words, tmp_path / "a").out == "pushed 20 bytes\n"
    for another in "bcde":
        done = command(*words, tmp_path / another)
        assert done.status == 2 and "name another producer" in done.err
    assert served.lines() == b"1\n" * 10


def test_what_is_no_address_is_refused_at_once(command, tmp_path):
    (tmp_path / "a.jsonl").touch()
    done = command("millwheel", "push", "nohost", tmp_path / "a.jsonl", "--producer", "p")
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert "HOST:PORT: 'nohost' is no address: give HOST:PORT" in done.err


@pytest.mark.parametrize("end", [b"", b"\n"])
def test_a_file_goes_on_where_a_pipe_has_pushed_its_beginning(served, command, tmp_path, end):
    with served.pusher() as pusher:
        pusher.push_all(io.BufferedReader(io.BytesIO(b"1\n23" + end)))
    (tmp_path / "a").write_bytes(b"1\n23\n4\n")
    words = ["millwheel", "push", served.address, "--producer", "p"]
    assert command(*words, tmp_path / "a").status == 0
    assert served.lines().split() == [b"1", b"23", b"4"]
    (tmp_path / "b").write_bytes(b"1\n23\n5\n6\n")
    assert "of another file" in command(*words, tmp_path / "b").err


def test_a_producer_of_a_former_version_is_known_by_its_number(tmp_path):
    logs = PushedLogs(tmp_path, ManualClock())
    with logs._env.begin(write=True) as txn:
        txn.put(b"a", push._encode((7, 1)), db=logs._producers)
    assert take(logs, ("a", 7, 9, b"3\n"), ("a", 0, 0, b"")) == [9, 9]
    logs.close()


def test_a_line_that_is_still_written_waits_for_its_end(served, command, tmp_path):
    log = tmp_path / "a.jsonl"
    push_it = ["millwheel", "push", served.address, "--producer", "p", log]
    log.write_bytes(b'{"n": 1}\n{"n"')
    done = command(*push_it)
    assert (done.status, done.out) == (0, "pushed 9 bytes\n")
    assert done.err.count("\n") == 1
    assert f"{log}: its last line (4 bytes) has no newline" in done.err
    assert "echo >> FILE" in done.err
    assert command(*push_it).out == "pushed 0 bytes\n"
    with log.open("ab") as file:
        file.write(b": 2}\n")
    done = command(*push_it)
    assert (done.status, done.out, done.err) == (0, "pushed 9 bytes\n", "")
    assert served.lines() == b'{"n": 1}\n{"n": 2}\n'


@pytest.mark.parametrize("closed", [b"\n", b""])
def test_a_line_that_is_too_long_is_told_and_those_around_it_are_pushed(served, command, tmp_path, closed):
    log, short, long = tmp_path / "a.jsonl", b'{"n": 1}\n', b"x" * (2 * BATCH_BYTES_MAX + 7)
    log.write_bytes(short + long + b"\n" + long + b"\n" + short + long + closed)
    push_it = ["millwheel", "push", served.address, "--producer", "p", log]
    done = command(*push_it)
    assert (done.status, done.out) == (1, "pushed 18 bytes\n")
    places = [9, 9 + len(long) + 1, 18 + 2 * len(long) + 2]
    assert done.err.splitlines() == [
        f"photon: the line at byte {at} is longer than 4 MiB, and is passed over: shorten it" for at in places
    ]
    assert served.lines() == short * 2
    with log.open("ab") as file:
        file.write(b"\n" * (not closed) + short)
    assert command(*push_it).out == "pushed 9 bytes\n"
    assert command(*push_it).out == "pushed 0 bytes\n"
    assert served.lines() == short * 3


def test_standard_input_is_pushed_as_it_comes(served):
    command = [sys.executable, "-m", "photon", "millwheel", "push", served.address, "--producer", "p"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        process.stdin.write(b'{"user": "u", "ts": 1}\n{"user"')
        process.stdin.flush()
        wait_until(lambda: served.lines() == b'{"user": "u", "ts": 1}\n')
        process.stdin.write(b': "u", "ts": 2}')
        process.stdin.close()
        assert process.wait(60) == 0
    assert served.lines() == b'{"user": "u", "ts": 1}\n{"user": "u", "ts": 2}\n'
