"""Joined lines are found and read alike in every form that their files have (joiner/joined_lines.py)."""

import json
from pathlib import Path

import pytest

from joiner import joined_lines
from joiner.joined_lines import JoinedDecoder, blocks_of, inside, joined_files
from photon.core.errors import StorageError
from photon.core.settings import Settings, parse_settings
from photon.logs import parquet
from photon.logs.parquet import convert


def write(path: Path, *lines: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_each_file_is_listed_once_and_as_parquet_where_it_is_completed_just_now(tmp_path: Path) -> None:
    names = ["east/a.jsonl", "east/b.jsonl", "east/b.parquet", "west/c.parquet", "west/c.manifest", "run"]
    for name in names:
        write(tmp_path / name)
    found = [str(path.relative_to(tmp_path)) for path in joined_files(tmp_path)]
    assert found == ["east/a.jsonl", "east/b.parquet", "west/c.parquet"]
    assert joined_files(tmp_path / "none") == []


def test_blocks_are_whole_lines_with_their_offsets_but_for_an_unended_last_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(joined_lines, "BLOCK_BYTES", 20)
    path = write(tmp_path / "a.jsonl", *({"id": n} for n in range(20)))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"id":')
    blocks = list(blocks_of(path))
    assert len(blocks) > 5
    assert all(whole[start:].startswith(data) for start, data in blocks[:-1])
    assert all(data.endswith(b"\n") for _, data in blocks[:-1])
    assert b"".join(data for _, data in blocks) == whole + b'{"id":'


def test_rows_of_parquet_are_lines_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.setattr(parquet, "_PARQUET_ROWS", 3)
    for lines in (
        [{"id": f"c{n}", "primary": {"id": n}} for n in range(7)],
        [{"id": "c", "x": 1}, {"id": "d", "x": "text"}],  # no column holds both: the lines themselves
        [{"event": 5}],  # an event with one field, which has the name of the column of such lines
    ):
        rows = tmp_path / "a.parquet"
        convert(write(tmp_path / "a.jsonl", *lines), rows)
        blocks = list(blocks_of(rows))
        assert [start for start, _ in blocks] == list(range(0, len(lines), 3))
        assert [json.loads(line) for _, data in blocks for line in data.splitlines()] == lines


def test_parquet_that_cannot_be_read_is_a_storage_error(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "a.parquet"
    with pytest.raises(FileNotFoundError):
        list(blocks_of(path))
    path.write_bytes(b"PAR1 and no more")
    with pytest.raises(StorageError):
        list(blocks_of(path))


def test_a_line_tells_its_event_where_the_settings_say() -> None:
    settings = parse_settings(
        {"primary": {"id": "q.id"}, "foreign": {"id": "ctx.id"}, "adapter": {"field": "with"}}
    )
    decoder = JoinedDecoder(settings, {"inside": inside(settings)})
    chunk = b'{"ctx":{"id":"c1"},"with":{"q":{"id":7}}}\n{"id":"c2"}\n'
    found = decoder.decode(chunk)
    assert [decoder.columns[name](found.events) for name in ("id", "inside")] == [["c1"], [7]]
    assert found.rows == [0]
    assert [(bad.start, bad.line) for bad in found.malformed] == [(42, b'{"id":"c2"}')]


def test_what_the_adapter_put_into_its_field_is_told_as_it_stands() -> None:
    decoder = JoinedDecoder(Settings(), raw=True)
    found = decoder.decode(b'{"id":"a","primary":{"id": 1 }}\n{"id":"b"}\n')
    assert [bytes(event.raw) for event in found.events] == [b'{"id": 1 }', b""]
