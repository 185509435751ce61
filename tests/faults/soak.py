"""Random faults on a whole system, for as long as wanted: `python -m tests.faults.soak --minutes 30`.

Rounds of a few minutes, each a new system of two pipelines and five replicas behind proxies, whose output is
checked. `--seed` plays the same faults again, in the same order and on the same events; when each of them
hits is up to the machine. Ends with a report, status 1 if a round broke a promise, or could not be judged.
Full disks and wrong clocks have tests of their own (test_disks.py, test_clocks.py), and are not met here.
"""

import json
import random
import secrets
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import click

from tests.faults.kit.checkers import BrokenError, Report
from tests.faults.kit.crashing_nursery import CrashingNursery
from tests.faults.kit.feeder import Feed, cut_short
from tests.faults.kit.system import FaultSystem
from tests.faults.kit.toxiproxy import ToxiproxyError, need_toxiproxy
from tests.faults.regions import REGIONS
from tests.faults.scenarios import SCENARIOS, Scenario, crashing_at_points

FAULTS_A_ROUND: Final = 8
CLICKS_PER_S: Final = 150.0
CLICKS: Final = 200_000
"""Of a feed, which is cut when a round's faults are over."""
_ROUND_TRIP_MS: Final = (0.0, 20.0, 100.0)


@dataclass(slots=True)
class Soaked:
    """What became of all rounds."""

    seed: int
    rounds: int = 0
    failed: list[str] = field(default_factory=list)
    not_judged: int = 0
    """Of those that failed: rounds that did not come to their end, so that nobody knows what they would have
    lost."""
    crashes: int = 0
    """At marked points."""
    faults: Counter[str] = field(default_factory=Counter)
    events_in: int = 0
    fates: Counter[str] = field(default_factory=Counter)
    joined: int = 0
    duplicates: int = 0
    lost: int = 0
    longest_stall_s: float = 0.0
    minutes: float = 0.0

    def add(self, report: Report) -> None:
        self.events_in += report.events_in
        self.joined += report.joined
        self.duplicates += report.duplicates
        self.lost += report.lost
        self.longest_stall_s = max(self.longest_stall_s, report.longest_stall_s)
        for fates in report.fates.values():
            self.fates.update(fates)

    def fail(self, error: Exception) -> None:
        self.failed.append(f"round {self.rounds}: {type(error).__name__}: {error}")
        sys.stderr.write(f"{self.failed[-1]}\n")

    def as_document(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "minutes": round(self.minutes, 1),
            "rounds": self.rounds,
            "not_judged": self.not_judged,
            "crashes": self.crashes,
            "faults": dict(self.faults.most_common()),
            "events_in": self.events_in,
            "fates": dict(self.fates),
            "joined": self.joined,
            "duplicates": self.duplicates,
            "lost": self.lost,
            "longest_stall_s": round(self.longest_stall_s, 1),
            "failed": self.failed,
        }


def soak(minutes: float, seed: int, directory: Path) -> Soaked:
    """Round after round until the time is over; one at least."""
    soaked = Soaked(seed)
    began = time.monotonic()
    directory.mkdir(parents=True, exist_ok=True)
    launcher = CrashingNursery(directory / "reached")
    try:
        while not soaked.rounds or time.monotonic() - began < 60.0 * minutes:
            rng = random.Random(f"{seed}/{soaked.rounds}")
            try:
                soaked.add(_round(rng, directory / f"round-{soaked.rounds}", launcher, soaked.faults))
            except BrokenError as error:
                soaked.add(error.report)
                soaked.fail(error)
            except Exception as error:
                soaked.not_judged += 1
                soaked.fail(error)
            soaked.rounds += 1
    finally:
        launcher.close()
    soaked.crashes = launcher.reached().total()
    soaked.minutes = (time.monotonic() - began) / 60.0
    return soaked


def _round(rng: random.Random, directory: Path, launcher: CrashingNursery, faults: Counter[str]) -> Report:
    seed = rng.randrange(1 << 32)
    directory.mkdir(parents=True)
    round_trip_ms = rng.choice(_ROUND_TRIP_MS)
    settings: dict[str, dict[str, Any]] = {
        # Queries that were not logged when the feed is cut come when a busy machine gets there.
        "joiner": {"processes": rng.choice((1, 2)), "unjoinable_age_s": 30.0},
        "registry": {"shards": rng.choice((1, 3))},
    }
    if round_trip_ms:
        settings["registry"] |= {"election_timeout_ms": 1_000, "lease_s": 6.0}  # else the kit's
    chosen: Sequence[Scenario] = rng.choices(
        (*SCENARIOS, *REGIONS, crashing_at_points(launcher)), k=FAULTS_A_ROUND
    )
    feed = Feed(seed, CLICKS, CLICKS_PER_S)
    with FaultSystem(
        directory, seed, feed, replicas=5, settings=settings, proxies=True, launcher=launcher
    ) as system:
        if round_trip_ms:
            system.proxies.latency(system.topology.regions, round_trip_ms, round_trip_ms / 10)
        system.until_joined(50)
        for scenario in chosen:
            sys.stderr.write(f"  {scenario.__name__}\n")
            faults[scenario.__name__] += 1
            scenario(system, rng)
            system.check_now()
        cut_short(system.feeder)
        return system.finish(300.0)


@click.command()
@click.option("--minutes", type=float, default=10.0, show_default=True)
@click.option("--seed", type=int, help="Of an earlier run  [default: a new one]")
@click.option("--report", type=click.Path(path_type=Path), help="Write the report there, too.")
def main(minutes: float, seed: int | None, report: Path | None) -> None:
    """Random faults, then a report: events in, fates, joined twice, lost, longest stall."""
    try:
        need_toxiproxy()
    except ToxiproxyError as error:
        raise click.ClickException(str(error)) from error
    seed = secrets.randbits(32) if seed is None else seed
    sys.stderr.write(f"seed {seed}\n")
    directory = Path(tempfile.mkdtemp(prefix="photon-soak-"))
    soaked = soak(minutes, seed, directory)
    told = json.dumps(soaked.as_document(), indent=2)
    click.echo(told)
    if report is not None:
        report.write_text(told + "\n", "utf-8")
    if soaked.failed:
        sys.stderr.write(f"what the failed rounds wrote is kept in {directory}\n")
    sys.exit(1 if soaked.failed else 0)


if __name__ == "__main__":
    main()
