"""Chunks of JSON lines to columns, against Python's own json module."""

import datetime
import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from photon.core.columns import unpack_times
from photon.core.errors import SettingsError
from photon.core.ids import IdPacker
from photon.core.settings import Foreign, Primary
from photon.logs.formats import ForeignBatch, JsonLines, PrimaryBatch


def logs(time_unit: str = "us") -> JsonLines:
    return JsonLines(Primary(), Foreign(time_unit=time_unit), IdPacker())


def foreign_line(**fields: object) -> bytes:
    return json.dumps({"id": "c", "primary_id": "q", "ts_us": 5} | fields).encode() + b"\n"


def times_of(unit: str, *values: object) -> list[int]:
    batch = logs(unit).parse_foreign(
        b"".join(foreign_line(id=f"c{n}", ts_us=v) for n, v in enumerate(values))
    )
    assert not batch.malformed
    return unpack_times(batch.times).tolist()


HALF = " is half a character, which is no text"

# What is in a line: any JSON, in many spellings, or something that is none.
json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)
id_values = st.text(max_size=6) | st.integers(-(2**70), 2**70) | st.uuids().map(str)
events = st.builds(
    lambda event, rest: rest | event,
    st.fixed_dictionaries(
        {"id": id_values, "primary_id": id_values, "ts_us": st.integers(-(2**63), 2**63 - 1)}
    ),
    st.dictionaries(st.text(max_size=5), json_values, max_size=3),
)
spellings = st.builds(
    lambda event, ascii, spaces: json.dumps(
        event, ensure_ascii=ascii, separators=(" , ", " : ") if spaces else (",", ":")
    ).encode("utf-8"),
    events,
    st.booleans(),
    st.booleans(),
)
cut_lines = st.builds(lambda line, share: line[: int(len(line) * share)], spellings, st.floats(0.05, 0.95))
odd_lines = st.sampled_from(
    [
        b"",
        b"   ",
        b"\t",
        b"null",
        b"[]",
        b"{}",
        b"5",
        b'"id"',
        b"{",
        b"}",
        b'{"id":"a","primary_id":"b"}',
        b'{"id":"a","primary_id":"b","ts_us":5}}',
        b'{"id":"a","primary_id":"b","ts_us":5}{"id":"c","primary_id":"b","ts_us":5}',
        b'{"id":"a","primary_id":"b","ts_us":5} {"id":"c","primary_id":"b","ts_us":5}',
        b'{"id":"a","primary_id":"b","ts_us":5',
        b'{"id":"a","primary_id":"b","ts_us":5,"x":{}',
        b'{"id":"a","primary_id":"b","ts_us":5,"x":"\xff"}',
        b'{"id":"a","primary_id":"b","ts_us":5,"x":"\x07"}',
        b'{"id":["a"],"primary_id":"b","ts_us":5}',
        b'{"id":"a","primary_id":null,"ts_us":5}',
        b'{"id":true,"primary_id":"b","ts_us":5}',
        b'{"id":1.5,"primary_id":"b","ts_us":5}',
        b'{"id":"a","primary_id":"b","ts_us":"5"}',
        b'{"id":"a","primary_id":"b","ts_us":9223372036854775808}',
        b'{"id":"a","primary_id":"b","ts_us":1e400}',
        b'{"id":"a","primary_id":"b","ts_us":NaN}',
        b"\xef\xbb\xbf{}",
    ]
)
lines = st.one_of(spellings, spellings, cut_lines, odd_lines)
line_ends = st.sampled_from([b"\n", b"\r\n", b" \n"])
margins = st.sampled_from([b"", b"", b"", b" ", b"\t"])


def what_json_says(line: bytes, ids: tuple[str, ...] = ("id", "primary_id")) -> tuple[str, str, int] | None:
    """(id, primary_id, time) if the line is a foreign event."""
    try:
        event = json.loads(line.decode("utf-8"), parse_constant=lambda text: pytest.fail(text))
    except (ValueError, pytest.fail.Exception):
        return None
    if not isinstance(event, dict):
        return None
    named = [event.get(name) for name in ids]
    if not all(is_an_id(value) for value in named):
        return None
    time = event.get("ts_us")
    if isinstance(time, bool) or not isinstance(time, int | float) or not -(2**63) <= time < 2**63:
        return None
    return str(named[0]), str(named[-1]), time if isinstance(time, int) else round(time)


def is_an_id(value: object) -> bool:
    return isinstance(value, str | int) and not isinstance(value, bool) and value != ""


@given(st.lists(st.tuples(margins, lines, line_ends), max_size=12), st.booleans())
def test_a_chunk_parses_to_what_the_json_module_finds_in_each_line(
    parts: list[tuple[bytes, bytes, bytes]], ended: bool
) -> None:
    chunk = b"".join(margin + line + end for margin, line, end in parts)
    chunk = chunk if ended else chunk.removesuffix(b"\n")
    batch = logs().parse_foreign(chunk)
    expected, bad, offset = [], [], 0
    for raw in chunk.split(b"\n"):
        line = raw.strip().removeprefix("\ufeff".encode()).lstrip()
        start = offset + len(raw.rstrip()) - len(line)
        offset += len(raw) + 1
        if line:
            found = what_json_says(line)
            (bad if found is None else expected).append((line, start, found))
    packer = IdPacker()
    assert batch.lines == [line for line, _, _ in expected]
    assert batch.starts.tolist() == [start for _, start, _ in expected]
    assert batch.ids == packer.pack([found[0] for _, _, found in expected])
    assert batch.primary_ids == packer.pack([found[1] for _, _, found in expected])
    assert unpack_times(batch.times).tolist() == [found[2] for _, _, found in expected]
    assert [(m.line, m.start) for m in batch.malformed] == [(line, start) for line, start, _ in bad]
    assert all(m.reason and "\n" not in m.reason for m in batch.malformed)


@given(st.lists(st.tuples(margins, spellings | cut_lines, line_ends), max_size=12))
def test_primary_lines_need_an_id_only(parts: list[tuple[bytes, bytes, bytes]]) -> None:
    batch = logs().parse_primary(b"".join(margin + line + end for margin, line, end in parts))
    good = [line.strip() for _, line, _ in parts if what_json_says(line, ("id",))]
    assert batch.lines == good
    assert batch.ids == IdPacker().pack([str(json.loads(line)["id"]) for line in good])
    assert len(batch.malformed) == sum(bool(line.strip()) for _, line, _ in parts) - len(good)


def test_a_primary_event_with_an_empty_id_is_malformed() -> None:
    batch = logs().parse_primary(b'{"id":"q"}\n{"id":""}\n{"id":0}\n')
    assert batch.ids == IdPacker().pack(["q", "0"])
    assert [m.reason for m in batch.malformed] == ["not a valid event: an empty id in `id`"]


def test_nuls_around_a_line_are_white_space_and_within_it_they_are_not() -> None:
    good = foreign_line()
    batch = logs().parse_foreign(
        bytes(9) + good + bytes(4) + b"\n" + good[:-1] + bytes(3) + b"\n" + good[:9] + bytes(9) + good
    )
    assert batch.lines == [good[:-1]] * 2
    assert batch.starts.tolist() == [9, 9 + len(good) + 5]
    assert len(batch.malformed) == 1


def test_an_object_that_reaches_over_lines_does_not_shift_its_neighbours() -> None:
    """Three lines that hold three objects, but not one each: only whole lines count."""
    good = foreign_line(id="good")
    chunk = (
        b'{"id":"a"\n,"primary_id":"q","ts_us":1}\n' + foreign_line(id="b")[:-1] + foreign_line(id="c") + good
    )
    batch = logs().parse_foreign(chunk)
    assert batch.lines == [good[:-1]]
    assert batch.ids == IdPacker().pack(["good"])
    assert len(batch.malformed) == 3


def test_every_bad_line_of_many_is_found_and_no_good_one_is_lost() -> None:
    rows = [foreign_line(id=f"c{n}") if n % 7 else b"# %d\n" % n for n in range(1000)]
    batch = logs().parse_foreign(b"".join(rows))
    assert [m.line for m in batch.malformed] == [row[:-1] for n, row in enumerate(rows) if n % 7 == 0]
    assert batch.lines == [row[:-1] for n, row in enumerate(rows) if n % 7]


def test_a_line_that_is_no_text_is_found_wherever_it_stands_in_a_long_chunk() -> None:
    rows = [b'{"id":"q%d","x":"%s"}\n' % (n, "дом".encode() * 50) for n in range(1000)]
    for bad in (0, 500, 999):
        spoilt = [*rows]
        spoilt[bad] = spoilt[bad].replace(b'"}', b'\xd0"}')
        batch = logs().parse_primary(b"".join(spoilt))
        assert [one.start for one in batch.malformed] == [len(b"".join(rows[:bad]))]
        assert batch.malformed[0].reason.startswith("not UTF-8: byte 0xd0 at")
        assert batch.lines == [row[:-1] for row in [*rows[:bad], *rows[bad + 1 :]]]
    assert logs().parse_primary(b"".join(rows)).malformed == []


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"primary_id":"q","ts_us":5}', "not a valid event: Object missing required field `id`"),
        (b'{"id":"c","ts_us":5}', "not a valid event: Object missing required field `primary_id`"),
        (b'{"id":"","primary_id":"q","ts_us":5}', "not a valid event: an empty id in `id`"),
        (b'{"id":"c","primary_id":"","ts_us":5}', "not a valid event: an empty id in `primary_id`"),
        (b'{"id":"c","primary_id":"q"}', "field 'ts_us' is missing (an opaque id needs its event's time)"),
        (b'{"id":"c","primary_id":"q","ts_us":1e30}', "field 'ts_us' is out of range"),
        (b'{"id":"c","primary_id":"q","ts_us":1,"x":"\xff"}', "not UTF-8: byte 0xff at 42"),
        *(
            (b'{"id":"c","primary_id":"q","ts_us":1,"x":"%s"}' % text, f"not a valid event: {half}{HALF}")
            for text, half in [
                (rb"\ud800", r"\ud800"),
                (rb"\ud83d\ude00\\\uDC00 and more", r"\uDC00"),
                (rb"\ud800\u0041", r"\ud800"),
            ]
        ),
        (rb'{"id":"\ud83d\ude00\\ud800"', "not a valid event: Input data was truncated"),
        (
            rb'{"id":"c","primary_id":7.5,"ts_us":1,"x":"\ud800"}',
            "not a valid event: Expected `int | str`, got `float` in `primary_id`",
        ),
        (
            b'{"id":"c","primary_id":"q","ts_us":"5"}',
            "not a valid event: Expected `int | float | null`, got `str` in `ts_us`: a time is a JSON "
            'number, or text with time_unit = "rfc3339"',
        ),
        (b'{"id":"c","primary_id":"q","ts_us":1}' * 2, "not a valid event: not one JSON object"),
    ],
)
def test_the_reason_says_what_is_wrong_with_the_line(line: bytes, reason: str) -> None:
    batch = logs().parse_foreign(foreign_line() + line + b"\n" + foreign_line())
    assert [m.reason for m in batch.malformed] == [reason]
    assert batch.malformed[0].start == len(foreign_line())


def test_nesting_too_deep_to_parse_is_malformed_and_the_rest_goes_on() -> None:
    deep = b'{"id":"c","primary_id":"q","ts_us":1,"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
    batch = logs().parse_foreign(foreign_line() + deep + foreign_line(id="d"))
    assert len(batch.lines) == 2 and len(batch.malformed) == 1


def test_fields_have_the_names_of_the_settings() -> None:
    own = JsonLines(
        Primary(id="q q"), Foreign(id="primary_id", primary_id="id", time="größe", time_unit="s"), IdPacker()
    )
    batch = own.parse_foreign(b'{"primary_id":"c","id":"q","gr\xc3\xb6\xc3\x9fe":2,"ts_us":"no matter"}\n')
    assert (batch.ids, batch.primary_ids) == (IdPacker().pack(["c"]), IdPacker().pack(["q"]))
    assert unpack_times(batch.times).tolist() == [2_000_000]
    assert own.parse_primary(b'{"q q":"q"}\n').ids == batch.primary_ids


@pytest.mark.parametrize(
    ("unit", "given", "expected"),
    [
        ("s", [1_700_000_000, -5, 0], [1_700_000_000_000_000, -5_000_000, 0]),
        ("ms", [1_700_000_000_123, -1], [1_700_000_000_123_000, -1_000]),
        ("us", [2**63 - 1, -(2**63)], [2**63 - 1, -(2**63)]),
        ("ns", [1_700_000_000_123_456_789, -1], [1_700_000_000_123_456, -1]),
        ("s", [1_700_000_000.123456, -0.5], [1_700_000_000_123_456, -500_000]),
        ("ms", [1.0005, 2.5], [1_000, 2_500]),
        ("ns", [1e9, 1_700_000_000_123_456_789], [1_000_000, 1_700_000_000_123_456]),
        (
            "s",
            [9_223_372_036_854, -9_223_372_036_854],
            [9_223_372_036_854_000_000, -9_223_372_036_854_000_000],
        ),
    ],
)
def test_times_are_microseconds_whatever_their_unit(unit: str, given: list, expected: list[int]) -> None:
    assert times_of(unit, *given) == expected


@given(
    st.sampled_from(["s", "ms", "us", "ns"]), st.lists(st.integers(-(2**62), 2**62) | st.floats(-1e9, 1e9))
)
def test_an_events_time_does_not_depend_on_its_batch(unit: str, values: list[int | float]) -> None:
    fits = [v for v in values if abs(v) * {"s": 10**6, "ms": 10**3}.get(unit, 1) < 2**63]
    assert times_of(unit, *fits) == [times_of(unit, value)[0] for value in fits]


@pytest.mark.parametrize(
    ("unit", "value"),
    [("us", 2**63), ("us", -(2**63) - 1), ("s", 9_223_372_036_855), ("ms", 2**62), ("s", 1e13)],
)
def test_a_time_that_does_not_fit_is_malformed_and_its_neighbours_are_not(unit: str, value: float) -> None:
    batch = logs(unit).parse_foreign(
        foreign_line(id="a") + foreign_line(id="b", ts_us=value) + foreign_line(id="c")
    )
    assert batch.ids == IdPacker().pack(["a", "c"])
    assert [m.reason for m in batch.malformed] == ["field 'ts_us' is out of range"]


def test_the_time_of_a_photon_id_is_the_events_time() -> None:
    """Paper 3.1. A field that says otherwise, or none, does not matter."""
    mixed = [
        foreign_line(id="10.0.0.1:7:1700", ts_us=5),
        foreign_line(id="opaque", ts_us=-6),
        b'{"id":"[2001:db8::1]:7:1800","primary_id":"q"}\n',
    ]
    assert unpack_times(logs().parse_foreign(b"".join(mixed)).times).tolist() == [1700, -6, 1800]
    assert unpack_times(logs().parse_foreign(mixed[0] + mixed[2]).times).tolist() == [1700, 1800]


@pytest.mark.parametrize("chunk", [b"", b"\n", b"\r\n\r\n", b"  \n\t\n"])
def test_nothing_and_blank_lines_make_empty_columns(chunk: bytes) -> None:
    foreign: ForeignBatch = logs().parse_foreign(chunk)
    primary: PrimaryBatch = logs().parse_primary(chunk)
    assert foreign.ids == foreign.primary_ids == foreign.times == primary.ids == b""
    assert foreign.lines == primary.lines == foreign.malformed == primary.malformed == []
    assert foreign.starts.dtype == np.int64 and math.prod(foreign.starts.shape) == 0


def test_a_byte_order_mark_is_no_part_of_the_line() -> None:
    mark = "\ufeff".encode()
    line = foreign_line(id="c1")
    batch = logs().parse_foreign(mark + line + b" " + mark + b" " + line + mark + b"\n" + line)
    assert batch.lines == [line.strip()] * 3
    assert batch.starts.tolist() == [3, 3 + len(line) + 5, 3 + len(line) + 5 + len(line) + 4]
    assert not batch.malformed


NESTED = JsonLines(
    Primary(id="ctx.query.id"),
    Foreign(id="ctx.click.id", primary_id="ctx.query.id", time="at.ms", time_unit="ms"),
    IdPacker(),
)


def test_a_dotted_path_leads_into_objects() -> None:
    line = b'{"at":{"ms":7,"x":[]},"ctx":{"click":{"id":"c"},"query":{"y":1,"id":17}},"id":"no"}'
    batch = NESTED.parse_foreign(line + b"\n")
    assert (batch.ids, batch.primary_ids) == (IdPacker().pack(["c"]), IdPacker().pack(["17"]))
    assert unpack_times(batch.times).tolist() == [7_000]
    assert NESTED.parse_primary(line).ids == batch.primary_ids


@pytest.mark.parametrize("at", ["", ',"at":null', ',"at":{}', ',"at":{"ms":null}'])
def test_a_time_that_is_missing_at_any_depth_is_the_photon_ids_own(at: str) -> None:
    line = '{"ctx":{"click":{"id":"%s"},"query":{"id":"q"}}%s}\n'
    batch = NESTED.parse_foreign((line % ("10.0.0.1:7:1700", at) + line % ("opaque", at)).encode())
    assert unpack_times(batch.times).tolist() == [1700]
    assert [bad.reason for bad in batch.malformed] == [
        "field 'at.ms' is missing (an opaque id needs its event's time)"
    ]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"ctx":{"click":{"id":"c"},"query":{}}}', "missing required field `id` in `ctx.query`"),
        (b'{"ctx":{"click":{"id":"c"}}}', "missing required field `query` in `ctx`"),
        (b'{"ctx":5}', "Expected `object`, got `int` in `ctx`"),
        (b'{"ctx":{"click":{"id":true}}}', "Expected `int | str`, got `bool` in `ctx.click.id`"),
        (b'{"ctx.click.id":"c"}', "missing required field `ctx`"),
    ],
)
def test_the_reason_names_the_place_in_the_event(line: bytes, reason: str) -> None:
    (bad,) = NESTED.parse_foreign(line).malformed
    assert bad.reason.endswith(reason)


def test_two_dots_are_a_dot_in_a_name() -> None:
    own = JsonLines(Primary(id="attributes.trace..id"), Foreign(), IdPacker())
    batch = own.parse_primary(b'{"attributes":{"trace.id":"t"}}\n{"attributes":{"trace":{"id":"t"}}}\n')
    assert batch.ids == IdPacker().pack(["t"]) and len(batch.malformed) == 1


@pytest.mark.parametrize("path", [".id", "ctx.", "a....b.", "."])
def test_a_path_with_an_empty_part_is_refused(path: str) -> None:
    with pytest.raises(SettingsError, match="has an empty part"):
        JsonLines(Primary(id=path), Foreign(), IdPacker())


@pytest.mark.parametrize("names", [("a", "a.b"), ("a.b", "a"), ("a.b.c", "a.b"), ("a.b", "a.b")])
def test_an_id_that_would_have_to_be_an_object_too_is_refused(names: tuple[str, str]) -> None:
    with pytest.raises(SettingsError, match="can't lie within another"):
        JsonLines(Primary(), Foreign(id=names[0], primary_id=names[1]), IdPacker())


zones = st.integers(-23 * 60 - 59, 23 * 60 + 59).map(
    lambda minutes: datetime.timezone(datetime.timedelta(minutes=minutes))
)


@given(st.lists(st.datetimes(timezones=zones), min_size=1, max_size=5))
def test_rfc3339_times_are_read_to_the_microsecond(moments: list[datetime.datetime]) -> None:
    epoch = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
    expected = [(moment - epoch) // datetime.timedelta(microseconds=1) for moment in moments]
    assert times_of("rfc3339", *[moment.isoformat() for moment in moments]) == expected


def test_rfc3339_in_its_spellings() -> None:
    same = ["2024-02-29T12:00:00.5Z", "2024-02-29t12:00:00.500000z", "2024-02-29 14:00:00.50+02:00"]
    assert times_of("rfc3339", *same) == [1_709_208_000_500_000] * 3


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("2024-02-29T12:00:00", "Expected `datetime` with a timezone component in `ts_us`"),
        ("2024-02-30T12:00:00Z", "Invalid RFC3339 encoded datetime in `ts_us`"),
        ("yesterday", "Invalid RFC3339 encoded datetime in `ts_us`"),
        (1_700_000_000, "Expected `datetime | null`, got `int` in `ts_us`"),
        (None, "field 'ts_us' is missing (an opaque id needs its event's time)"),
    ],
)
def test_what_is_no_rfc3339_time_is_malformed_and_its_neighbours_are_not(value: object, reason: str) -> None:
    good = foreign_line(ts_us="2024-01-01T00:00:00Z")
    batch = logs("rfc3339").parse_foreign(good + foreign_line(ts_us=value) + good)
    assert len(batch.lines) == 2
    assert batch.malformed[0].reason.endswith(reason)


def test_many_events_without_a_time_are_each_malformed_and_in_order() -> None:
    rows = [foreign_line(id=f"c{n}", ts_us=None if n % 3 else n) for n in range(30)]
    batch = logs().parse_foreign(b"".join([*rows[:10], b"no event\n", *rows[10:]]))
    assert unpack_times(batch.times).tolist() == list(range(0, 30, 3))
    assert len(batch.malformed) == 21
    assert [bad.start for bad in batch.malformed] == sorted(bad.start for bad in batch.malformed)


def test_times_of_primary_events_are_read_by_their_own_field_and_unit():
    lines = JsonLines(Primary("meta.id", "at", "s"), Foreign(), IdPacker())
    events = [
        b'{"meta":{"id":"a"},"at":1.5,"ts_us":9}',
        b'{"at":2,"meta":{"id":"10.0.0.1:7:1700000000000000"}}',
    ]
    ids = lines.parse_primary(b"\n".join(events)).ids
    times, wrong = lines.primary_times(ids, events)
    assert (unpack_times(times).tolist(), wrong) == ([1_500_000, 1_700_000_000_000_000], {})
    odd = [b'{"at":null}', b'{"at":"soon"}', b'{"at":1e300}']
    times, wrong = lines.primary_times(ids[:16] * 3 + ids[16:], [*odd, events[1]])
    assert unpack_times(times).tolist() == [0, 0, 0, 1_700_000_000_000_000]
    assert wrong.keys() == {0, 1, 2} and "missing" in wrong[0] and "str" in wrong[1] and "range" in wrong[2]
