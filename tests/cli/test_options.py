"""How a command is told which system it is about: --work, --config, PHOTON_CONFIG."""

import click
import pytest
from click.testing import CliRunner

from photon.cli import dispatcher, history, registry, verify
from photon.cli.options import config_option, path_option, system_options, work_option


@click.command()
@system_options
def of_system(work, config):
    click.echo(f"{work} {config}")


@click.command()
@config_option("Settings.")
@path_option("--out", multiple=True)
@work_option("Work.")
def of_output(out, work, config):
    click.echo(f"{work} {config}")


def run(command, *arguments):
    done = CliRunner().invoke(command, arguments, env={"PHOTON_CONFIG": "/env/photon.toml"})
    assert done.exit_code == 0, done.output
    return done.output.strip()


@pytest.fixture
def a_run(tmp_path):
    (tmp_path / ".photon").mkdir()
    (tmp_path / ".photon" / "topology.json").touch()
    return str(tmp_path)


def test_the_environment_names_the_settings_where_the_command_line_does_not():
    assert run(of_system) == "None /env/photon.toml"
    assert run(of_system, "--config", "mine.toml") == "None mine.toml"


def test_a_run_that_is_named_goes_before_the_environment_but_not_before_what_is_said_beside(a_run, tmp_path):
    work = str(tmp_path / ".photon")
    assert run(of_system, "--work", a_run) == f"{work} None"
    assert run(of_system, "--work", a_run, "--config", "mine.toml") == f"{work} mine.toml"
    assert run(of_output, "--out", a_run) == "None None"
    assert run(of_output, "--out", str(tmp_path / "elsewhere")) == "None /env/photon.toml"


@pytest.mark.parametrize("asked", [verify.command, history.verify, registry.reshard, dispatcher.init])
def test_a_command_that_takes_a_time_says_in_whose_zone(asked):
    assert "without a zone: local time" in " ".join(run(asked, "--help").split())
