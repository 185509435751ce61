"""Each role killed at each marked point between two of its IO steps, in a whole system under load."""

import json
import random
from collections import Counter
from pathlib import Path

import pytest

from eventstore.client import EventStoreClient
from photon.cluster.topology import Pipeline
from photon.core.fates import Found
from photon.core.ids import IdPacker
from tests.faults import scenarios
from tests.faults.kit.crashing import POINTS, SELDOM, Crash
from tests.faults.kit.crashing_nursery import CrashingNursery
from tests.faults.kit.feeder import Feed, cut_short
from tests.faults.kit.system import FaultSystem, seed_for

pytestmark = [pytest.mark.faults, pytest.mark.timeout(600)]

REACHED_S = 300
CLICKS_PER_S = 200
CLICKS = round(1.2 * REACHED_S * CLICKS_PER_S)
"""Fed for as long as points may take to be reached; cut then."""
ROUNDS = 2
PASSES_MAX = 2
VOTED = "vote stored"
FILLED = "cache filled"
LOOKUP_IDS = 1_000
SETTINGS = {
    "registry": {"lease_s": 1.5},
    "joiner": {"output_file_bytes_max": 50_000, "unjoinable_age_s": 4.0},
}


def test_killed_at_each_point_between_two_steps_every_event_is_joined_once(tmp_path):
    rng = random.Random(seed := seed_for("points"))
    launcher = CrashingNursery(tmp_path / "reached")
    second = tmp_path / "second"
    settings = {**SETTINGS, "joiner": {**SETTINGS["joiner"], "output_roots": [str(second)]}}
    feed = Feed(seed, CLICKS, CLICKS_PER_S, malformed=0.03, all_late=True)
    system = FaultSystem(tmp_path, seed, feed, settings=settings, launcher=launcher)
    victims = {f"{role}-{name}": role for role in POINTS if role != "registry" for name in ("east", "west")}
    wanted = Counter()
    for process, role in [*victims.items(), ("registry-r0", "registry")]:
        points = [point for _ in range(ROUNDS) for point in rng.sample(POINTS[role], len(POINTS[role]))]
        if role == "registry":  # there need be no election later
            points = [VOTED, *[point for point in points if point != VOTED]]
        if points[0] == FILLED:  # from the logs, by a cache that a kill has emptied
            points = [*points[1:], FILLED]
        launcher.arm(process, [Crash(point, passes(point, rng)) for point in points])
        wanted.update(f"{process}: {point}" for point in points)
    try:
        with system:
            system.until(
                lambda: scenarios.lets_up(system) or launcher.reached() == wanted, "every point", REACHED_S
            )
            cut_short(system.feeder)
            system.until_drained()
            for pipeline in system.topology.pipelines:
                assert_every_query_is_in_the_map(system, pipeline)
            system.finish()
            assert_roots_are_alike(system.out, second)
    finally:
        launcher.close()


def passes(point: str, rng: random.Random) -> int:
    return 0 if point in SELDOM else rng.randrange(PASSES_MAX + 1)


def assert_every_query_is_in_the_map(system: FaultSystem, pipeline: Pipeline) -> None:
    """One that is in none would be joined by the other datacenter, so that nobody might notice."""
    eventstore = f"eventstore-{pipeline.datacenter}"
    system.kill(eventstore)  # what is only in its cache is gone
    system.until(lambda: (system.status(eventstore) or {}).get("caught_up"), f"{eventstore} to have read all")
    client = EventStoreClient(pipeline.eventstores, 10.0)
    queries = list(system.feeder.truth.queries.items())
    for start in range(0, len(queries), LOOKUP_IDS):
        some = queries[start : start + LOOKUP_IDS]
        found, lines = client.lookup(IdPacker().pack([text for text, _ in some]))
        missing = [text for (text, _), one in zip(some, found, strict=True) if one != Found.FOUND]
        assert missing == []
        assert lines == [line for _, line in some]
    letters = Counter(
        (letter["file"], letter["offset"])
        for path in system.topology.dead_letters_directory(pipeline.datacenter).glob("primary-*.jsonl")
        for letter in map(json.loads, path.read_bytes().splitlines())
    )
    assert len(letters) == letters.total() == system.feeder.truth.malformed_queries


def assert_roots_are_alike(first: Path, second: Path) -> None:
    for path in (first / "joined").glob("*/*.jsonl"):
        assert (second / path.relative_to(first)).read_bytes() == path.read_bytes()
