"""The leader is killed, again and again: the time until the next commit succeeds at clients that try."""

import statistics
import time
from itertools import pairwise
from typing import Any, Final

from benchmarks.registry_cluster import Cluster
from benchmarks.registry_load import Clients
from benchmarks.registry_parts import Plan

TARGET_WORST_S: Final = 1.5
_TRYING: Final = 4
_BEFORE_S: Final = 0.5
SETTLED_S: Final = 4.0
SETTLED_QUICK_S: Final = 0.5
WATCH_S: Final = 5.0
WATCH_QUICK_S: Final = 2.5
_KILLS_QUICK: Final = 2


def failover(plan: Plan) -> dict[str, Any]:
    """SIGKILL at default settings; the killed replica comes back before the next round."""
    gaps = []
    with Cluster(plan.directory) as cluster, Clients(cluster.addresses, 1) as clients:
        for _ in range(_KILLS_QUICK if plan.quick else plan.kills):
            cluster.wait_until_settled(SETTLED_QUICK_S if plan.quick else SETTLED_S)
            gaps.append(kill_once(cluster, clients, WATCH_QUICK_S if plan.quick else WATCH_S))
    return {
        "kills": len(gaps),
        "p50_s": round(statistics.median(gaps), 3),
        "worst_s": round(max(gaps), 3),
        "each_s": [round(gap, 3) for gap in gaps],
        "target_worst_s": TARGET_WORST_S,
        "reached": max(gaps) < TARGET_WORST_S,
    }


def kill_once(cluster: Cluster, clients: Clients, watch_s: float) -> float:
    """Seconds from the kill to the end of the silence it made; the killed one runs again after."""
    begin, end = clients.begin(watch_s, ids=1, in_flight=_TRYING, keep_times=True)
    time.sleep(max(0.0, begin + _BEFORE_S - time.monotonic()))
    leader = cluster.leader()
    killed_at = cluster.kill(leader)
    ends = sorted(at for seen in clients.finish() for at in seen["ends"])
    gap = silence_s(ends, killed_at, end)
    cluster.start(leader)
    cluster.wait_until_even()
    return gap


def silence_s(successes: list[float], killed_at: float, end: float) -> float:
    """From the kill to the end of the longest time without a success after it (at most until `end`).

    The first success after the kill may be an answer that was already on its way.
    """
    moments = [killed_at, *(at for at in successes if at > killed_at), end]
    _, stop = max(pairwise(moments), key=lambda pair: pair[1] - pair[0])
    return stop - killed_at
