"""Tokens are cleared after lines that are sure to hold the id of their own event (joiner/clearing.py)."""

import pytest

from joiner import clearing, joined_ids
from joiner.adapter import Adapter, Skip
from photon.core.columns import split_ids
from photon.core.fates import Joined
from photon.core.ids import IdPacker
from tests.joiner.clearing_kit import (
    Registry,
    clear,
    event,
    foreign,
    join,
    made_settings,
    names,
    wait_until,
    workers,
)
from tests.joiner.fakes import NOW_US

PARENT = IdPacker().pack(["parent"])


@pytest.fixture
def registry():
    return Registry()


@pytest.fixture
def make(tmp_path, registry):
    yield from workers(tmp_path, registry)


class Drops(Adapter):
    """What it says is not so."""

    keeps_id = True

    def join(self, primary, foreign):
        return {"both": [primary.data["id"], foreign.data["id"]]}


class Overwrites(Adapter):
    """The primary event's id, which may be a foreign event's, stands where the foreign event's was. It says
    otherwise."""

    keeps_id = True

    def join(self, primary, foreign):
        return foreign.data | {"id": foreign.data["primary_id"]} if foreign.data["ts_us"] % 2 else None


class Rewrites(Adapter):
    keeps_id = True

    def join(self, primary, foreign):
        if foreign.data["id"].endswith("0"):
            return Skip("not this one")
        return {"text": primary.data["text"], **foreign.data}


class ToParent(Adapter):
    """Joined lines under the id of another click."""

    def join(self, primary, foreign):
        return foreign.data | {"id": foreign.data["parent"]}


TO_PARENT = made_settings(adapter={"use": f"{__name__}:ToParent"})
PLAIN = made_settings()


def children(start, count=6):
    return [event(f"child-{start}-{row}", parent="parent", pad="x" * 100) for row in range(count)]


def test_another_events_token_stays_where_an_adapter_writes_that_events_id(make, registry):
    """CLEAR compares no tokens: the parent's own joiner may be about to ask again with the one it has."""
    registry.tokens[PARENT] = b"another's"
    worker = make(TO_PARENT)
    join(worker, TO_PARENT, children(0), children(1))
    worker._output.end()
    assert clear(worker) is None
    assert (registry.asked, registry.tokens[PARENT]) == ([], b"another's")
    (told,) = worker.status()["notices"]
    assert "keeps the tokens" in told and f"{__name__}:ToParent" in told and "keeps_id = True" in told


def test_who_clears_nothing_on_purpose_is_told_nothing(make):
    worker = make(made_settings(adapter={"use": f"{__name__}:ToParent"}, joiner={"clear_tokens": False}))
    assert worker.status()["notices"] == []


@pytest.mark.parametrize("end", ["is stopped", "crashes"])
def test_files_of_an_adapter_that_keeps_no_ids_are_passed_over_by_later_lives_too(make, registry, end):
    """The adapter is mended, or taken out, and the files of before are still to be cleared."""
    registry.tokens[PARENT] = b"another's"
    worker = make(TO_PARENT)
    join(worker, TO_PARENT, children(0), children(1))
    worker.stop(5) if end == "is stopped" else worker.close()
    for life in range(2):
        worker = make(PLAIN)
        cleared = join(worker, PLAIN, names(life))
        assert worker.stop(5)
        assert not registry.cleared & {PARENT, *(key for key, _ in cleared)}
    worker = make(PLAIN)
    status = clear(worker)
    assert registry.tokens[PARENT] == b"another's"
    assert len(registry.cleared) == status["cleared"] == 12
    assert (status["passed_over"], status["behind"]) == (2, 0)


def test_batches_that_such_an_adapter_left_are_not_cleared_after_by_the_life_that_ends_them(make, registry):
    registry.tokens[PARENT] = b"another's"
    worker = make(TO_PARENT)
    registry.failures = ["after"]
    worker.join(foreign(TO_PARENT, children(0)))
    worker.close()
    for _ in range(2):
        worker = make(PLAIN)
        worker.start()
        wait_until(lambda worker=worker: not worker.status()["unresolved"])
        join(worker, PLAIN, names(len(registry.tokens)))
        assert worker.stop(5)
    clear(make(PLAIN))
    assert registry.tokens[PARENT] == b"another's"
    assert len(registry.cleared) == 6, "of the second life's"


def test_events_whose_adapter_drops_the_ids_keep_their_tokens_and_are_counted(make, registry):
    settings = made_settings(adapter={"use": f"{__name__}:Drops"})
    worker = make(settings)
    join(worker, settings, [event(f"e{n}") for n in range(40)])
    worker._output.end()
    status = clear(worker)
    assert (status["cleared"], status["unclearable"], status["behind"]) == (0, 40, 0)
    assert registry.asked == []
    assert "keeps the tokens" in worker.status()["notices"][-1]


def test_a_file_that_tells_no_ids_is_read_in_parts_all_the_same(make, registry, monkeypatch):
    """Else what is held of it had no bound, and a restart would begin it anew."""
    monkeypatch.setattr(joined_ids, "BLOCK_BYTES", 200)
    monkeypatch.setattr(joined_ids, "BLOCKS_MAX", 3)
    monkeypatch.setattr(clearing, "NOTE_S", 0.0)
    notes = []
    settings = made_settings(adapter={"use": f"{__name__}:Drops"}, joiner={"output_file_bytes_max": 100_000})
    worker = make(settings, checkpoint=lambda step: step == "clearing noted" and notes.append(step))
    join(worker, settings, [event(f"e{n}") for n in range(200)])
    worker._output.end()
    assert clear(worker)["unclearable"] == 200
    assert len(notes) > 5


def test_an_id_that_an_adapter_wrote_over_the_events_own_is_not_cleared(make, registry):
    """It may be another event's, in flight or lost."""
    settings = made_settings(adapter={"use": f"{__name__}:Overwrites"})
    worker = make(settings)
    joined = join(worker, settings, [event("x", ts_us=NOW_US * 2 + 1), event("y", ts_us=NOW_US * 2)])
    other = IdPacker().pack(["q-x"])
    registry.tokens[other] = b"another's"
    worker._output.end()
    assert clear(worker)["unclearable"] == 1
    assert registry.tokens[other] == b"another's"
    assert registry.cleared == {joined[1][0]}


def test_an_adapter_that_keeps_id_and_time_is_cleared_after(make, registry):
    settings = made_settings(adapter={"use": f"{__name__}:Rewrites"})
    worker = make(settings)
    batch = foreign(settings, [event(f"e{n}") for n in range(10)])
    assert worker.join(batch).outcomes.count(Joined.FILTERED) == 1
    worker._output.end()
    assert clear(worker)["cleared"] == 9
    assert registry.cleared == set(split_ids(batch.ids)[1:])
