"""Outputs that would be one another's, and names that are nobody's, are refused before a run writes."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from photon.cluster.preflight import check_leaders, check_outputs, check_same_run
from photon.core.errors import SettingsError, UsageError
from photon.core.settings import Joiner, Registry, Settings
from tests.system import join_arguments, write_lines


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(*roots, out="out", work="out/.photon"):
    check_outputs(Path(out), Path(work), roots)


@pytest.mark.parametrize("root", ["out/joined", "out/joined/east", "out/.photon", "out/more", "link/joined"])
def test_a_root_within_the_output_is_refused(here, root):
    (here / "out").mkdir()
    (here / "link").symlink_to(here / "out")
    with pytest.raises(SettingsError, match=re.escape(f"{root} lies within the output out")):
        check("other", root)


def test_an_output_within_a_roots_joined_logs_is_refused(here):
    with pytest.raises(SettingsError, match="r/joined/out lies within the joined logs of r"):
        check("r", out="r/joined/out", work="w")
    check("r", out="r/out", work="w")


def test_a_root_within_another_ones_joined_logs_is_refused(here):
    for roots in (["r", "r/joined/east"], ["r/joined/east", "r"]):
        with pytest.raises(SettingsError, match="r/joined/east lies within the joined logs of r"):
            check(*roots)
    check("r", "r/other")


def test_roots_that_are_one_directory_are_named_as_they_were_configured(here):
    (here / "r").mkdir()
    (here / "link").symlink_to(here / "r")
    for roots, names in ((["r", "./x/../r"], "./x/../r and r"), (["r", "link"], "link and r")):
        with pytest.raises(SettingsError, match=re.escape(f"{names} are the same directory")):
            check(*roots)
    with pytest.raises(SettingsError, match=re.escape("./out and out are the same directory")):
        check("./out")


def test_a_root_whose_joined_logs_lead_into_the_output_is_refused(here):
    (here / "out" / "joined" / "east").mkdir(parents=True)
    (here / "r").mkdir()
    (here / "r" / "joined").symlink_to(here / "out" / "joined" / "east")
    with pytest.raises(SettingsError, match="r lies within the output out"):
        check("r")


@pytest.mark.parametrize("work", ["out/joined", "out/joined/w", "out/dead-letters", "r/joined/w"])
def test_a_work_directory_among_the_output_is_refused(here, work):
    with pytest.raises(UsageError, match=f"--work {work} lies within"):
        check("r", work=work)


def made(work, out, *roots):
    out.mkdir(exist_ok=True, parents=True)
    work.mkdir(exist_ok=True, parents=True)
    (out / "joined").mkdir(exist_ok=True)
    settings = Settings(joiner=replace(Joiner(), output_roots=tuple(map(str, roots))))
    check_outputs(out, work, settings.joiner.output_roots)
    check_same_run(work, out, settings, {"east": 1}, 0)


def test_the_output_or_a_root_of_another_run_is_no_root(here):
    made(here / "wa", here / "a", here / "r")
    for root in ("a", "r"):
        with pytest.raises(SettingsError, match=f"{root} belongs to another run"):
            made(here / "wb", here / "b", here / root)
    assert not (here / "wb" / "run.json").exists()
    with pytest.raises(SettingsError, match="a/joined/east lies within the joined logs of another run"):
        made(here / "wb", here / "b", here / "a" / "joined" / "east")
    made(here / "wa", here / "a", here / "r", here / "s")  # its own roots again, and one more
    with pytest.raises(SettingsError, match="s belongs to another run"):
        made(here / "wb", here / "b", here / "s")


def resumed(here, joiners):
    check_same_run(here / "w", here / "a", Settings(), joiners, 0)


def test_a_joiner_that_is_left_out_is_refused_by_its_name_though_there_are_as_many(here):
    made(here / "w", here / "a")
    resumed(here, {"east": 2, "west": 1})
    with pytest.raises(UsageError, match="datacenters east, west, and west, which is left out"):
        resumed(here, {"east": 2, "north": 1})
    with pytest.raises(UsageError, match="made with 2 joiners in east, and joiner-east-1, which is left out"):
        resumed(here, {"east": 1, "west": 2})
    resumed(here, {"west": 1, "north": 1, "east": 2})
    with pytest.raises(UsageError, match="and north, which is left out"):
        resumed(here, {"east": 2, "west": 1})


def test_a_run_is_not_resumed_with_another_field_for_the_id(here):
    made(here / "w", here / "a")
    other = replace(Settings(), foreign=replace(Settings().foreign, id="uid"))
    with pytest.raises(SettingsError, match=r"foreign\.id was id when"):
        check_same_run(here / "w", here / "a", other, {"east": 1}, 0)


def test_a_run_is_not_resumed_with_another_spread_than_its_registry_was_founded_with(here):
    made(here / "w", here / "a")
    other = replace(Settings(), ids=replace(Settings().ids, time_spread_max_s=60.0))
    with pytest.raises(SettingsError, match=r"ids\.time_spread_max_s was 3600\.0 when"):
        check_same_run(here / "w", here / "a", other, {"east": 1}, 0)


def test_a_leader_must_be_a_replica(here):
    settings = Settings(registry=replace(Registry(), leaders=("r2", "r9")))
    with pytest.raises(
        SettingsError, match=r"registry.leaders: no replica is named 'r9'; they are r0, r1, r2"
    ):
        check_leaders(here / "w", settings)
    check_leaders(here / "w", Settings(registry=replace(Registry(), leaders=("r2",))))


@pytest.mark.parametrize(
    ("text", "more", "said"),
    [
        ('[joiner]\noutput_roots = ["out/joined/east"]', [], "lies within the output"),
        ('[registry]\nleaders = ["east"]', [], "no replica is named 'east'"),
        ("", ["--work", "out/joined"], "lies within"),
    ],
)
def test_a_run_that_would_go_wrong_is_refused_in_a_line(here, refused, text, more, said):
    write_lines(here / "queries" / "q.jsonl", [{"id": "q1"}])
    write_lines(here / "clicks" / "c.jsonl", [{"id": "c1", "primary_id": "q1", "ts_us": 2}])
    (here / "photon.toml").write_text(text)
    assert said in refused(*join_arguments(here, Path("out"), "--config", "photon.toml", *more))
