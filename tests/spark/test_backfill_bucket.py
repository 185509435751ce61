"""One bucket of a backfill, attempt by attempt, against a real registry; without Spark."""

import json
from collections import Counter, deque
from dataclasses import replace

import msgspec
import pytest

from photon.core.errors import FencedError, UnavailableError
from photon.core.ids import IdPacker, Token
from photon.core.settings import Settings, parse_settings
from tests.spark.kit import BEGUN_US, planned_job

pa = pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")
pytestmark = pytest.mark.spark

BUCKET = 3
NUMBERS = iter(range(1, 1000))


@pytest.fixture
def work(registry, tmp_path):
    from spark.backfill.bucket import Work
    from spark.backfill.job import LogInput, Place

    place = Place(tmp_path, "old")
    place.staging.mkdir(parents=True)
    logs = [(LogInput(name, 0, ""),) for name in ("queries.jsonl", "clicks.jsonl")]
    return Work(planned_job(next(NUMBERS), primary=logs[0], foreign=logs[1]), place, Settings(), registry.at)


def rows(kind, *events, file=1, **more):
    """A record batch of the kind's rows; foreign ones as (id, primary id)."""
    from spark.backfill.rows import Kind, place_of

    foreign = kind is Kind.FOREIGN
    keys = [IdPacker().pack([event[1] if foreign else event]) for event in events]
    lines = [
        b'{"id":"%s","primary_id":"%s"}' % (event[0].encode(), event[1].encode())
        if foreign
        else b'{"id":"%s"}' % event.encode()
        for event in events
    ]
    return pa.RecordBatch.from_pydict(
        {
            "key": pa.array(keys, pa.binary()),
            "place": pa.array([place_of(kind, file, next(NUMBERS)) for _ in events], pa.int64()),
            "id": pa.array([IdPacker().pack([e[0]]) if foreign else None for e in events], pa.binary()),
            "time_us": pa.array([BEGUN_US if foreign else None for _ in events], pa.int64()),
            "line": pa.array(lines, pa.binary()),
            "reason": pa.array([None] * len(events), pa.string()),
            "bucket": pa.array([BUCKET] * len(events), pa.int32()),
        }
    )


def primaries(*ids):
    from spark.backfill.rows import Kind

    return rows(Kind.PRIMARY, *ids, file=0)


def clicks(*pairs):
    from spark.backfill.rows import Kind

    return rows(Kind.FOREIGN, *pairs)


def run(work, *batches):
    from spark.backfill.bucket import join_bucket

    (result,) = join_bucket(iter(batches), work)
    return result


def joined_ids(work, result):
    if result.joined is None:
        return []
    with (work.place.staging / result.joined.name).open("rb") as file:
        return [json.loads(line)["id"] for line in file]


def letters(work, result):
    if result.letters is None:
        return []
    with (work.place.staging / result.letters.name).open("rb") as file:
        return [(found["fate"], found["event"]["id"]) for found in map(json.loads, file)]


def names(prefix, count):
    return [f"{prefix}{next(NUMBERS)}" for _ in range(count)]


def test_an_attempt_that_died_after_its_first_commit_is_made_up_for(work):
    from spark.backfill.bucket import join_bucket

    a, b = names("dies", 2)

    def until_death():
        yield primaries("q")
        yield clicks((a, "q"))
        raise SystemError("the machine is gone")

    with pytest.raises(SystemError):
        list(join_bucket(until_death(), work))
    result = run(work, primaries("q"), clicks((a, "q")), clicks((b, "q")))
    assert joined_ids(work, result) == [a, b]


def test_an_id_that_stands_twice_is_joined_once_within_a_batch_and_over_batches_in_each_attempt(work):
    a, b = names("twice", 2)
    batches = [primaries("q"), clicks((a, "q"), (b, "q"), (a, "q")), clicks((b, "q"), (a, "q"))]
    for _ in range(2):  # a second attempt wins again all that the first had won
        result = run(work, *batches)
        assert Counter(joined_ids(work, result)) == {a: 1, b: 1}
        assert result.fates == {"joined": 2, "duplicate": 3}


def test_lines_of_events_that_repeat_are_let_go_of_while_the_bucket_goes_on(work):
    from contextlib import ExitStack

    from spark.backfill.bucket import _Task

    (a,) = names("often", 1)
    repeated = clicks((a, "q"), (a, "q"))
    with ExitStack() as opened:
        task = _Task(work, BUCKET, opened)
        task.take(primaries("q"))
        for _ in range(12):
            task.take(repeated)
        assert _lines_held(task, b'"%s"' % a.encode()) <= 2
        result = task.end()
    assert joined_ids(work, result) == [a]
    assert result.fates == {"joined": 1, "duplicate": 23}


def _lines_held(thing, text, depth=5):
    """How many strings of bytes with `text` in them hang on an object."""
    if isinstance(thing, bytes):
        return thing.count(text)
    if isinstance(thing, list | tuple | set | deque):
        return sum(_lines_held(one, text, depth) for one in thing)
    names = [*getattr(thing, "__dict__", ()), *getattr(thing, "__slots__", ())]
    if not depth or not type(thing).__module__.startswith("spark.backfill"):
        return 0
    return sum(_lines_held(getattr(thing, name), text, depth - 1) for name in names)


def test_an_event_without_primary_is_a_dead_letter_unless_it_is_registered(work, registry):
    a, b = names("orphan", 2)
    registry.commit([a], Token("east:1", 77, 2), BEGUN_US)
    result = run(work, clicks((a, "none"), (b, "none")))
    assert result.joined is None
    assert letters(work, result) == [("unjoinable", b)]
    assert result.fates == {"duplicate": 1, "unjoinable": 1}


def test_of_a_primary_that_stands_twice_the_first_line_is_joined(work):
    first = primaries("q", "q")
    lines = pa.array([b'{"id":"q","n":1}', b'{"id":"q","n":2}'], pa.binary())
    first = first.set_column(first.schema.get_field_index("line"), "line", lines)
    result = run(work, first, clicks((names("p", 1)[0], "q")))
    with (work.place.staging / result.joined.name).open("rb") as file:
        assert json.loads(file.read())["primary"]["n"] == 1


def test_what_the_adapter_filters_is_not_registered(work, tmp_path, monkeypatch, registry):
    from dataclasses import replace

    monkeypatch.chdir(tmp_path)
    (tmp_path / "odd_adapter.py").write_text(
        "from joiner.adapter import Adapter, Skip\n"
        "class Odd(Adapter):\n"
        "    def join(self, primary, foreign):\n"
        "        return Skip('odd') if foreign.data['id'].endswith('x') else None\n"
    )
    work = replace(work, settings=parse_settings({"adapter": {"use": "odd_adapter:Odd"}}))
    a, b = names("filter", 2)
    result = run(work, primaries("q"), clicks((a, "q"), (b + "x", "q")))
    assert joined_ids(work, result) == [a]
    assert letters(work, result) == [("filtered", b + "x")]
    registry.commit([b + "x"], Token("east:1", 77, 3), BEGUN_US)


def test_a_fenced_job_ends_and_stages_no_result(work, registry):
    from spark.backfill.bucket import join_bucket

    assert registry.client.fence(work.job.incarnation).fenced
    with pytest.raises(FencedError, match="backfill/old is fenced"):
        list(join_bucket(iter([primaries("q"), clicks((names("f", 1)[0], "q"))]), work))


def test_a_registry_founded_anew_meanwhile_takes_nothing(work, registry, monkeypatch):
    from spark.backfill.bucket import join_bucket

    monkeypatch.setattr("spark.backfill.bucket.PATIENCE_S", 0.5)
    work = replace(work, job=msgspec.structs.replace(work.job, registry="6a" * 16))
    [a] = names("f", 1)
    with pytest.raises(UnavailableError, match="another registry, founded anew"):
        list(join_bucket(iter([primaries("q"), clicks((a, "q"))]), work))
    registry.commit([a], Token("east:1", 77, 4), BEGUN_US)


def test_rows_of_another_bucket_are_refused(work):
    from spark.backfill.bucket import join_bucket

    stray = primaries("q")
    at = stray.schema.get_field_index("bucket")
    stray = stray.set_column(at, "bucket", pa.array([BUCKET + 1], pa.int32()))
    with pytest.raises(AssertionError, match="bucket"):
        list(join_bucket(iter([primaries("q"), stray]), work))


def test_thefilter_of_primaries_keeps_all_that_are_named_and_few_others(tmp_path):
    import numpy as np

    from spark.backfill.rows import filter_of, may_be_in

    rng = np.random.default_rng(5)
    named = rng.integers(0, 1 << 64, 20_000, np.uint64)
    named[:10_000].tofile(tmp_path / "one")
    named[10_000:].tofile(tmp_path / "two")
    bits = filter_of([str(tmp_path / "one"), str(tmp_path / "two")], len(named))
    assert may_be_in(bits, named).all()
    assert may_be_in(bits, rng.integers(0, 1 << 64, 20_000, np.uint64)).mean() < 0.05
