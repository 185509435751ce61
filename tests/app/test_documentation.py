"""The documents are held against the code."""

import dataclasses
import re
from pathlib import Path

from photon.core.settings import Settings, to_document

ROOT = Path(__file__).parents[2]


def test_the_configuration_page_lists_every_setting_with_its_default() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text("utf-8")
    listed: dict[str, dict[str, str]] = {}
    for section, body in re.findall(r"^## \[(\w+)\].*?\n(.*?)(?=^## |\Z)", page, re.M | re.S):
        listed[section] = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", body, re.M))
    actual = {
        section: {
            key: str(value).lower()
            if isinstance(value, bool)
            else f'"{value}"'
            if isinstance(value, str)
            else str(value)
            for key, value in values.items()
        }
        for section, values in to_document(Settings()).items()
    }
    assert listed == actual


def test_every_link_between_documents_leads_somewhere() -> None:
    for page in [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text("utf-8")):
            assert (page.parent / target).exists(), f"{page.relative_to(ROOT)} links to {target}"


def test_settings_are_frozen_all_the_way_down() -> None:
    for field in dataclasses.fields(Settings):
        section = getattr(Settings(), field.name)
        assert section.__dataclass_params__.frozen
