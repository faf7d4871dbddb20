"""Chapters of the tutorial: pictures that a page draws, pages as notebooks, and the first chapter in both forms."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import nbformat
import pytest

sys.path.insert(0, str(Path(__file__).parents[2]))  # docs is no installed package

from docs.notebooks import SETUP, TUTORIAL, as_file, chapters, notebook_of, run_chapter, run_notebook
from docs.page_text import ROOT, blocks, headings, links
from docs.run_pages import Drawn, Ran, picture_texts, run_page, write

DRAW = """from evenly.report import draw

bars = draw.stacked([draw.StackedBar("device 0", {"parameters": 3e6})], "{:.0f} B".format, title="Memory")
open("00-page.svg", "w").write(draw.standalone(bars))
print("drawn")"""
PAGE = f"""<!-- commands: slow -->
# 0. A chapter

See [another](01-other.md), [a page](../start.md) and [a site](https://example.org).

```python
# picture.py
{DRAW}
```

```
$ python picture.py   # draws
drawn
```

![memory of a device](../pictures/tutorial/00-page.svg)

## Exercises

<details markdown="1">
<summary>Answer</summary>

With code:

```
$ python -c "raise SystemExit(3)"
(exit code 3)
```

</details>

<details markdown="1">
<summary>Answer</summary>

Without `code`.

</details>
"""


@pytest.fixture
def page(tmp_path: Path) -> Path:
    folder = tmp_path / "docs" / "tutorial"
    folder.mkdir(parents=True)
    (folder / "01-other.md").write_text("# 1. Another\n")
    (folder / "00-page.md").write_text(PAGE)
    return folder / "00-page.md"


def problems(results: list[Ran | Drawn]) -> list[str]:
    return [result.problem for result in results]


def test_a_picture_is_drawn_by_its_page(page: Path) -> None:
    results = [*run_page(page, quick=False)]
    assert [result.what for result in results] == [
        "python picture.py   # draws", 'python -c "raise SystemExit(3)"', "the picture 00-page.svg",
    ]  # fmt: skip
    assert problems(results) == ["", "", "there is no such file (--write puts it there)"]
    write(page, results)
    assert problems([*run_page(page, quick=False)]) == ["", "", ""]
    page.write_text(PAGE.replace('"device 0"', '"device 1"').replace("3e6", "4e6"))
    assert problems([*run_page(page, quick=False)]) == ["", "", ""]
    page.write_text(PAGE.replace('"parameters"', '"gradients"'))
    assert "+gradients" in problems([*run_page(page, quick=False)])[2]
    page.write_text(PAGE.replace('open("00', 'open("01'))
    assert problems([*run_page(page, quick=False)])[2] == "no command has written 00-page.svg"
    assert [*run_page(page, quick=True)] == []


def test_texts_of_a_picture_are_those_without_figures() -> None:
    svg = '<text x="1">rank 0 &amp; 2.5 s</text><text class="tick soft">3 s</text><text class="soft">time</text>'
    assert picture_texts(svg) == ["rank N & N s", "time"]


def test_a_page_becomes_a_notebook(page: Path) -> None:
    made = notebook_of(page)
    nbformat.validate(nbformat.reads(as_file(made), as_version=4))
    cells: list[Any] = made["cells"]
    assert [cell["source"] for cell in cells] == [
        SETUP,
        "# 0. A chapter\n\nSee [another](01-other.ipynb), a page and [a site](https://example.org).",
        f"%%writefile picture.py\n# picture.py\n{DRAW}",
        "!python picture.py",
        'from IPython.display import SVG\n\nSVG("00-page.svg")  # memory of a device',
        "## Exercises\n\n**Answer**\n\nWith code:",
        '!python -c "raise SystemExit(3)"',
        '<details markdown="1">\n<summary>Answer</summary>\n\nWithout `code`.\n\n</details>',
    ]
    assert cells[3]["outputs"][0]["text"] == "drawn\n"


def test_a_notebook_is_executed(page: Path, tmp_path: Path) -> None:
    write(page, [*run_page(page, quick=False)])
    (tmp_path / "run").mkdir()
    results = run_notebook(page, tmp_path / "run", tmp_path / "00-page.ipynb")
    assert [result.problem for result in results] == ["", "", ""]
    saved: Any = nbformat.read(tmp_path / "00-page.ipynb", as_version=4)
    assert "image/svg+xml" in saved.cells[4].outputs[0].data and len(saved.cells) == 8
    page.write_text(PAGE.replace("\ndrawn\n", "\nsomething else\n"))
    (tmp_path / "again").mkdir()
    results = run_notebook(page, tmp_path / "again", tmp_path / "00-page.ipynb")
    assert "+drawn" in results[0].problem and [result.problem for result in results[1:]] == ["", ""]


# ------------------------------------------------------------------------------------------------ the chapters
@pytest.mark.parametrize("chapter", chapters(), ids=lambda page: page.stem)
def test_the_form_of_a_chapter(chapter: Path) -> None:
    text = chapter.read_text(encoding="utf-8")
    titles = headings(text)
    number = chapter.stem.partition("-")[0]
    assert text.startswith("<!-- commands: slow -->\n")
    assert titles[0][1].startswith(f"{int(number)}. " if number.isdigit() else "Appendix")
    last = [title for level, title in titles if level == 2][-2:]
    assert last == ["What to take along", "Exercises"]
    exercises = [title for level, title in titles if level == 3 and title.startswith("Exercise")]
    assert [title.partition(":")[0] for title in exercises] == ["Exercise 1", "Exercise 2", "Exercise 3"]
    assert len(re.findall(r"^<summary>Answer</summary>$", text, re.MULTILINE)) == 3
    assert f"../pictures/tutorial/{chapter.stem}.svg" in {link.target for link in links(text) if link.is_picture}
    for link in links(text):  # a notebook shows the file that a command above has written
        name = link.target.rpartition("/")[2]
        drawing = [
            block.line + len(block.lines)
            for block in blocks(text)
            if block.language == "python" and name in "".join(block.lines)
        ]
        assert not link.is_picture or min(drawing) < link.line, f"{name} stands above what draws it"


def test_the_list_has_all_chapters() -> None:
    listed = {link.target for link in links((TUTORIAL / "index.md").read_text(encoding="utf-8"))}
    assert {page.name for page in chapters()} <= listed


@pytest.mark.full
def test_the_first_chapter_runs_as_a_page_and_as_a_notebook(tmp_path: Path) -> None:
    """`make tutorial` runs all of them."""
    first = TUTORIAL / "01-memory.md"
    page_s, notebook_s, differing = run_chapter(first, tmp_path / first.stem)
    assert differing == [] and page_s > 0 < notebook_s
    assert (tmp_path / first.stem / "01-memory.ipynb").exists() and first.is_relative_to(ROOT)
