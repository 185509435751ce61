"""What is found of one event in files and columns, and the words for it."""

import json
import os
import re
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner

from joiner import joined_lines as reader
from photon.cli.explain import command, told, verdict
from photon.cli.status import command as status
from photon.cluster.explain import Asked, joined_lines, letters_of, registered
from photon.core.errors import UsageError
from photon.core.fates import Fate
from photon.core.ids import Token
from photon.logs.writer import DeadLetter, dead_letter_lines

ASKED = Asked("c\N{LATIN SMALL LETTER E WITH ACUTE}1", b"\1" * 16, "ctx.id", "ctx.query")
REGISTERED = {
    "shard": 0, "joiner": "a:1", "process": None, "incarnation": "5", "time_us": 1
}  # fmt: skip
NOTHING = {
    "id": "c1", "joined": [], "dead_letters": [], "registry": None, "pending": {"east": None}, "primary": None,
    "unreadable": {}, "not_here": [],
}  # fmt: skip


def event(id_, **more):
    return {"ctx": {"id": id_, "query": "q"}, **more}


@pytest.fixture
def out(tmp_path):
    (tmp_path / "east").mkdir()
    return tmp_path


@pytest.fixture
def lines(out):
    """Writes the joined lines of a file."""
    return lambda *lines, name="a": (out / "east" / f"{name}.jsonl").write_text("\n".join(lines), "utf-8")


@pytest.fixture
def tables(out):
    """Writes a file of Parquet."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    def write(name, *rows):
        parquet.write_table(pyarrow.Table.from_pylist(rows), out / "east" / f"{name}-000000.parquet")

    return write


def test_a_line_is_found_by_the_id_at_its_path_however_it_is_escaped(out, lines):
    some = [
        json.dumps(event("other", text=ASKED.id), ensure_ascii=False),  # holds the id, and is not it
        json.dumps(event(ASKED.id), ensure_ascii=False),
        json.dumps(event(ASKED.id), ensure_ascii=True),
    ]
    lines(*some, json.dumps(event(ASKED.id))[:-1])  # a torn one
    found = sorted(joined_lines(out, ASKED), key=lambda row: row["offset"])
    assert [row["line"] for row in found] == some[1:]
    assert [row["offset"] for row in found] == [len("\n".join(some[:n]).encode()) + 1 for n in (1, 2)]


@pytest.mark.parametrize(
    ("id_", "written"),
    [
        ("a/b", r"a\/b"),  # PHP
        ("a&b", r"a\u0026b"),  # Go
        ("q=\N{LATIN SMALL LETTER E WITH ACUTE}", r"q\u003D\u00E9"),
        ('"', r"\""),
    ],
)
def test_a_line_is_found_however_its_writer_spells_the_id(out, lines, id_, written):
    lines(line := f'{{"id":"{written}"}}', "")
    assert [row["line"] for row in joined_lines(out, Asked(id_, b"", "id", "p"))] == [line]


def test_a_line_that_spells_the_id_in_two_ways_is_told_once(out, lines):
    both = json.dumps(event(ASKED.id)) + json.dumps(ASKED.id, ensure_ascii=False)
    lines(both.replace('}}"', '},"x":"') + "}", "")
    assert len(list(joined_lines(out, ASKED))) == 1


def test_lines_on_both_sides_of_a_read_are_found_at_their_offsets(out, lines, monkeypatch):
    monkeypatch.setattr(reader, "BLOCK_BYTES", 50)
    some = [json.dumps(event(ASKED.id if n % 3 == 0 else "other", n=n)) for n in range(20)]
    lines(*some, "")
    found = [(row["offset"], row["line"]) for row in joined_lines(out, ASKED)]
    assert found == [(sum(len(one) + 1 for one in some[:n]), some[n]) for n in range(0, 20, 3)]


def test_a_file_that_its_joiner_cuts_is_read_to_its_new_end(out, monkeypatch):
    monkeypatch.setattr(reader, "BLOCK_BYTES", 8)
    path = out / "east" / "joiner-east-000000.jsonl"
    line = json.dumps(event(ASKED.id, pad="x" * 300_000)) + "\n"
    path.write_text(line * 3)
    found = joined_lines(out, ASKED)
    assert next(found)["offset"] == 0
    os.truncate(path, len(line) + 1)
    assert list(found) == []


def test_files_that_are_gone_meanwhile_are_passed_over_and_those_that_cannot_be_read_are_told(out, lines):
    (out / "east" / "a.jsonl").mkdir()
    for name in "bc":
        lines(json.dumps(event(ASKED.id)), "", name=name)
    unreadable = {}
    found = joined_lines(out, ASKED, unreadable)
    assert next(found)["file"].endswith("b.jsonl")
    (out / "east" / "c.jsonl").unlink()  # completed as Parquet
    assert list(found) == [] and unreadable.keys() == {str(out / "east" / "a.jsonl")}
    assert "Is a directory" in unreadable[str(out / "east" / "a.jsonl")]


def test_an_id_in_a_field_with_a_dot_in_its_name_is_found(out):
    line = json.dumps({"attributes": {"http.id": "c1"}})
    (out / "east" / "a.jsonl").write_text(line + "\n")
    letter = DeadLetter(Fate.UNJOINABLE, "gone", line.encode(), "c.jsonl", 7)
    (out / "east" / "foreign-000000.jsonl").write_bytes(dead_letter_lines([letter]))
    asked = Asked("c1", b"", "attributes.http..id", "p")
    assert [row["file"][-7:] for row in joined_lines(out, asked)] == ["a.jsonl"]
    assert [row["fate"] for row in letters_of(out, asked)] == ["unjoinable"]


def test_a_row_is_found_in_parquet_once_though_its_lines_are_still_there(out, lines, tables):
    rows = [event("other", n=0), event(ASKED.id, n=1)]
    tables("a", *rows)
    tables("b", *({"event": json.dumps(row)} for row in rows))
    assert [(row["row"], json.loads(row["line"])["n"]) for row in joined_lines(out, ASKED)] == [(1, 1)] * 2
    lines(*map(json.dumps, rows), "", name="a-000000")
    assert len(list(joined_lines(out, ASKED))) == 2


def test_parquet_that_cannot_be_read_is_told_and_the_others_are_looked_through(out, tables):
    broken = out / "east" / "a-000000.parquet"
    broken.write_bytes(b"PAR1 and no more")
    nested = 1
    for _ in range(60):
        nested = [nested]
    tables("b", {"deep": nested})
    tables("c", event(ASKED.id))
    unreadable = {}
    assert len(list(joined_lines(out, ASKED, unreadable))) == 1
    assert unreadable.keys() == {str(broken), str(out / "east" / "b-000000.parquet")}
    page = told({**NOTHING, "unreadable": unreadable})
    assert "not all answer" in page[0] and any("too deeply nested" in line for line in page)
    page = told({**NOTHING, "unreadable": unreadable, "registry": REGISTERED})
    assert "may stand in a file that cannot be read" in page[0]


def test_rows_that_only_look_like_lines_are_no_trouble(out, tables):
    for name, values in (("a", [5]), ("b", ["x"]), ("c", [b"\xff", json.dumps(event(ASKED.id)).encode()])):
        tables(name, *({"event": value} for value in values))
    assert [(row["file"][-16:], row["row"]) for row in joined_lines(out, ASKED)] == [("c-000000.parquet", 1)]


def test_a_line_nested_too_deeply_to_be_parsed_is_passed_over(out, lines):
    deep = '{"x":"' + ASKED.id + '","deep":' + "[" * 100_000 + "]" * 100_000 + "}"
    lines(deep, json.dumps(event(ASKED.id)), "")
    assert len(list(joined_lines(out, ASKED))) == 1


@pytest.mark.parametrize(("given", "why"), [("", "is empty"), ("\udcff", "\\xff: not UTF-8")])
def test_an_id_that_can_be_no_events_is_bad_usage(given, why):
    for arguments in ([given, "--work", "w"], ["c1", "--work", "w", "--primary-id", given]):
        result = CliRunner().invoke(command, arguments)
        assert isinstance(result.exception, UsageError) and why in str(result.exception)


@pytest.mark.parametrize("arguments", [[], ["--work", "w", "--config", "c"]])
def test_a_system_is_named_in_one_way(arguments):
    for one in (command, status):
        result = CliRunner().invoke(one, [*(["c1"] if one is command else []), *arguments])
        assert isinstance(result.exception, UsageError)
        assert "by one of --work (of a run here) and --config" in str(result.exception)


class Registry:
    """Of one shard that holds one id; only its leader has read its log."""

    def __init__(self):
        self.configuration = lambda: SimpleNamespace(shards=[0])

    def client(self, timeout_s):
        return nullcontext(self)

    def scan(self, shard, timeout_s, ids, fresh=False):
        token = Token("a:1", 5, 1).pack()
        return [SimpleNamespace(tokens=[token] * fresh, guarded=np.zeros(int(fresh), bool))]


def test_a_replica_that_was_just_started_is_not_believed_that_an_event_is_not_registered():
    topology = SimpleNamespace(processes=lambda role: [])
    assert registered(topology, b"\1" * 16, Registry) == {**REGISTERED, "incarnation": f"{5:016x}"}


def test_the_registry_of_a_run_that_has_ended_is_started_once_for_all_events(monkeypatch):
    started = []

    @contextmanager
    def asked_registry(named):
        started.append(named.work)
        yield SimpleNamespace(registry="its registry")
        started.append("stopped")

    def explain(topology, event_id, primary_id, registry):
        return {**NOTHING, "id": event_id, "registry": {"silent": f"{registry()}, {len(started)}"}}

    for name, stub in (
        ("find_system", lambda *_: None),
        ("has_ended", lambda work: True),
        ("asked_registry", asked_registry),
        ("explain", explain),
    ):
        monkeypatch.setattr(f"photon.cli.explain.{name}", stub)
    result = CliRunner().invoke(command, ["c1", "c2", "c3", "--work", "w"])
    assert result.output.count("does not answer (its registry, 1)") == 3
    assert started == [Path("w"), "stopped"]


def test_directories_that_are_on_another_machine_are_told(out):
    away = [f"{out}/joined/west", f"{out}/dead-letters/west"]
    page = told({**NOTHING, "not_here": away, "registry": REGISTERED})
    assert "it may stand in a file that cannot be read here" in page[0]
    assert [f"  not here       {path}: is not on this machine" for path in away] == page[2:4]
    assert "not all answer" in told({**NOTHING, "not_here": away})[0]


def test_a_search_for_nothing_ends(out, lines):
    lines('{"ctx":{"id":"c"}}', '{"ctx":{"id":"d"}}', "")
    assert list(joined_lines(out, Asked("", b"\1" * 16, "ctx.id", "ctx.query"))) == []


def test_when_an_event_waits_since_and_till_is_told_in_words():
    row = {"waiting_since_us": 1_795_000_000_000_000, "tries": 2, "due_us": 1_795_000_060_000_000}
    (line,) = [line for line in told({**NOTHING, "pending": {"east": row}}) if "pending" in line]
    assert re.search(r"east: waiting since 2026-\S+, tries 2, due 2026-\S+$", line)


def test_letters_of_every_datacenter_are_found(out):
    (out / "west").mkdir()
    line = json.dumps(event(ASKED.id)).encode()
    letter = DeadLetter(Fate.UNJOINABLE, "gone", line, "c.jsonl", 7)
    for name in ("east", "west"):
        (out / name / "foreign-000000.jsonl").write_bytes(dead_letter_lines([letter]))
    found = [(row["datacenter"], row["fate"], row["offset"]) for row in letters_of(out, ASKED)]
    assert found == [("east", "unjoinable", 7), ("west", "unjoinable", 7)]


@pytest.mark.parametrize(
    ("found", "word"),
    [
        ({"joined": [{"file": "f", "offset": 0, "line": "{}"}]}, "joined"),
        ({"pending": {"east": {"tries": 2}}}, "waits"),
        ({"registry": REGISTERED}, "registered, and in no joined log"),
        ({"dead_letters": [{"fate": "filtered", "reason": "r", "datacenter": "east", "file": "f", "offset": 0}]}, "filtered"),
        ({"registry": {"silent": "no answer"}}, "not all answer"),
        ({}, "not seen"),
    ],
)  # fmt: skip
def test_the_verdict_is_the_most_that_can_be_said(found, word):
    whole = {**NOTHING, **found}
    assert word in verdict(whole)
    assert told(whole)[0] == f"c1: {verdict(whole)}"
