"""Small files of a process's directory: what they say, and what is told where they can't be read."""

import errno
import os
from pathlib import Path

import pytest

from photon.core.disk import read_json, storage_errors
from photon.core.errors import CorruptStateError, StorageError
from photon.core.protocol import NEWEST, mark


def test_a_mark_of_this_build_is_written_once_and_read(tmp_path: Path) -> None:
    for _ in range(2):
        mark(tmp_path / "new" / "protocol-0")
        assert (tmp_path / "new" / "protocol-0").read_bytes() == f"{NEWEST}\n".encode()


def test_a_mark_of_a_newer_build_names_it(tmp_path: Path) -> None:
    (tmp_path / "protocol-0").write_bytes(b"77\n")
    with pytest.raises(CorruptStateError, match=r"protocol version 77, .* run the build that wrote it"):
        mark(tmp_path / "protocol-0")


@pytest.mark.parametrize("content", [b"q\n", b"\xb1\n", b"-1\n"])
def test_a_damaged_mark_is_called_damaged(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "protocol-0").write_bytes(content)
    with pytest.raises(CorruptStateError, match="protocol-0: it is damaged"):
        mark(tmp_path / "protocol-0")
    assert (tmp_path / "protocol-0").read_bytes() == content


def test_json_that_is_no_text_is_called_corrupt(tmp_path: Path) -> None:
    (tmp_path / "state").write_bytes(b'{"a": "\xb1"}')
    with pytest.raises(CorruptStateError, match=r"state: .* restore it"):
        read_json(tmp_path / "state", dict[str, str])


def test_a_process_with_too_few_files_is_told_which_limit_to_raise(tmp_path: Path) -> None:
    mend = pytest.raises(StorageError, match=r"Too many open files; raise the limit \(ulimit -n")
    with mend, storage_errors(tmp_path):
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
