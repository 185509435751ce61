"""Bad usage and bad settings: one line that says what, where and how to mend it; exit status 2."""

import errno
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest

from photon.cli import main as cli
from photon.cli.main import EXAMPLES
from tests.system import write_lines


@pytest.fixture
def logs(tmp_path):
    write_lines(tmp_path / "queries" / "q.jsonl", [{"id": "q1", "ts_us": 1}])
    write_lines(tmp_path / "clicks" / "c.jsonl", [{"id": "c1", "primary_id": "q1", "ts_us": 2}])
    return tmp_path


@pytest.fixture
def join(logs, refused):
    """What a join is refused with, with these settings or other arguments."""

    def call(settings="", **other):
        (logs / "photon.toml").write_text(settings)
        given = {name: logs / name for name in ("queries", "clicks", "out", "photon.toml")} | other
        names = dict(zip(given, ("--primary", "--foreign", "--out", "--config"), strict=True))
        return refused("join", *(word for name in given for word in (names[name], given[name])))

    return call


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ("[foreign]\nprimery_id = 'q'\n", r"photon\.toml.*foreign\.primery_id.*mean 'foreign\.primary_id'"),
        ("[registry]\nshards = 'two'\n", "must be a whole number"),
        ("[registry]\nshards = 0\n", "from 1 to"),
        ("[foreign]\ntime_unit = 'minutes'\n", "s, ms, us, ns"),
        ("[foreign\n", "not valid TOML"),
        ("[adapter]\nuse = 'no_such_module:Thing'\n", "no_such_module"),
    ],
)
def test_bad_settings_are_told_with_what_they_may_be(join, settings, told):
    assert re.search(told, join(settings))


def test_what_is_not_there_or_can_not_be_made_is_named(logs, join):
    (logs / "file").write_text("")
    for name, path in (
        ("photon.toml", logs / "none.toml"),
        ("queries", logs / "nowhere" / "*.jsonl"),
        ("out", logs / "file" / "out"),
    ):
        assert str(path).removesuffix("/*.jsonl").removesuffix("/out") in join(**{name: path})


REPLACE = "registry replace r1 --registry h:1"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("join --primary x --out y", "--foreign"),
        (
            "verify --foreign a.jsonl b.jsonl c.jsonl --out out",
            r"arguments \(b.jsonl c.jsonl\).*globs in quotes",
        ),
        ("jion", "jion.*Did you mean join"),
        ("zzz", "No such command 'zzz'"),
        ("reshard 3", "say which registry"),
        ("reshard 3 --work nowhere", "nowhere"),
        ("reshard 0 --registry 127.0.0.1:1", "0 is not in the range"),
        (f"{REPLACE} --name r3 --raft x --grpc h:1", "x"),
        (f"{REPLACE} --name ../r3 --raft h:1 --grpc h:1", r"\.\./r3"),
        (f"{REPLACE} --name r3 --raft a/b:1 --grpc h:1", "a/b:1"),
        (f"{REPLACE} --name r3 --raft h:1 --grpc g:g", "g:g"),
        (f"{REPLACE} --name r3", "give OLD, --name, --raft and --grpc"),
        (f"{REPLACE} --cancel r3", "stands alone"),
        ("registry scan 0 --work a --registry b:1", "say which registry"),
        (f"registry scan 0 --work a --config {os.devnull}", "leave --config out"),
        (f"registry scan 0 --config {os.devnull}", "say which registry"),
        ("joiner serve --name east", "--config"),
        (f"joiner serve --name east --config {os.devnull}", "replicas"),
    ],
)
def test_bad_usage_is_told_in_a_line(refused, words, told):
    assert re.search(told, refused(*words.split()))


COMMANDS = """join generate demo bench status explain dead-letters adapter verify registry eventstore joiner
dispatcher"""


@pytest.mark.parametrize(
    "port", ["127.0.0.1:99999", "127.0.0.1:0", "127.0.0.1", "127.0.0.1:x", "::1", "::1:7400"]
)
def test_the_health_of_a_port_that_there_can_not_be_is_not_asked(refused, port):
    assert re.search(r"ADDRESS: .* is no address: give HOST:PORT", refused("health", port, "--timeout", "1"))


def test_a_health_check_imports_nothing_that_works_on_events(tmp_path):
    """Each pod runs one every ten seconds."""
    (tmp_path / "photon.toml").write_text("[registry]\nshards = 2\n")
    script = (
        "import sys; from photon.cli.main import photon;"
        f"photon(['health', '127.0.0.1:1', '--config', {str(tmp_path / 'photon.toml')!r}],"
        " standalone_mode=False)"
    )
    code = f"try:\n    {script}\nexcept Exception as error:\n    print(error, *sys.modules, sep='\\n')"
    said, *loaded = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert said.startswith("127.0.0.1:1: ")
    heavy = {"numpy", "pyarrow", "lmdb", "photon.cluster", "photon.rpc.servers"}
    assert heavy.intersection(loaded) == set()


def test_help_lists_the_commands(command):
    done = command("--help")
    assert done.status == 0
    for name in COMMANDS.split():
        assert name in done.out


def test_every_command_has_examples_of_which_no_word_is_refused(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name in ("queries.jsonl", "clicks.jsonl"):
        Path(name).touch()
    monkeypatch.setattr(click.Command, "invoke", lambda *_: None)
    assert EXAMPLES.keys() == cli._COMMANDS.keys()
    for name, examples in EXAMPLES.items():
        for example in examples:
            words = shlex.split(example)
            assert words[0] == name
            cli.photon.main(words, standalone_mode=False)


def test_the_examples_end_the_help_of_a_command(command):
    for words in ("verify", "dead-letters"):
        wanted = "".join(f"    photon {example}\n" for example in EXAMPLES[words])
        assert command(words, "--help").out.endswith(f"\n  Examples:\n{wanted}")


@pytest.mark.parametrize("words", ["", "registry", "dead-letters", "millwheel"])
def test_a_group_alone_tells_what_it_has(command, words):
    done = command(*words.split())
    assert (done.status, done.err) == (0, "")
    assert done.out.startswith(f"Usage: photon {words}".rstrip())
    assert "Commands:" in done.out


def test_a_disk_that_is_full_before_anything_runs_is_one_line(monkeypatch, capsys):
    def full(*_arguments, **_options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/work/topology.partial")

    monkeypatch.setattr(cli.photon, "main", full)
    with pytest.raises(SystemExit) as end:
        cli.main(["join"])
    assert end.value.code == 1
    told = capsys.readouterr().err
    assert told.startswith("photon: /work/topology.partial: no space left")
    assert told.count("\n") == 1


@pytest.mark.parametrize("command", ["verify", "recover", "backfill", "registry"])
def test_grpc_leaves_forks_alone_in_commands_that_start_a_jvm(command, monkeypatch):
    monkeypatch.delenv("GRPC_ENABLE_FORK_SUPPORT", raising=False)
    cli.photon.get_command(None, command)
    assert os.environ.pop("GRPC_ENABLE_FORK_SUPPORT") == "0"


@pytest.mark.parametrize(
    "command", ["status", "join", "explain", "registry replace", "registry scan", "dispatcher init"]
)
def test_grpc_does_not_talk_beside_a_command_that_calls(command, monkeypatch):
    monkeypatch.setenv("GRPC_VERBOSITY", "")
    monkeypatch.delenv("GRPC_VERBOSITY")
    cli.photon.resolve_command(None, command.split())
    assert os.environ["GRPC_VERBOSITY"] == "ERROR"


@pytest.mark.parametrize("role", ["registry", "eventstore", "joiner", "dispatcher"])
def test_grpc_tells_the_log_of_a_server_whom_it_refused(role, monkeypatch):
    monkeypatch.delenv("GRPC_VERBOSITY", raising=False)
    cli.photon.resolve_command(None, [role, "serve", "--name", "east"])
    assert "GRPC_VERBOSITY" not in os.environ


def test_the_command_that_is_installed_is_python_m_photon():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert project["scripts"] == {"photon": "photon.__main__:main"}


def test_python_without_assertions_is_refused():
    done = subprocess.run(
        [sys.executable, "-O", "-m", "photon", "--version"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert "PYTHONOPTIMIZE" in done.stderr
    assert done.stderr.count("\n") == 1


def test_ctrl_c_while_the_command_is_imported_ends_it_without_a_word(tmp_path):
    (tmp_path / "click.py").write_text("raise KeyboardInterrupt\n")  # as where it is not ignored
    repository = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-m", "photon", "--version"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (tmp_path, repository)))},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


def test_python_m_photon_is_the_command():
    done = subprocess.run(
        [sys.executable, "-m", "photon", "jion"], capture_output=True, text=True, timeout=100, check=False
    )
    assert done.returncode == 2 and done.stderr.startswith("photon: ") and "jion" in done.stderr
