"""Counting joined events, while files are written, converted and taken away (joiner/output_files.py)."""

import errno
import os

import pyarrow
import pyarrow.parquet
import pytest

from joiner import output_files
from joiner.output_files import CompleteFile, Manifest, complete_files, count_joined
from photon.core.errors import CorruptStateError, DiskFullError


@pytest.fixture
def east(tmp_path):
    directory = tmp_path / "joined" / "east"
    directory.mkdir(parents=True)
    return directory


def rows(path, count):
    pyarrow.parquet.write_table(pyarrow.table({"n": [*range(count)]}), path)
    return path.stat().st_size


def list_file(directory, name, size, lines, stem="j"):
    manifest = Manifest(directory, stem)
    manifest.add(CompleteFile(name, size, lines, "00000000", None, 0))
    manifest.close()


def test_lines_of_all_datacenters_and_joiners_count_or_of_one_kind_of_writer_alone(east, tmp_path):
    assert count_joined(tmp_path) == count_joined(tmp_path / "none") == 0
    west = tmp_path / "joined" / "west"
    west.mkdir()
    (east / "joiner-000000.jsonl").write_bytes(b"1\n2\n")
    (east / "backfill-000000.jsonl").write_bytes(b"3\n")
    (west / "joiner-000000.jsonl").write_bytes(b"4\n5\n6\ntorn")
    (tmp_path / "joined" / "run").write_bytes(b"not\nlines\n")
    assert count_joined(tmp_path / "joined") == 6
    assert count_joined(east) == 3
    assert count_joined(tmp_path, "joiner-") == 5


def test_a_listed_file_is_not_read_unless_it_has_another_size(east):
    (east / "j-000000.jsonl").write_bytes(b"1\n2\n")
    list_file(east, "j-000000.jsonl", 4, 77)
    assert count_joined(east) == 77
    (east / "j-000000.jsonl").write_bytes(b"1\n")
    assert count_joined(east) == 1


def test_lines_and_their_rows_count_once_before_and_after_the_listing(east):
    (east / "j-000000.jsonl").write_bytes(b"1\n2\n")
    (east / "j-000000.parquet.tmp").write_bytes(b"half")
    assert count_joined(east) == 2
    size = rows(east / "j-000000.parquet", 2)
    assert count_joined(east) == 2
    list_file(east, "j-000000.parquet", size, 2)
    assert count_joined(east) == 2
    (east / "j-000000.jsonl").unlink()
    assert count_joined(east) == 2


def test_a_file_that_is_converted_while_it_is_counted_counts_once(east, monkeypatch):
    (east / "j-000000.jsonl").write_bytes(b"1\n2\n")
    real = os.listdir

    def names(directory):
        found = real(directory)
        list_file(east, "j-000000.parquet", rows(east / "j-000000.parquet", 2), 2)
        (east / "j-000000.jsonl").unlink(missing_ok=True)
        return found

    monkeypatch.setattr(os, "listdir", names)
    assert count_joined(east) == 2
    monkeypatch.setattr(os, "listdir", real)
    (east / "j-000001.jsonl").write_bytes(b"1\n2\n")
    counted = output_files._count

    def count(path, entry):
        if path.name == "j-000001.jsonl":
            list_file(east, "j-000001.parquet", rows(east / "j-000001.parquet", 2), 2)
            path.unlink()
        return counted(path, entry)

    monkeypatch.setattr(output_files, "_count", count)
    assert count_joined(east) == 4


def test_rows_that_no_manifest_tells_are_counted(east):
    rows(east / "j-000000.parquet", 3)
    assert count_joined(east) == 3
    list_file(east, "j-000000.parquet", os.path.getsize(east / "j-000000.parquet"), 3)
    assert count_joined(east) == 3


def test_what_is_gone_counts_no_more_though_it_is_listed(east):
    list_file(east, "j-000000.jsonl", 4, 2)
    assert count_joined(east) == 0
    assert [*complete_files(east)] == ["j-000000.jsonl"]


def test_what_a_failed_write_leaves_in_a_manifest_is_cut_before_the_next_entry(east, monkeypatch):
    def half(fd, data):
        os.write(fd, data[:9])
        patched.setattr(os, "ftruncate", full)
        full()

    def full(*_):
        raise OSError(errno.ENOSPC, "full")

    manifest = Manifest(east, "j")
    entry = CompleteFile("j-000000.jsonl", 4, 2, "00000000", None, 0)
    with monkeypatch.context() as patched, pytest.raises(DiskFullError):
        patched.setattr(output_files, "write_all", half)
        manifest.add(entry)
    manifest.add(entry)
    manifest.close()
    (east / entry.file).write_bytes(b"a\nb\n")
    assert [*complete_files(east)] == [entry.file]


def test_a_manifest_that_grows_is_read_to_its_last_whole_line(east):
    list_file(east, "j-000000.jsonl", 4, 2)
    with (east / "j.manifest").open("ab") as manifest:
        manifest.write(b'{"file":"j-0000')
    assert [*complete_files(east)] == ["j-000000.jsonl"]
    (east / "k.manifest").write_bytes(b"{}\n")
    with pytest.raises(CorruptStateError, match=r"k\.manifest"):
        complete_files(east)
