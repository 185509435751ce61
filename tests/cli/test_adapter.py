"""`photon adapter test`, and the examples of the guide, run as they stand there."""

import gzip
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import textwrap
from itertools import accumulate
from pathlib import Path

import click.testing
import pytest
import zstandard

from photon.cli.main import photon
from photon.core.errors import AdapterError, StorageError, UsageError
from tests.system import PHOTON, join, read_lines, write_logs

ROOT = Path(__file__).parents[2]
GUIDE = (ROOT / "docs" / "adapters.md").read_text("utf-8")


@pytest.fixture
def directory(tmp_path, monkeypatch):
    """The current directory, in which modules of the user's lie."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield tmp_path
    for name in ("my_adapters", "users_own"):
        sys.modules.pop(name, None)


def run(*arguments: object) -> click.testing.Result:
    return click.testing.CliRunner().invoke(photon, ["adapter", "test", *map(str, arguments)])


def test_the_examples_of_the_guide_give_what_the_guide_says(directory):
    blocks = re.findall(r"^```(\w+) ?(\S*)\n(.*?)^```$", GUIDE, re.M | re.S)
    files: dict[str, str] = {}
    for _, name, text in blocks:
        if name:  # a module is written bit by bit
            files[name] = files.get(name, "") + text
    for name, text in files.items():
        (directory / name).write_text(text)
    told = [text.removeprefix("$ ").split("\n", 1) for kind, _, text in blocks if kind == "console"]
    assert len(told) == 6
    for command, output in told:
        words = shlex.split(command)
        assert words[:3] == ["photon", "adapter", "test"]
        result = run(*words[3:])
        assert result.output == output
        assert result.exit_code == (1 if "raised" in output else 0)


@pytest.fixture
def own(directory):
    (directory / "users_own.py").write_text(
        "from photon import Adapter, Skip\n"
        "class Own(Adapter):\n"
        "    def join(self, primary, foreign):\n"
        "        if 'skip' in primary.data: return Skip(primary.data['skip'])\n"
        "        return foreign.data.get('result')\n"
    )
    return directory


def test_the_outcomes_as_a_document(own):
    pairs = [
        {"primary": {"id": 1}, "foreign": {"id": "c1"}},
        {"primary": {"id": 1, "skip": "why"}, "foreign": {"id": "c2"}},
        {"primary": {"id": 1}, "foreign": {"id": "c3", "result": 7}},
        {"primary": {"id": 1}},
    ]
    (own / "pairs").write_text("\n".join(map(json.dumps, pairs)))
    result = run("pairs", "--use", "users_own:Own", "--json")
    document = json.loads(result.output)
    assert [one["outcome"] for one in document["events"]] == ["joined", "skipped", "raised", "malformed"]
    assert document["events"][0]["event"] == {"id": "c1", "primary": {"id": 1}}
    assert document["events"][1] == {"place": "pairs:2", "outcome": "skipped", "reason": "why"}
    assert "returned int" in document["events"][2]["reason"]
    assert (document["joined"], document["raised"], document["no_primary"]) == (1, 1, 0)
    assert result.exit_code == 1


@pytest.mark.parametrize(
    "line",
    [
        "{}",
        "no json",
        '{"primary":{"id":1},"foreign":5}',
        '{"primary":{"id":1},"foreign":{}}',
        '{"primary":{"id":1},"foreign":{"id":1},"expected":1}',
    ],
)
def test_a_line_that_is_no_pair_is_told_and_the_others_are_joined(own, line):
    (own / "pairs").write_text(line + '\n{"primary":{"id":1},"foreign":{"id":"c1"}}\n')
    result = run("pairs")
    assert "pairs:1  malformed   no line {" in result.output
    assert "2 events: 1 joined, 1 malformed" in result.output
    assert result.exit_code == 1


def test_two_logs_are_brought_together_by_ids_whatever_their_spelling(own):
    (own / "q").write_text('{"id":17,"n":1}\n{"id":"17","n":2}\nbad\n')
    (own / "c").write_text('{"id":"a","primary_id":"17","ts_us":1}\n{"id":"b","primary_id":8,"ts_us":1}\n')
    result = run("--primary", "q", "--foreign", "c", "--json")
    document = json.loads(result.output)
    outcomes = {one["place"]: one["outcome"] for one in document["events"]}
    assert outcomes == {"q:34": "malformed", "c:0": "joined", "c:39": "no primary"}
    assert document["events"][1]["event"]["primary"] == {"id": 17, "n": 1}


def test_what_is_not_said_clearly_is_refused(own):
    (own / "f").write_text("")
    for arguments in ([], ["f", "--primary", "f", "--foreign", "f"], ["--primary", "f"]):
        result = run(*arguments)
        assert isinstance(result.exception, UsageError) and "give either FILE" in str(result.exception)
    assert isinstance(run("f", "--use", "users_own:No").exception, AdapterError)
    assert run("f").output == "0 events: nothing to join\n"


@pytest.mark.parametrize("swallow", ["Exception", "BaseException"])
def test_ctrl_c_ends_the_test_of_an_adapter_that_never_does(directory, swallow):
    (directory / "users_own.py").write_text(
        "import sys, time\n"
        "from photon import Adapter\n"
        "class Own(Adapter):\n"
        "    def join(self, primary, foreign):\n"
        "        print('here', flush=True)\n"
        "        while True:\n"
        "            try:\n"
        "                time.sleep(60)\n"
        f"            except {swallow}:\n"
        "                pass\n"
    )
    (directory / "pairs").write_text('{"primary":{"id":"q"},"foreign":{"id":"c"}}\n')
    command = [*PHOTON, "adapter", "test", "pairs", "--use", "users_own:Own"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=directory, stdout=subprocess.PIPE, env=environment) as running:
        try:
            assert running.stdout.readline() == b"here\n"
            running.send_signal(signal.SIGINT)
            assert running.wait(60.0) == -signal.SIGINT
        finally:
            running.kill()


def test_an_adapter_that_interrupts_is_judged_as_any_other(own):
    (own / "users_own.py").write_text(
        "from photon import Adapter\n"
        "class Own(Adapter):\n"
        "    def join(self, primary, foreign):\n"
        "        raise KeyboardInterrupt('\\ud800')\n"
    )
    (own / "pairs").write_text('{"primary":{"id":"q"},"foreign":{"id":"c"}}\n')
    result = run("pairs", "--use", "users_own:Own")
    assert result.exit_code == 1
    assert "adapter raised KeyboardInterrupt: \\ud800 (users_own.py:4)" in result.output


def run_with(own, code, count, settings=""):
    """The summary of a join of so many clicks with the adapter of this code; its dead letters."""
    (own / "users_own.py").write_text(
        "import os, re, time\nfrom photon import Adapter, Skip\nclass Own(Adapter):\n"
        f"    def join(self, primary, foreign):\n{textwrap.indent(textwrap.dedent(code), ' ' * 8)}"
    )
    write_logs(own, count)
    (own / "photon.toml").write_text(f'[adapter]\nuse = "users_own:Own"\n{settings}')
    return join(own, own / "out", "--config", own / "photon.toml"), read_lines(own / "out" / "dead-letters")


@pytest.mark.cluster
def test_in_a_run_the_adapter_changes_and_skips_events_and_where_it_raises_one_is_lost(own, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # where Photon is; the adapter is in the current directory
    code = """
    if foreign.data['id'] == 'c7':
        raise LookupError('no such campaign:\\n7')
    if int(primary.data['id'][1:]) % 2 == 0:
        return Skip('not paid')
    return {'id': foreign.data['id'], 'query': primary.data['id']}
    """
    summary, letters = run_with(own, code, 20)
    assert (summary["joined"], summary["filtered"], summary["adapter_error"]) == (9, 10, 1)
    paid = [f"q{n}" for n in range(1, 20, 2) if n != 7]
    assert sorted(row["query"] for row in read_lines(own / "out" / "joined")) == sorted(paid)
    assert [row["reason"] for row in letters].count("not paid") == 10
    (letter,) = [row for row in letters if row["fate"] != "filtered"]
    assert letter["reason"] == "adapter raised LookupError: no such campaign: 7 (users_own.py:7)"
    assert (letter["fate"], letter["event"]["id"]) == ("adapter_error", "c7")


@pytest.mark.cluster
@pytest.mark.long
@pytest.mark.parametrize(
    "poison", ["re.match('(a+)+$', 'a' * 60 + 'b')", "time.sleep(1e6)", "os.kill(os.getpid(), 9)"]
)
def test_in_a_run_an_event_that_hangs_or_kills_the_adapter_becomes_a_dead_letter_and_the_rest_is_joined(
    own, monkeypatch, poison
):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    code = f"if foreign.data['id'] == 'c700': {poison}"
    summary, (letter,) = run_with(own, code, 2_000, "timeout_s = 1.0\n")
    assert (summary["joined"], summary["adapter_error"], summary["pending"]) == (1999, 1, 0)
    assert letter["event"]["id"] == "c700" and "ended 3 times while the adapter worked" in letter["reason"]


@pytest.fixture
def clicks(own):
    """Queries, and lines of clicks whose queries they are."""
    (own / "queries.jsonl").write_text('{"id":"q"}\n')
    return [b'{"id":"c%d","primary_id":"q","ts_us":%d,"text":"%s"}\n' % (n, n, b"x" * n) for n in range(100)]


def outcomes(log: str, *options: str) -> list[tuple[str, str]]:
    command = ("--primary", "queries.jsonl", "--foreign", log, "--use", "users_own:Own", "--json", *options)
    document = json.loads(run(*command).output)
    return [(one["place"].partition(":")[2], one["outcome"]) for one in document["events"]]


def test_samples_have_the_places_of_their_lines_and_a_last_one_without_a_newline_counts(clicks):
    Path("clicks.jsonl").write_bytes(b"".join(clicks).rstrip())
    starts = [0, *accumulate(map(len, clicks))][:-1]
    assert outcomes("clicks.jsonl") == [(str(start), "joined") for start in starts]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_samples_may_be_compressed_in_several_frames_and_damage_is_told(clicks, suffix):
    pack = gzip.compress if suffix == ".gz" else zstandard.compress
    log = Path(f"clicks.jsonl{suffix}")
    log.write_bytes(pack(b"".join(clicks[:3])) + pack(b"".join(clicks[3:])))
    assert [outcome for _, outcome in outcomes(log.name)] == ["joined"] * 100
    log.write_bytes(log.read_bytes()[:-9])
    result = run("--primary", "queries.jsonl", "--foreign", log)
    assert isinstance(result.exception, StorageError) and "not a whole archive" in str(result.exception)


def test_a_sample_longer_than_a_line_may_be_is_malformed_and_its_neighbours_are_joined(clicks):
    Path("photon.toml").write_text("[logs]\nline_bytes_max = 4096\n")
    long = b'{"id":"long","primary_id":"q","ts_us":1,"text":"%s"}\n' % (b"x" * 3_000_000)
    Path("clicks.jsonl").write_bytes(clicks[0] + long + clicks[1])
    first, second = len(clicks[0]), len(clicks[0]) + len(long)
    expected = [("0", "joined"), (str(first), "malformed"), (str(second), "joined")]
    assert outcomes("clicks.jsonl", "--config", "photon.toml") == expected
