"""No page lies: its links lead somewhere, its paths and options exist, and its commands print what it shows."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[2]))  # docs is no installed package

from docs.generate_reference import commands, parameters
from docs.generate_reference import pages as reference
from docs.hooks import add_pages, for_site
from docs.page_text import ROOT, Block, anchors, blocks, headings, links, original_of, pages, prose
from docs.run_pages import Command, Ran, agrees, commands_of, run_page, write

# A path of the repository, as pages have it.
NAMED = re.compile(
    r"(?<![\w/.-])((?:docs|examples|benchmarks|tests|evenly)/[\w/.-]*\w\.(?:py|md|json|jsonl|svg|toml|csv|sh))\b"
)
USED = re.compile(r"(?:^\s*(?:\$ )?|`)evenly ((?:bench )?[a-z]+)\b([^`]*)")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")
MARKS = re.compile(r"(run|slow|run, slow|not run, [^,]+.*)?")
RUN_IN_CI = [page for page in pages() if original_of(page) is None]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def target_text(path: Path) -> str | None:
    """The text of the page at `path`, which may be one that is generated; None where there is none."""
    if path.parent == ROOT / "docs" / "reference":
        return reference().get(path.name)
    return path.read_text(encoding="utf-8") if path.suffix == ".md" and path.exists() else None


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    broken: list[str] = []
    for link in links(text_of(page)):
        path, _, anchor = link.target.partition("#")
        if "://" in link.target or link.target.startswith("mailto:"):
            continue
        target = (page.parent / path).resolve() if path else page
        text = target_text(target)
        if (text is None and not target.exists()) or (anchor and anchor not in anchors(text or "")):
            broken.append(f"line {link.line}: {link.target}")
    assert broken == []


@pytest.mark.parametrize("page", [page for page in pages() if page.name != "CHANGELOG.md"], ids=name_of)
def test_paths_exist(page: Path) -> None:
    missing = [
        f"line {number}: {path}"
        for number, line in enumerate(text_of(page).splitlines(), 1)
        for path in NAMED.findall(line)
        if not (ROOT / path).exists() and not path.startswith("docs/reference/")
    ]
    assert missing == []


def options() -> dict[str, set[str]]:
    """Command, without `evenly` -> its options."""
    return {
        name.removeprefix("evenly "): {one.name for one in parameters(command)} | {"--help"}
        for name, command in commands()
    }


@pytest.mark.parametrize("page", [page for page in pages() if page.name != "CHANGELOG.md"], ids=name_of)
def test_commands_and_options_exist(page: Path) -> None:
    known = options()
    strange: list[str] = []
    for number, line in enumerate(text_of(page).splitlines(), 1):
        for name, rest in USED.findall(line):
            if name.split()[0] not in {one.split()[0] for one in known}:
                continue  # a sentence
            rest, _, further = re.sub(r"\s#\s.*", "", rest).partition(" -- ")
            allowed = known.get(name, {one for each in known.values() for one in each})
            strange += [f"line {number}: {name} {one}" for one in OPTION.findall(rest) if one not in allowed]
            if name != "run":  # whose job has arguments of its own there
                strange += [f"line {number}: {one}" for one in OPTION.findall(further) if one not in known["run"]]
    assert strange == []


def nav_pages(entries: list[object]) -> Iterator[str]:
    for entry in entries:
        if isinstance(entry, str):
            yield entry
        elif isinstance(entry, dict):
            for value in entry.values():
                yield from nav_pages(value if isinstance(value, list) else [value])


def test_every_page_is_in_the_navigation() -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    add_pages(config["nav"])
    docs = ROOT / "docs"
    written = [page.relative_to(docs).as_posix() for page in pages() if page.is_relative_to(docs)]
    generated = ["index.md", "ko/index.md", *(f"reference/{name}" for name in reference())]
    assert sorted(nav_pages(config["nav"])) == sorted([*written, *generated])


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_lists_and_tables_stand_after_an_empty_line(page: Path) -> None:
    """The site's Markdown takes them for text otherwise."""
    begins = re.compile(r"(?:[-*] |1\. |\|)")
    continues = re.compile(r"\s|[-*] |\d+\. |\||#|<!--|$")
    before, wrong = "", []
    for number, line in prose(text_of(page)):
        if begins.match(line) and not continues.match(before):
            wrong.append(f"line {number}: {line[:40]}")
        before = line
    assert wrong == []


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_marks_are_those_that_are_known(page: Path) -> None:
    text = text_of(page)
    assert [block.mark for block in blocks(text) if not MARKS.fullmatch(block.mark)] == []
    marked = [number for number, line in enumerate(text.splitlines(), 1) if line.startswith("<!-- commands:")]
    at_blocks = {block.line - 2 for block in blocks(text)}
    assert [number for number in marked if number != 1 and number not in at_blocks] == []


@pytest.mark.full_but("README.md", "docs/start.md", "docs/checkpoints.md")
@pytest.mark.parametrize("page", RUN_IN_CI, ids=name_of)
def test_commands_print_what_is_shown(page: Path) -> None:
    """But those that take long, which `make pages` runs."""
    assert {result.what: result.problem for result in run_page(page, quick=True) if result.problem} == {}


# ------------------------------------------------------------------------------------------------------- the parts
def test_what_varies_is_not_compared() -> None:
    shown = ["8 steps on 2 ranks (data=2) in 0.4 s: loss 1.6581 -> 3.1109, evaluation loss 0.5000"]
    assert agrees(shown, ["8 steps on 2 ranks (data=2) in 12.9 s: loss 1.6583 -> 3.1101,", "  evaluation loss 0.5001"])
    assert not agrees(shown, ["8 steps on 2 ranks (data=2) in 0.4 s: loss 1.6581 -> 3.3109, evaluation loss 0.5000"])
    assert not agrees(shown, ["8 steps on 4 ranks (data=2) in 0.4 s: loss 1.6581 -> 3.1109, evaluation loss 0.5000"])
    assert agrees([" ddp  2  equal  2.2e-16"], [" ddp  2  equal  0.0e+00"])
    assert not agrees([" ddp  2  equal  2.2e-16"], [" ddp  2  equal  3.1e-05"])
    assert not agrees(["step 15.9 s"], ["step 16.1 s"])


def test_dots_stand_for_any_lines() -> None:
    printed = ["a", "b", "c", "d"]
    assert agrees(["a", "...", "d"], printed) and agrees(["...", "c", "d"], printed) and agrees(["a", "..."], printed)
    assert not agrees(["a", "..", "d"], printed)
    assert not agrees(["b", "...", "d"], printed)
    assert not agrees(["a", "...", "x"], printed)


PAGE = """# A page

<!-- commands: run -->
```
echo one   # a comment
```

```python
# job.py
x = 1
```

```
$ cat job.py
# job.py
x = 1

$ false
(exit code 1)
$ echo two
three
```

<!-- commands: not run, needs Slurm -->
```
$ srun false
```
"""


def test_a_page_is_run_from_top_to_bottom_and_can_be_written(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE)
    results = [*run_page(page, quick=False)]
    assert [(ran.what, ran.line) for ran in results] == [
        ("echo one", 5), ("cat job.py", 14), ("false", 18), ("echo two", 20),
    ]  # fmt: skip
    assert [bool(ran.problem) for ran in results] == [False, False, False, True]
    assert "-three" in results[-1].problem and "+two" in results[-1].problem
    write(page, results)
    assert page.read_text() == PAGE.replace("three", "two")
    assert not any(ran.problem for ran in run_page(page, quick=False))


def test_what_serves_is_interrupted_once_it_says_where(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "<!-- commands: run -->\n```\nmkdir runs\nevenly board runs --port 0   # live\nevenly board none\n```\n"
    )
    _, served, none = run_page(page, quick=False)
    assert not served.problem and isinstance(served, Ran) and "http://127.0.0.1" in served.printed[0]
    assert "there is no such folder" in none.problem


def test_an_exit_code_that_is_not_shown_is_a_difference() -> None:
    assert Ran(Command("x", 1, []), [], 1).problem.startswith("exit code 1, not 0")
    assert not Ran(Command("x", 1, ["(exit code 1)"]), [], 1).problem
    assert not Ran(Command("x", 1, None), ["anything"], 0).problem


def test_a_mark_in_the_first_line_holds_for_the_page() -> None:
    text = "<!-- commands: not run, needs Slurm -->\n# A page\n\n```\n$ srun\n```\n\n"
    text += "<!-- commands: slow -->\n```\n$ ls\n```\n"
    assert [(block.mark, block.line) for block in blocks(text)] == [("not run, needs Slurm", 5), ("slow", 10)]
    assert [*commands_of(Block(1, "", "", ["no command"]))] == []


def test_paths_of_a_page_are_links_on_the_site() -> None:
    text = (
        "See `docs/guide.md`, [how](../benchmarks/published/README.md), [this](#part).\n\n```\n`docs/guide.md`\n```\n"
    )
    assert for_site(text, "accuracy.md") == (
        "See [`docs/guide.md`](guide.md), how (`benchmarks/published/README.md`), [this](#part).\n\n"
        "```\n`docs/guide.md`\n```\n"
    )
    assert for_site("[Go on](docs/start.md#x), `docs/speed.md`\n", "index.md") == (
        "[Go on](start.md#x), [`docs/speed.md`](speed.md)\n"
    )
    assert for_site("`docs/design/README.md`\n", "design/plan.md") == "[`docs/design/README.md`](README.md)\n"


def test_headings_are_no_comments_of_code() -> None:
    assert headings("# One\n\n```\n# no heading\n```\n\n## Two, `x`\n") == [(1, "One"), (2, "Two, `x`")]
    assert anchors("## Two, `x` and y\n") == {"two-x-and-y"}
