"""Keys with much of a computation's records are named, and no other ones are."""

import random

import numpy as np
import pytest

from millwheel.engine.shares import HOT_SHARE, Heavy
from tests.waiting import wait_until


def fed(keys, batch):
    heavy = Heavy()
    for at in range(0, len(keys), batch):
        names, counts = np.unique(keys[at : at + batch], return_counts=True)
        heavy.add(names.tolist(), counts)
    return heavy.first()


@pytest.mark.parametrize("batch", [1, 7, 5_000])
@pytest.mark.parametrize("share", [0.9, 0.4, 0.1])
def test_a_key_is_told_if_it_has_a_large_share_and_never_a_larger_one(batch, share):
    dice = random.Random(4)
    keys = ["hot" if dice.random() < share else f"user{dice.randrange(3_000)}" for _ in range(30_000)]
    found = fed(keys, batch)
    if share < HOT_SHARE:
        assert found is None
    else:
        key, told = found
        assert key == "hot" and share - 0.1 < told <= keys.count("hot") / len(keys)


def test_few_records_say_nothing_and_old_ones_are_forgotten():
    assert fed(["hot"] * 1_000, 10) is None
    assert fed(["was"] * 200_000 + ["hot"] * 400_000, 1_000)[0] == "hot"


@pytest.mark.long
@pytest.mark.timeout(200)
def test_a_run_names_the_key_that_overloads_a_worker(system, tmp_path):
    lines = [{"user": "hot" if n % 4 else f"user{n}", "ts": n, "what": "click"} for n in range(120_000)]
    system.write("a.jsonl", lines)
    told = tmp_path / "told"
    system.start("--workers", "2", name="tests.millwheel.topologies:SLOW", told=told)
    wait_until(lambda: "is overloaded" in told.read_text(), 100, pause=0.5)
    assert "of the records of 'windows' there are of the key 'hot'" in told.read_text()
    hot = [one["hot"] for one in system.status()["processes"].values()]
    assert any(one and (one["computation"], one["key"]) == ("windows", "hot") for one in hot), hot
    assert "add up parts of it first" in system.ask("status", "--work", "work")
