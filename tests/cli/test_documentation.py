"""The documents are held against the code."""

import dataclasses
import re
from pathlib import Path

from photon.core.settings import DatacenterPlace, ReplicaPlace, Settings, to_document

ROOT = Path(__file__).parents[2]


NAMED: dict[str, type] = {"replicas": ReplicaPlace, "datacenters": DatacenterPlace}
"""Sections of which there may be several, each with a name."""
FREE = "via"
"""The one whose keys are not ours."""


def test_the_configuration_page_lists_every_setting_with_its_default() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    listed: dict[str, dict[str, str]] = {}
    for section, body in re.findall(r"^## \[([\w.]+)\].*?\n(.*?)(?=^## |\Z)", page, re.M | re.S):
        listed[section] = dict(re.findall(r"^\| `(\w+)` \| (?:`(.*?)` )?\|", body, re.M))
    actual = {
        section: {key: shown(value) for key, value in values.items()}
        for section, values in to_document(Settings()).items()
        if section not in (*NAMED, FREE)
    }
    for section, kind in NAMED.items():
        actual[f"{section}.NAME"] = {field.name: shown(field.default) for field in dataclasses.fields(kind)}
    assert listed == actual | {f"{FREE}.NAME": {}}


def shown(value: object) -> str:
    """As TOML has it; empty where there is no default."""
    if value is dataclasses.MISSING:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(list(value) if isinstance(value, tuple) else value)


def test_every_link_between_documents_leads_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_every_decision_is_in_their_list() -> None:
    decisions = ROOT / "docs" / "decisions"
    listed = re.findall(r"\]\((\d+[\w-]+\.md)\)", (decisions / "README.md").read_text("utf-8"))
    assert listed == sorted(path.name for path in decisions.glob("0*.md"))


def test_every_path_that_a_document_names_is_there() -> None:
    rooms = "photon|joiner|dispatcher|eventstore|idregistry|spark|tests|benchmarks"
    pages = [*ROOT.glob("docs/*.md"), ROOT / "README.md", ROOT / "ARCHITECTURE.md"]
    for page in pages:
        for path in re.findall(rf"`((?:{rooms})/[\w/.]*)`", page.read_text("utf-8")):
            assert (ROOT / path).exists(), f"{page.relative_to(ROOT)} names {path}"


def test_settings_are_frozen_all_the_way_down() -> None:
    sections = [getattr(Settings(), field.name) for field in dataclasses.fields(Settings)]
    for section in [*NAMED.values(), *(section for section in sections if section != {})]:
        assert section.__dataclass_params__.frozen
