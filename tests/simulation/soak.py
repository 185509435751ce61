"""Many seeds, by several processes, and what they add up to."""

import logging
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import replace
from multiprocessing import get_context

from tests.simulation.cluster import Plan, Run, play
from tests.simulation.holes import HOLES

KINDS = [
    (replicas, machine, hostile, members)
    for machine, members in (("register", False), ("register", True), ("registry", False), ("registry", True))
    for replicas in (3, 5)
    for hostile in (False, True)
]
_SHOWN = 10
_REPORT_S = 60.0


def plans(first: int, count: int) -> Iterator[Plan]:
    """Each seed in the next kind: all sizes, moods and machines in turn."""
    for seed in range(first, first + count):
        replicas, machine, hostile, members = KINDS[seed % len(KINDS)]
        yield Plan(seed, replicas, machine, hostile, members)


def _play(plan: Plan) -> tuple[Plan, dict[str, list[str]], dict[str, int]]:
    logging.disable(logging.CRITICAL)
    try:
        run = play(plan)
    except Exception as error:  # the simulator's own mistake counts as a broken seed: somebody must look
        return plan, {"simulator": [repr(error)]}, {}
    return plan, run.broken, run.stats


def soak(first: int, count: int, jobs: int) -> int:
    """Play, report while it goes on and at the end; 1 where a rule was broken."""
    began = told = time.monotonic()
    stats: Counter[str] = Counter()
    broken: list[tuple[Plan, dict[str, list[str]]]] = []
    kinds: Counter[str] = Counter()
    with get_context("spawn").Pool(jobs) as pool:
        for done, (plan, findings, counts) in enumerate(
            pool.imap_unordered(_play, plans(first, count), 8), 1
        ):
            stats.update(counts)
            mood = "hostile" if plan.hostile else "as in life"
            changing = ", members change" * plan.members
            kinds[f"{plan.replicas} replicas, {plan.machine}, {mood}{changing}"] += 1
            if findings:
                broken.append((plan, findings))
                print(f"BROKEN {', '.join(findings)}: {plan.command()}", flush=True)
            if time.monotonic() - told > _REPORT_S:
                told = time.monotonic()
                print(f"{done} of {count} seeds, {len(broken)} broken, {told - began:.0f} s", flush=True)
    _report(count, kinds, stats, broken, time.monotonic() - began)
    return 1 if broken else 0


def _report(
    count: int,
    kinds: Counter[str],
    stats: Counter[str],
    broken: list[tuple[Plan, dict[str, list[str]]]],
    seconds: float,
) -> None:
    print(f"\n{count} seeds in {seconds:.0f} s, {len(broken)} broken")
    for kind, runs in sorted(kinds.items()):
        print(f"  {runs:7} {kind}")
    hours = stats.pop("virtual_ms", 0) / 3_600_000
    print(f"  {hours:.1f} virtual hours; " + ", ".join(f"{n} {name}" for name, n in stats.items()))
    for plan, findings in broken[:_SHOWN]:
        print(f"  {plan.command()}")
        for rule, found in findings.items():
            print(f"    {rule}: {found[0]}")


def search(plan: Plan, hole: str | None, count: int) -> int:
    """Tell which of the seeds from the plan's on notice the hole."""
    noticed = 0
    for seed in range(plan.seed, plan.seed + count):
        run = _with(hole, replace(plan, seed=seed))
        if run.broken:
            noticed += 1
            print(f"{seed}: {', '.join(run.broken)}", flush=True)
    print(f"{noticed} of {count} seeds")
    return 0 if noticed else 1


def _with(hole: str | None, plan: Plan) -> Run:
    with nullcontext() if hole is None else HOLES[hole]():
        return play(plan)
