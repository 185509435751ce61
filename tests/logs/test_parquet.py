"""What becomes of lines as Parquet: exact columns, or the lines themselves."""

import json

import pyarrow.parquet
import pytest

from photon.logs import parquet


@pytest.fixture(params=[8 << 20, 64], ids=["one block", "many blocks"])
def convert(tmp_path, monkeypatch, request):
    monkeypatch.setattr(parquet, "_CONVERTED_BYTES", request.param)

    def run(*lines):
        (tmp_path / "in").write_bytes(b"".join(line + b"\n" for line in lines))
        rows = parquet.convert(tmp_path / "in", tmp_path / "out.parquet")
        table = pyarrow.parquet.read_table(tmp_path / "out.parquet")
        assert rows == table.num_rows == len(lines)
        return table

    return run


def test_fields_become_typed_columns_and_times_stay_as_they_were_written(convert):
    lines = [
        json.dumps(
            {
                "id": f"c-{n}", "ts_us": 1_700_000_000_000_000 + n, "price": n / 4, "paid": n % 2 == 0,
                "at": "2026-11-22T03:04:05Z", "tags": ["x"] * (n % 3),
                "primary": {"id": f"q-{n}", "at": "2026-11-22"},
            }
        ).encode()
        for n in range(40)
    ]  # fmt: skip
    table = convert(*lines)
    assert table.to_pylist() == [json.loads(line) for line in lines]
    assert [str(field.type) for field in table.schema] == [
        "string", "int64", "double", "bool", "string", "list<element: string>",
        "struct<id: string, at: string>",
    ]  # fmt: skip


def test_a_field_that_comes_late_is_null_before(convert):
    lines = [b'{"id":"a%02d"}' % n for n in range(20)] + [b'{"id":"z","more":{"n":1.5}}']
    table = convert(*lines)
    assert table.column("more").to_pylist() == [None] * 20 + [{"n": 1.5}]


def test_a_field_that_is_whole_here_and_a_fraction_there_is_a_double(convert):
    lines = [b'{"id":"a%02d","n":%d}' % (n, n) for n in range(20)] + [b'{"id":"z","n":1.5}']
    assert convert(*lines).column("n").to_pylist() == [*range(20), 1.5]


@pytest.mark.parametrize("odd", [b"null", b"5", b'"a"', b"[]"])
@pytest.mark.parametrize("others", [[], [b'{"id":"a"}']])
def test_a_line_that_is_no_object_is_kept_as_it_is(convert, odd, others):
    assert convert(odd, *others).column("event").to_pylist() == [line.decode() for line in [odd, *others]]
    assert convert(*others, odd).column("event").to_pylist() == [line.decode() for line in [*others, odd]]


@pytest.mark.parametrize(
    "odd",
    [
        b'{"id":7}',
        b'{"id":"z","big":18446744073709551615}',
        b'{"id":"z","deep":[{"big":18446744073709551615}]}',
        b'{"id":"z","big":9007199254740993,"x":{"big":[0.5,9007199254740993]}}',
        b'{"id":"z","id":"z"}',
        b'{"id":"z","surrogate":"\\ud800"}',
        b'{"id":"z","empty":{}}',
        b'{"id":"z","mixed":[1,"x"]}',
    ],
)
def test_lines_that_no_columns_hold_exactly_stay_lines(convert, odd):
    lines = [b'{"id":"a%02d"}' % n for n in range(20)] + [odd]
    table = convert(*lines)
    assert table.column_names == ["event"]
    assert str(table.schema.field("event").type) == "string"
    assert table.column("event").to_pylist() == [line.decode() for line in lines]


def test_lines_nested_deeper_than_parquet_can_be_read_stay_lines(convert):
    deep = [b'{"id":"a","deep":' + b"[" * 60 + b"1" + b"]" * 60 + b"}"]
    assert convert(*deep).column("event").to_pylist() == [line.decode() for line in deep]


def test_lines_that_are_no_text_stay_bytes(convert):
    lines = [b'{"id":"a%02d"}' % n for n in range(20)] + [b'{"id":"\xff"}']
    assert convert(*lines).column("event").to_pylist() == lines


def test_events_whose_only_field_is_named_like_the_column_of_lines_are_told_from_lines(convert):
    lines = [b'{"event":"a"}', b'{"event":"{}"}']
    assert convert(*lines).column("event").to_pylist() == [line.decode() for line in lines]


def test_events_without_fields_are_counted(convert):
    assert convert(b"{}", b"{}").column("event").to_pylist() == ["{}", "{}"]


def test_a_line_longer_than_a_block_is_one_row(convert):
    lines = [b'{"id":"%s"}' % (b"x" * 500), b'{"id":"b"}']
    assert convert(*lines).to_pylist() == [json.loads(line) for line in lines]
