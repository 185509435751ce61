"""Clearing the tokens of what a backfill published: files and a real registry, no Spark."""

import json

import msgspec
import pytest

from joiner import parquet
from joiner.manifest import Manifest
from joiner.output_files import CompleteFile
from photon.core.columns import pack_times
from photon.core.errors import UnavailableError, UsageError
from photon.core.fates import Released
from photon.core.ids import IdPacker
from photon.core.settings import parse_settings
from photon.core.tokens import Token
from tests.idregistry.cluster import wait_until
from tests.spark.real_registry import RealRegistry

pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")
pytestmark = pytest.mark.spark

BEGUN_US = 1_700_000_000_000_000
NUMBERS = iter(range(1, 1000))
EVENTS = 30


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    made = RealRegistry(tmp_path_factory.mktemp("registry"), shards=2)
    yield made
    made.close()


class Killed(BaseException):
    pass


class Done:
    """A backfill of three published files, whose events are registered."""

    def __init__(self, directory, registry, output_format="jsonl"):
        from spark.backfill.bucket import BucketResult
        from spark.backfill.job import Job, Phase, Place
        from spark.backfill.staging import Staged

        self.registry, self.notices = registry, []
        self.place = Place(directory, "old")
        self.place.home.mkdir(parents=True)
        staged = Staged("joined", 1, EVENTS, "0")
        self.job = Job(
            incarnation=next(NUMBERS),
            begun_us=BEGUN_US,
            reading="",
            spark="",
            output_format=output_format,
            patterns=((), ()),
            primary=(),
            foreign=(),
            buckets=3,
            first_number=5,
            phase=Phase.DONE,
            results=tuple(BucketResult(b, {}, 0, 0, staged, None, None, 1, 2) for b in range(3)),
        )
        self.place.save(self.job)
        self.names = [f"{self.job.incarnation}-{n}" for n in range(3 * EVENTS)]
        manifest = Manifest(self.place.joined, "backfill")
        for bucket in range(3):
            names = self.names[bucket * EVENTS : (bucket + 1) * EVENTS]
            registry.commit(names, self.token(bucket), BEGUN_US)
            path = self.place.joined / f"backfill-{5 + bucket:06d}.jsonl"
            events = [{"id": name, "primary_id": "q", "ts_us": BEGUN_US, "primary": {}} for name in names]
            path.write_text("".join(json.dumps(event) + "\n" for event in events))
            if output_format == "parquet":
                parquet.convert(path, path.with_suffix(".parquet"))
                path.unlink()
            manifest.add(CompleteFile(self.job.joined_name(bucket), 1, EVENTS, "0", 1, 2))
        manifest.close()

    def token(self, bucket):
        return Token(self.place.token_address, self.job.incarnation, BEGUN_US + bucket)

    def clear(self, checkpoint=lambda _: None, registry=None, **joiner):
        from spark.backfill.clearing import Clearer

        settings = parse_settings({"joiner": {"clear_ids_per_s": 1_000_000, **joiner}, **self.settings})
        used = registry or self.registry.client
        return Clearer(self.place.load(), self.place, settings, used, self.notices.append, checkpoint).clear()

    settings = {}  # noqa: RUF012

    def holders(self):
        """Event names that still have their token."""
        client = self.registry.client
        wait_until(lambda: client.fence(self.job.incarnation).fenced)
        kept = set()
        for bucket in range(3):
            names = self.names[bucket * EVENTS : (bucket + 1) * EVENTS]
            packed, times = IdPacker().pack(names), pack_times([BEGUN_US] * EVENTS)

            def outcomes(packed=packed, times=times, token=self.token(bucket).pack()):
                return client.release(packed, times, [token], [EVENTS])

            first = outcomes()
            while Released.NOT_FENCED in first:
                first = outcomes()
            kept |= {name for name, told in zip(names, first, strict=True) if told == Released.RELEASED}
        return kept


@pytest.mark.parametrize("output_format", ["jsonl", "parquet"])
def test_the_tokens_of_all_published_events_are_cleared_and_of_no_others(tmp_path, registry, output_format):
    done = Done(tmp_path / "out", registry, output_format)
    registry.commit([f"{done.job.incarnation}-unpublished"], done.token(0), BEGUN_US)
    job = done.clear()
    assert job == done.place.load()
    assert (job.clearing.results, job.clearing.ids) == (3, 3 * EVENTS)
    assert done.holders() == set()
    assert len(done.names) == 3 * EVENTS
    packed, times = IdPacker().pack([f"{done.job.incarnation}-unpublished"]), pack_times([BEGUN_US])
    assert registry.client.release(packed, times, [done.token(0).pack()], [1]) == bytes([Released.RELEASED])


def test_a_kill_while_clearing_harms_nothing_and_the_next_run_goes_on(tmp_path, registry, monkeypatch):
    import spark.backfill.clearing as module

    monkeypatch.setattr(module, "NOTE_S", 0.0)
    monkeypatch.setattr(module, "BATCH_IDS_MAX", 20)
    done, seen = Done(tmp_path / "out", registry), []

    def die(_):
        seen.append(1)
        if len(seen) == 3:  # the first batch of the second file
            raise Killed

    with pytest.raises(Killed):
        done.clear(die)
    assert module.is_left(done.place.load(), parse_settings({}))
    assert done.place.load().clearing.results == 1
    asked = []
    job = done.clear(asked.append)
    assert job.clearing.results == 3
    assert len(asked) == 4  # not the first file again
    assert not module.is_left(job, parse_settings({}))
    assert done.holders() == set()


def test_a_registry_that_goes_away_is_told_and_the_next_run_goes_on(tmp_path, registry, monkeypatch):
    import spark.backfill.clearing as module

    class Away:
        def clear(self, *_):
            raise UnavailableError("nobody answers")

    monkeypatch.setattr(module, "PATIENCE_S", 0.0)
    done = Done(tmp_path / "out", registry)
    with pytest.raises(UnavailableError, match=r"all is published.*nobody answers.*same command again"):
        done.clear(registry=Away())
    assert done.clear().clearing.ids == 3 * EVENTS


def test_tokens_are_not_cleared_at_another_registry_than_the_backfills_own(tmp_path, registry):
    from spark.backfill.job import reading_of
    from spark.backfill.run import Order, backfill

    done, settings = Done(tmp_path / "out", registry), parse_settings({})
    kept = {"reading": reading_of(settings), "registry": "0" * 32}
    done.place.save(msgspec.structs.replace(done.job, **kept))
    order = Order((), (), done.place, "jsonl", registry.at, settings)
    with pytest.raises(UsageError, match="name the --work or --registry that it was begun with"):
        backfill(order, lambda: pytest.fail("Spark was started"))
    assert done.holders() == set(done.names)


def test_a_file_that_was_taken_away_is_passed_over(tmp_path, registry):
    done = Done(tmp_path / "out", registry)
    (done.place.joined / "backfill-000006.jsonl").unlink()
    job = done.clear()
    assert (job.clearing.results, job.clearing.ids) == (3, 2 * EVENTS)
    assert done.holders() == set(done.names[EVENTS : 2 * EVENTS])


def test_an_adapter_that_may_write_other_ids_has_nothing_cleared_and_it_is_told(
    tmp_path, registry, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "parents_adapter.py").write_text(
        "from joiner.adapter import Adapter\n"
        "class Parents(Adapter):\n"
        "    def join(self, primary, foreign):\n"
        "        return {**foreign.data, 'id': foreign.data['parent']}\n"
    )
    done = Done(tmp_path / "out", registry)
    done.settings = {"adapter": {"use": "parents_adapter:Parents"}}
    job = done.clear()
    assert (job.clearing.results, job.clearing.ids) == (3, 0)
    assert ["keeps_id" in notice for notice in done.notices] == [True]
    assert done.holders() == set(done.names)


def test_lines_that_tell_no_id_are_told_and_the_others_are_cleared(tmp_path, registry):
    done = Done(tmp_path / "out", registry)
    with (done.place.joined / "backfill-000005.jsonl").open("a") as file:
        file.write('{"other":1}\n')
    assert done.clear().clearing.ids == 3 * EVENTS
    assert ["1 joined lines" in notice for notice in done.notices] == [True]


def test_no_more_ids_a_second_are_cleared_than_the_settings_allow(tmp_path, registry, monkeypatch):
    import spark.backfill.clearing as module

    clock = [100.0]

    class Time:
        monotonic = staticmethod(lambda: clock[0])

        @staticmethod
        def sleep(seconds):
            clock[0] += seconds

    monkeypatch.setattr(module, "time", Time)
    done = Done(tmp_path / "out", registry)
    done.clear(clear_ids_per_s=10)
    assert clock[0] - 100.0 >= (3 * EVENTS - 10) / 10


def test_a_job_that_is_not_done_or_settings_that_clear_nothing_have_nothing_left(tmp_path, registry):
    from spark.backfill.clearing import is_left
    from spark.backfill.job import Phase

    job = Done(tmp_path / "out", registry).job
    assert is_left(job, parse_settings({}))
    assert not is_left(job, parse_settings({"joiner": {"clear_tokens": False}}))
    assert not is_left(msgspec.structs.replace(job, phase=Phase.JOINED), parse_settings({}))
