"""A page in two languages has the same headings' levels, commands and pictures in both."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # docs is no installed package

from docs.page_text import ROOT, headings, links, original_of, pages, shown_commands

PAIRS = [(page, original) for page in pages() if (original := original_of(page)) is not None and original.exists()]


def shape(page: Path, text: str) -> dict[str, list[object]]:
    """What both languages have in common."""
    return {
        "headings": [level for level, _ in headings(text)],
        "commands": [*shown_commands(text)],
        "pictures": [(page.parent / link.target).resolve() for link in links(text) if link.is_picture],
    }


@pytest.mark.parametrize(("page", "original"), PAIRS, ids=lambda page: str(page.relative_to(ROOT)))
def test_both_languages_have_the_same_parts(page: Path, original: Path) -> None:
    of_page, of_original = (shape(one, one.read_text(encoding="utf-8")) for one in (page, original))
    for part, found in of_page.items():
        assert found == of_original[part], part


def test_what_is_missing_is_found() -> None:
    english = "# Start\n\n## Run\n\n![a run](pictures/run.svg)\n\n```\n$ evenly run job.py   # two\nprinted\n```\n"
    korean = "# 시작\n\n## 실행\n\n![실행](../pictures/run.svg)\n\n```\n$ evenly run job.py   # 두 개\nprinted\n```\n"
    at, there = ROOT / "docs" / "start.md", ROOT / "docs" / "ko" / "start.md"
    assert shape(at, english) == shape(there, korean)
    assert shape(at, english)["commands"] == ["evenly run job.py"]
    for less in ("## 실행", "$ evenly run job.py", "![실행](../pictures/run.svg)"):
        assert shape(at, english) != shape(there, korean.replace(less, ""))


def test_which_page_is_translated() -> None:
    assert original_of(ROOT / "README.ko.md") == ROOT / "README.md"
    assert original_of(ROOT / "docs" / "ko" / "design" / "plan.md") == ROOT / "docs" / "design" / "plan.md"
    assert original_of(ROOT / "docs" / "start.md") is None
