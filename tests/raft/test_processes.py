"""Three processes, the leader killed with SIGKILL again and again under load."""

import subprocess
import sys
import threading
from collections import defaultdict
from pathlib import Path

import pytest

from tests.ports import free_ports
from tests.waiting import wait_until

ROOT = Path(__file__).resolve().parents[2]


class Nodes:
    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.pairs = [f"{name}={port}" for name, port in zip("abc", free_ports(3), strict=True)]
        self.processes: dict[str, subprocess.Popen[str]] = {}
        self.answers: dict[tuple[str, str], str] = {}
        self.states: dict[str, tuple[str, str]] = {}
        self.leader = "a"

    def start(self, name: str) -> None:
        arguments = [
            sys.executable,
            "-m",
            "tests.raft.node_process",
            name,
            str(self.directory / name),
            *self.pairs,
        ]
        process = subprocess.Popen(
            arguments, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self.processes[name] = process
        threading.Thread(target=self._read, args=(name, process), daemon=True).start()

    def _read(self, name: str, process: "subprocess.Popen[str]") -> None:
        assert process.stdout is not None
        for line in process.stdout:
            words = line.split()
            if not line.endswith("\n") or len(words) != 4:
                continue  # killed while it spoke
            one, two, three, leader = words
            if leader != "-":
                self.leader = leader
            if one == "?":
                self.states[name] = (two, three)
            elif three != "again":
                self.answers[one, two] = three

    def say(self, name: str, line: str) -> None:
        process = self.processes.get(name)
        if process is not None and process.stdin is not None:
            try:
                process.stdin.write(line + "\n")
                process.stdin.flush()
            except (BrokenPipeError, ValueError):
                pass

    def kill(self, name: str) -> None:
        process = self.processes.pop(name)
        process.kill()
        process.communicate()

    def register(self, pairs: list[tuple[str, str]]) -> None:
        """Offer each pair, at the leader and then at anybody, until it is answered."""
        turn = 0

        def settled() -> bool:
            nonlocal turn
            left = [pair for pair in pairs if pair not in self.answers]
            if left and turn % 20 == 0:
                names = [self.leader, *self.processes] if turn % 60 == 0 else list(self.processes)
                for name in dict.fromkeys(names):
                    for key, token in left:
                        self.say(name, f"{key} {token}")
            turn += 1
            return not left

        wait_until(settled)


@pytest.mark.cluster
@pytest.mark.timeout(90)
@pytest.mark.long
def test_a_leader_killed_under_load_never_costs_an_acknowledged_id(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    for name in "abc":
        nodes.start(name)
    try:
        for killed in range(3):
            batch = [
                (f"id{number}", str(killed * 10 + who))
                for number in range(150 + killed * 30)
                for who in (1, 2)
            ]
            client = threading.Thread(target=nodes.register, args=(batch,))
            client.start()
            wait_until(lambda: len(nodes.answers) > killed * 300 + 30)
            victim = nodes.leader if nodes.leader in nodes.processes else next(iter(nodes.processes))
            nodes.kill(victim)
            client.join()
            nodes.start(victim)
        winners: dict[str, set[str]] = defaultdict(set)
        for (key, token), answer in nodes.answers.items():
            if answer == "won":
                winners[key].add(token)
        assert all(len(tokens) == 1 for tokens in winners.values())
        assert len(winners) == 210

        def equal() -> bool:
            for name in nodes.processes:
                nodes.say(name, "?")
            return len(nodes.states) == 3 and len(set(nodes.states.values())) == 1

        wait_until(equal)
    finally:
        for name in list(nodes.processes):
            nodes.kill(name)
