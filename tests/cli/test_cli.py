"""Bad usage and bad settings: one line that says what, where and how to mend it; exit status 2."""

import configparser
import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from photon.cli import main as cli
from tests.system import photon, write_lines


@pytest.fixture
def logs(tmp_path):
    write_lines(tmp_path / "queries" / "q.jsonl", [{"id": "q1", "ts_us": 1}])
    write_lines(tmp_path / "clicks" / "c.jsonl", [{"id": "c1", "primary_id": "q1", "ts_us": 2}])
    return tmp_path


def refused(*arguments):
    done = photon(*arguments)
    lines = done.stderr.strip().splitlines()
    assert done.returncode == 2, done.stderr
    assert len(lines) == 1, done.stderr
    assert done.stdout == ""
    return lines[0]


def join_with(logs, config_text):
    config = logs / "photon.toml"
    config.write_text(config_text)
    return refused(
        "join",
        "--primary",
        logs / "queries",
        "--foreign",
        logs / "clicks",
        "--out",
        logs / "out",
        "--config",
        config,
    )


def test_a_misspelt_setting_names_the_nearest_known_one(logs):
    line = join_with(logs, "[foreign]\nprimery_id = 'q'\n")
    assert "foreign.primery_id" in line
    assert "did you mean 'foreign.primary_id'" in line
    assert "photon.toml" in line


def test_a_setting_of_the_wrong_type_or_range_says_what_it_may_be(logs):
    assert "must be a whole number" in join_with(logs, "[registry]\nshards = 'two'\n")
    assert "from 1 to" in join_with(logs, "[registry]\nshards = 0\n")
    assert "s, ms, us, ns" in join_with(logs, "[foreign]\ntime_unit = 'minutes'\n")


def test_a_settings_file_that_is_no_toml_or_not_there_is_named(logs):
    assert "not valid TOML" in join_with(logs, "[foreign\n")
    line = refused(
        "join", "--primary", logs / "queries", "--foreign", logs / "clicks", "--out", logs / "out",
        "--config", logs / "none.toml",
    )  # fmt: skip
    assert "none.toml" in line


def test_a_directory_that_is_not_there_is_named(logs):
    line = refused(
        "join", "--primary", logs / "nowhere" / "*.jsonl", "--foreign", logs / "clicks", "--out", logs / "out"
    )
    assert str(logs / "nowhere") in line


def test_an_adapter_that_cannot_be_loaded_is_named(logs):
    line = join_with(logs, "[adapter]\nuse = 'no_such_module:Thing'\n")
    assert "no_such_module" in line


def test_an_output_that_cannot_be_made_is_named(logs):
    (logs / "file").write_text("")
    line = refused(
        "join", "--primary", logs / "queries", "--foreign", logs / "clicks", "--out", logs / "file" / "out"
    )
    assert str(logs / "file") in line


def test_a_missing_option_is_bad_usage():
    assert "--foreign" in refused("join", "--primary", "x", "--out", "y")


def test_a_glob_that_the_shell_made_several_arguments_of_is_bad_usage():
    line = refused("verify", "--foreign", "a.jsonl", "b.jsonl", "c.jsonl", "--out", "out")
    assert "unexpected extra arguments (b.jsonl c.jsonl)" in line
    assert "globs in quotes" in line


def test_an_unknown_command_is_bad_usage():
    assert "jion" in refused("jion")


def test_help_lists_the_commands():
    done = photon("--help")
    assert done.returncode == 0
    for name in (
        "join",
        "generate",
        "demo",
        "bench",
        "status",
        "explain",
        "dead-letters",
        "adapter",
        "verify",
        "registry",
        "eventstore",
        "joiner",
        "dispatcher",
    ):
        assert name in done.stdout


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
    setup = configparser.ConfigParser()
    setup.read(Path(__file__).parents[2] / "setup.cfg")
    assert setup["options.entry_points"]["console_scripts"].split() == ["photon", "=", "photon.__main__:main"]


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
