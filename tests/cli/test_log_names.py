"""Logs whose names are no UTF-8, and that can't be read: told by name, and everything else is joined."""

import gzip
import json
import os

import pytest

from tests.system import join_arguments, photon, write_lines


@pytest.mark.long
@pytest.mark.cluster
def test_a_broken_log_whose_name_is_no_utf_8_is_told_and_all_others_are_joined(tmp_path):
    logs = tmp_path / "logs"
    write_lines(logs / "queries" / "q.jsonl", [{"id": "q", "ts_us": 1}])
    write_lines(logs / "clicks" / "c.jsonl", [{"id": "c", "primary_id": "q", "ts_us": 1}])
    for kind in ("queries", "clicks"):
        with open(os.fsencode(logs / kind) + b"/d\xe9.jsonl.gz", "wb") as file:
            file.write(gzip.compress(b'{"id":"d","primary_id":"q","ts_us":1}\n' * 99)[:-20])
        with open(os.fsencode(logs / kind) + b"/e\xe9.jsonl", "wb") as file:
            file.write(b'{"id":"e","prim')
    done = photon(*join_arguments(logs, tmp_path / "out"))
    assert done.returncode == 1
    assert "started again" not in done.stderr
    assert rf"{logs}/clicks/d\xe9.jsonl.gz was not read" in done.stderr
    summary = json.loads(done.stdout)
    assert summary["joined"] == 1
    assert sorted(summary["unread_files"]) == [
        rf"{logs}/{kind}/d\xe9.jsonl.gz" for kind in ("clicks", "queries")
    ]
