"""Registry sets: which processes have a replica of which shard (paper 2.2.2: "separate servers"). Pure.

A set is a few replicas, in as many datacenters, which host the same shards. The directory is of MAIN_SET; all
others follow it as learners. A resharding spreads its shards evenly over all sets, so load comes to a new
set with the event time from which the shards hold, and nothing is copied. A set that is to go has no part in
the next resharding, and is empty when the registry has forgotten what it held.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import count


def spread(shards: int, sets: Iterable[str], homes: Mapping[int, str]) -> dict[int, str]:
    """So many shards -> their sets. `homes`: of the shards that there are; those of a set are taken first.

    A set gets one more than another only where the number does not divide, the one that has fewest shards.
    """
    held = Counter(homes.values())
    taken = Counter(dict.fromkeys(sets, 0))
    unused = (number for number in count() if number not in homes)
    there = {name: iter(sorted(shard for shard, home in homes.items() if home == name)) for name in taken}
    found: dict[int, str] = {}
    for _ in range(shards):
        name = min(taken, key=lambda one: (taken[one], held[one], one))
        taken[name] += 1
        shard = next(there[name], None)
        found[next(unused) if shard is None else shard] = name
    return dict(sorted(found.items()))
