"""Several workers under faults come to what plain Python counts: kills, links that stall, frames that come
twice.

Each rule that keeps it so is taken out in turn: some seed must notice.
"""

import random

import pytest

from millwheel.engine.store import FRAME, POSITION, STATE, TIMERS, MemoryStore
from millwheel.engine.wheel import Wheel
from millwheel.testing import World, _Worker, in_order, oracle, run
from tests.millwheel.topologies import clicks, expected, two_stages
from tests.seeds import seeds

HOLE_SEEDS = 40


def play(seed):
    dice = random.Random(seed)
    lines = clicks(dice, 120, users=dice.choice([1, 5, 40]))
    found = run(two_stages(), {"clicks": lines}, workers=1 + seed % 4, seed=seed)
    assert found.pop("dead-letters") == []
    assert in_order(found) == in_order(expected(lines))


@seeds(25, 200, 2_000)
def test_every_record_counts_once_and_none_is_late(seed):
    play(seed)


def test_the_oracle_agrees_with_plain_python():
    lines = clicks(random.Random(7), 200)
    found = oracle(two_stages(), {"clicks": lines})
    found.pop("dead-letters")
    assert in_order(found) == in_order(expected(lines))


def leaving_out(table):
    commit = MemoryStore.commit

    def without(self, changes):
        commit(self, {row: value for row, value in changes.items() if not row.startswith(table)})

    return without


HEAR = Wheel._hear


def without_known_duplicates(self, frame):
    self._heard.pop(frame.lane, None)
    HEAR(self, frame)


LOW = Wheel._low


def low_without_productions(self, name):
    unacked, self._unacked = self._unacked, {}
    try:
        return LOW(self, name)
    finally:
        self._unacked = unacked


def low_without_timers(self, name):
    stage = self.stages.get(name)
    if stage is None:
        return LOW(self, name)
    stage.oldest_work = lambda: None
    return LOW(self, name)


def bound_of_what_is_read_only(self):
    """The injectors' bounds count before their records are durable with whom they are for."""
    for name in self.wheel._bounds:
        low = self.wheel._bounds[name]
        self.world.authority._reports[self.me][name] = low
    TURN(self)


TURN = _Worker.turn

HOLES = {
    "duplicates are not known": (Wheel, "_hear", without_known_duplicates),
    "records for others are not in the commit": (MemoryStore, "commit", leaving_out(FRAME)),
    "what is read is not in the commit": (MemoryStore, "commit", leaving_out(POSITION)),
    "state is not in the commit": (MemoryStore, "commit", leaving_out(STATE)),
    "timers are not in the commit": (MemoryStore, "commit", leaving_out(TIMERS)),
    "a low watermark forgets records under way": (Wheel, "_low", low_without_productions),
    "a low watermark forgets timers": (Wheel, "_low", low_without_timers),
    "what is not yet durable counts for the authority": (_Worker, "turn", bound_of_what_is_read_only),
}


@pytest.mark.parametrize("hole", HOLES)
def test_a_rule_that_is_left_out_is_missed(hole, monkeypatch):
    owner, name, instead = HOLES[hole]
    monkeypatch.setattr(owner, name, instead)
    monkeypatch.setattr("millwheel.testing._STEPS_MAX", 30_000)
    for seed in range(HOLE_SEEDS):
        try:
            play(seed)
        except (AssertionError, KeyError):
            return
    pytest.fail(f"{HOLE_SEEDS} seeds did not miss it: {hole}")


def test_no_low_watermark_goes_back(monkeypatch):
    seen = {}

    class Watching(World):
        def step(self):
            super().step()
            for worker in self.nodes:
                for name, stage in worker.wheel.stages.items():
                    key = worker.sequencer, name
                    assert stage.low_watermark >= seen.get(key, stage.low_watermark)
                    seen[key] = stage.low_watermark
                    assert stage.low_watermark <= max(
                        self.authority.marks[name],
                        min(self.authority.marks[m] for m in self.plan.makers[name]),
                    )

    world = Watching(two_stages(), {"clicks": clicks(random.Random(3), 100)}, workers=3, seed=3)
    world.run()
    assert world.authority.ended
