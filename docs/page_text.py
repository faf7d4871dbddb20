"""What pages are made of: headings, links, pictures, fenced blocks, and the commands in them. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FENCE = re.compile(r"^ *```(\w*)")
MARK = re.compile(r"^<!-- commands: (.*) -->$")
LINK = re.compile(r"(!?)\[([^\]]*)\]\(([^)\s]+)\)")
CODE = re.compile(r"`[^`]*`")
COMMENT = re.compile(r"\s+#(?: .*)?$")  # of the shell, behind a command


@dataclass(frozen=True)
class Block:
    """A fenced block.

    line:     number of its first line, from 1.
    language: what stands behind the fence.
    mark:     of the comment `<!-- commands: MARK -->` in the line above it, else that in the page's first line.
    """

    line: int
    language: str
    mark: str
    lines: list[str]


@dataclass(frozen=True)
class Link:
    """A link, or a picture."""

    line: int
    text: str
    target: str
    is_picture: bool


def pages(root: Path = ROOT) -> list[Path]:
    """All pages of a user or a maintainer."""
    return [*sorted(root.glob("*.md")), *sorted((root / "docs").rglob("*.md"))]


def original_of(page: Path) -> Path | None:
    """The English page that `page` is in Korean: README.ko.md, docs/ko/start.md; None for a page in English."""
    if page.name.endswith(".ko.md"):
        return page.with_name(f"{page.name.removesuffix('.ko.md')}.md")
    korean = ROOT / "docs" / "ko"
    return ROOT / "docs" / page.relative_to(korean) if page.is_relative_to(korean) else None


def _lines(text: str) -> Iterator[tuple[int, str, bool]]:
    """Number, line, and whether it belongs to a fenced block, fences included."""
    fenced = False
    for number, line in enumerate(text.splitlines(), 1):
        is_fence = FENCE.match(line) is not None
        yield number, line, fenced or is_fence
        fenced ^= is_fence


def prose(text: str) -> Iterator[tuple[int, str]]:
    """The lines outside of fenced blocks, with their numbers."""
    yield from ((number, line) for number, line, fenced in _lines(text) if not fenced)


def headings(text: str) -> list[tuple[int, str]]:
    """Level and title of each."""
    found = (re.match(r"(#+) (.+)", line) for _, line in prose(text))
    return [(len(one[1]), one[2].strip()) for one in found if one is not None]


def anchors(text: str) -> set[str]:
    """What links to a part of the page may name."""
    return {re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", title).strip().lower()) for _, title in headings(text)}


def links(text: str) -> list[Link]:
    """Links and pictures, but those in code."""
    return [
        Link(number, one[2], one[3], bool(one[1]))
        for number, line in prose(text)
        for one in LINK.finditer(CODE.sub(lambda code: " " * len(code[0]), line) if "](" in line else "")
    ]


def blocks(text: str) -> Iterator[Block]:
    """The fenced blocks, in their order."""
    lines = text.splitlines()
    of_page = MARK.match(lines[0]) if lines else None
    begun: int | None = None
    for number, line in enumerate(lines):
        if FENCE.match(line) is None:
            continue
        if begun is None:
            begun = number
            continue
        above = MARK.match(lines[begun - 1].strip()) if begun else None
        mark = above or of_page
        fence = FENCE.match(lines[begun])
        assert fence is not None
        yield Block(begun + 2, fence[1], mark[1] if mark else "", lines[begun + 1 : number])
        begun = None


def file_of(block: Block) -> str | None:
    """The name of the file that a block of Python is, as its first line says; None where it is none."""
    named = re.match(r"# (\w+\.py)$", block.lines[0]) if block.language == "python" and block.lines else None
    return named[1] if named is not None else None


def shown_commands(text: str) -> list[str]:
    """The commands of all blocks, without prompts, comments and what they print."""
    found: list[str] = []
    for block in blocks(text):
        prompted = [line[2:] for line in block.lines if line.startswith("$ ")]
        listed = [line for line in block.lines if line.startswith("evenly ")]
        found += [COMMENT.sub("", line) for line in prompted or listed]
    return found
