"""Entries of deleted logs leave the map; reads of the logs are few and bounded (paper 3.4.2)."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eventstore.lookup import GAP_BYTES_MAX, SPAN_BYTES_MAX, spans_of
from eventstore.rules.entries import Place
from photon.core.fates import Found
from photon.core.settings import EventStore
from tests.eventstore.kit import Parts, append, line, pack
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def small_steps(monkeypatch):
    monkeypatch.setattr("eventstore.log_file_map.ENTRIES_A_STEP", 7)


def fill(root, name, count, server):
    idents = [f"10.0.0.{server}:1:{n * 20_000_000}" if n % 2 else f"{name}-{n}" for n in range(count)]
    append(root / "logs" / name, *map(line, idents))
    return idents


def sweep(parts):
    steps = 0
    while parts.map.sweep_step():
        steps += 1
    return steps


def test_entries_of_deleted_logs_are_swept_out_in_small_steps_and_those_of_others_stay(root):
    kept, gone = fill(root, "a.jsonl", 60, 1), fill(root, "b.jsonl", 60, 2)
    parts = Parts(root, settings=EventStore(map_interval_s=1.0)).read_all()
    fill(root, "c.jsonl", 2, 3)
    parts.read_all()
    assert parts.map.entries() == {"sparse": 61, "dense": 61, "repeated": 0}
    parts.delete("b.jsonl")
    assert sweep(parts) > 120 // 7
    assert parts.map.entries() == {"sparse": 31, "dense": 31, "repeated": 0}
    assert parts.map.swept == 60
    assert {state.name.rpartition("/")[2] for state in parts.map.states()} == {"a.jsonl", "c.jsonl"}
    assert parts.in_logs(*kept) == list(map(line, kept))
    assert parts.in_logs(*gone) == [None] * 60
    assert sweep(parts) == 0
    parts.close()
    parts = Parts(root, settings=EventStore(map_interval_s=1.0)).read_all()
    assert parts.in_logs(*kept) == list(map(line, kept))
    assert sweep(parts) == 0


def test_the_number_of_a_swept_log_is_never_given_to_another(root):
    fill(root, "a.jsonl", 4, 1)
    fill(root, "b.jsonl", 4, 2)
    Parts(root).read_all().close()
    (root / "logs" / "b.jsonl").unlink()
    parts = Parts(root).read_all()
    sweep(parts)
    assert sweep(parts) == 0
    parts.close()
    late = fill(root, "c.jsonl", 4, 3)
    parts = Parts(root).read_all()
    assert sorted(state.number for state in parts.map.states()) == [0, 1, 2]
    assert parts.in_logs(*late) == list(map(line, late))


def test_a_log_deleted_while_a_sweep_is_under_way_has_its_own_sweep(root):
    fill(root, "a.jsonl", 40, 1)
    fill(root, "b.jsonl", 40, 2)
    fill(root, "c.jsonl", 2, 3)
    parts = Parts(root).read_all()
    parts.delete("a.jsonl")
    for _ in range(3):
        assert parts.map.sweep_step()
    parts.delete("b.jsonl")
    sweep(parts)
    assert parts.map.entries() == {"sparse": 1, "dense": 1, "repeated": 0}


def test_an_opaque_id_of_a_deleted_log_that_comes_again_stays(root):
    append(root / "logs" / "a.jsonl", *[line(f"id-{n}") for n in range(30)])
    append(root / "logs" / "z.jsonl", line("other"))
    parts = Parts(root).read_all()
    parts.delete("a.jsonl")
    assert parts.map.sweep_step()
    append(root / "logs" / "b.jsonl", *[line(f"id-{n}", "again") for n in range(30)])
    parts.read_all()
    sweep(parts)
    assert parts.in_logs(*[f"id-{n}" for n in range(30)]) == [line(f"id-{n}", "again") for n in range(30)]


def test_the_idle_reader_sweeps_by_itself(root, monkeypatch):
    monkeypatch.setattr("eventstore.reader._SWEEP_EVERY_S", 0.0)
    monkeypatch.setattr("eventstore.reader._SWEEP_AGAIN_S", 0.01)
    fill(root, "a.jsonl", 60, 1)
    fill(root, "b.jsonl", 2, 2)
    parts = Parts(root).read_all()
    parts.reader.start()
    (root / "logs" / "a.jsonl").unlink()
    wait_until(lambda: parts.map.entries() == {"sparse": 1, "dense": 1, "repeated": 0})
    parts.reader.stop()


places = st.lists(
    st.builds(Place, st.integers(0, 2), st.integers(0, 900_000), st.integers(1, 70_000)), unique=True
).map(sorted)


@given(places)
def test_spans_cover_each_place_once_and_little_else(wanted):
    spans = spans_of(wanted)
    assert [place for span in spans for place in span.places] == wanted
    for span in spans:
        file, offset, length = span.place
        assert offset == span.places[0].offset
        reach = offset
        for place in span.places:
            assert place.file == file
            assert place.offset <= reach + GAP_BYTES_MAX
            reach = max(reach, place.offset + place.length)
        assert length == reach - offset
        assert length <= SPAN_BYTES_MAX or len(span.places) == 1


def test_a_span_is_bounded_though_places_go_on_and_on():
    wanted = [Place(0, 16_384 * n, 16_384) for n in range(100)]
    assert [len(span.places) for span in spans_of(wanted)] == [16] * 6 + [4]
    assert len(spans_of([Place(0, 0, 2 * SPAN_BYTES_MAX), Place(0, 5, 6)])) == 2


def test_events_close_to_each_other_are_read_at_once(root):
    idents = [f"10.0.0.{n % 8}:1:{n}" for n in range(800)]
    append(root / "logs" / "a.jsonl", *[line(i, "x" * 80) for i in idents])
    parts = Parts(root).read_all()
    size = (root / "logs" / "a.jsonl").stat().st_size
    reads = []
    logs, _ = parts.logs._tools()
    original = logs.read
    logs.read = lambda place, state: reads.append(place) or original(place, state)
    assert parts.in_logs(*idents) == [line(i, "x" * 80) for i in idents]
    assert len(reads) == -(-size // SPAN_BYTES_MAX)
    assert parts.logs.bytes_read <= size


def test_of_a_log_that_was_cut_off_what_is_still_there_is_found(root):
    idents = [f"opaque-{n}" for n in range(40)]
    append(root / "logs" / "a.jsonl", *map(line, idents))
    Parts(root).read_all().close()
    parts = Parts(root)
    with open(root / "logs" / "a.jsonl", "r+b") as file:
        file.truncate(len(line(idents[0])) * 20)
    lines, doubtful = parts.logs.get_many([pack(i) for i in idents])
    assert lines[:15] == [line(i) for i in idents[:15]]
    assert lines[25:] == [None] * 15
    assert doubtful[25:] == [True] * 15


@pytest.mark.parametrize("kind", ["photon", "opaque"])
def test_of_repeated_primaries_the_first_is_taken(root, kind):
    """Said in docs/eventstore.md: of an opaque id the first read, of a photon id that of the first file."""
    ident = "10.0.0.1:1:5" if kind == "photon" else "opaque"
    append(root / "logs" / "a.jsonl", line(ident, "first"), line("10.0.0.1:1:4"), line(ident, "second"))
    append(root / "logs" / "b.jsonl", line(ident, "third"))
    parts = Parts(root).read_all()
    for _ in range(2):
        column, lines = parts.lookup.look_up(pack(ident))
        assert (column[0], lines) == (Found.FOUND, [line(ident, "first")])
        assert parts.in_logs(ident) == [line(ident, "first")]
        parts.cache.clear()
        append(root / "logs" / "b.jsonl", line("more"))
        parts.read_all()


def test_an_opaque_id_that_was_repeated_in_another_log_is_found_there_when_its_first_is_deleted(root):
    append(root / "logs" / "a.jsonl", *[line(f"id-{n}", "first") for n in range(20)])
    parts = Parts(root).read_all()
    append(root / "logs" / "b.jsonl", *[line(f"id-{n}", "second") for n in range(10)], line("id-3", "third"))
    append(root / "logs" / "c.jsonl", *[line(f"id-{n}", "fourth") for n in range(5)])
    parts.read_all()
    idents = [f"id-{n}" for n in range(20)]
    assert parts.in_logs(*idents) == [line(i, "first") for i in idents]
    parts.delete("a.jsonl")
    seconds = [line(i, "second") for i in idents[:10]]
    assert parts.in_logs(*idents) == [*seconds, *[None] * 10]
    sweep(parts)
    parts.map.sweep_step()
    parts.delete("b.jsonl")
    assert parts.in_logs(*idents[:6]) == [*[line(i, "fourth") for i in idents[:5]], None]


def test_repeats_in_deleted_logs_are_swept_out_too(root):
    idents = [f"id-{n}" for n in range(20)]
    for name in ("a", "b", "c"):
        append(root / "logs" / f"{name}.jsonl", *[line(ident, name) for ident in idents])
    append(root / "logs" / "z.jsonl", line("other"))
    parts = Parts(root).read_all()
    assert parts.map.entries() == {"sparse": 0, "dense": 21, "repeated": 40}
    parts.delete("b.jsonl")
    sweep(parts)
    assert parts.map.entries() == {"sparse": 0, "dense": 21, "repeated": 20}
    parts.delete("a.jsonl")
    sweep(parts)
    assert parts.map.entries() == {"sparse": 0, "dense": 1, "repeated": 20}
    assert parts.in_logs(*idents) == [line(ident, "c") for ident in idents]
    parts.delete("c.jsonl")
    sweep(parts)
    assert parts.map.entries() == {"sparse": 0, "dense": 1, "repeated": 0}
    assert parts.map.swept == 60
