"""Recovery's reading: what is lost, and nothing that stands anywhere. Over a real registry."""

import json
from collections import Counter
from pathlib import Path

import pytest

from joiner.adapter import Adapter
from photon.core.columns import split_ids, unpack_times
from photon.core.errors import UnavailableError, UsageError
from photon.core.ids import IdPacker, Token
from photon.core.settings import parse_settings
from spark.losses import Loss
from tests.spark.kit import WrittenLogs, foreign, joined, primary

pytestmark = pytest.mark.spark

DEAD, OTHER = Token("10.0.0.1:70", (1 << 63) + 3, 1_000), Token("10.0.0.2:70", 5, 9_000)


@pytest.fixture(scope="module")
def registry(registry):
    registry.commit([f"d{n}" for n in range(40)], DEAD)
    registry.commit([f"o{n}" for n in range(10)], OTHER)
    return registry


@pytest.fixture
def logs(tmp_path):
    return WrittenLogs(tmp_path)


@pytest.fixture
def read(session, registry, logs):
    def make(*outs, settings=None, details=""):
        from spark.recovery import Sources, SparkReading

        sources = Sources([str(logs.directory / "clicks")], [*map(str, outs or [logs.out])], registry.at)
        return SparkReading(session, sources, settings or parse_settings({}, "test"), details)

    return make


def packed(*ids):
    return set(split_ids(IdPacker().pack(list(ids))))


def line_of(name):
    return json.loads(joined(foreign(name, "q"), primary("q")))


def keys_of(session, paths, **settings):
    from spark.reading.paths import input_paths
    from spark.recovery import joined_keys

    rows = joined_keys(session, input_paths(map(str, paths)), parse_settings(settings, "test")).collect()
    told = {bytes(row.id) for row in rows if row.id is not None}
    return told, sum(row.untold for row in rows), sum(row.damaged for row in rows)


def test_what_stands_in_a_joined_log_in_whatever_state_is_not_lost(session, logs):
    whole = [json.dumps(line_of(name)).encode() for name in ("a", "b", "c", "d", "e")]
    hole = b"\0\0\n\0\0"  # white space, and the line behind it is read: what it took is found lost by its ids
    path = logs.joined(
        "east", whole[0] + b"\n", whole[1][:30] + whole[2] + b"\n", b'{"no": "id"}\n', hole + whole[4] + b"\n"
    )
    with Path(path).open("ab") as file:
        file.write(whole[3])  # its newline was cut off: whoever reads it all the same must not see it twice
    assert keys_of(session, [path]) == (packed("a", "d", "e"), 1, 1)


class Own(Adapter):
    def join(self, primary, foreign):
        return None


def test_lines_of_an_adapter_are_known_by_their_ids_unless_its_field_hides_them(session, logs):
    path = logs.joined("east", {"id": "a", "cost": 3}, {"cost": 3})
    assert keys_of(session, [path], adapter={"use": f"{__name__}:Own"}) == (packed("a"), 1, 0)
    with pytest.raises(UsageError, match=r"adapter\.field"):
        keys_of(session, [path], adapter={"field": "id"})


def test_joined_logs_as_parquet_are_read_too(session, tmp_path):
    from photon.logs.parquet import convert

    lines = tmp_path / "joiner-east-000000.jsonl"
    lines.write_bytes(b"".join(json.dumps(line_of(f"p{n}")).encode() + b"\n" for n in range(20)))
    rows = lines.with_suffix(".parquet")
    convert(lines, rows, lambda: None)
    assert keys_of(session, [rows]) == (packed(*(f"p{n}" for n in range(20))), 0, 0)


def test_a_line_longer_than_any_event_is_not_taken_for_a_damaged_one(session, logs):
    path = logs.joined("east", line_of("a") | {"more": "x" * 3_000_000})
    assert keys_of(session, [path], logs={"line_bytes_max": 100_000}) == (packed("a"), 0, 0)


def test_losses_are_told_by_incarnation_and_by_how_old_their_tokens_are(logs, read, tmp_path):
    logs.joined("east", *(line_of(f"d{n}") for n in range(10)))
    logs.joined("west", *(line_of(f"o{n}") for n in range(4)))
    survey = read(details=str(tmp_path / "details")).survey(young_us=5_000, doubtful_us=1_000)
    assert survey.losses == [
        Loss(DEAD.address, DEAD.incarnation, 30, 0, 30, 1_000),
        Loss(OTHER.address, OTHER.incarnation, 0, 6, 0, 9_000),
    ]
    assert (survey.registered, survey.untold, survey.damaged) == (50, 0, 0)
    import pyarrow.parquet as pq

    rows = pq.read_table(tmp_path / "details").to_pylist()
    joiners = Counter((row["joiner"], row["incarnation"]) for row in rows)
    assert joiners[DEAD.address, f"{DEAD.incarnation:016x}"] == 30
    assert joiners.total() == 36


def test_what_stands_in_one_of_several_outputs_is_not_lost(logs, read, tmp_path):
    other = WrittenLogs(tmp_path / "other")
    logs.joined("east", *(line_of(f"d{n}") for n in range(10)))
    other.joined("east", *(line_of(f"d{n}") for n in range(10, 40)))
    survey = read(logs.out, other.out).survey(0, 0)
    assert [loss.address for loss in survey.losses] == [OTHER.address]


def test_a_file_that_is_moved_between_the_listings_of_two_outputs_is_read(logs, read, tmp_path, monkeypatch):
    from spark import recovery as recovering

    archive = WrittenLogs(tmp_path / "archive")
    archive.joined("east", *(line_of(f"o{n}") for n in range(10)))
    path = Path(logs.joined("west", *(line_of(f"d{n}") for n in range(40))))
    aside = archive.out / "joined" / "east" / "moved.jsonl"
    listed = []

    def list_and_move(out, kind):
        found = recovering_paths(out, kind)
        if not listed:  # the archive's; the other one comes next
            path.rename(aside)
        listed.append(out)
        return found

    recovering_paths = recovering.output_paths
    monkeypatch.setattr(recovering, "output_paths", list_and_move)
    survey = read(archive.out, logs.out).survey(0, 0)
    assert (survey.losses, survey.joined, survey.known) == ([], pytest.approx(50, abs=5), 50)


def test_listings_that_never_agree_are_told():
    from spark.recovery import listed_twice

    with pytest.raises(UnavailableError, match="moved"):
        listed_twice(lambda numbers=iter(range(100)): [str(next(numbers))])


def test_of_what_is_joined_under_another_key_the_registry_knows_nothing(logs, read):
    logs.joined("east", *(line_of(f"d{n}") for n in range(40)))
    other = parse_settings({"ids": {"key": "another key, long enough"}}, "test")
    survey = read(settings=other).survey(0, 0)
    assert (survey.joined, survey.known) == (pytest.approx(40, abs=4), 0)


def test_lost_events_come_with_every_line_that_has_their_id(logs, read, monkeypatch):
    monkeypatch.setattr("spark.recovery.PIECE_EVENTS_MAX", 7)
    logs.joined("east", *(line_of(f"d{n}") for n in range(10)))
    lines = [foreign(f"d{n}", "q") for n in range(30)] + [
        foreign("d29", "another"),
        foreign("d29", "another"),
    ]
    logs.foreign(*lines, b'{"id": "d39", "primary_id": "q"', name="a.jsonl")
    lost = read().lost([DEAD.incarnation])
    pieces = list(lost.events())
    assert lost.untold == 0
    assert lost.missing == {DEAD.incarnation: 10}
    found = Counter(json.loads(line)["id"] for piece in pieces for line in piece.lines.splitlines())
    assert found == Counter({**{f"d{n}": 1 for n in range(10, 30)}, "d29": 2})
    ids = {key for piece in pieces for key in split_ids(piece.ids)}
    assert ids == packed(*(f"d{n}" for n in range(10, 30)))
    for piece in pieces:
        assert (piece.tokens, piece.counts) == ([DEAD.pack()], [len(split_ids(piece.ids))])
        assert set(unpack_times(piece.times).tolist()) == {2}
    assert len(pieces) == 3


@pytest.mark.parametrize(("name", "most"), [("PIECE_EVENTS_MAX", 2), ("PIECE_BYTES_MAX", 60)])
def test_an_id_whose_lines_tell_several_times_is_one_event_of_one_piece(logs, read, monkeypatch, name, most):
    monkeypatch.setattr(f"spark.recovery.{name}", most)
    logs.joined("east", *(line_of(f"d{n}") for n in range(30)))
    again = [{**foreign(f"d{n}", "q"), "ts_us": 1_000 * t} for n in range(30, 40) for t in range(1, 4)]
    logs.foreign(*again, name="a.jsonl")
    pieces = list(read().lost([DEAD.incarnation]).events())
    assert sum(piece.count for piece in pieces) == 10
    assert sum(len(unpack_times(piece.times)) for piece in pieces) == 30
    assert len(pieces) >= 5
    assert Counter(key for piece in pieces for key in {*split_ids(piece.ids)}) == dict.fromkeys(
        packed(*(f"d{n}" for n in range(30, 40))), 1
    )
