"""Play seeds from the command line.

python -m tests.simulation --seed 7 --replicas 5 -v          one seed, telling what happens
python -m tests.simulation --whole --seed 7 -v               one of a registry whole; --soak N: from there on
python -m tests.simulation --soak 10000 --jobs 2             many, with a report at the end
python -m tests.simulation --hole s3 --search 200            which seeds notice a hole
"""

import argparse
import logging
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

from tests.simulation import whole
from tests.simulation.cluster import WORKLOADS, Plan, play
from tests.simulation.holes import HOLES
from tests.simulation.soak import search, soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulation", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seed", type=int, default=0, help="play this one, or begin with it")
    parser.add_argument("--replicas", type=int, choices=(1, 2, 3, 4, 5, 6, 7), default=3)
    parser.add_argument("--machine", choices=sorted(WORKLOADS), default="register")
    parser.add_argument("--whole", action="store_true", help="a registry whole, instead of one group")
    parser.add_argument("--hostile", action="store_true", help="each message by itself: lost, late, twice")
    parser.add_argument("--members", action="store_true", help="replicas come and go")
    parser.add_argument("--hole", choices=sorted(HOLES), help="with this guard taken away")
    parser.add_argument("--search", type=int, metavar="N", help="of N seeds, those that notice the hole")
    parser.add_argument("--soak", type=int, metavar="N", help="N seeds of every size, mood and machine")
    parser.add_argument("--jobs", type=int, default=1, help="processes to soak with")
    parser.add_argument("-v", "--verbose", action="store_true", help="tell what happens")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    if given.whole:
        seeds = range(given.seed, given.seed + (given.soak or 1))
        wholes = [whole.Whole(seed, whole.SPREAD_S * (seed % 2)) for seed in seeds]
        return max(_tell(each, whole.play, given.hole, given.verbose) for each in wholes)
    if given.soak:
        return soak(given.seed, given.soak, given.jobs)
    plan = Plan(given.seed, given.replicas, given.machine, given.hostile, given.members)
    if given.search:
        return search(plan, given.hole, given.search)
    return _tell(plan, play, given.hole, given.verbose)


def _tell(plan: Any, play: Callable[[Any, Any], Any], hole: str | None, verbose: bool) -> int:
    with nullcontext() if hole is None else HOLES[hole]():
        run = play(plan, print if verbose else None)
    print(", ".join(f"{name} {count}" for name, count in run.stats.items()))
    for rule, findings in run.broken.items():
        for finding in findings[:10]:
            print(f"{rule}: {finding}")
    print(f"seed {plan.seed}: {'BROKEN' if run.broken else 'all rules hold'}; again: {plan.command()}")
    return 1 if run.broken else 0


if __name__ == "__main__":
    sys.exit(main())
