"""The public API: every name is there, typed, documented; importing it loads nothing of ours."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import photon

DOCS = Path(__file__).parents[1] / "docs"
PAGE = DOCS / "api.md"


@pytest.mark.parametrize("name", photon.__all__)
def test_every_public_name_is_there_and_on_the_page(name):
    assert getattr(photon, name) is not None
    assert f"`{name}" in PAGE.read_text()


def test_a_name_that_is_not_there_is_an_error_of_the_usual_kind():
    with pytest.raises(AttributeError, match="no attribute 'Joiner'"):
        _ = photon.Joiner
    assert set(photon.__all__) <= set(dir(photon))


def test_importing_it_loads_none_of_the_rooms():
    code = (
        "import sys, photon\n"
        "loaded = [m for m in sys.modules if m.split('.')[0] in ('joiner', 'grpc', 'numpy', 'lmdb')]\n"
        "assert not loaded, loaded\n"
        "from photon import Adapter, Skip\n"
        "assert Adapter().join.__name__ == 'join' and 'grpc' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_documents_import_nothing_but_the_public_api():
    rooms = r"photon\.\w+|joiner|dispatcher|eventstore|idregistry|spark"
    for page in [DOCS.parent / "README.md", *DOCS.glob("*.md")]:
        assert not re.findall(rf"^\s*(?:from|import) (?:{rooms})\b.*", page.read_text("utf-8"), re.M), page


@pytest.mark.cluster
def test_logs_are_joined_by_one_call_and_by_the_next_one_no_more(tmp_path):
    (tmp_path / "q.jsonl").write_text('{"id": "q1", "ts_us": 1}\n')
    (tmp_path / "c.jsonl").write_text('{"id": "c1", "primary_id": "q1", "ts_us": 2}\n')
    globs = str(tmp_path / "q*.jsonl"), [str(tmp_path / "c*.jsonl")]
    summary = photon.join(*globs, tmp_path / "out", datacenters=2)
    assert (summary["joined"], summary["pending"]) == (1, 0)
    again = photon.join(*globs, str(tmp_path / "out"), datacenters=2)
    assert (again["joined"], again["joined_this_run"]) == (1, 0)
    files = (tmp_path / "out" / "joined").rglob("*.jsonl")
    assert [line for file in files for line in file.read_text().splitlines()] == [
        '{"id": "c1", "primary_id": "q1", "ts_us": 2,"primary":{"id": "q1", "ts_us": 1}}'
    ]
