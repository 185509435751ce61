"""Random faults on machines that compute one run: `python -m tests.millwheel.soak --minutes 60`.

Rounds of some two minutes, each a new run of three machines over PostgreSQL and its standby, all links behind
proxies, while lines are written. At its end each window must stand in the sinks as plain Python counts it.
`--seed` draws the same faults again; when each of them hits is up to the machine. Ends with a report; status
1 if a round was not exact.
"""

import contextlib
import json
import os
import random
import secrets
import signal
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

import click

from tests.faults.kit.toxiproxy import ToxiproxyServer, need_toxiproxy
from tests.millwheel.running import LOSES, Pair, Proxied, System
from tests.waiting import wait_until

NAMES = ("one", "two", "three")
PARTS = 60
"""Of a thousand lines, one a second."""
SERVERS = ("first", "second")
FAULTS_A_ROUND = 9


class Round:
    def __init__(self, directory, seed, proxies, pair):
        directory.mkdir(parents=True)
        self.random, self.proxies, self.pair = random.Random(seed), proxies, pair
        self.servers = [one.uri.partition("@")[2].partition("/")[0] for one in (pair.first, pair.second)]
        self.proxied = proxies.create(dict(zip(SERVERS, self.servers, strict=True)))
        uri = pair.uri.format("schema=run").replace(",".join(self.servers), ",".join(self.proxied.values()))
        self.system = System(directory)
        self.several = Proxied(self.system, uri, directory, seed, proxies, NAMES, lines=1000 * PARTS)
        self.failed_over = False

    def play(self, faults):
        for name in NAMES:
            self.several.start(name, "--follow")
        self.several.computes(*NAMES)
        feeder = threading.Thread(target=self._feed)
        feeder.start()
        try:
            for _ in range(FAULTS_A_ROUND):
                time.sleep(self.random.uniform(0.5, 4))
                fault = self.random.choice(FAULTS)
                sys.stderr.write(f"  {fault.__name__}\n")
                faults[fault.__name__] += 1
                fault(self)
        finally:
            feeder.join()
        for name in NAMES:
            self._there(name)
        self.several.computes(*NAMES)
        self.several.feed(PARTS, PARTS)
        for name in NAMES:
            self.system.signal(name, signal.SIGTERM)
        wait_until(lambda: not any(any(self.system.processes(name)) for name in NAMES))
        self.several.finish(*NAMES)

    def close(self):
        for name in NAMES:
            self.system.signal(name, signal.SIGKILL)

    def _feed(self):
        for part in range(PARTS):
            self.several.write(part, part + 1)
            time.sleep(1)

    def _there(self, name):
        if not any(self.system.processes(name)):
            self.several.start(name, "--follow")

    def _name(self):
        return self.random.choice(NAMES)

    def _links(self):
        """Of one machine."""
        name = self._name()
        return [link for link in self.several.links if link.startswith(name)]

    # What happens

    def kill_a_worker(self):
        workers = self.system.workers(work=self._name())
        for pid in workers[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill_a_machine(self):
        name = self._name()
        self.system.signal(name, signal.SIGKILL)
        time.sleep(self.random.uniform(0, 5))
        self._there(name)

    def stop_a_machine(self):
        name = self._name()
        self.system.signal(name, signal.SIGTERM)
        wait_until(lambda: not any(self.system.processes(name)))
        self._there(name)

    def freeze_a_machine(self):
        name = self._name()
        self.system.signal(name, signal.SIGSTOP)
        time.sleep(self.random.uniform(1, 8))
        self.system.signal(name, signal.SIGCONT)

    def kill_all_machines(self):
        for name in NAMES:
            self.system.signal(name, signal.SIGKILL)
        for name in NAMES:
            self._there(name)

    def cut_a_machine_off(self):
        self._during(self._links(), self.proxies.enable, False)

    def lose_what_a_machine_sends(self):
        self._during(self._links(), self.proxies.add, "timeout", "upstream", {"timeout": 0}, 1.0)

    def slow_all_links(self):
        slow = {"latency": 100, "jitter": 50}
        self._during(self.several.links, self.proxies.add, "latency", "downstream", slow, 1.0)

    def cut_the_database_off(self):
        self._during(SERVERS, self.proxies.enable, False)

    def lose_what_the_database_is_sent(self):
        self._during(SERVERS, self.proxies.add, "timeout", "upstream", {"timeout": 0}, 1.0)

    def freeze_the_standby(self):
        if not self.failed_over:
            self.pair.second.signal(signal.SIGSTOP)
            time.sleep(self.random.uniform(0.5, 4))
            self.pair.second.signal(signal.SIGCONT)

    def fail_over(self):
        if not self.failed_over:
            self.failed_over = True
            self.pair.first.kill()
            time.sleep(self.random.uniform(0, 4))
            self.pair.second.promote()
            self.several.uris = [f"postgresql://photon@{self.proxied['second']}/postgres?schema=run&{LOSES}"]

    def _during(self, links, does, *given):
        """For some seconds."""
        for link in links:
            does(link, *given)
        time.sleep(self.random.uniform(0.3, 6))
        for link in links:
            self.proxies.clear(link)
            self.proxies.enable(link, True)


FAULTS = [
    Round.kill_a_worker,
    Round.kill_a_machine,
    Round.stop_a_machine,
    Round.freeze_a_machine,
    Round.kill_all_machines,
    Round.cut_a_machine_off,
    Round.lose_what_a_machine_sends,
    Round.slow_all_links,
    Round.cut_the_database_off,
    Round.lose_what_the_database_is_sent,
    Round.freeze_the_standby,
    Round.fail_over,
]


@click.command()
@click.option("--minutes", type=float, default=10.0, show_default=True)
@click.option("--seed", type=int, help="Of an earlier run  [default: a new one]")
def main(minutes, seed):
    """Random faults on machines that compute one run, then a report."""
    seed = secrets.randbits(32) if seed is None else seed
    sys.stderr.write(f"seed {seed}\n")
    directory = Path(tempfile.mkdtemp(prefix="millwheel-soak-"))
    faults, failed, rounds, began = Counter(), [], 0, time.monotonic()
    while not rounds or time.monotonic() - began < 60 * minutes:
        sys.stderr.write(f"round {rounds}\n")
        with (
            contextlib.closing(ToxiproxyServer(need_toxiproxy())) as proxies,
            contextlib.closing(Pair()) as pair,
        ):
            played = Round(directory / f"{rounds}", f"{seed}/{rounds}", proxies, pair)
            with contextlib.closing(played):
                try:
                    played.play(faults)
                except Exception as error:
                    failed.append(f"round {rounds}: {type(error).__name__}: {error}")
                    sys.stderr.write(f"{failed[-1]}\n")
        rounds += 1
    told = {
        "seed": seed,
        "rounds": rounds,
        "faults": dict(faults.most_common()),
        "lines": rounds * PARTS * 1000,
    }
    told |= {"minutes": round((time.monotonic() - began) / 60, 1), "failed": failed}
    click.echo(json.dumps(told, indent=2))
    if failed:
        sys.stderr.write(f"what the rounds wrote is in {directory}\n")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
