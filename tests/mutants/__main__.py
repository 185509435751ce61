"""`make mutants`: make each mistake of the list, run the tests that should notice it, and count.

python -m tests.mutants                       all; status 1 where too few are noticed
python -m tests.mutants --sample 30           some of all
python -m tests.mutants --room raft --find    the first test of the room that notices, for new entries
"""

import argparse
import queue
import random
import tempfile
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.mutants.mutants import Copy, Mutant, mutants

NOTICED_MIN = 0.95
QUICK_MIN = 0.5
_FAILED = 1  # pytest's status
_SAMPLE_SEED = 14


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__.splitlines()[0])
    parser.add_argument("--room", default="*", help="of this list only")
    parser.add_argument("--find", action="store_true", help="run the room's tests instead of `told_by`")
    parser.add_argument("--sample", type=int, help="so many, drawn at random: the same ones of the same list")
    parser.add_argument("--jobs", type=int, default=2)
    given = parser.parse_args()
    listed = list(mutants(given.room))
    if given.sample:
        listed = random.Random(_SAMPLE_SEED).sample(listed, given.sample)
    with tempfile.TemporaryDirectory(prefix="photon-mutants-") as scratch:
        copies: queue.SimpleQueue[Copy] = queue.SimpleQueue()
        for number in range(given.jobs):
            copies.put(Copy(Path(scratch) / str(number)))
        if not given.find:
            _check_the_tests(listed, copies)

        def noticed(mutant: Mutant) -> bool:
            copy = copies.get()
            try:
                return _noticed(copy, mutant, given.find)
            finally:
                copies.put(copy)

        with ThreadPoolExecutor(given.jobs) as pool:
            told = list(pool.map(noticed, listed))
    return _report(listed, told)


def _check_the_tests(listed: list[Mutant], copies: "queue.SimpleQueue[Copy]") -> None:
    """That they pass without any mistake. All at once: most of such a short run is its start."""
    copy = copies.get()
    for long in {mutant.long for mutant in listed}:
        tests = {test for mutant in listed if mutant.long == long for test in mutant.told_by}
        status, failed = copy.tests(None, tuple(sorted(tests)), long)
        if status != 0:
            raise SystemExit(f"fails without any mistake: {failed}")
    copies.put(copy)


def _noticed(copy: Copy, mutant: Mutant, find: bool) -> bool:
    tests = (f"tests/{mutant.room}",) if find or not mutant.told_by else mutant.told_by
    status, failed = copy.tests(mutant, tests, mutant.long)
    if status not in (0, _FAILED):
        raise SystemExit(f"{mutant.file}: {mutant.what}: pytest ended with {status}\n{failed}")
    print(f"{'noticed ' if status else 'SURVIVED'} {mutant.room}: {mutant.what}", flush=True)
    if find and status:
        print(f"    {failed}", flush=True)
    return status == _FAILED


def _report(listed: list[Mutant], told: list[bool]) -> int:
    rooms, noticed = Counter(mutant.room for mutant in listed), Counter[str]()
    for mutant, tells in zip(listed, told, strict=True):
        noticed[mutant.room] += tells
    for room, count in sorted(rooms.items()):
        print(f"{room:<12} {noticed[room]:>4} of {count}")
    quick = sum(tells and not mutant.long for mutant, tells in zip(listed, told, strict=True))
    share, quick_share = sum(told) / len(told), quick / len(told)
    print(
        f"{sum(told)} of {len(told)} mistakes are noticed ({share:.0%}), {quick_share:.0%} within `make test`"
    )
    return 0 if share >= NOTICED_MIN and quick_share >= QUICK_MIN else 1


if __name__ == "__main__":
    raise SystemExit(main())
