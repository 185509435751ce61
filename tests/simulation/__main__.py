"""Play seeds from the command line.

python -m tests.simulation --seed 7 --replicas 5 -v          one seed, telling what happens
python -m tests.simulation --whole --seed 7 -v               one of a registry whole
python -m tests.simulation --hole s3 --search 200            which seeds notice a hole
PHOTON_SIM_SEEDS=10000 pytest tests/simulation/test_seeds.py many, of every size, mood and machine
"""

import argparse
import logging
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from tests.simulation import whole
from tests.simulation.caught import HOUR
from tests.simulation.cluster import WORKLOADS, Plan, play
from tests.simulation.holes import HOLES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seed", type=int, default=0, help="play this one, or begin with it")
    parser.add_argument("--replicas", type=int, choices=(1, 2, 3, 4, 5, 6, 7), default=3)
    parser.add_argument("--machine", choices=sorted(WORKLOADS), default="register")
    parser.add_argument("--whole", action="store_true", help="a registry whole, instead of one group")
    parser.add_argument("--hour", action="store_true", help="a registry whole, and 50 members of a group")
    parser.add_argument("--hostile", action="store_true", help="each message by itself: lost, late, twice")
    parser.add_argument("--members", action="store_true", help="replicas come and go")
    parser.add_argument("--hole", choices=sorted(HOLES), help="with this guard taken away")
    parser.add_argument("--search", type=int, metavar="N", help="of N seeds, those that notice the hole")
    parser.add_argument("-v", "--verbose", action="store_true", help="tell what happens")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if given.hour:
        return _tell(replace(HOUR, seed=given.seed), whole.play, given.hole, given.verbose)
    if given.whole:
        played = whole.Whole(given.seed, whole.SPREAD_S * (given.seed % 2))
        return _tell(played, whole.play, given.hole, given.verbose)
    plan = Plan(given.seed, given.replicas, given.machine, given.hostile, given.members)
    if given.search:
        return _search(plan, given.hole, given.search)
    return _tell(plan, play, given.hole, given.verbose)


def _tell(plan: Any, play: Callable[[Any, Any], Any], hole: str | None, verbose: bool) -> int:
    with _opened(hole):
        run = play(plan, print if verbose else None)
    print(", ".join(f"{name} {count}" for name, count in run.stats.items()))
    for rule, findings in run.broken.items():
        for finding in findings[:10]:
            print(f"{rule}: {finding}")
    print(f"seed {plan.seed}: {'BROKEN' if run.broken else 'all rules hold'}; again: {plan.command()}")
    return 1 if run.broken else 0


def _search(plan: Plan, hole: str | None, count: int) -> int:
    """Which of the seeds from the plan's on notice the hole."""
    noticed = 0
    for seed in range(plan.seed, plan.seed + count):
        with _opened(hole):
            run = play(replace(plan, seed=seed))
        if run.broken:
            noticed += 1
            print(f"{seed}: {', '.join(run.broken)}", flush=True)
    print(f"{noticed} of {count} seeds")
    return 0 if noticed else 1


def _opened(hole: str | None) -> AbstractContextManager[None]:
    return nullcontext() if hole is None else HOLES[hole]()


if __name__ == "__main__":
    sys.exit(main())
