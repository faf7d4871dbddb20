"""The Korean pages have what the English pages have: headings, code, pictures, links, tables and figures.

A page that changes in one language has to change in the other. What the sentences say is for people to compare.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
KOREAN = ROOT / "docs" / "ko"
GLOSSARY = KOREAN / "glossary.md"  # has no English counterpart
PAGES = [(ROOT / "README.md", ROOT / "README.ko.md")] + [
    (ROOT / "docs" / page.relative_to(KOREAN), page) for page in sorted(KOREAN.rglob("*.md")) if page != GLOSSARY
]
TRANSLATED = {english.resolve(): korean.resolve() for english, korean in PAGES}

FENCED = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^ {4}(evenly .*)$", re.MULTILINE)
HEADING = re.compile(r"^(#+) (.*)$", re.MULTILINE)
LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)]*)\)")
CODE_SPAN = re.compile(r"`([^`]+)`")
COMMENT = re.compile(r"(^|\s)# .*$", re.MULTILINE)
# GitHub does not end bold text where a mark of punctuation stands before the asterisks and a letter behind them.
UNCLOSED = re.compile(r"[^\w\s*]\*\*\w")
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")

pages = pytest.mark.parametrize(("english", "korean"), PAGES, ids=[korean.stem for _, korean in PAGES])


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def commands_of(text: str) -> list[str]:
    """Fenced blocks without comments, and the commands of indented ones without the words behind them."""
    fenced = [
        "\n".join(line.rstrip() for line in COMMENT.sub("", block).splitlines()) for block in FENCED.findall(text)
    ]
    return fenced + [re.split(r"\s{3,}", line)[0] for line in INDENTED.findall(FENCED.sub("", text))]


def headings_of(page: Path) -> list[tuple[int, str]]:
    """Level and anchor of each heading."""
    headings = HEADING.findall(FENCED.sub("", text_of(page)))
    return [(len(marks), re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", title).lower())) for marks, title in headings]


def links_of(page: Path) -> list[str]:
    """Targets of links and pictures, sorted: paths are those of English pages, anchors the numbers of headings."""
    english = {korean: english for english, korean in TRANSLATED.items()}
    found: list[str] = []
    for picture, target in LINK.findall(FENCED.sub("", text_of(page))):
        path, _, anchor = target.partition("#")
        if "://" in path:
            found.append(target)
            continue
        resolved = (page.parent / path).resolve() if path else page.resolve()
        assert resolved.exists(), f"{page.name}: {target} leads nowhere"
        number = [name for _, name in headings_of(resolved)].index(anchor) if anchor else ""
        found.append(f"{picture}{english.get(resolved, resolved).relative_to(ROOT)}#{number}")
    return sorted(found)


def sections_of(page: Path) -> list[str]:
    """The text under each heading, without code blocks, what stands before the first heading left out."""
    return re.split(r"^#+ ", FENCED.sub("", text_of(page)), flags=re.MULTILINE)[1:]


def tables_of(text: str) -> list[list[str]]:
    """The cells of each row of each table."""
    rows = (line.strip() for line in FENCED.sub("", text).splitlines())
    return [re.split(r"(?<!\\)\|", row.strip("|")) for row in rows if row.startswith("|")]


def code_spans(text: str) -> set[str]:
    """What stands in backticks; the names of pages are those of the English ones."""
    return {" ".join(span.split()).replace("docs/ko/", "docs/") for span in CODE_SPAN.findall(text)}


def test_pages_are_there() -> None:
    assert {korean.stem for _, korean in PAGES} >= {
        "README.ko",
        "guide",
        "planning",
        "checkpoints",
        "pipeline",
        "faults",
    }
    assert [korean.name for english, korean in PAGES if not english.exists()] == []


def test_the_whole_tutorial_is_in_korean() -> None:
    english, korean = ({page.name for page in (docs / "tutorial").glob("*.md")} for docs in (ROOT / "docs", KOREAN))
    assert korean == english


@pages
def test_headings(english: Path, korean: Path) -> None:
    assert [level for level, _ in headings_of(korean)] == [level for level, _ in headings_of(english)]


@pages
def test_code_and_commands(english: Path, korean: Path) -> None:
    assert commands_of(text_of(korean)) == commands_of(text_of(english))


@pages
def test_links_and_pictures(english: Path, korean: Path) -> None:
    """The READMEs, which link each other, have README.md each: a translation counts as its page."""
    assert links_of(korean) == links_of(english)


@pages
def test_links_lead_to_korean_pages(english: Path, korean: Path) -> None:
    targets = [target.partition("#")[0] for _, target in LINK.findall(FENCED.sub("", text_of(korean)))]
    resolved = [(korean.parent / target).resolve() for target in targets if target and "://" not in target]
    assert [path.name for path in resolved if path in TRANSLATED and path != english.resolve()] == []


@pages
def test_tables(english: Path, korean: Path) -> None:
    """As many rows and columns, and the same figures in cells that have no words."""
    expected, found = tables_of(text_of(english)), tables_of(text_of(korean))
    assert [len(row) for row in found] == [len(row) for row in expected]
    for row, translated in zip(expected, found, strict=True):
        for cell, other in zip(row, translated, strict=True):
            if not re.search(r"[A-Za-z]{2}", CODE_SPAN.sub("", cell)):
                assert other.strip() == cell.strip(), row[0]


@pages
def test_names_and_figures_of_each_section(english: Path, korean: Path) -> None:
    """What stands in backticks is the same, and no figure of the English text is missing."""
    for section, translated in zip(sections_of(english), sections_of(korean), strict=True):
        heading = section.partition("\n")[0]
        assert code_spans(translated) == code_spans(section), heading
        assert {*NUMBER.findall(section)} - {*NUMBER.findall(translated)} == set(), heading


@pages
def test_bold_text_ends(english: Path, korean: Path) -> None:
    """In `**GPU(x)**는` the asterisks would show: a Korean particle follows without a blank."""
    text = FENCED.sub("", text_of(korean))
    bold = (match.end() for match in re.finditer(r"\*\*[^*\n]+\*\*", text))
    assert [text[end - 12 : end + 1] for end in bold if UNCLOSED.fullmatch(text[end - 3 : end + 1])] == []
