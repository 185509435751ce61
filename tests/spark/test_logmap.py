"""A built and loaded log file map against the one that the reader writes on the same logs."""

import gzip
import json
import random

import pytest

from eventstore.built_map import load
from eventstore.log_file_map import LogFileMap
from eventstore.segments import identity_of
from photon.core.errors import UsageError
from photon.core.ids import IdPacker
from photon.core.settings import EventStore, Foreign, Primary, Settings
from photon.logs.formats import JsonLines
from tests.eventstore.kit import Parts, append, pack

pytestmark = pytest.mark.spark

SETTINGS = Settings(eventstore=EventStore(map_bytes_max=1 << 26))


@pytest.fixture
def small_splits(session):
    session.conf.set("spark.sql.files.maxPartitionBytes", "3000b")
    yield
    session.conf.unset("spark.sql.files.maxPartitionBytes")


class Logs:
    """Logs that the same events are written to again and again; and a reader's map and a built one."""

    def __init__(self, root, session):
        self.root, self.session = root, session
        self.logs, self.built = root / "logs", root / "built"
        self.logs.mkdir()
        self.ids = []
        self._random = random.Random(7)

    def photon(self, count, servers=5):
        """Ids of a few servers, roughly in the order of their times."""
        made = []
        for _ in range(count):
            n = len(self.ids) + len(made)
            server = self._random.randrange(servers)
            head = f"[2001:db8::{server}]" if server == 3 else f"{'10' if server % 2 else '200'}.0.0.{server}"
            made.append(f"{head}:7:{1_700_000_000_000_000 + 900 * n + self._random.randrange(3000)}")
        self.ids += made
        return made

    def opaque(self, count):
        made = [f"query-{len(self.ids) + n}" for n in range(count)]
        self.ids += made
        return made

    def write(self, name, ids, end=b"\n"):
        append(
            self.logs / name,
            *[b'{"id":"%s","text":"%s"}' % (i.encode(), b"x" * (len(i) % 40)) for i in ids],
            end=end,
        )

    def build(self):
        from spark.logmap import build

        return build(self.session, [str(self.logs)], self.built, SETTINGS)

    def load(self, name="loaded", **more):
        into = self.root / name / "map"
        loaded = load(self.built, into, SETTINGS, **more)
        return into, loaded

    def reader(self, name="read"):
        """What the event store's own reader makes of the logs."""
        return IdentifiedParts(self.root / name, self.logs)

    def check_same(self, exactly=True):
        """The built map answers as the reader's, which has read all by now."""
        into, _ = self.load()
        loaded = IdentifiedParts(into.parent, self.logs)
        read = self.reader().read_all()
        keys = [pack(text) for text in [*self.ids, "unknown", "10.0.0.1:7:1"]]
        names, expected_names = ({s.number: s.name for s in m.states()} for m in (loaded.map, read.map))
        assert {s.name: (s.offset, s.head, s.tail) for s in loaded.map.states()} == {
            s.name: (s.offset, s.head, s.tail) for s in read.map.states()
        }
        if exactly:
            assert entries_of(loaded.map, names) == entries_of(read.map, expected_names)
        assert loaded.logs.get_many(keys) == read.logs.get_many(keys)
        found = loaded.logs.get_many(keys)[0]
        assert all(found[:-2]) and not any(found[-2:])
        assert loaded.map.counts.primary_events == read.map.counts.primary_events
        assert loaded.map.counts.malformed == read.map.counts.malformed
        # And it reads nothing again.
        before = {s.number: s.offset for s in loaded.map.states()}
        loaded.read_all()
        assert {s.number: s.offset for s in loaded.map.states()} == before
        assert loaded.map.counts.primary_events == read.map.counts.primary_events
        loaded.close()
        read.close()


class IdentifiedParts(Parts):
    def __init__(self, root, logs):
        (root / "map").mkdir(parents=True, exist_ok=True)
        import tests.eventstore.kit as kit

        original = kit.LogFileMap
        kit.LogFileMap = lambda path, settings: original(path, settings, identity_of(SETTINGS))
        try:
            super().__init__(root, logs, settings=SETTINGS.eventstore)
        finally:
            kit.LogFileMap = original
        self.reader.log_format = JsonLines(Primary(), Foreign(), IdPacker())


def entries_of(log_file_map, names):
    """Every entry, its file by name."""
    found = []
    for table in log_file_map._tables:
        for hash, (offset, file, length) in zip(table.hashes.tolist(), table.places.tolist()):
            found.append((hash, names[file], offset, length))
    return sorted(found)


@pytest.fixture
def logs(tmp_path, session):
    return Logs(tmp_path, session)


def test_photon_ids_give_the_very_entries_that_the_reader_writes(logs, small_splits):
    logs.write("a.jsonl", logs.photon(300))
    logs.write("b.jsonl", logs.photon(200))
    built = logs.build()
    assert (built.new, built.events, built.entries) == (2, 500, 500)
    logs.check_same()


def test_opaque_and_mixed_and_repeated_ids_are_found_where_the_reader_finds_them(logs, small_splits):
    opaque, photon = logs.opaque(200), logs.photon(100)
    mixed = opaque + photon
    random.Random(3).shuffle(mixed)
    logs.write("a.jsonl", mixed)
    logs.write("b.jsonl", [*opaque[:20], *logs.opaque(50), *opaque[10:30], *opaque[:5]])
    logs.write("c.jsonl", opaque[:10])
    built = logs.build()
    assert built.entries == 300 + 20 + 50 + 20 + 5 + 10
    logs.check_same()


def test_malformed_blank_and_unended_lines_are_where_the_reader_has_them(logs, small_splits):
    logs.write("a.jsonl", logs.photon(50))
    append(logs.logs / "a.jsonl", b"no json", b"", b'{"id":1.5}', b"\xff")
    logs.write("a.jsonl", logs.opaque(50))
    logs.write("a.jsonl", ["unended"], end=b"")
    logs.write("empty.jsonl", [], end=b"")
    logs.build()
    into, loaded = logs.load(dead_letters=logs.root / "letters")
    assert loaded.malformed == 3
    read = logs.reader().read_all()
    letters = (logs.root / "letters" / "primary-000000.jsonl").read_bytes()
    assert letters.splitlines() == read.letters()
    counts = LogFileMap(into, SETTINGS.eventstore, identity_of(SETTINGS)).counts
    assert (counts.dead_letter_file, counts.dead_letter_offset) == (0, len(letters))
    assert counts == read.map.counts
    read.close()


def test_a_second_build_reads_only_the_growth_and_equals_a_reader_that_went_on(logs, small_splits):
    read = logs.reader()
    logs.write("a.jsonl", logs.photon(77))
    logs.write("b.jsonl", logs.opaque(40))
    logs.write("small.jsonl", logs.photon(2))
    logs.write("begun.jsonl", logs.opaque(1), end=b"")
    read.read_all()
    first = logs.build()
    for _ in range(3):
        logs.write("a.jsonl", [*logs.photon(31), *logs.opaque(3), *logs.ids[80:90]])
        logs.write("small.jsonl", logs.photon(1))
        append(logs.logs / "begun.jsonl", b"")  # ends its line, then nothing
        logs.write(f"new-{len(logs.ids)}.jsonl", [*logs.opaque(5), *logs.ids[70:100]])
        read.read_all()
        again = logs.build()
        assert (again.new, again.gone) == (1, 0)
        assert again.grown >= 2
        assert again.events < first.events
    assert logs.build().as_document() | {"bytes": 0} == dict.fromkeys(first.as_document(), 0)
    logs.reader = lambda: read
    logs.check_same()


def test_a_part_of_a_line_is_nothing_new_and_makes_no_generation(logs):
    logs.write("b.jsonl", logs.photon(40))
    logs.build()
    logs.write("b.jsonl", ["begun"], end=b"")
    logs.write("only-begun.jsonl", ["begun"], end=b"")
    built = logs.build()
    assert built.as_document() == {**dict.fromkeys(built.as_document(), 0), "new": 1}
    built = logs.build()
    assert built.as_document() == dict.fromkeys(built.as_document(), 0)
    assert len(list(logs.built.glob("generation-*"))) == 1
    for name in ("b.jsonl", "only-begun.jsonl"):
        append(logs.logs / name, b'"}')
    built = logs.build()
    assert (built.new, built.grown, built.events, built.malformed) == (0, 2, 0, 2)


def test_letters_of_logs_that_were_overwritten_cut_or_deleted_go_with_their_counts(logs, small_splits):
    for name in ("cut", "deleted", "kept", "overwritten"):
        logs.write(f"{name}.jsonl", logs.photon(60))
        append(logs.logs / f"{name}.jsonl", *[b"bad %d of %s" % (n, name.encode()) for n in range(9)])
    logs.build()
    append(logs.logs / "kept.jsonl", b"bad 9 of kept")
    (logs.logs / "deleted.jsonl").unlink()
    (logs.logs / "cut.jsonl").write_bytes(b"bad 0 of cut anew\n")
    data = (logs.logs / "overwritten.jsonl").read_bytes()
    (logs.logs / "overwritten.jsonl").write_bytes(b"x" + data)
    built = logs.build()
    assert built.gone == 3
    (logs.logs / "kept.jsonl").rename(logs.logs / "kept.jsonl.1")
    _, loaded = logs.load(dead_letters=logs.root / "letters")
    letters = (logs.root / "letters" / "primary-000000.jsonl").read_bytes().splitlines()
    lines = [json.loads(letter)["event"] for letter in letters]
    assert loaded.malformed == len(lines) == 10 + 1 + 10
    assert sum(text.endswith("of kept") for text in lines) == 10
    assert not any(text.endswith("of deleted") for text in lines)


def test_a_renamed_log_is_known_again_and_an_overwritten_one_is_taken_anew(logs):
    a, b = logs.photon(50), [*logs.photon(50), *logs.opaque(20)]
    logs.write("a.jsonl", a)
    logs.write("b.jsonl", b)
    logs.build()
    (logs.logs / "a.jsonl").rename(logs.logs / "a.jsonl.1")
    logs.write("a.jsonl", logs.photon(30))
    (logs.logs / "b.jsonl").unlink()
    logs.write("b.jsonl", [*logs.opaque(10), *b[60:]])
    del logs.ids[50:110]  # what b held, but for its last ones
    built = logs.build()
    assert (built.new, built.grown, built.gone, built.events) == (2, 0, 1, 50)
    logs.check_same(exactly=False)


@pytest.mark.parametrize("written", [0, 500])
def test_a_log_that_is_rotated_before_it_is_read_is_read_under_its_new_name(
    logs, small_splits, monkeypatch, written
):
    """What its name holds by then was mapped as if it were the rest of the log, or ended the build."""
    import spark.logmap as building

    logs.write("a.jsonl", logs.photon(200))
    reading = building.rows_of

    def rotated(*given):
        (logs.logs / "a.jsonl").rename(logs.logs / "a.jsonl.1")
        logs.write("a.jsonl", logs.photon(written))
        return reading(*given)

    with monkeypatch.context() as patch:
        patch.setattr(building, "rows_of", rotated)
        built = logs.build()
    assert (built.new, built.events) == (1, 200)
    assert logs.build().events == written
    logs.check_same()


def test_logs_that_are_not_named_again_stay_in_the_map(logs):
    from spark.logmap import build

    logs.write("a.jsonl", logs.photon(50))
    logs.write("b.jsonl", logs.opaque(50))
    build(logs.session, [str(logs.logs / "a*")], logs.built, SETTINGS)
    built = build(logs.session, [str(logs.logs / "b*")], logs.built, SETTINGS)
    assert (built.new, built.gone) == (1, 0)
    logs.check_same()


def test_archives_are_mapped_as_the_reader_maps_them(logs, small_splits):
    logs.write("plain.jsonl", [*logs.photon(60), *logs.opaque(30)])
    data = (logs.logs / "plain.jsonl").read_bytes()
    (logs.logs / "plain.jsonl").unlink()
    (logs.logs / "a.jsonl.gz").write_bytes(gzip.compress(data[:-1]))
    logs.write("more.jsonl", [*logs.photon(60), *logs.opaque(30)])
    assert logs.build().new == 2
    assert logs.build().new == 0
    logs.check_same()


def test_a_build_that_failed_leaves_the_map_as_it_was_and_the_next_is_right(logs, monkeypatch):
    import spark.logmap as building

    logs.write("a.jsonl", [*logs.photon(60), *logs.opaque(30)])
    logs.build()
    logs.write("a.jsonl", [*logs.photon(10), *logs.opaque(10)])
    known = (logs.built / "files.json").read_bytes()

    class KilledError(BaseException):
        pass

    def killed(*_):
        raise KilledError

    for name in ("write_segments", "_remove_others", "_summed"):
        with monkeypatch.context() as patch:
            patch.setattr(building, name, killed)
            with pytest.raises(KilledError):
                logs.build()
        assert (logs.built / "files.json").read_bytes() == known
        assert len(list(logs.built.glob("generation-*"))) == 2
    assert logs.build().events == 20
    assert len(list(logs.built.glob("generation-*"))) == 2
    logs.check_same()


def test_a_map_of_other_ids_is_not_added_to(logs):
    from spark.logmap import build

    logs.write("a.jsonl", logs.photon(3))
    logs.build()
    with pytest.raises(UsageError, match="other ids"):
        build(logs.session, [str(logs.logs)], logs.built, Settings(primary=Primary(id="qid")))
    with pytest.raises(UsageError, match="from a disk"):
        build(logs.session, ["s3a://bucket/*"], logs.built, SETTINGS)
