"""`photon init` and `photon join --check`: settings for logs that nobody has described."""

import gzip
import io
import json
import os
import random
import uuid

import pytest
import zstandard

from photon.core.settings import Settings, load_settings
from photon.logs import packed, sample
from photon.logs.fields import guess
from photon.logs.formats import json_lines
from tests.system import join, write_lines


def ids(rng, count):
    return [str(uuid.UUID(int=rng.getrandbits(128))) for _ in range(count)]


def a_pair(rng):
    """Impressions and clicks of somebody else: nested, counted, priced, some twice."""
    shown = ids(rng, 600)
    primary = [
        {
            "imp": {"meta": {"uuid": one}},
            "seq": n,
            "served_at": f"2026-11-20T08:{n % 60:02}:10+02:00",
            "price": 0.25,
        }
        for n, one in enumerate(shown)
    ]
    clicks = [
        {"ClickId": f"c{n}", "n": n, "ctx": {"imp": {"id": rng.choice(shown)}}, "ts": 1_763_622_600 + n}
        for n in range(200)
    ]
    return primary + primary[:20], clicks


def test_nested_fields_units_and_which_field_names_which_are_found():
    found = guess(*a_pair(random.Random(1)))
    told = [
        found.primary_id,
        found.primary_time,
        found.foreign_id,
        found.foreign_primary_id,
        found.foreign_time,
    ]
    assert [one and (one.path, one.unit, one.sure) for one in told] == [
        ("imp.meta.uuid", "", True),
        ("served_at", "rfc3339", True),
        ("ClickId", "", True),
        ("ctx.imp.id", "", True),
        ("ts", "s", True),
    ]
    assert found.primary_id.why == "600 values in 620 lines"


def test_a_bad_value_here_and_there_hides_no_field():
    """As in logs that people have: a null, a list, an empty id, a time that is none."""
    primary, clicks = a_pair(random.Random(2))
    wanted = guess(primary, clicks)
    clicks[3]["ClickId"], clicks[50]["ClickId"], clicks[70]["ts"] = None, ["c50"], "n/a"
    clicks[99]["ctx"]["imp"]["id"] = ""
    primary[7]["served_at"], primary[8]["imp"]["meta"]["uuid"] = "yesterday", {}
    found = guess(primary, clicks)
    for name in ("primary_id", "primary_time", "foreign_id", "foreign_primary_id", "foreign_time"):
        before, now = getattr(wanted, name), getattr(found, name)
        assert (now.path, now.unit, now.sure) == (before.path, before.unit, before.sure)


@pytest.mark.parametrize(
    ("primary", "foreign", "wanted"),
    [
        # Both count from one, so that `id` is in `id`, too.
        ({"id": int}, {"id": int, "query_id": lambda n: n // 2}, ("id", "id", "query_id")),
        (
            {"span_id": hex},
            {"line": str, "uid": lambda n: f"u{n}", "span_id": hex},
            ("span_id", "uid", "span_id"),
        ),
        ({"a.b": hex}, {"x": lambda n: -n, "of": hex}, ("a..b", "x", "of")),
    ],
)
def test_names_decide_between_what_the_values_leave_open(primary, foreign, wanted):
    def made(kinds):
        return [{name: kind(n) for name, kind in kinds.items()} for n in range(300)]

    found = guess(made(primary), made(foreign))
    assert (found.primary_id.path, found.foreign_id.path, found.foreign_primary_id.path) == wanted


@pytest.mark.parametrize(
    ("value", "unit"),
    [
        (1_763_622_600, "s"),
        (1_763_622_600.25, "s"),
        (1_763_622_600_000, "ms"),
        (1_763_622_600_000_000, "us"),
        (1_763_622_600_000_000_000, "ns"),
        ("2026-11-20 08:10:00+02:00", "rfc3339"),
        ("2026-11-20", ""),
        (True, ""),
        (12, ""),
        (-5, ""),
    ],
)
def test_units_of_times_are_told_by_their_size(value, unit):
    found = guess([{"id": f"q{n}", "at": value} for n in range(9)], [{"id": "c", "of": "q1"}])
    assert (found.primary_time.unit if found.primary_time else "") == unit


@pytest.mark.parametrize(
    ("at", "unit"),
    [
        ("1763622600", "s"),
        ("1763622600.25", "s"),
        ("1763622600000", "ms"),
        ("1763622600000000", "us"),
        ("1763622600000000000", "ns"),
    ],
)
def test_times_of_csv_that_are_numbers_are_found_and_what_init_writes_reads_them(tmp_path, command, at, unit):
    (tmp_path / "q.csv").write_text("qid,seq,at\n" + "".join(f"00{n},{n},{at}\n" for n in range(99)), "utf-8")
    clicks = "".join(f"c{n},00{n},{at if n else 'n/a'}\n" for n in range(99))
    (tmp_path / "c.csv").write_text(f"cid,query_qid,clicked_at\n{clicks}", "utf-8")
    logs = ("--primary", tmp_path / "q.csv", "--foreign", tmp_path / "c.csv")
    config = tmp_path / "photon.toml"
    assert command("init", *logs, "--config", config).status == 0
    settings = load_settings(config)
    assert (settings.primary.time, settings.primary.time_unit) == ("at", unit)
    assert (settings.foreign.id, settings.foreign.time, settings.foreign.time_unit) == (
        "cid",
        "clicked_at",
        unit,
    )
    checked = command("join", "--check", *logs, "--config", config)
    assert "98 of 98 foreign events (100.0%)" in checked.out
    assert guess([{"id": "q", "at": at}], []).primary_time is None, "JSON has numbers for that"


def test_where_nothing_fits_nothing_is_claimed():
    found = guess([{"kind": "a"}] * 50, [{"colour": "red"}] * 50)
    assert (found.primary_id, found.foreign_id, found.foreign_primary_id, found.primary_time) == (None,) * 4


def test_what_init_writes_joins_the_logs_and_check_says_so_before(tmp_path, command):
    primary, clicks = a_pair(random.Random(2))
    clicks[7]["ctx"]["imp"]["id"] = "nobody"
    (tmp_path / "queries").mkdir()
    packed = b"".join(json.dumps(event).encode() + b"\n" for event in primary[:300])
    (tmp_path / "queries" / "old.jsonl.gz").write_bytes(gzip.compress(packed))
    write_lines(tmp_path / "queries" / "new.jsonl", primary[300:])
    write_lines(tmp_path / "clicks" / "c.jsonl", clicks)
    logs = ("--primary", tmp_path / "queries", "--foreign", tmp_path / "clicks")
    config = tmp_path / "photon.toml"
    wrong = command("join", "--check", *logs)
    assert wrong.status == 1
    assert "0 of 0 foreign events" in wrong.out and "missing required field `id`" in wrong.out
    done = command("init", *logs, "--config", config)
    assert done.status == 0, done.err
    assert "foreign.primary_id  ctx.imp.id" in done.out
    assert load_settings(config).primary.id == "imp.meta.uuid"
    again = command("init", *logs, "--config", config)
    assert (again.status, again.err.count("\n")) == (2, 1)
    checked = command("join", "--check", *logs, "--config", config)
    assert checked.status == 0
    assert "199 of 200 foreign events (99.5%) have their primary event in all primary logs" in checked.out
    assert checked.out.count("primary  {") == 3
    told = json.loads(command("join", "--check", "--json", *logs, "--config", config).out)
    assert (told["foreign"], told["found"], len(told["pairs"])) == (200, 199, 3)
    summary = join(tmp_path, tmp_path / "out", "--config", config)
    assert (summary["joined"], summary["unjoinable"]) == (199, 1)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
def test_utf_16_is_named_with_the_mend_by_init_by_check_and_for_each_line(tmp_path, command, encoding):
    lines = "".join(json.dumps({"id": f"é{n}"}, ensure_ascii=False) + "\n" for n in range(3))
    (tmp_path / "p.jsonl").write_bytes(lines.encode(encoding))
    write_lines(tmp_path / "f.jsonl", [{"id": "c", "primary_id": "1", "ts_us": 1}])
    logs = ("--primary", tmp_path / "p.jsonl", "--foreign", tmp_path / "f.jsonl")
    mend = "UTF-16, not UTF-8: convert the file, as by iconv -f UTF-16 -t UTF-8"
    assert f"it is {mend}" in command("init", *logs, "--config", tmp_path / "x").err
    assert mend in command("join", "--check", *logs).out
    found = json_lines(Settings()).parse_primary(lines.encode(encoding)).malformed
    assert [bad.reason for bad in found] == [mend] * 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("id,time\n1,2\n", "it looks like CSV with commas; write 'csv://FILE' for it"),
        ("id\ttime\n1\t2\n", "it looks like CSV with tabs; write 'csv://FILE?delimiter=%09' for it"),
        ('id=q1 text="a, b" time=2\n', "it looks like logfmt; make JSON lines of it: mlr --idkvp"),
        ('{\n "id": 1\n}\n', "it is JSON over several lines; make a line of each object: jq -c . FILE"),
        ('[{"id": 1},\n{"id": 2}]\n', "it is one JSON array"),
        ("hello\n", "it holds no JSON objects"),
    ],
)
def test_what_is_no_json_lines_is_named_with_the_mend(tmp_path, command, text, said):
    (tmp_path / "p").write_text(text)
    write_lines(tmp_path / "f.jsonl", [{"id": "c"}])
    done = command(
        "init", "--primary", tmp_path / "p", "--foreign", tmp_path / "f.jsonl", "--config", tmp_path / "x"
    )
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert said in done.err
    assert not (tmp_path / "x").exists()


@pytest.mark.parametrize(("pack", "suffix"), [(gzip.compress, ".gz"), (zstandard.compress, ".zst")])
def test_an_archive_by_another_name_is_named_with_the_mend(tmp_path, refused, pack, suffix):
    (tmp_path / "p.log").write_bytes(pack(b'{"id": "1"}\n'))
    write_lines(tmp_path / "f.jsonl", [{"id": "c", "primary_id": "1"}])
    logs = ("--primary", tmp_path / "p.log", "--foreign", tmp_path / "f.jsonl")
    assert f"mv FILE FILE{suffix}" in refused("init", *logs, "--config", tmp_path / "x")


def test_a_table_with_another_delimiter_is_named_with_the_uri_which_is_guessed_from(
    tmp_path, command, refused
):
    (tmp_path / "p.csv").write_text("".join(f"q{n};{n}\n" for n in ("id", *range(9))))
    (tmp_path / "f.csv").write_text("".join(f"c{n}\tq{n}\n" for n in ("id", *range(9))))
    p, f = f"csv://{tmp_path}/p.csv?delimiter=;", f"csv://{tmp_path}/f.csv?delimiter=%09"
    config = tmp_path / "x"
    assert f"write '{p}'" in refused(
        "init", "--primary", tmp_path / "p.csv", "--foreign", f, "--config", config
    )
    assert f"write '{f}'" in refused(
        "init", "--primary", p, "--foreign", tmp_path / "f.csv", "--config", config
    )
    assert not config.exists()
    assert command("init", "--primary", p, "--foreign", f, "--config", config).status == 0


def test_standard_input_is_looked_at_by_init_and_check_as_any_log(tmp_path, command, refused, monkeypatch):
    primary, clicks = a_pair(random.Random(3))
    write_lines(tmp_path / "p.jsonl", primary)
    config = tmp_path / "photon.toml"

    def piped():
        lines = b"".join(json.dumps(event).encode() + b"\n" for event in clicks)
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines)))
        return "--primary", tmp_path / "p.jsonl", "--foreign", "-"

    assert command("init", *piped(), "--config", config).status == 0
    checked = command("join", "--check", *piped(), "--config", config)
    assert checked.status == 0
    assert checked.out.splitlines()[-1].startswith("200 of 200 foreign events")
    os.mkfifo(tmp_path / "fifo")
    said = refused("join", "--check", "--primary", tmp_path / "p.jsonl", "--foreign", tmp_path / "fifo")
    assert "fifo is a pipe, which can be read once only: pipe it into photon join and write - for it" in said
    for asked in (("init", "--config", tmp_path / "x"), ("join", "--check")):
        assert "standard input (-) can be one" in refused(*asked, "--primary", "-", "--foreign", "-")


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_an_archive_that_is_cut_short_is_named_by_init_and_check(tmp_path, command, suffix):
    lines = b"".join(json.dumps({"id": str(n)}).encode() + b"\n" for n in range(100))
    packed = gzip.compress(lines) if suffix == ".gz" else zstandard.compress(lines)
    broken = tmp_path / f"p.jsonl{suffix}"
    broken.write_bytes(packed[: len(packed) // 2])
    write_lines(tmp_path / "f.jsonl", [{"id": "c", "primary_id": "1"}])
    logs = ("--primary", broken, "--foreign", tmp_path / "f.jsonl")
    for asked in (("init", *logs, "--config", tmp_path / "x"), ("join", "--check", *logs)):
        done = command(*asked)
        assert (done.status, done.err.count("\n")) == (1, 1)
        assert f"{broken}: not a whole archive" in done.err


def test_a_log_without_a_line_end_is_read_a_bounded_piece_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(sample, "_LINE_BYTES_MAX", 1 << 16)
    monkeypatch.setattr(packed, "PLAIN_STEP_BYTES", 1 << 12)
    (tmp_path / "blob").write_bytes(b"x" * (1 << 18))
    read = [*map(len, sample.pieces(str(tmp_path / "blob")))]
    assert sum(read) == 1 << 18
    assert max(read) <= (1 << 16) + (1 << 12)
