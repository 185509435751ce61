"""What generated queries and clicks look like: ids, payloads, delays, malformed lines. No clock, no files."""

import json
import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

PAYLOADS: Final = 4096
"""Different payload texts; events draw from them."""
USERS: Final = 50_000_000

_PROCESSES_A_SERVER: Final = 2
_QUERY: Final = '{"id":"%s","ts_us":%d,"payload":{"user":"u%08d",%s}}\n'
_CLICK: Final = '{"id":"%s","primary_id":"%s","ts_us":%d,"payload":{%s}}\n'
_TEXT: Final = (
    "cheap flights hotel near station running shoes size 42 weather tomorrow best pizza naïve bayes "
    "café ouvert dimanche Straßenbahn fahrplan 東京 天気 купить велосипед garden chairs second hand laptop "
    'repair "open late" how to fix a\\b path guitar chords lyrics ticket price museum opening hours 🚲 rental'
)
_COUNTRIES: Final = ("US", "DE", "JP", "FR", "BR", "IN", "PT", "GB", "MX", "NL")
_DEVICES: Final = ("mobile", "desktop", "tablet")


@dataclass(frozen=True, slots=True)
class DelayLimits:
    """Seconds from query to click: 90 % come before `body`, 99.9 % before `tail`, all before `longest`."""

    body: float = 60.0
    tail: float = 3_600.0
    longest: float = 86_400.0


def delays_us(rng: np.random.Generator, count: int, limits: DelayLimits) -> Ints:
    """Delays with a long tail: 10 % beyond `body`, 0.1 % beyond `tail`, none beyond `longest`."""
    share, place = rng.random(count), rng.random(count)
    mean = limits.body / 6
    body = -mean * np.log1p(-place * (1 - np.exp(-6.0)))
    tail = limits.body * (limits.tail / limits.body) ** place
    far = limits.tail * (limits.longest / limits.tail) ** place
    seconds = np.where(share < 0.9, body, np.where(share < 0.999, tail, far))
    return (seconds * 1e6).astype(np.int64) + 1


def heads(side: int, processes: int) -> list[str]:
    """`ip:pid` of so many server processes: 10.0.x.y for queries (side 0), 10.1.x.y for clicks (side 1)."""
    servers = [divmod(number + _PROCESSES_A_SERVER, _PROCESSES_A_SERVER) for number in range(processes)]
    return [f"10.{side}.{s >> 8}.{s & 255}:{1000 + s % 9000 + 10_000 * p}" for s, p in servers]


def photon_ids(servers: Sequence[str], process: Ints, times: Ints) -> list[str]:
    return list(
        map("%s:%d".__mod__, zip(map(servers.__getitem__, process.tolist()), times.tolist(), strict=True))
    )


def opaque_ids(raw: bytes) -> list[str]:
    """16 x N bytes -> N ids of 32 hex digits."""
    text = raw.hex()
    return [text[at : at + 32] for at in range(0, len(text), 32)]


def query_payloads(seed: int) -> list[str]:
    """The inside of payload objects, without the user."""
    rng = random.Random(f"queries {seed}")
    return [_query_payload(rng) for _ in range(PAYLOADS)]


def click_payloads(seed: int) -> list[str]:
    rng = random.Random(f"clicks {seed}")
    return [
        _inside(
            {
                "ad": f"a{rng.randrange(10**6)}",
                "position": rng.randrange(1, 9),
                "cost_micros": rng.randrange(10**6),
            }
        )
        for _ in range(PAYLOADS)
    ]


def _query_payload(rng: random.Random) -> str:
    return _inside(
        {
            "query": " ".join(rng.choices(_TEXT.split(), k=rng.randrange(2, 6))),
            "country": rng.choice(_COUNTRIES),
            "device": rng.choice(_DEVICES),
            "results": rng.randrange(2_000_000),
            "latency_ms": round(rng.lognormvariate(3.5, 0.6), 2),
            "ads": [f"a{rng.randrange(10**6)}" for _ in range(rng.randrange(1, 4))],
        }
    )


def _inside(payload: dict[str, object]) -> str:
    return json.dumps(payload, ensure_ascii=False, separators=(",", ":"))[1:-1]


def query_lines(
    ids: Iterable[str], times: Iterable[int], users: Iterable[int], payloads: Iterable[str]
) -> list[bytes]:
    """One JSON object a line, newline included."""
    return list(map(str.encode, map(_QUERY.__mod__, zip(ids, times, users, payloads, strict=True))))


def click_lines(
    ids: Iterable[str], primary_ids: Iterable[str], times: Iterable[int], payloads: Iterable[str]
) -> list[bytes]:
    return list(map(str.encode, map(_CLICK.__mod__, zip(ids, primary_ids, times, payloads, strict=True))))


def pair_lines(primary_ids: Iterable[str], foreign_ids: Iterable[str]) -> list[bytes]:
    """Lines of the truth's digest (photon.app.verify_pairs)."""
    return list(map(str.encode, map("%s\t%s\n".__mod__, zip(primary_ids, foreign_ids, strict=True))))


def _with_payload(start: bytes) -> Callable[[bytes], bytes]:
    return lambda line: line.replace(b'"payload":{', b'"payload":{' + start, 1)


_SPOILERS: Final[tuple[Callable[[bytes], bytes], ...]] = (
    lambda line: line[: len(line) // 2] + b"\n",  # cut off
    _with_payload(b'"name":"\xff\xfe",'),  # not UTF-8
    lambda line: b"{" + line.partition(b",")[2],  # no id
    lambda line: b'{"id":null,' + line.partition(b",")[2],
    lambda line: b"[" + line[:-1] + b"]\n",  # no object
    _with_payload(b'"name":"\x01",'),  # a bare control character
    lambda line: line[:-1] + line,  # two events in a line
    lambda line: b"# " + line,
)
SPOILINGS: Final = len(_SPOILERS)


def spoil(line: bytes, how: int) -> bytes:
    """A malformed line made of a good one, newline included; `how` is from 0 to SPOILINGS - 1."""
    return _SPOILERS[how](line)
