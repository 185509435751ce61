"""Publishing under the lease, and giving a job up: files and a real registry, no Spark."""

import threading
from contextlib import contextmanager

import msgspec
import pytest

from joiner.leases import Lease, LeaseKeeper
from joiner.output_files import complete_files, count_joined
from photon.core.clock import ManualClock
from photon.core.columns import pack_times
from photon.core.errors import CorruptStateError, FencedError, LockedError, UnavailableError, UsageError
from photon.core.ids import IdPacker, Token
from photon.core.settings import parse_settings
from tests.spark.kit import BEGUN_US, RealRegistry, planned_job
from tests.waiting import wait_until

pytest.importorskip("pyarrow")
pytest.importorskip("pyspark")
pytestmark = pytest.mark.spark

NUMBERS = iter(range(1, 1000))


class Granting:
    """A registry that gives a lease of any length, until it is told to fence."""

    fenced = False

    def keep_alive(self, *_):
        if self.fenced:
            raise FencedError("fenced")

    def commit(self, *_):
        raise AssertionError


class Desk:
    """A job of three buckets, of which the middle one is empty, staged and not published."""

    def __init__(self, directory):
        from spark.backfill.job import BucketResult, Phase, Place, Staged

        self.clock, self.registry, self.seen = ManualClock(), Granting(), []
        self.place = Place(directory, "old")
        self.place.staging.mkdir(parents=True)
        results = []
        for bucket in range(3):
            line, letter = b'{"id":"%d"}\n' % bucket, b'{"fate":"unjoinable"}\n'
            files = {"joined": line} if bucket != 1 else {"foreign": letter}
            for kind, data in files.items():
                (self.place.staging / f"{kind}-{bucket}.jsonl").write_bytes(data)
            staged = {
                kind: Staged(f"{kind}-{bucket}.jsonl", len(data), 1, "0") for kind, data in files.items()
            }
            results.append(
                BucketResult(bucket, {}, 0, 0, staged.get("joined"), staged.get("foreign"), None, 1, 2)
            )
        self.job = planned_job(next(NUMBERS), phase=Phase.JOINED, results=tuple(results))
        self.lease = Lease(self.place.token_address, self.job.incarnation, 10.0)
        self.keeper = LeaseKeeper(self.registry, self.lease, self.clock, lambda _: None, lambda _: None)
        self.keeper.renew_due()

    def publish(self, at="", then=lambda: None):
        from spark.backfill.publishing import Publisher

        def checkpoint(where):
            self.seen.append(where)
            if where == at:
                then()

        Publisher(self.place, self.job, self.keeper, checkpoint).publish()

    def joined(self):
        return sorted(path.name for path in self.place.joined.glob("*.jsonl"))

    def listed(self):
        return sorted(complete_files(self.place.joined))


BOTH = ["backfill-000005.jsonl", "backfill-000007.jsonl"]


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path / "out")


def test_staged_files_get_the_numbers_of_their_buckets_and_are_listed(desk):
    desk.publish()
    assert desk.joined() == desk.listed() == BOTH
    assert count_joined(desk.place.joined) == 2
    assert [path.name for path in desk.place.letters.iterdir()] == ["foreign-backfill-000006.jsonl"]


@pytest.mark.parametrize("at", ["lease seen", "renamed", "listed"])
def test_a_driver_that_is_killed_while_publishing_is_followed_by_one_that_publishes_the_rest(desk, at):
    class Killed(BaseException):
        pass

    def die():
        raise Killed

    import spark.backfill.publishing as module

    with pytest.raises(Killed), pytest.MonkeyPatch.context() as patch:
        if at == "renamed":  # a kill takes nothing back
            patch.setattr(module, "BaseException", ZeroDivisionError, raising=False)
        desk.publish(at, die)
    assert len(desk.joined()) == {"lease seen": 0, "renamed": 1, "listed": 1}[at]
    desk.publish()
    assert desk.joined() == desk.listed() == BOTH


@pytest.mark.parametrize("at", ["lease seen", "renamed"])
def test_a_file_renamed_while_the_lease_ran_out_is_taken_back_and_stays_so_when_fenced(desk, at):
    def stand_still():
        desk.clock.advance(60.0)
        desk.registry.fenced = True
        desk.keeper.renew_due()

    with pytest.raises(FencedError, match="--abandon"):
        desk.publish(at, stand_still)
    assert desk.joined() == desk.listed() == []
    assert (desk.place.staging / "joined-0.jsonl").exists()


def test_a_lease_that_ran_out_and_is_had_again_publishes_all(desk):
    def stand_still():
        if desk.seen.count("renamed") == 1:
            desk.clock.advance(60.0)
            # As the keeper's own thread would, a moment later.
            threading.Timer(0.1, desk.keeper.renew_due).start()

    desk.publish("renamed", stand_still)
    assert desk.joined() == desk.listed() == BOTH
    assert desk.seen.count("renamed") == 3


def test_a_file_that_an_earlier_run_renamed_is_made_durable_before_it_is_listed(desk, monkeypatch):
    import spark.backfill.publishing as module

    desk.place.joined.mkdir(parents=True)
    (desk.place.staging / "joined-0.jsonl").rename(desk.place.joined / BOTH[0])
    done = []
    monkeypatch.setattr(module, "sync_directory", lambda path: done.append(path.parent.name))
    add = module.Manifest.add
    monkeypatch.setattr(module.Manifest, "add", lambda own, entry: (done.append(entry.file), add(own, entry)))
    desk.publish()
    assert done.index("joined") < done.index(BOTH[0])
    assert desk.listed() == BOTH


def test_dead_letters_are_durable_before_any_file_is_listed(desk, monkeypatch):
    import spark.backfill.publishing as module

    done = []
    sync = module.sync_directory
    monkeypatch.setattr(module, "sync_directory", lambda path: (done.append(path.parent.name), sync(path)))

    def listed():
        assert "dead-letters" in done
        assert [path.name for path in desk.place.letters.iterdir()] == ["foreign-backfill-000006.jsonl"]
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        desk.publish("listed", listed)


def test_what_is_taken_back_leaves_no_dead_letters_but_those_of_published_buckets(desk):
    from spark.backfill.publishing import take_back

    with pytest.raises(ZeroDivisionError):
        desk.publish("listed", lambda: 1 // 0)
    kept = desk.place.letters / "foreign-backfill-000005.jsonl"
    others = desk.place.letters / "foreign-backfill-000004.jsonl"
    for path in (kept, others, desk.place.letters / "primary-backfill-000007.jsonl"):
        path.touch()
    assert take_back(desk.job, desk.place) == {0}
    assert {*desk.place.letters.iterdir()} == {kept, others}


@pytest.mark.parametrize(
    ("now", "gone"),
    [
        ("as it was", True),
        ("grown", True),
        ("rewritten", False),
        ("not read", False),
    ],
)
def test_dead_letters_of_an_earlier_job_go_once_those_of_one_over_the_same_logs_are_there(
    desk, tmp_path, now, gone
):
    from spark.backfill.job import look_at

    def look(name):
        return look_at((str(tmp_path / name),), "foreign", lambda _: ())

    log = tmp_path / "a.jsonl"
    log.write_text("a line\n")
    (tmp_path / "b.jsonl").write_text("another\n")
    old = msgspec.structs.replace(desk.job, first_number=2, foreign=look("a.jsonl"), primary=look("b.jsonl"))
    desk.place.save(old)
    desk.place.put_away(old, "done")
    letters = desk.place.letters
    letters.mkdir(parents=True)
    for name in (
        "foreign-backfill-000002.jsonl",
        "primary-backfill-000003.jsonl",
        "foreign-east-000002.jsonl",
    ):
        (letters / name).touch()
    log.write_text({"grown": "a line\nand one\n", "rewritten": "b line\n"}.get(now, "a line\n"))
    desk.job = msgspec.structs.replace(desk.job, foreign=look("b.jsonl" if now == "not read" else "*.jsonl"))

    def still_there():
        assert (letters / "foreign-backfill-000002.jsonl").exists()
        assert (letters / "foreign-backfill-000006.jsonl").exists()

    desk.publish("listed", still_there)
    left = {path.name for path in letters.iterdir()}
    assert ("foreign-backfill-000002.jsonl" not in left) == gone
    assert left - {"foreign-backfill-000002.jsonl"} == {
        "primary-backfill-000003.jsonl",
        "foreign-east-000002.jsonl",
        "foreign-backfill-000006.jsonl",
    }


def test_a_staged_file_that_is_gone_or_cut_is_told_with_the_way_out(desk):
    (desk.place.staging / "joined-2.jsonl").write_bytes(b"")
    with pytest.raises(CorruptStateError, match=r"joined-2\.jsonl.*--abandon"):
        desk.publish()


def test_one_backfill_of_a_datacenter_at_a_time(desk):
    from spark.backfill.run import locked

    with locked(desk.place), pytest.raises(LockedError, match="another backfill"):
        locked(desk.place)


# --- giving up


@pytest.fixture(scope="module")
def other_registry(tmp_path_factory):
    made = RealRegistry(tmp_path_factory.mktemp("other-registry"))
    yield made
    made.close()


@pytest.fixture
def resume(desk, tmp_path):
    """The desk's job, kept as that of `registry` (None: not kept), is gone on with by a command that names
    `named`."""
    from spark.backfill.job import reading_of
    from spark.backfill.run import Order, backfill

    settings = parse_settings({"registry": {"lease_s": 2.0}})
    patterns = ((str(tmp_path / "q"),), (str(tmp_path / "c"),))

    def resume(named, registry, **changed):
        if registry is not None:
            identity = registry.client.identity()
            kept = {"reading": reading_of(settings), "patterns": patterns, "registry": identity}
            desk.place.save(msgspec.structs.replace(desk.job, **kept, **changed))
        order = Order(*patterns, desk.place, "jsonl", named.at, settings)
        return backfill(order, lambda: pytest.fail("Spark was started"))

    return resume


@pytest.mark.parametrize("phase", ["planned", "joined"])
def test_a_job_does_not_go_on_with_another_registry_than_its_own(
    desk, resume, registry, other_registry, phase
):
    with pytest.raises(UsageError, match="name the --work or --registry that it was begun with"):
        resume(other_registry, registry, phase=phase)
    assert desk.joined() == []


@pytest.mark.parametrize("how", ["done", "abandoned"])
def test_a_further_job_has_the_registry_of_the_jobs_before_it(desk, resume, registry, other_registry, how):
    if how == "abandoned":
        desk.place.save(msgspec.structs.replace(desk.job, registry=registry.client.identity()))
        desk.place.put_away(desk.job, how)
    for _ in range(2):
        with pytest.raises(UsageError, match="another --datacenter"):
            if how == "done":
                resume(other_registry, registry, phase="done", output_format="parquet")
            else:
                resume(other_registry, None)
    assert (desk.place.load() is not None) == (how == "done")


def test_a_job_goes_on_with_its_own_registry(desk, resume, registry):
    assert resume(registry, registry)["files"] == BOTH == desk.listed()


def test_a_job_is_not_abandoned_at_another_registry_than_its_own(desk, registry, other_registry):
    from spark.backfill.publishing import abandon

    with registered(desk, registry) as ids:
        (desk.place.joined).mkdir(parents=True)
        (desk.place.joined / BOTH[1]).write_bytes(b"renamed, and not listed\n")
        with pytest.raises(UsageError, match="name the --work or --registry that it was begun with"):
            abandon(desk.job, desk.place, other_registry.client)
        assert desk.joined() == BOTH[1:]
        assert set(present(registry, ids[0])) == {1}
        assert abandon(desk.job, desk.place, registry.client).released == 60


@contextmanager
def registered(desk, registry):
    """Bucket b registered `b-0` to `b-19` there."""
    desk.job = msgspec.structs.replace(desk.job, registry=registry.client.identity())
    ids = {bucket: [f"{desk.job.incarnation}-{bucket}-{n}" for n in range(20)] for bucket in range(3)}
    for bucket, texts in ids.items():
        token = Token(desk.place.token_address, desk.job.incarnation, BEGUN_US + bucket)
        registry.commit(texts, token, BEGUN_US + bucket)
    yield ids


def present(registry, texts):
    return registry.client.lookup(IdPacker().pack(texts), pack_times([BEGUN_US] * len(texts)))


def test_abandoning_releases_what_stands_in_no_published_file_and_nothing_else(desk, registry):
    from spark.backfill.publishing import abandon

    with registered(desk, registry) as ids:
        others = [f"{desk.job.incarnation}-o{n}" for n in range(20)]
        registry.commit(others, Token("east:1", next(NUMBERS), BEGUN_US), BEGUN_US)
        with pytest.raises(ZeroDivisionError):
            desk.publish("listed", lambda: 1 // 0)
        assert desk.listed() == BOTH[:1]
        (desk.place.joined / BOTH[1]).write_bytes(b"renamed, and not listed\n")
        done = abandon(desk.job, desk.place, registry.client)
        assert (done.released, done.kept) == (40, 1)
        assert desk.joined() == BOTH[:1]
        assert set(present(registry, ids[0] + others)) == {1}
        assert set(present(registry, ids[1] + ids[2])) == {0}
        # Now they are somebody else's, and a second time changes nothing.
        registry.commit(ids[1], Token("east:1", next(NUMBERS), BEGUN_US), BEGUN_US)
        assert abandon(desk.job, desk.place, registry.client).released == 0
        assert set(present(registry, ids[0] + ids[1])) == {1}


def test_abandoning_waits_for_the_end_of_the_lease_and_then_nothing_can_be_registered(desk, registry):
    from photon.core.fates import Committed
    from spark.backfill.publishing import abandon

    registry.client.keep_alive(desk.place.token_address, desk.job.incarnation, 0.5)
    with registered(desk, registry) as ids:
        notices = []
        assert abandon(desk.job, desk.place, registry.client, notices.append).released == 60
        assert "lease" in notices[0]
        token = Token(desk.place.token_address, desk.job.incarnation, BEGUN_US + 1).pack()
        packed = IdPacker().pack(ids[1])
        outcomes = registry.client.commit(packed, pack_times([BEGUN_US] * 20), token)
        assert set(outcomes) == {Committed.FENCED}


def test_what_recovery_took_from_a_backfill_that_it_fenced_stays_with_who_joined_it(desk, registry):
    from spark.backfill.publishing import abandon

    with registered(desk, registry) as ids:
        wait_until(lambda: registry.client.fence(desk.job.incarnation).fenced)
        desk.keeper.fenced(desk.lease)
        with pytest.raises(FencedError, match="same command with --abandon"):
            desk.publish()
        token = Token(desk.place.token_address, desk.job.incarnation, BEGUN_US + 1).pack()
        packed, times = IdPacker().pack(ids[1]), pack_times([BEGUN_US + 1] * 20)
        wait_until(lambda: set(registry.client.release(packed, times, [token], [20])) <= {0, 1})
        registry.commit(ids[1], Token("east:1", next(NUMBERS), BEGUN_US), BEGUN_US + 1)
        assert abandon(desk.job, desk.place, registry.client).released == 40
        assert set(present(registry, ids[1])) == {1}
        assert set(present(registry, ids[0] + ids[2])) == {0}


@pytest.mark.parametrize("refused", ["NOT_FENCED", "MISROUTED"])
def test_ids_that_the_registry_does_not_release_are_told_and_abandoning_is_run_again(
    desk, registry, monkeypatch, refused
):
    from photon.core.fates import Released
    from spark.backfill import publishing

    with registered(desk, registry) as ids:
        real, times = registry.client.release, []

        def release(*arguments):
            outcomes = real(*arguments)
            times.append(1)
            return outcomes if len(times) > 1 else bytes([Released[refused]]) + outcomes[1:]

        with monkeypatch.context() as patch:
            patch.setattr(registry.client, "release", release)
            with pytest.raises(UnavailableError, match="again"):
                publishing.abandon(desk.job, desk.place, registry.client)
        publishing.abandon(desk.job, desk.place, registry.client)
        assert set(present(registry, ids[0] + ids[1] + ids[2])) == {0}


def test_numbers_of_files_are_never_used_again(desk):
    from spark.backfill.publishing import next_number

    assert next_number(desk.place) == 0
    desk.place.save(desk.job)
    desk.place.put_away(desk.job, "abandoned")
    assert next_number(desk.place) == 8
    desk.place.joined.mkdir(parents=True)
    (desk.place.joined / "backfill-000031.jsonl").touch()
    assert next_number(desk.place) == 32


def test_an_id_is_led_to_its_shard_and_to_that_which_guards_it_where_a_resharding_began_within_the_hour():
    import numpy as np

    from idregistry.rules.sharding import BEGINNING, NOWHERE, Configuration, Interval
    from photon.core.columns import take_ids
    from spark.backfill.publishing import _routed
    from tests.idregistry.kit import opaque_id

    hour_us = 3_600_000_000
    intervals = (
        Interval(BEGINNING, (0, 1)),
        Interval(10 * hour_us + 7, (0, 1, 2, 3, 4)),
        Interval(11 * hour_us + 9, (0, 1, 2)),
    )
    configuration = Configuration(3, intervals, hour_us)
    rng = np.random.default_rng(3)
    ids = b"".join(map(opaque_id, range(300)))
    exact = rng.integers(9 * hour_us, 13 * hour_us, 300, np.int64)
    exact[:100] = rng.integers(10 * hour_us, 10 * hour_us + 14, 100)
    places = configuration.places(ids, exact.tobytes())
    guarded = 0
    for column in range(places.shape[1]):
        rows = np.flatnonzero(places[:, column] != NOWHERE)
        there, some = places[rows, column], take_ids(ids, rows)
        guarded += int((there % 2).sum())
        routed = _routed(configuration, there, some, exact[rows] // hour_us * hour_us)
        assert (configuration.places(some, routed) == there[:, None]).any(1).all()
    assert guarded > 100
